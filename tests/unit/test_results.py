"""Buffers for results: how many, and when they are used again."""

from __future__ import annotations

import numpy as np

from mpift.reduction.buckets import ParameterSpec, lay_out
from mpift.reduction.results import Results


def make() -> Results:
    return Results(lay_out([ParameterSpec("a", 3, "float32")], 1, 1))


def receive(results: Results, round_: int) -> np.ndarray:
    array = results.receive(0)
    array[:] = round_
    results.complete(round_)
    return array


def test_a_rank_that_keeps_up_needs_two_buffers() -> None:
    results = make()
    seen = set()
    for round_ in range(10):
        seen.add(id(receive(results, round_)))
        results.release(round_)
    assert len(seen) == 2


def test_what_is_not_applied_is_kept_and_used_again_after_that() -> None:
    results = make()
    arrays = [receive(results, round_) for round_ in range(4)]
    assert not any(np.shares_memory(a, b) for a in arrays for b in arrays if a is not b)
    for round_ in range(4):
        with results.reading(round_) as (array,):
            assert (array == round_).all()
        results.release(round_)
    later = [receive(results, round_) for round_ in range(4, 7)]
    assert {id(array) for array in later} <= {id(array) for array in arrays}


def test_the_last_result_stays_for_a_hand_over_while_the_next_is_received() -> None:
    results = make()
    receive(results, 0)
    results.release(0)
    results.receive(0)[:] = 7
    assert (results.last[0] == 0).all()


def test_a_buffer_that_may_still_be_written_into_is_not_used_again() -> None:
    results = make()
    stale = results.receive(0)
    results.renew(0)
    for round_ in range(5):
        assert receive(results, round_) is not stale
        results.release(round_)


def test_another_layout_still_has_the_last_result_of_the_one_before() -> None:
    results = make()
    receive(results, 0)
    results.release(0)
    after = results.relayout(lay_out([ParameterSpec("b", 5, "float32")], 1, 1))
    assert [array.size for array in after.last] == [7]
    assert after.receive(0).size == 9
    after.complete(1)
    after.release(1)
    assert [array.size for array in after.last] == [9]
    assert after.receive(0).size == 9
