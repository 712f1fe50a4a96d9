"""``mpift bench verify``: what it costs to verify that all replicas are equal, here and now.

Starts its own ranks on this machine (``verified_ranks``), which train models of the size of the
examples' and compare their states every few steps. The ``ratio`` comes from within the run: what a
step waits for verification, and what that takes of a processor, over the step's own time; the
training thread's part of it counts in both. Steps without verification take turns with those with
it, but a difference of a thousandth is far below what repeated runs differ by on any machine, so
their ratio is shown only as a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpift.bench.machine import START_SECONDS, results_of, threads_a_rank
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.errors import ConfigError
from mpift.testing.ranks import run_ranks

# The examples whose models are trained, and how many times a turn's steps: a small model's are
# short, and the mean of a few checks would hang on whether one of them lost its processor.
MODELS = {"digits": 10, "chargpt": 1}
# A bound on one step.
_STEP_SECONDS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` turns of ``steps`` steps (times that of the model) with verification every
    ``every`` steps, and as many without."""

    ranks: int = 4
    every: int = 10
    rounds: int = 4
    steps: int = 40

    def steps_of(self, model: str) -> int:
        """Timed steps of this model in one turn."""
        return self.steps * MODELS[model]

    @property
    def seconds_max(self) -> float:
        """No healthy run takes longer."""
        steps = 2 * (self.rounds + 1) * (self.steps + self.every + 1)
        return START_SECONDS + len(MODELS) * steps * _STEP_SECONDS_MAX


@dataclass(frozen=True, slots=True)
class RankCost:
    """One rank's means over its steps with verification, in seconds. ``waited`` is how long the
    training thread was held up, ``cpu`` what verification took of a processor in any thread,
    ``message`` of it in the service thread."""

    step: float
    waited: float
    cpu: float
    message: float
    checks: int

    @property
    def ratio(self) -> float:
        """Of a step with verification to one in which it were free."""
        return 1 + (self.waited + self.cpu) / self.step


@dataclass(frozen=True, slots=True)
class Row:
    """One model. ``cost`` is that of the rank for which verification is dearest; ``on`` and ``off``
    are seconds of one step with and without, of the slowest rank in each turn."""

    model: str
    parameters: int
    state_bytes: int
    cost: RankCost
    on: Spread
    off: Spread
    on_to_off: Spread

    def as_json(self) -> dict[str, Any]:
        """Plain values; seconds a step."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "ratio": self.cost.ratio,
            "step_seconds": self.cost.step,
            "waited_seconds": self.cost.waited,
            "cpu_seconds": self.cost.cpu,
            "message_seconds": self.cost.message,
            "checks": self.cost.checks,
            "on_seconds": self.on.median,
            "off_seconds": self.off.median,
            "on_to_off": self.on_to_off.median,
            "spread": {
                "on_seconds": asdict(self.on),
                "off_seconds": asdict(self.off),
                "on_to_off": asdict(self.on_to_off),
            },
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was measured, a row a model."""

    plan: Plan
    threads: int
    rows: Sequence[Row]

    @property
    def ratio(self) -> float:
        """That of the model for which verification is dearest."""
        return max(row.cost.ratio for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain values: the ratio, the rows, and how it was run."""
        return {
            "ranks": self.plan.ranks,
            "ratio": self.ratio,
            "models": [row.as_json() for row in self.rows],
            "verify_every": self.plan.every,
            "rounds": self.plan.rounds,
            "steps": self.plan.steps,
            "threads": self.threads,
        }


def make_plan(ranks: int, every: int = 10, rounds: int = 4, steps: int = 40) -> Plan:
    """Raises ``ConfigError`` where there would be nothing to compare or no whole number of checks
    in a turn."""
    if ranks < 2:
        raise ConfigError(f"{ranks} rank has nobody to compare with: take at least 2")
    if min(every, rounds, steps) < 1 or steps % every:
        raise ConfigError(
            f"{rounds} turns of {steps} steps with a check every {every}: all must be at least 1,"
            " and the steps a multiple of those between two checks"
        )
    return Plan(ranks, every, rounds, steps)


def measure(plan: Plan) -> VerifyReport:
    """Start the plan's ranks here and let them train.

    Raises ``MpiftError`` if a rank fails, replicas differ or all takes unreasonably long.
    """
    # Here, since it loads torch.
    from mpift.bench.verified_ranks import train

    threads = threads_a_rank(plan.ranks)
    outcome = run_ranks(
        plan.ranks,
        train,
        asdict(plan),
        timeout_seconds=plan.seconds_max,
        environment={"OMP_NUM_THREADS": str(threads)},
    )
    return report(plan, threads, results_of(outcome, plan.ranks))


def report(plan: Plan, threads: int, by_rank: Sequence[Mapping[str, Any]]) -> VerifyReport:
    """Put together what the ranks measured: for each, what ``verified_ranks.train`` returns."""
    rows = []
    for model in MODELS:
        found = [rank["models"][model] for rank in by_rank]
        costs = [
            _cost(plan, model, one, rank["message_cpu_seconds"])
            for one, rank in zip(found, by_rank, strict=True)
        ]
        on, off = (
            [max(turn) for turn in zip(*(one[way] for one in found), strict=True)]
            for way in ("on_seconds", "off_seconds")
        )
        rows.append(
            Row(
                model,
                found[0]["parameters"],
                found[0]["state_bytes"],
                max(costs, key=lambda cost: cost.ratio),
                spread_of(on),
                spread_of(off),
                spread_of(ratios(on, off)),
            )
        )
    return VerifyReport(plan, threads, rows)


def _cost(plan: Plan, model: str, found: Mapping[str, Any], message_cpu_seconds: float) -> RankCost:
    steps, checks = plan.rounds * plan.steps_of(model), found["checks"]
    message = checks * message_cpu_seconds / steps
    return RankCost(
        sum(found["on_seconds"]) / plan.rounds,
        found["waited_seconds"] / steps,
        found["cpu_seconds"] / steps + message,
        message,
        checks,
    )
