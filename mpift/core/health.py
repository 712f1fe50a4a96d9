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

The device adds reasons, and no part of the score, which stays that of the four metrics:

    DEGRADED   ``CORRECTED_DEGRADED`` memory errors corrected within ``WINDOW_SECONDS``; a
               temperature at its limit; a link to other devices that was up and is down, or was
               within ``WINDOW_SECONDS``; a warning of the driver, or one that does not answer
    NEAR       ``CORRECTED_NEAR`` of such errors; a temperature within a tenth of its limit

The node's band is the worst of all reasons. A device's faults (memory errors that could not be
corrected, an alarm of its own) come as ``accelerator_fault``. Only errors that come while it is
watched count: the first count seen is where it begins, as is one that has fallen, since it was
reset. A link that was never up is one that nobody has connected.

So busy is not dead: processor and network at 100 % mean that they are used, and whatever the limits
are, they alone never make a node critical. A busy accelerator is the aim of it all, and has none.

A band is climbed one step a sample, so a warning comes before the worst (a fault alone skips it).
It is left once the loads of the last ``SAMPLES_TO_FALL`` samples, each raised by ``MARGIN``, would
not lead into it: a use that wavers by less than the margin changes the band once at most. So does
a temperature; of corrected errors there have to be less than half as many.

Nothing here evicts anybody: ``evict_due`` answers a question that only a configured job asks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import NamedTuple

from mpift.errors import MpiftError

HEALTHY_BELOW = 0.8  # of the score
NEAR_FROM = 0.9  # of a limit: of a threshold, or of HEALTHY_BELOW
CRITICAL_FROM = 1.0  # of the weighted mean: on average, everything is at its threshold
MARGIN = 0.05  # of a load
SAMPLES_TO_FALL = 3

# Of a device. One corrected error in ten minutes is cosmic rays; a memory that goes on to fail has
# them ever more often.
WINDOW_SECONDS = 600.0
CORRECTED_NEAR = 2
CORRECTED_DEGRADED = 10


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
class Device:
    """What the driver of a rank's accelerator tells of it; None where unknown.

    ``corrected_errors`` of its memory are counted from any moment on. ``link_up`` is its own link
    to other devices, of which mpift makes no use. ``warning`` says what is not well and no fault,
    "" if there is nothing.
    """

    name: str
    corrected_errors: int | None = None
    temperature_celsius: float | None = None
    temperature_limit_celsius: float | None = None
    link_up: bool | None = None
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a node's resources are used by, each a share from 0 to 1; None where unknown.

    ``accelerator_fault`` says in words what is wrong with the device, None if nothing is known to
    be; ``device`` is what may become one. ``MpiftError`` for a share outside 0 to 1.
    """

    cpu: float | None = None
    memory: float | None = None
    disk: float | None = None
    network: float | None = None
    accelerator: float | None = None
    accelerator_fault: str | None = None
    device: Device | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            share = getattr(self, item.name)
            if isinstance(share, int | float) and not 0 <= share <= 1:
                raise MpiftError(f"{item.name} use is {share}, not a share from 0 to 1")


class _DeviceHistory(NamedTuple):
    """What has to be remembered of the device's readings; times on the caller's clock."""

    corrected_errors: int | None = None  # the last count that was known
    rises: tuple[tuple[float, int], ...] = ()  # of it, within the window: when, by how much
    link_was_up: bool = False
    link_down_at: float = -math.inf  # the last time it was, of a link that had been up

    def after(self, now: float, device: Device) -> _DeviceHistory:
        """With one more reading."""
        before, count = self.corrected_errors, device.corrected_errors
        rise = count - before if count is not None and before is not None else 0
        rises = tuple(item for item in self.rises if now - item[0] < WINDOW_SECONDS)
        is_down = self.link_was_up and device.link_up is False
        return _DeviceHistory(
            before if count is None else count,
            (*rises, (now, rise)) if rise > 0 else rises,
            self.link_was_up or device.link_up is True,
            now if is_down else self.link_down_at,
        )


class _Concern(NamedTuple):
    """One reason of the device: the band it leads to, and the worst that it lets no one leave."""

    band: Band
    ceiling: Band
    words: str


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
    _device: _DeviceHistory = field(default=_DeviceHistory(), repr=False)
    # Whether the device has a part in it, which is this rank's own and not its node's.
    is_of_device: bool = False
    # Whether a capacity is near its limit, or the device is not well: people should know.
    is_serious: bool = False

    def observe(self, now: float, metrics: Metrics) -> Health:
        """The health after a sample taken at ``now`` (seconds); without any news, the same band."""
        loads = _loads(metrics, self.limits)
        fault, device = metrics.accelerator_fault, metrics.device
        if not loads and not fault and device is None:
            return replace(self, score=None)  # not observed: no evidence lengthens a critical time
        history = self._device if device is None else self._device.after(now, device)
        concerns = [] if device is None else _concerns(now, device, history)
        aim = max([_band(loads, self.limits), *(concern.band for concern in concerns)])
        raised = {name: load * (1 + MARGIN) for name, load in loads.items()}
        ceiling = max([_band(raised, self.limits), *(concern.ceiling for concern in concerns)])
        if fault:
            aim = ceiling = Band.CRITICAL
        ceilings = (*self._ceilings, ceiling)[-SAMPLES_TO_FALL:]
        band = Band.CRITICAL if fault else self.band
        if aim > band:
            band = Band(band + 1)
        elif len(ceilings) == SAMPLES_TO_FALL:
            band = min(band, max(ceilings))
        words = [concern.words for concern in concerns if concern.band > Band.HEALTHY]
        return replace(
            self,
            band=band,
            score=_score(loads, self.limits) if loads else None,
            reason=_reason(band, aim, metrics, words, loads, self.limits),
            band_since=self.band_since if band == self.band else now,
            observed_at=now,
            _ceilings=ceilings,
            _device=history,
            is_of_device=bool(fault or words),
            is_serious=bool(fault or words)
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
    if not loads:
        return Band.HEALTHY
    over = [name for name, load in loads.items() if load >= 1]
    runs_out = any(limits[name].is_capacity for name in over)
    if len(over) >= 2 and runs_out and _weighted(loads, limits) >= CRITICAL_FROM:
        return Band.CRITICAL
    score = _score(loads, limits)
    if score >= HEALTHY_BELOW:
        return Band.DEGRADED
    return Band.NEAR if score >= NEAR_FROM * HEALTHY_BELOW else Band.HEALTHY


def _concerns(now: float, device: Device, history: _DeviceHistory) -> list[_Concern]:
    """All that is to be said of the device."""
    window = f"in the last {WINDOW_SECONDS / 60:g} min"
    found = []
    if device.warning:
        found.append(_Concern(Band.DEGRADED, Band.DEGRADED, f"{device.name}: {device.warning}"))
    errors = sum(rise for _, rise in history.rises)
    if errors:
        noun = "corrected memory error" if errors == 1 else "corrected memory errors"
        words = f"{device.name}: {errors} {noun} {window}"
        found.append(_Concern(_errors_band(errors), _errors_band(2 * errors), words))
    temperature, limit = device.temperature_celsius, device.temperature_limit_celsius
    if temperature is not None and limit:
        load = temperature / limit
        words = f"{device.name}: {temperature:g} C of {limit:g} C"
        found.append(_Concern(_heat_band(load), _heat_band(load * (1 + MARGIN)), words))
    if now - history.link_down_at < WINDOW_SECONDS:
        is_down = history.link_down_at == now
        lost = "is down" if is_down else f"was down {window}"
        words = f"{device.name}: its link to other devices {lost}"
        found.append(_Concern(Band.DEGRADED, Band.DEGRADED, words))
    return found


def _errors_band(errors: int) -> Band:
    if errors >= CORRECTED_DEGRADED:
        return Band.DEGRADED
    return Band.NEAR if errors >= CORRECTED_NEAR else Band.HEALTHY


def _heat_band(load: float) -> Band:
    if load >= 1:
        return Band.DEGRADED
    return Band.NEAR if load >= NEAR_FROM else Band.HEALTHY


def _reason(
    band: Band,
    aim: Band,
    metrics: Metrics,
    device: list[str],
    loads: Mapping[str, float],
    limits: Mapping[str, Limit],
) -> str:
    """What led to the band, the gravest first; ``aim`` is the band of the sample by itself.

    ``device`` has the device's reasons in words.
    """
    if band is Band.HEALTHY:
        return ""
    words = [f"accelerator fault: {metrics.accelerator_fault}"] if metrics.accelerator_fault else []
    words += device
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
