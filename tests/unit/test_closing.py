"""What a coordinator does about late ranks, and how long it waits before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.closing import (
    Closing,
    Decline,
    End,
    Nudge,
    PatienceOver,
    Told,
    parse_quorum,
    ranks_needed,
)
from mpift.core.patience import Patience, parse_patience
from mpift.core.rounds import Standing
from mpift.errors import ConfigError


def told(member: int, standing: Standing, round_: int = 0, turn: int = 0) -> Told:
    return Told(member, standing, round_, turn)


def arrived(*members: int, round_: int = 0, turn: int = 0) -> list[Told]:
    return [told(member, Standing.ARRIVED, round_, turn) for member in members]


def away(*members: int, turn: int = 0) -> list[Told]:
    return [told(member, Standing.AWAY, 0, turn) for member in members]


def play(state: Closing, *story: Any) -> tuple[Closing, list[Any]]:
    done: list[Any] = []
    for event in story:
        state, instructions = state.handle(event)
        done += instructions
    return state, done


FOUR = Closing.of((0, 1, 2, 3), "majority")


@pytest.mark.parametrize(
    ("quorum", "needed"),
    [("majority", [1, 2, 2, 3, 3]), ("all", [1, 2, 3, 4, 5]), (2, [1, 2, 2, 2, 2])],
)
def test_a_quorum_is_one_of_the_present_view(quorum: Any, needed: list[int]) -> None:
    assert [ranks_needed(quorum, size) for size in range(1, 6)] == needed


@given(st.floats(0.01, 1.0), st.integers(1, 1000))
def test_a_fraction_is_rounded_up(fraction: float, size: int) -> None:
    needed = ranks_needed(fraction, size)
    assert 1 <= needed <= size
    assert needed - 1 < fraction * size


@pytest.mark.parametrize("wrong", ["most", "0", "1.5", "0.0", 0, -1, 1.5, float("nan"), True, None])
def test_a_quorum_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="quorum must be"):
        parse_quorum(wrong)


def test_a_quorum_can_be_given_as_text() -> None:
    assert [parse_quorum(text) for text in ("all", "3", "0.75")] == ["all", 3, 0.75]


def test_a_late_rank_is_nudged_when_patience_is_over_and_not_before_a_quorum() -> None:
    state, done = play(FOUR, *arrived(0, 1), PatienceOver(0))
    assert done == []
    assert not state.missing
    state, done = play(state, *arrived(3))
    assert done == []
    assert state.missing == {2}
    state, done = play(state, PatienceOver(0))
    assert done == [Nudge(0, (2,), late=(2,))]
    assert not state.missing


def test_a_round_that_all_arrive_in_needs_no_word() -> None:
    state, done = play(FOUR, *arrived(2, 0, 3, 1), PatienceOver(0))
    assert done == []
    assert not state.missing


def test_a_patience_that_was_over_for_another_round_closes_nothing() -> None:
    state, _ = play(FOUR, *arrived(0, 1, 2), *arrived(0, 1, 2, round_=1))
    assert play(state, PatienceOver(0))[1] == []
    assert play(state, PatienceOver(1))[1] == [Nudge(1, (3,), late=(3,))]


def test_those_who_are_away_are_nudged_at_once_if_nobody_else_is_missing() -> None:
    _, done = play(FOUR, *away(3), *arrived(0, 1, 2))
    assert done == [Nudge(0, (3,), late=())]


def test_where_most_are_away_whoever_arrives_is_told_to_go_on() -> None:
    state, done = play(FOUR, *away(0, 1, 2), *arrived(3))
    assert done == [Decline(0, (3,))]
    # It comes again, and is told again.
    _, done = play(state, *arrived(3))
    assert done == [Decline(0, (3,))]


@pytest.mark.parametrize("past", [Standing.AWAY, Standing.LEFT, Standing.COMPUTING])
def test_nobody_goes_on_without_a_round_that_somebody_is_past(past: Standing) -> None:
    # Its result is on its way to the last one.
    words = [told(0, past, 1), told(1, Standing.LEFT, 0), told(2, Standing.LEFT, 0)]
    _, done = play(FOUR, *words, *arrived(3), told(0, Standing.LEFT, 1))
    assert done == [Nudge(0, (0, 1, 2), late=())]


def test_half_are_no_majority() -> None:
    _, done = play(Closing.of((0, 1), "majority"), *away(0), *arrived(1))
    assert done == [Nudge(0, (0,), late=())]


def test_to_be_away_is_void_once_anybody_has_done_that_operation() -> None:
    state, done = play(FOUR, *away(0, 1, 2, turn=5), *arrived(3, turn=6))
    assert done == []
    _, done = play(state, *arrived(0, 1, turn=6), PatienceOver(0))
    assert done == [Nudge(0, (2,), late=(2,))]


def test_the_lane_ends_once_all_have_left_after_the_last_round_with_anything_in_it() -> None:
    left = [told(member, Standing.LEFT, round_) for member, round_ in enumerate((7, 8, 7))]
    state, done = play(Closing.of((0, 1, 2), "majority"), *left)
    assert done == [End(8)]
    assert play(state, told(0, Standing.LEFT, 8))[1] == []


# -- patience --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["long", -1, float("inf"), "nan", True, None])
def test_a_patience_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="patience must be"):
        parse_patience(wrong)


def learned(spread: float, rounds: int = 20, size: int = 4) -> Patience:
    """Rounds of one second each, whose quorums take ``spread`` seconds to arrive."""
    patience = Patience("adaptive", 10.0)
    for round_ in range(rounds):
        patience.quorum_arrived(float(round_), [round_ - spread, float(round_)])
    return patience


def test_a_fixed_patience_is_what_it_is() -> None:
    assert Patience(0.25, 10.0).seconds(4, hopeful=False) == 0.25


def test_an_adaptive_patience_knows_nothing_at_first() -> None:
    assert learned(0.0, rounds=3).seconds(4, hopeful=True) == 10.0


def test_it_waits_for_half_of_what_a_lost_gradient_costs() -> None:
    assert learned(0.0).seconds(4, hopeful=True) == pytest.approx(1 / 8)
    assert learned(0.0).seconds(25, hopeful=True) == pytest.approx(1 / 50)


def test_it_waits_for_what_the_operating_system_may_need() -> None:
    assert learned(0.0).seconds(1000, hopeful=True) == 0.01


def test_where_arrivals_spread_more_it_goes_by_their_spread_up_to_its_limit() -> None:
    assert learned(0.2).seconds(100, hopeful=True) == pytest.approx(0.6)
    assert learned(20.0).seconds(100, hopeful=True) == 10.0


def test_nobody_waits_for_who_was_missing_before_already() -> None:
    assert learned(0.1).seconds(4, hopeful=False) == 0.0


def test_the_time_of_a_rebuild_is_not_taken_for_a_slow_round() -> None:
    patience = learned(0.0)
    patience.forget_time()
    patience.quorum_arrived(1000.0, [1000.0, 1000.0])
    assert patience.seconds(4, hopeful=True) == pytest.approx(1 / 8)


def test_ranks_that_come_early_because_they_were_late_do_not_make_it_patient() -> None:
    patience = Patience("adaptive", 10.0)
    for round_ in range(20):
        patience.quorum_arrived(float(round_), [float(round_)])
    assert patience.seconds(4, hopeful=True) == pytest.approx(1 / 8)
