"""One rank of ``mpift bench straggler``: training at a timed wait, with ranks late by plan.

A step is a wait as long as computation would take, as on an accelerator that leaves the processor
free, and then a real gradient of 4 MB, reduced and applied. So many ranks on few cores don't slow
each other down, and who is late is decided here alone. All trainings of a run live in one launch,
and each starts mpift anew: with several optimizers at once no rank would be left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mpift.torch as hvd
from mpift.bench.straggler import Plan, rounds_per_second
from mpift.simulate.stragglers import late_ranks

# Elements of the one parameter, in float32.
ELEMENTS = 1 << 20
_LEARNING_RATE = 1e-3
_MOMENTUM = 0.9
# The adaptive patience waits for everybody while it knows nothing, 5 rounds; its median is of other
# rounds than those after as many more.
_WARM_UP_ROUNDS = 12

# How many step times more this rank needs in a round.
Lateness = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Run:
    """``pace`` in rounds per second, ``participation`` as a share of the ranks, and how often the
    others went on without which member."""

    pace: float
    participation: float
    late_rounds: Mapping[int, int]


# Quorum and patience.
_WAYS = {"all": ("all", None), "majority": ("majority", "adaptive")}


class Training:
    """One optimizer, and the rounds that it goes through."""

    def __init__(self, step_seconds: float, quorum: str, patience: str | None = None) -> None:
        self._step_seconds = step_seconds
        self._parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
        # Another gradient on every rank, so that who took part in a round shows in the parameters.
        generator = torch.Generator().manual_seed(hvd.rank())
        self._direction = torch.randn(ELEMENTS, generator=generator)
        sgd = torch.optim.SGD([self._parameter], lr=_LEARNING_RATE, momentum=_MOMENTUM)
        self._optimizer = hvd.DistributedOptimizer(
            sgd, [("parameter", self._parameter)], quorum=quorum, patience=patience
        )

    def run(self, rounds: int, lateness: Lateness) -> Run:
        """Train for that many rounds after some to warm up; all ranks have the same bits then."""
        optimizer = self._optimizer
        warm_up = _WARM_UP_ROUNDS
        first = optimizer.rounds_applied
        marks = []
        hvd.barrier()
        for _ in hvd.rounds(range(warm_up + rounds), optimizer):
            late_steps = lateness(optimizer.rounds_applied - first)
            time.sleep(self._step_seconds * (1 + late_steps))
            optimizer.zero_grad()
            torch.dot(self._parameter, self._direction).backward()
            optimizer.step()
            marks.append((optimizer.rounds_applied - first, time.perf_counter()))
        reports = [report for report in optimizer.rounds if report.round >= first + warm_up]
        shares = [report.participants / report.size for report in reports]
        late = Counter(member for report in reports for member in report.late)
        return Run(rounds_per_second(marks, warm_up), sum(shares) / len(shares), dict(late))

    def digest(self) -> str:
        """Of parameter and optimizer state."""
        return hvd.digest([self._parameter, self._optimizer.state_dict()])


def straggle(given: Mapping[str, Any]) -> dict[str, Any]:
    """Run on every rank: what ``given``, a ``Plan`` as a mapping, asks for.

    Paces are in rounds per second, one an alternation or a delay, in the plan's order.
    """
    plan = Plan(**given)
    torch.set_num_threads(1)
    digests: list[str] = []

    def train(name: str, rounds: int, lateness: Lateness) -> Run:
        hvd.init()
        training = Training(plan.step_seconds, *_WAYS[name])
        run = training.run(rounds, lateness)
        digests.append(training.digest())
        hvd.shutdown()
        return run

    found: dict[str, Any] = {"majority": [], "all": []}
    for turn in range(plan.alternations):
        for name in ("majority", "all") if turn % 2 == 0 else ("all", "majority"):
            found[name].append(train(name, plan.even_rounds, _never).pace)
    found = {"even": found["majority"], "even_all": found["all"]}
    found |= {"synchronous": [], "majority": [], "participation": []}
    for delay in plan.delays:
        late = _one_late_rank(plan, delay)
        found["synchronous"].append(train("all", plan.synchronous_rounds, late).pace)
        run = train("majority", plan.majority_rounds, late)
        found["majority"].append(run.pace)
        found["participation"].append(run.participation)
    run = train("majority", plan.persistent_rounds, _slow_last_rank(plan.slowdown))
    found["persistent"] = run.pace
    found["late_rounds"] = {str(member): count for member, count in run.late_rounds.items()}
    found["bytes"] = 4 * ELEMENTS
    found["digests"] = digests
    return found


def _slow_last_rank(slowdown: float) -> Lateness:
    return lambda _round: slowdown - 1 if hvd.rank() == hvd.size() - 1 else 0.0


def _never(_round: int) -> float:
    return 0.0


def _one_late_rank(plan: Plan, delay_steps: float) -> Lateness:
    """One rank a round, drawn alike on all ranks."""
    late = late_ranks(plan.seed, plan.ranks, plan.majority_rounds + _WARM_UP_ROUNDS)
    return lambda round_: delay_steps * (late[round_ % len(late)] == hvd.rank())
