"""How well a node is: one weighted score, four bands, and the reason in words.

A metric's *load* is its use over its threshold, so 1 is the limit, and 0 if its use is unknown:
nothing is held against a node that nobody measured. Over all metrics that have a limit,

    weighted = sum(weight * load) / sum(weight)
    score    = max(weighted, 0.8 * highest load)

A single metric at its threshold lifts the score to 0.8, so "below 0.8 is healthy" and "a single
breach is abnormal" are one rule, and the score grows without a jump. The bands:

    HEALTHY    score below 0.72
    NEAR       0.72 to 0.8: still healthy, within a tenth of a limit; the warning that comes first
    DEGRADED   from 0.8: a metric over its threshold, or the node as a whole close to its limits
    CRITICAL   weighted from 1, and at least two metrics over their thresholds, one of them a
               capacity (memory, disk); or the accelerator reports a fault

So busy is not dead: processor and network at 100 % mean that they are used, and whatever the limits
are, they alone never make a node critical. A busy accelerator is the aim of it all, and has none.

A band is climbed one step a sample, so a warning comes before the worst (a fault alone skips it).
It is left once the loads of the last ``SAMPLES_TO_FALL`` samples, each raised by ``MARGIN``, would
not lead into it: a use that wavers by less than the margin changes the band once at most.

Nothing here evicts anybody: ``evict_due`` answers a question that only a configured job asks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from mpift.errors import MpiftError

HEALTHY_BELOW = 0.8  # of the score
NEAR_FROM = 0.9  # of a limit: of a threshold, or of HEALTHY_BELOW
CRITICAL_FROM = 1.0  # of the weighted mean: on average, everything is at its threshold
MARGIN = 0.05  # of a load
SAMPLES_TO_FALL = 3


class Band(enum.IntEnum):
    """How well a node is, in order of severity; see the module for the borders."""

    HEALTHY = 0
    NEAR = 1
    DEGRADED = 2
    CRITICAL = 3


@dataclass(frozen=True, slots=True)
class Limit:
    """Use from which a metric is abnormal, and its part in the score.

    A *capacity* runs out, and then something fails; the others are rates, which are merely busy.
    """

    threshold: float
    weight: float
    is_capacity: bool

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise MpiftError(f"a health threshold lies in (0, 1], not at {self.threshold}")
        if not 0 < self.weight < math.inf:
            raise MpiftError(f"a health weight is positive and finite, not {self.weight}")


LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "cpu": Limit(threshold=0.9, weight=0.4, is_capacity=False),
        "memory": Limit(threshold=0.85, weight=0.3, is_capacity=True),
        "disk": Limit(threshold=0.8, weight=0.2, is_capacity=True),
        "network": Limit(threshold=0.95, weight=0.1, is_capacity=False),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a node's resources are used by, each a share from 0 to 1; None where unknown.

    ``accelerator_fault`` says in words what is wrong with the device, None if nothing is known to
    be. ``MpiftError`` for a share outside 0 to 1.
    """

    cpu: float | None = None
    memory: float | None = None
    disk: float | None = None
    network: float | None = None
    accelerator: float | None = None
    accelerator_fault: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            share = getattr(self, item.name)
            if isinstance(share, int | float) and not 0 <= share <= 1:
                raise MpiftError(f"{item.name} use is {share}, not a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class Health:
    """A node's health after the samples so far; ``observe`` gives the next.

    ``score`` is None while no metric with a limit is known. ``reason`` is empty for a node that is
    simply healthy. ``band_since`` and ``observed_at`` (the last sample that told anything) are in
    seconds on the caller's clock.
    """

    limits: Mapping[str, Limit] = field(default_factory=lambda: LIMITS, repr=False)
    band: Band = Band.HEALTHY
    score: float | None = None
    reason: str = ""
    band_since: float = -math.inf
    observed_at: float = -math.inf
    # For the last samples: the worst band that each, raised by the margin, would allow.
    _ceilings: tuple[Band, ...] = field(default=(), repr=False)
    # Whether a capacity is near its limit, or the device has a fault: people should know.
    is_serious: bool = False

    def observe(self, now: float, metrics: Metrics) -> Health:
        """The health after a sample taken at ``now`` (seconds); without any news, the same band."""
        loads = _loads(metrics, self.limits)
        fault = metrics.accelerator_fault
        if not loads and not fault:
            return replace(self, score=None)  # not observed: no evidence lengthens a critical time
        if fault:
            band = aim = ceiling = Band.CRITICAL
        else:
            aim = _band(loads, self.limits)
            ceiling = _band({n: load * (1 + MARGIN) for n, load in loads.items()}, self.limits)
        ceilings = (*self._ceilings, ceiling)[-SAMPLES_TO_FALL:]
        if not fault:
            band = self.band
            if aim > band:
                band = Band(band + 1)
            elif len(ceilings) == SAMPLES_TO_FALL:
                band = min(band, max(ceilings))
        return replace(
            self,
            band=band,
            score=_score(loads, self.limits) if loads else None,
            reason=_reason(band, aim, metrics, loads, self.limits),
            band_since=self.band_since if band == self.band else now,
            observed_at=now,
            _ceilings=ceilings,
            is_serious=bool(fault)
            or any(load >= NEAR_FROM for n, load in loads.items() if self.limits[n].is_capacity),
        )

    @property
    def critical_seconds(self) -> float:
        """From the first to the latest sample of an unbroken critical time; 0 if it is not one."""
        return self.observed_at - self.band_since if self.band is Band.CRITICAL else 0.0

    def evict_due(self, evict_critical_after_seconds: float | None) -> bool:
        """Whether the node was critical for that long; never with None or 0, the defaults."""
        if not evict_critical_after_seconds:
            return False
        return self.critical_seconds >= evict_critical_after_seconds


def _loads(metrics: Metrics, limits: Mapping[str, Limit]) -> dict[str, float]:
    """Use over threshold of every known metric that has a limit."""
    uses = {name: getattr(metrics, name) for name in limits}
    return {name: use / limits[name].threshold for name, use in uses.items() if use is not None}


def _weighted(loads: Mapping[str, float], limits: Mapping[str, Limit]) -> float:
    total = math.fsum(limit.weight for limit in limits.values())
    return math.fsum(limits[name].weight * load for name, load in loads.items()) / total


def _score(loads: Mapping[str, float], limits: Mapping[str, Limit]) -> float:
    return max(_weighted(loads, limits), HEALTHY_BELOW * max(loads.values()))


def _band(loads: Mapping[str, float], limits: Mapping[str, Limit]) -> Band:
    """The band of these loads by themselves. More load never means a better band."""
    over = [name for name, load in loads.items() if load >= 1]
    runs_out = any(limits[name].is_capacity for name in over)
    if len(over) >= 2 and runs_out and _weighted(loads, limits) >= CRITICAL_FROM:
        return Band.CRITICAL
    score = _score(loads, limits)
    if score >= HEALTHY_BELOW:
        return Band.DEGRADED
    return Band.NEAR if score >= NEAR_FROM * HEALTHY_BELOW else Band.HEALTHY


def _reason(
    band: Band,
    aim: Band,
    metrics: Metrics,
    loads: Mapping[str, float],
    limits: Mapping[str, Limit],
) -> str:
    """What led to the band, the gravest first; ``aim`` is the band of the sample by itself."""
    if band is Band.HEALTHY:
        return ""
    words = [f"accelerator fault: {metrics.accelerator_fault}"] if metrics.accelerator_fault else []
    for name, load in sorted(loads.items(), key=lambda item: -item[1]):
        if load >= NEAR_FROM:
            where = "over" if load >= 1 else "near"
            use, threshold = getattr(metrics, name), limits[name].threshold
            words.append(f"{name} {_percent(use)} {where} its threshold {_percent(threshold)}")
    weighted = _weighted(loads, limits) if loads else 0.0
    if weighted >= NEAR_FROM * HEALTHY_BELOW:
        words.append(f"weighted score {weighted:.2f}, healthy below {HEALTHY_BELOW:g}")
    if aim < band:
        words.append(f"recovering from {band.name.lower()}")
    return "; ".join(words)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
