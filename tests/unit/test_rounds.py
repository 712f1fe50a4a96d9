"""Rounds, told as stories of one rank."""

from __future__ import annotations

import pytest

from mpift.core.rounds import (
    BucketCompleted,
    Contributed,
    Deliver,
    Event,
    Faulted,
    Finish,
    HandedOver,
    HandOver,
    Instruction,
    Joined,
    Reconciled,
    Rounds,
    Start,
)
from mpift.errors import MpiftError


def play(state: Rounds, *story: Event) -> tuple[Rounds, list[Instruction]]:
    done: list[Instruction] = []
    for event in story:
        state, instructions = state.handle(event)
        done += instructions
    return state, done


def test_buckets_start_in_order_whatever_order_they_are_filled_in() -> None:
    _, done = play(Rounds(3), Contributed(2), Contributed(0), Contributed(1))
    assert [i.bucket for i in done if isinstance(i, Start)] == [0, 1, 2]


def test_a_round_is_delivered_when_its_last_bucket_completes() -> None:
    state, done = play(
        Rounds(2),
        Contributed(0),
        Contributed(1),
        BucketCompleted(0, 1, 4),
        BucketCompleted(0, 0, 4),
    )
    assert done[-1] == Deliver(round=0, reduced_in=0)
    assert state.completed == 1


def test_after_a_fault_that_nobody_had_finished_all_buckets_are_reduced_again() -> None:
    story = (Contributed(0), Contributed(1), BucketCompleted(0, 0, 4), Faulted())
    state, _ = play(Rounds(2), *story)
    _, done = play(state, Reconciled(1, (0, 0, 0)))
    assert done == [Start(1, 0, 0, real=True), Start(1, 0, 1, real=True)]


def test_who_is_behind_takes_the_result_and_does_not_reduce_again() -> None:
    state, _ = play(Rounds(1), Contributed(0), Faulted())
    state, done = play(state, Reconciled(1, (1, 0)))
    assert done == [HandOver(1, round=0, giver=0)]
    state, done = play(state, HandedOver(1, 0, reduced_in=0, last=False))
    assert done == [Deliver(round=0, reduced_in=0)]


def test_who_is_ahead_waits_for_the_hand_over_before_it_starts_anything() -> None:
    story = (Contributed(0), BucketCompleted(0, 0, 2), Contributed(0), Faulted())
    state, _ = play(Rounds(1), *story)
    state, done = play(state, Reconciled(1, (1, 0)))
    assert done == [HandOver(1, round=0, giver=0)]
    _, done = play(state, HandedOver(1, 0, reduced_in=0, last=False))
    assert done == [Start(1, 1, 0, real=True)]


def test_a_completion_of_an_older_epoch_is_dropped() -> None:
    state, _ = play(Rounds(1), Contributed(0), Faulted(), Reconciled(1, (0, 0)))
    assert play(state, BucketCompleted(0, 0, 3)) == (state, [])


def test_a_rank_that_has_joined_gives_zeros_and_ends_with_the_round_that_nobody_joins() -> None:
    state, done = play(Rounds(2), Joined(), BucketCompleted(0, 0, 3))
    assert done == [Start(0, 0, 0, real=False), Start(0, 0, 1, real=False)]
    state, done = play(state, BucketCompleted(0, 1, 3), BucketCompleted(0, 0, 0))
    assert done == [Deliver(0, 0), Start(0, 1, 0, real=False), Finish(0)]
    assert state.finished


def test_members_more_than_one_round_apart_are_a_broken_promise() -> None:
    state, _ = play(Rounds(1), Faulted())
    with pytest.raises(MpiftError, match="more than one apart"):
        state.handle(Reconciled(1, (0, 2)))


def test_a_bucket_contributed_twice_is_refused() -> None:
    state, _ = play(Rounds(2), Contributed(1))
    with pytest.raises(MpiftError, match="twice"):
        state.handle(Contributed(1))


def test_the_layout_cannot_change_in_the_middle_of_a_round() -> None:
    state, _ = play(Rounds(2), Contributed(1))
    with pytest.raises(MpiftError, match="layout"):
        state.with_buckets(3)
