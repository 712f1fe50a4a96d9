"""Gradient rounds, told as stories of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.core.lockstep import (
    BucketCompleted,
    Contributed,
    Deliver,
    Faulted,
    Finish,
    HandedOver,
    HandOver,
    Joined,
    Reconciled,
    Start,
)
from mpift.core.rounds import (
    Announce,
    Applied,
    Awaited,
    CameBack,
    CarryNothing,
    Declined,
    Drop,
    Ended,
    Flushed,
    GiveBack,
    Nudged,
    Rounds,
    Standing,
    WentAway,
)
from mpift.errors import MpiftError

TWO = Rounds(2, max_lag=2)


def play(state: Rounds, *story: Any) -> tuple[Rounds, list[Any]]:
    """What is done, without the words to the coordinator."""
    done: list[Any] = []
    for event in story:
        state, instructions = state.handle(event)
        done += [i for i in instructions if not isinstance(i, Announce)]
    return state, done


def words(state: Rounds, *story: Any) -> list[tuple[Standing, int]]:
    said: list[tuple[Standing, int]] = []
    for event in story:
        state, instructions = state.handle(event)
        said += [(i.standing, i.round) for i in instructions if isinstance(i, Announce)]
    return said


def complete(*buckets: int, epoch: int = 0) -> list[Any]:
    return [BucketCompleted(epoch, bucket, 3) for bucket in buckets]


# -- in time -----------------------------------------------------------------------------------


def test_buckets_start_in_order_whatever_order_they_are_filled_in() -> None:
    _, done = play(Rounds(3), Contributed(2), Contributed(0), Contributed(1))
    assert [i.bucket for i in done if isinstance(i, Start)] == [0, 1, 2]


def test_a_round_is_delivered_when_its_last_bucket_completes() -> None:
    state, done = play(TWO, Contributed(0), Contributed(1), *complete(1, 0))
    assert done[-1] == Deliver(round=0, reduced_in=0, counted=frozenset({0, 1}))
    assert state.completed == 1
    assert state.settled


def test_the_coordinator_hears_of_an_arrival_once_and_of_the_next_round_nothing() -> None:
    story = [Contributed(0), Contributed(1), Awaited(), *complete(0, 1), Applied(1)]
    assert words(TWO, *story) == [(Standing.ARRIVED, 0)]


def test_a_bucket_contributed_twice_is_refused() -> None:
    state, _ = play(TWO, Contributed(1))
    with pytest.raises(MpiftError, match="twice"):
        state.handle(Contributed(1))


def test_the_layout_cannot_change_in_the_middle_of_a_round() -> None:
    state, _ = play(TWO, Contributed(1))
    with pytest.raises(MpiftError, match="layout"):
        state.with_buckets(3)
    assert TWO.with_buckets(3).buckets == 3


# -- late --------------------------------------------------------------------------------------


def test_a_nudged_rank_gives_zeros_for_what_is_not_in_place() -> None:
    _, done = play(TWO, Contributed(0), Nudged(0, 0))
    assert done == [Start(0, 0, 0, real=True), Start(0, 0, 1, real=False)]


def test_a_late_gradient_counts_in_the_next_round_and_the_rest_of_it_is_zeros_there() -> None:
    state, _ = play(TWO, Contributed(0), Nudged(0, 0), Contributed(1))
    state, done = play(state, *complete(0, 1))
    assert done == [Deliver(0, 0, frozenset({0}))]
    # Bucket 0 of this gradient was counted: once the main thread waits, nothing more can come.
    _, done = play(state, Awaited())
    assert done == [Start(0, 1, 0, real=False), Start(0, 1, 1, real=True, late=True)]


def test_a_gradient_is_late_only_once_its_round_completed_here() -> None:
    state, _ = play(Rounds(1, max_lag=2), Nudged(0, 0), Contributed(0), Faulted())
    _, done = play(state, Reconciled(1, (0, 0)))
    assert done == [Start(1, 0, 0, real=True)]


def test_where_late_gradients_are_dropped_nothing_of_them_is_left() -> None:
    dropping = Rounds(1, max_lag=2, carry=False)
    state, done = play(dropping, Nudged(0, 0), Contributed(0), *complete(0))
    assert done[-1] == Drop(frozenset({0}))
    assert state.settled
    state, _ = play(dropping, Nudged(0, 0), *complete(0))
    state, done = play(state, Contributed(0))
    assert done == [Drop(frozenset({0}))]


def test_carrying_can_be_given_up_on_the_way() -> None:
    state, _ = play(Rounds(1, max_lag=2), CarryNothing(), Nudged(0, 0), *complete(0))
    assert play(state, Contributed(0))[1] == [Drop(frozenset({0}))]


def test_a_nudge_that_comes_early_is_kept_and_a_stale_one_does_nothing() -> None:
    state, _ = play(Rounds(1, max_lag=2), Contributed(0), Nudged(0, 1))
    state, done = play(state, *complete(0))
    assert done[-1] == Start(0, 1, 0, real=False)
    state, _ = play(Rounds(1, max_lag=2), Contributed(0), *complete(0))
    assert play(state, Nudged(0, 0))[1] == []
    assert play(state, Nudged(7, 1))[1] == []


def test_a_rank_that_is_too_far_behind_is_waited_for() -> None:
    state, done = play(Rounds(1, max_lag=2), Nudged(0, 9), *complete(0))
    assert [i.round for i in done if isinstance(i, Start)] == [0, 1]
    state, done = play(state, *complete(0))
    assert done == [Deliver(1, 0)]
    assert play(state, Applied(1))[1] == [Start(0, 2, 0, real=False)]


# -- away, and the end -------------------------------------------------------------------------


def test_the_coordinator_is_told_who_is_away_and_who_is_back() -> None:
    story = (WentAway(), CameBack(), WentAway(), Joined())
    assert [word for word, _ in words(TWO, *story)] == [
        Standing.AWAY,
        Standing.COMPUTING,
        Standing.AWAY,
        Standing.LEFT,
    ]


def test_a_declined_round_gives_back_what_is_not_claimed_and_counts_the_rest_later() -> None:
    state, _ = play(Rounds(1, max_lag=0), Flushed(1), *complete(0))
    state, done = play(state, Contributed(0), Awaited(), Declined(0, 1))
    assert done == [GiveBack(frozenset({0}))]  # no room, so nothing was claimed
    state, done = play(Rounds(1), Contributed(0), Awaited(), Declined(0, 0))
    assert done == [Start(0, 0, 0, real=True), GiveBack(frozenset())]
    assert not state.settled
    _, done = play(state, *complete(0))
    assert done == [Deliver(0, 0, frozenset({0}))]


def test_a_decline_for_a_round_that_is_over_or_for_nobody_who_waits_is_ignored() -> None:
    state, _ = play(Rounds(1), Contributed(0), Awaited())
    assert play(state, Declined(0, 1))[1] == play(state, Declined(1, 0))[1] == []
    state, _ = play(Rounds(1), Contributed(0))
    assert play(state, Declined(0, 0))[1] == []


def test_a_flush_completes_rounds_with_what_is_there_across_a_fault() -> None:
    state, done = play(Rounds(1, max_lag=2), Flushed(1))
    assert done == [Start(0, 0, 0, real=False)]
    state, done = play(state, Faulted(), Reconciled(1, (0, 0)), *complete(0, epoch=1))
    assert done == [Start(1, 0, 0, real=False), Deliver(0, 1)]


def test_the_last_round_is_not_delivered_and_a_fault_before_it_asks_anew() -> None:
    state, done = play(Rounds(1), Joined(), Ended(0, 0), Faulted(), Reconciled(1, (0, 0)))
    assert done == [Start(0, 0, 0, real=False)]
    state, done = play(state, Ended(1, 0), *complete(0, epoch=1))
    assert done == [Start(1, 0, 0, real=False), Finish(1)]
    assert state.finished


# -- faults ------------------------------------------------------------------------------------


def test_after_a_fault_that_nobody_had_finished_all_buckets_are_reduced_again() -> None:
    story = (Contributed(0), Contributed(1), *complete(0), Faulted())
    state, _ = play(TWO, *story)
    _, done = play(state, Reconciled(1, (0, 0, 0)))
    assert done == [Start(1, 0, 0, real=True), Start(1, 0, 1, real=True)]


def test_who_is_behind_takes_the_result_and_knows_what_of_its_own_is_in_it() -> None:
    state, _ = play(TWO, Contributed(0), Nudged(0, 0), Contributed(1), Faulted())
    state, done = play(state, Reconciled(1, (1, 0)))
    assert done == [HandOver(1, round=0, giver=0)]
    state, done = play(state, HandedOver(1, 0, reduced_in=0, last=False))
    assert done[0] == Deliver(round=0, reduced_in=0, counted=frozenset({0}))
    assert state.waiting == {1}


def test_the_coordinator_hears_again_in_every_epoch() -> None:
    story = (Contributed(0), Contributed(1), Awaited(), Faulted(), Reconciled(1, (0, 0)))
    assert words(TWO, *story) == [(Standing.ARRIVED, 0), (Standing.ARRIVED, 0)]


def test_a_completion_of_an_older_epoch_is_dropped() -> None:
    state, _ = play(Rounds(1), Contributed(0), Faulted(), Reconciled(1, (0, 0)))
    assert play(state, *complete(0))[1] == []


def test_members_more_than_one_round_apart_are_a_broken_promise() -> None:
    state, _ = play(Rounds(1), Faulted())
    with pytest.raises(MpiftError, match="more than one apart"):
        state.handle(Reconciled(1, (0, 2)))
