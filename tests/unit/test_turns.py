"""Operations in turn, and what all lanes do after a fault, told as stories of one rank."""

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
from mpift.core.turns import Turns
from mpift.errors import MpiftError


def play(state: Turns, *story: Any) -> tuple[Turns, list[Any]]:
    done: list[Any] = []
    for event in story:
        state, instructions = state.handle(event)
        done += instructions
    return state, done


def test_a_bucket_starts_only_after_the_one_before_it_completed() -> None:
    state, done = play(Turns(2), Contributed(0))
    assert done == [Start(0, 0, 0, real=True)]
    _, done = play(state, BucketCompleted(0, 0, 3))
    assert done == [Start(0, 0, 1, real=True)]


def test_a_rank_that_has_joined_takes_part_with_nothing_until_nobody_calls_any_more() -> None:
    state, done = play(Turns(2), Joined(), BucketCompleted(0, 0, 3))
    assert done == [Start(0, 0, 0, real=False), Start(0, 0, 1, real=False)]
    state, done = play(state, BucketCompleted(0, 1, 3), BucketCompleted(0, 0, 0))
    assert done == [Deliver(0, 0), Start(0, 1, 0, real=False), Finish(0)]
    assert state.finished


def test_after_a_fault_an_operation_that_nobody_had_finished_is_done_again() -> None:
    state, _ = play(Turns(2), Contributed(0), BucketCompleted(0, 0, 3), Faulted())
    _, done = play(state, Reconciled(1, (0, 0)))
    assert done == [Start(1, 0, 0, real=True)]


def test_who_is_ahead_waits_for_the_hand_over_before_it_starts_anything() -> None:
    story = (Contributed(0), BucketCompleted(0, 0, 2), Contributed(0), Faulted())
    state, _ = play(Turns(1), *story)
    state, done = play(state, Reconciled(1, (1, 0)))
    assert done == [HandOver(1, round=0, giver=0)]
    _, done = play(state, HandedOver(1, 0, reduced_in=0, last=False))
    assert done == [Start(1, 1, 0, real=True)]


def test_an_operation_contributed_to_twice_is_refused() -> None:
    state, _ = play(Turns(2), Contributed(0))
    with pytest.raises(MpiftError, match="twice"):
        state.handle(Contributed(0))


def test_an_event_that_belongs_to_another_machine_is_an_error() -> None:
    with pytest.raises(MpiftError, match="knows no event"):
        Turns(1).handle("nonsense")
