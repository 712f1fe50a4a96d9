"""Majority rounds in simulated time: what the rule alone gives with late ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.simulate.stragglers import Pace, late_ranks, one_late_rank_a_round, pace

ROUNDS = 20_000
LATE = late_ranks(1, 4, ROUNDS)
DELAYS = st.floats(0.0, 20.0)


def test_without_late_ranks_a_round_takes_a_step_and_everybody_takes_part() -> None:
    assert pace([[1.0, 1.0, 1.0]] * 10) == Pace(1.0, 1.0)


def test_a_synchronous_round_takes_as_long_as_its_late_rank() -> None:
    result = one_late_rank_a_round(LATE, 4, 1.5, quorum="all")
    assert result.rounds_per_step_time == pytest.approx(1 / 2.5)
    assert result.participation == 1.0


def test_with_patience_for_the_whole_delay_rounds_are_synchronous() -> None:
    result = one_late_rank_a_round(LATE, 4, 1.5, patience_steps=1.5)
    assert result == one_late_rank_a_round(LATE, 4, 1.5, quorum="all")


def test_a_rank_late_by_one_and_a_half_steps_leaves_86_percent_of_the_even_pace() -> None:
    result = one_late_rank_a_round(LATE, 4, 1.5)
    assert result.rounds_per_step_time == pytest.approx(0.857, abs=0.003)
    assert result.rounds_per_step_time * 2.5 == pytest.approx(2.14, abs=0.01)


def test_a_rank_late_by_one_step_costs_the_others_nothing() -> None:
    # It arrives in the next round along with those that went on without it.
    assert one_late_rank_a_round(LATE, 4, 1.0).rounds_per_step_time == pytest.approx(1.0, abs=1e-3)


def test_three_rounds_by_hand() -> None:
    # Rank 2 misses round 0, which closes at 1. It arrives at 2.5, in the middle of round 2, which
    # began at 2 and closes when ranks 0 and 2 are there, at 3; rank 1 is late for that one.
    durations = [[1.0, 1.0, 2.5], [1.0, 1.0, 9.0], [1.0, 3.0, 9.0]]
    assert pace(durations) == Pace(3 / 3.0, (2 + 2 + 2) / 9)


def test_a_rank_too_far_behind_is_waited_for() -> None:
    # Rank 2 begins for round 0 and arrives at 10. With a lag of at most 3, round 4 waits for it.
    durations = [[1.0, 1.0, 10.0]] + [[1.0, 1.0, 1.0]] * 4
    assert pace(durations, max_lag=3) == Pace(5 / 10.0, (4 * 2 + 3) / 15)
    assert pace(durations, max_lag=4) == Pace(1.0, 10 / 15)


def test_with_two_ranks_both_are_needed() -> None:
    late = late_ranks(1, 2, 100)
    assert one_late_rank_a_round(late, 2, 3.0) == one_late_rank_a_round(late, 2, 3.0, quorum="all")


def test_patience_makes_rounds_fuller_and_slower() -> None:
    without = one_late_rank_a_round(LATE, 4, 1.5)
    with_some = one_late_rank_a_round(LATE, 4, 1.5, patience_steps=1.0)
    assert with_some.rounds_per_step_time < without.rounds_per_step_time
    assert with_some.participation > without.participation


@given(st.integers(0, 1000), st.integers(2, 9), DELAYS, st.integers(0, 6))
def test_the_pace_lies_between_the_synchronous_and_the_even_one(
    seed: int, ranks: int, delay: float, max_lag: int
) -> None:
    late = late_ranks(seed, ranks, 50)
    result = one_late_rank_a_round(late, ranks, delay, max_lag=max_lag)
    assert 1 / (1 + delay) - 1e-9 <= result.rounds_per_step_time <= 1 + 1e-9
    assert (ranks // 2 + 1) / ranks <= result.participation <= 1


def test_the_same_seed_draws_the_same_ranks_however_many_rounds_are_asked_for() -> None:
    assert late_ranks(7, 4, 10) == late_ranks(7, 4, 100)[:10]
    assert late_ranks(7, 4, 100) != late_ranks(8, 4, 100)
    assert set(LATE) == {0, 1, 2, 3}


@pytest.mark.parametrize(("late", "delay"), [([], 1.0), ([0, 1], -0.5)])
def test_what_gives_no_pace_is_refused(late: list[int], delay: float) -> None:
    with pytest.raises(ValueError, match="no pace"):
        one_late_rank_a_round(late, 4, delay)
