"""What the rule of majority rounds can give with late ranks: the rule alone, at no cost.

Every rank computes for one step time, and longer where it is late; communication takes no time. A
round closes once its quorum has arrived and patience is over. Who arrived takes part and begins its
next step; the others go on computing, and count in the round that is open when they arrive. A rank
that is more than ``max_lag`` rounds behind is waited for. Time is counted in step times.

What is measured on real ranks lies below this, by what communication and patience cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpift.core.closing import Quorum, ranks_needed
from mpift.simulate.network import random_of


@dataclass(frozen=True, slots=True)
class Pace:
    """``rounds_per_step_time``: 1 is that of ranks of which none is late. ``participation``: the
    share of the ranks that took part in a round, on average."""

    rounds_per_step_time: float
    participation: float


def late_ranks(seed: int, ranks: int, rounds: int) -> list[int]:
    """Which one of ``ranks`` ranks is late in each of the first ``rounds`` rounds."""
    random = random_of(seed, "late ranks")
    return [random.randrange(ranks) for _ in range(rounds)]


def one_late_rank_a_round(
    late: Sequence[int],
    ranks: int,
    delay_steps: float,
    *,
    quorum: Quorum = "majority",
    patience_steps: float = 0.0,
    max_lag: int = 4,
) -> Pace:
    """The pace where rank ``late[r]``, if it begins a step for round r, needs ``delay_steps`` more.

    ``quorum`` and ``max_lag`` are those of the optimizer; its patience is ``patience_steps`` step
    times. Raises ``ValueError`` where there are no rounds, or a delay is negative.
    """
    if not late or delay_steps < 0:
        raise ValueError(f"{len(late)} rounds with delays of {delay_steps} step times give no pace")
    durations = [[1.0 + delay_steps * (rank == chosen) for rank in range(ranks)] for chosen in late]
    return pace(durations, quorum, patience_steps, max_lag)


def pace(
    durations: Sequence[Sequence[float]],
    quorum: Quorum = "majority",
    patience_steps: float = 0.0,
    max_lag: int = 4,
) -> Pace:
    """The pace where rank i computes for ``durations[r][i]`` if it begins a step for round r.

    Durations and ``patience_steps`` are in step times.
    """
    everybody = range(len(durations[0]))
    needed = ranks_needed(quorum, len(everybody))
    now, participations = 0.0, 0
    begun_for = [0 for _ in everybody]  # the round for which each began its present step
    arrives = list(durations[0])
    for round_ in range(len(durations)):
        # Who arrived before the round was open stands first in it.
        arrivals = sorted(max(now, moment) for moment in arrives)
        quorum_at = arrivals[needed - 1]
        awaited = [arrives[rank] for rank in everybody if round_ - begun_for[rank] > max_lag]
        now = max(quorum_at, min(arrivals[-1], quorum_at + patience_steps), *awaited)
        participants = [rank for rank in everybody if arrives[rank] <= now]
        participations += len(participants)
        if round_ + 1 == len(durations):
            break
        for rank in participants:
            begun_for[rank] = round_ + 1
            arrives[rank] = now + durations[round_ + 1][rank]
    rounds = len(durations)
    return Pace(rounds / now, participations / (rounds * len(everybody)))
