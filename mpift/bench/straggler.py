"""``mpift bench straggler``: what late ranks cost, with majority rounds and without, here and now.

Starts its own ranks on this machine (``late_ranks``). In each round one rank, drawn at random, is
late by some step times; the same rounds are gone through synchronously (``quorum="all"``) and by
majority with adaptive patience. Beside what is measured stands the bound: what the rule gives at no
patience, with communication that takes no time (``mpift.simulate.stragglers``). One more run has a
rank that is slow all the time.

Paces are counted in rounds, over a whole run on rank 0, from when the patience has settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpift.bench.machine import START_SECONDS, results_of
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.errors import ConfigError, MpiftError
from mpift.simulate.stragglers import late_ranks, one_late_rank_a_round
from mpift.testing.ranks import run_ranks

# The delay whose figures stand for all, in step times.
HEADLINE_DELAY = 1.5
DELAYS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
# Its late ranks are those of a long run: the first hundred rounds have its bounds, within 2 %.
_TYPICAL_SEED = 4
# What a run may take, as a multiple of what it should.
_PATIENCE_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run; ``delays`` and ``slowdown`` are in step times, the latter a whole step's.

    A step of 0.25 s is long beside the reduction of 4 MB: 4 ranks on 2 cores take some 20 ms for
    it, which the bound does not know of.
    """

    ranks: int = 4
    delays: Sequence[float] = DELAYS
    step_seconds: float = 0.25
    seed: int = _TYPICAL_SEED
    alternations: int = 5
    even_rounds: int = 20
    synchronous_rounds: int = 8
    majority_rounds: int = 80
    persistent_rounds: int = 40
    slowdown: float = 3.0

    @property
    def seconds(self) -> float:
        """About how long it all takes."""
        even = 2 * self.alternations * (self.even_rounds + 5)
        # Whole steps lost in a round: all of the delay, or somewhat under half of it.
        synchronous = sum(1 + delay for delay in self.delays) * (self.synchronous_rounds + 3)
        majority = sum(1 + 0.45 * delay for delay in self.delays) * (self.majority_rounds + 20)
        steps = even + synchronous + majority + self.persistent_rounds + 20
        return 1.1 * self.step_seconds * steps


@dataclass(frozen=True, slots=True)
class Row:
    """One delay: paces in rounds per second, ``participation`` as the share of the ranks that were
    in a round by majority, and the bounds of speed-up and fraction of the even pace."""

    delay_steps: float
    synchronous: float
    majority: float
    participation: float
    fraction_of_even: float
    bound_speedup: float
    bound_fraction: float

    @property
    def speedup(self) -> float:
        """Of majority rounds over synchronous ones, with the same ranks late."""
        return self.majority / self.synchronous


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """What was measured. ``even`` and ``even_all`` are paces without late ranks by majority and
    synchronously, and ``even_ratios`` those of neighbours in time. ``late_rounds`` are the rounds
    that the others went on in without a member, where ``slow_member`` was always slow."""

    plan: Plan
    bytes: int
    even: Spread
    even_all: Spread
    even_ratios: Spread
    rows: Sequence[Row]
    persistent: float
    slow_member: int
    late_rounds: Mapping[int, int]
    identical: bool

    @property
    def headline(self) -> Row:
        """The row whose figures stand for all."""
        return next(row for row in self.rows if row.delay_steps == HEADLINE_DELAY)

    @property
    def communication_share(self) -> float:
        """The part of an even synchronous step that is no wait for computation."""
        return 1 - self.even_all.median * self.plan.step_seconds

    @property
    def others_fraction(self) -> float:
        """The pace of the others, with one rank that is always slow, over the even one."""
        return self.persistent / self.even.median

    @property
    def named(self) -> int | None:
        """The member that was late most often in that run; None if nobody was."""
        return max(self.late_rounds, key=lambda member: self.late_rounds[member], default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values: the headline's figures, then the curve, and how it was run."""
        row = self.headline
        return {
            "ranks": self.plan.ranks,
            "bytes": self.bytes,
            "delay_steps": row.delay_steps,
            "even_steps_per_s": self.even.median,
            "synchronous_steps_per_s": row.synchronous,
            "majority_steps_per_s": row.majority,
            "speedup": row.speedup,
            "fraction_of_even": row.fraction_of_even,
            "bound_speedup": row.bound_speedup,
            "bound_fraction": row.bound_fraction,
            "identical": self.identical,
            "even_ratio_to_all": self.even_ratios.median,
            "spread": {
                "even_steps_per_s": asdict(self.even),
                "even_ratio_to_all": asdict(self.even_ratios),
            },
            "communication_share": self.communication_share,
            "curve": [{**asdict(row), "speedup": row.speedup} for row in self.rows],
            "persistent": {
                "slow_member": self.slow_member,
                "named_member": self.named,
                "late_rounds": dict(self.late_rounds),
                "steps_per_s": self.persistent,
                "others_fraction": self.others_fraction,
            },
            "plan": asdict(self.plan),
        }


def make_plan(ranks: int, delays: Sequence[float] | None = None, quick: bool = False) -> Plan:
    """The plan for these delays, or for the usual ones; the headline's is always among them.

    ``quick`` has fewer rounds, and no more delays than were asked for. Raises ``ConfigError`` for a
    delay that is not above 0, or too few ranks.
    """
    if ranks < 2:
        raise ConfigError(f"{ranks} rank has nobody to wait for: take at least 2")
    chosen = (() if quick else DELAYS) if delays is None else delays
    wrong = [delay for delay in chosen if not 0 < delay < float("inf")]
    if wrong:
        raise ConfigError(f"a delay must be a number of step times above 0, not {wrong[0]}")
    every = tuple(sorted({*chosen, HEADLINE_DELAY}))
    if not quick:
        return Plan(ranks, every)
    return Plan(
        ranks,
        every,
        alternations=3,
        even_rounds=12,
        synchronous_rounds=6,
        majority_rounds=60,
        persistent_rounds=25,
    )


def measure(plan: Plan) -> StragglerReport:
    """Start the plan's ranks here and let them be late as it says.

    Raises ``MpiftError`` if a rank fails or all takes unreasonably long.
    """
    # Here, since it loads torch.
    from mpift.bench.late_ranks import straggle

    outcome = run_ranks(
        plan.ranks,
        straggle,
        asdict(plan),
        timeout_seconds=START_SECONDS + _PATIENCE_FACTOR * plan.seconds,
        environment={"OMP_NUM_THREADS": "1"},
    )
    return report(plan, results_of(outcome, plan.ranks))


def report(plan: Plan, by_rank: Sequence[Mapping[str, Any]]) -> StragglerReport:
    """Put together what the ranks of a run found; paces are rank 0's."""
    found = by_rank[0]
    even = spread_of(found["even"])
    late = late_ranks(plan.seed, plan.ranks, plan.majority_rounds)
    rows = []
    for number, delay in enumerate(plan.delays):
        bound = one_late_rank_a_round(late, plan.ranks, delay).rounds_per_step_time
        majority = found["majority"][number]
        rows.append(
            Row(
                delay,
                found["synchronous"][number],
                majority,
                found["participation"][number],
                majority / even.median,
                bound * (1 + delay),
                bound,
            )
        )
    return StragglerReport(
        plan,
        found["bytes"],
        even,
        spread_of(found["even_all"]),
        spread_of(ratios(found["even"], found["even_all"])),
        rows,
        found["persistent"],
        plan.ranks - 1,
        {int(member): count for member, count in sorted(found["late_rounds"].items())},
        all(rank["digests"] == found["digests"] for rank in by_rank),
    )


def rounds_per_second(marks: Sequence[tuple[int, float]], warm_up: int) -> float:
    """The pace of a run from its ``marks``: rounds applied so far, and when, in seconds.

    Raises ``MpiftError`` where fewer than two lie behind the first ``warm_up`` rounds.
    """
    counted = [mark for mark in marks if mark[0] >= warm_up]
    if len(counted) < 2:
        raise MpiftError(
            f"{len(counted)} steps after the first {warm_up} rounds give no pace: run more rounds"
        )
    (first, began), (last, ended) = counted[0], counted[-1]
    return (last - first) / (ended - began)
