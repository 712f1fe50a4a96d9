"""Buffers for results: how many, and when they are used again."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpift.reduction.buckets import Layout, ParameterSpec, lay_out
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


# -- in memory that others share -------------------------------------------------------------------

LIMIT_SECONDS = 10.0


def two_buckets(pinned: tuple[int, ...] = ()) -> Layout:
    """Of two devices."""
    specs = [ParameterSpec("a", 3, "float32", device=1), ParameterSpec("b", 5, "float32")]
    return lay_out(specs, 1, 1, pinned=pinned)


def places_of(layout: Layout) -> list[list[np.ndarray]]:
    return [[np.zeros(b.length, b.dtype) for b in layout.buckets] for _ in range(2)]


class Shared:
    """Results in two places; rounds are written as owners of slices do, into the place itself."""

    def __init__(self) -> None:
        layout = two_buckets()
        self.places = places_of(layout)
        self.results = Results(layout, shared=self.places)

    def write(self, round_: int) -> list[np.ndarray]:
        for bucket, place in enumerate(self.places[round_ % 2]):
            self.results.vacate(bucket)
            assert self.results.receive(bucket) is place
            place[:] = round_
        arrays = [self.results.receive(bucket) for bucket in range(2)]
        self.results.complete(round_)
        return arrays

    def expect(self, round_: int) -> list[np.ndarray]:
        with self.results.reading(round_) as arrays:
            for array in arrays:
                assert (array == round_).all()
            return list(arrays)

    def is_place(self, array: np.ndarray) -> bool:
        return any(array is place for places in self.places for place in places)


def test_rounds_take_turns_in_shared_places_and_a_rank_that_keeps_up_copies_nothing() -> None:
    shared = Shared()
    for round_ in range(6):
        arrays = shared.write(round_)
        assert all(a is b for a, b in zip(arrays, shared.places[round_ % 2], strict=True))
        found = shared.expect(round_)
        assert all(a is b for a, b in zip(found, arrays, strict=True))
        if round_ % 2:  # one round behind is still no more than there are places
            shared.results.release(round_ - 1)
            shared.results.release(round_)
    assert shared.results._spare == [[], []]


def test_what_is_unapplied_is_copied_before_it_is_written_over_and_nothing_else_is() -> None:
    shared = Shared()
    for round_ in range(4):
        shared.write(round_)
        if round_ == 1:
            shared.results.release(1)
    # Of the first four, round 0 was written over by round 2, and 1, which was applied, by 3.
    assert not any(shared.is_place(array) for array in shared.expect(0))
    for round_ in (2, 3):
        assert all(shared.is_place(array) for array in shared.expect(round_))
    shared.results.vacate(0)
    moved, kept = shared.expect(2)
    assert not shared.is_place(moved), "this bucket is about to be written"
    assert shared.is_place(kept), "and this one isn't yet"
    shared.results.vacate(0)
    assert shared.expect(2)[0] is moved, "it is copied once"


def test_copies_are_used_again_and_shared_places_never_become_spare_buffers() -> None:
    shared = Shared()
    for round_ in range(5):
        shared.write(round_)
    first = [array for round_ in range(3) for array in shared.expect(round_)]
    for round_ in range(5):
        shared.results.release(round_)
    for round_ in range(5, 9):
        shared.write(round_)
    again = [array for round_ in range(5, 7) for array in shared.expect(round_)]
    assert {id(array) for array in again} <= {id(array) for array in first}
    for round_ in range(5, 9):
        shared.expect(round_)
        shared.results.release(round_)
    spare = [array for each in shared.results._spare for array in each]
    assert len(spare) == len(first) == len({id(array) for array in spare})
    for array in spare:
        assert not any(np.shares_memory(array, p) for places in shared.places for p in places)


def test_a_released_round_is_not_copied_but_the_last_one_still_lies_there_for_a_hand_over() -> None:
    shared = Shared()
    for round_ in range(3):
        arrays = shared.write(round_)
        shared.results.release(round_)
    for bucket in range(2):
        shared.results.vacate(bucket)
        shared.results.receive(bucket)[:] = 99
    assert all(a is b for a, b in zip(shared.results.last, arrays, strict=True))
    assert all((array == 2).all() for array in shared.results.last)
    assert shared.results._spare == [[], []]


def test_while_somebody_reads_a_result_its_place_is_not_given_away() -> None:
    shared = Shared()
    shared.write(0)
    shared.write(1)
    begun, vacated = threading.Event(), threading.Event()

    def service() -> None:
        begun.set()
        shared.results.vacate(0)
        vacated.set()
        shared.places[0][0][:] = 2

    writer = threading.Thread(target=service)
    with shared.results.reading(0) as arrays:
        writer.start()
        assert begun.wait(LIMIT_SECONDS)
        assert not vacated.wait(0.2), "a result was taken from under its reader"
        assert (arrays[0] == 0).all()
    assert vacated.wait(LIMIT_SECONDS)
    writer.join(LIMIT_SECONDS)
    shared.expect(0)
    assert (shared.places[0][0] == 2).all()


def test_a_reader_of_what_nobody_writes_over_holds_nobody_up() -> None:
    shared = Shared()
    shared.write(0)
    shared.results.release(0)
    shared.write(1)
    with shared.results.reading(1):
        writer = threading.Thread(target=shared.write, args=(2,))
        writer.start()
        writer.join(LIMIT_SECONDS)
        assert not writer.is_alive()
    shared.expect(1)


def test_what_another_rank_hands_over_comes_into_memory_of_this_rank_alone() -> None:
    shared = Shared()
    shared.write(0)
    shared.results.release(0)
    fresh = [shared.results.renew(bucket) for bucket in range(2)]
    for array in fresh:
        assert not any(np.shares_memory(array, p) for places in shared.places for p in places)
        array[:] = 1
    shared.results.complete(1)
    assert all(a is b for a, b in zip(shared.expect(1), fresh, strict=True))
    shared.write(2)
    shared.write(3)  # in the place that round 1 would have had
    assert all(a is b for a, b in zip(shared.expect(1), fresh, strict=True)), "it needs no copy"


def test_a_buffer_that_is_forgotten_leaves_the_round_in_its_shared_place() -> None:
    shared = Shared()
    shared.write(0)
    private = shared.results.renew(1)
    shared.results.forget(1)
    assert shared.results.receive(1) is shared.places[1][1]
    assert shared.results.receive(1) is not private
    shared.results.forget(1)
    assert shared.results.receive(1) is shared.places[1][1]


@pytest.mark.parametrize("device", [0, 1])
def test_a_bucket_of_a_pinned_device_has_buffers_of_its_own(device: int) -> None:
    layout = two_buckets(pinned=(device,))
    places = places_of(layout)
    results = Results(layout, shared=places)
    own = next(n for n, bucket in enumerate(layout.buckets) if bucket.device == device)
    kept = []
    for round_ in range(4):
        for bucket in range(2):
            results.vacate(bucket)
            array = results.receive(bucket)
            assert (array is places[round_ % 2][bucket]) == (bucket != own)
            array[:] = round_
        kept.append(results.receive(own))
        results.complete(round_)
    assert len({id(array) for array in kept}) == 4, "they are not applied yet"
    for round_ in range(4):
        with results.reading(round_) as arrays:
            assert arrays[own] is kept[round_], "it was never in the way"
            assert all((array == round_).all() for array in arrays)
        results.release(round_)


def test_after_another_layout_rounds_lie_in_its_places_and_the_last_result_in_the_old() -> None:
    shared = Shared()
    for round_ in range(3):
        shared.write(round_)
        shared.results.release(round_)
    layout = lay_out([ParameterSpec("c", 2, "float64")], 1, 1)
    places = places_of(layout)
    after = shared.results.relayout(layout, places)
    assert all((array == 2).all() for array in after.last)
    for round_ in range(3, 8):
        after.vacate(0)
        assert after.receive(0) is places[round_ % 2][0]
        after.receive(0)[:] = round_
        after.complete(round_)
        assert (after.last[0] == round_).all()
        after.release(round_)
    assert after._spare == [[]], "arrays of the old layout are of other sizes"
