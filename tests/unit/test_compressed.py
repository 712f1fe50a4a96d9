"""Compressed sums: right and alike on all ranks, unharmed by faults, and of whole arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mpift.reduction import compressed, compressed_arrays
from mpift.reduction.codecs import Codec, Half, Plain, Threshold
from mpift.reduction.compressed import CompressedSum
from mpift.reduction.compressed_arrays import CompressedArray
from tests.unit.any_order import Comm, Request, network_of
from tests.unit.compressed_sums import Running, complete, results, start_all

CODECS = [Half("fp16"), Half("bf16"), Threshold(0.3), Plain()]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def through(codec: Codec, values: np.ndarray) -> np.ndarray:
    data = np.empty(codec.max_bytes(values.size), np.uint8)
    codec.encode(values, data)
    out = np.empty(values.size, np.float32)
    codec.decode(data, out)
    return out


def expected_sum(
    codec: Codec, contributions: Sequence[np.ndarray | None], elements: int, plain: np.ndarray
) -> np.ndarray:
    """The dumb way: values through the codec, one rank after the other, the sum through it."""
    total, exact = np.zeros((2, elements), np.float32)
    for contribution in contributions:
        if contribution is not None:
            total += through(codec, contribution[:elements])
            exact += contribution[:elements]
    return np.where(plain, exact, through(codec.of_sums, total))


@by_codec
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_of_several_buckets_are_right_and_alike_in_any_order_of_completion(
    codec: Codec, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "BLOCK_ELEMENTS", 7)
    counts = 3
    for seed in range(20):
        network, comms = network_of(size, seed)
        values = np.random.default_rng(seed)
        buckets = []
        for tag, elements in enumerate([0, 1, 50, 133]):
            ranges = [(1, 4), (4, 30), (45, 45), (46, 50)] if elements >= 50 else []
            plain = np.zeros(elements, np.bool_)
            for start, stop in ranges:
                plain[start:stop] = True
            given: list[np.ndarray | None] = [
                np.append(values.standard_normal(elements), [r, 1, 1]).astype(np.float32)
                for r in range(size)
            ]
            if size > 1 and tag % 2:
                given[seed % size] = None
            sums = [CompressedSum(codec, elements, counts, ranges) for _ in range(size)]
            buckets.append((sums, given, plain, start_all(comms, sums, given, tag)))
        complete(network, [each for *_, running in buckets for each in running])
        for sums, given, plain, _ in buckets:
            found = results(sums, plain.size + counts)[0]
            assert np.array_equal(
                found[: plain.size], expected_sum(codec, given, plain.size, plain)
            )
            there = [r for r in range(size) if given[r] is not None]
            assert found[plain.size :].tolist() == [sum(there), len(there), len(there)]
            assert sums[0].counts.tolist() == [sum(there), len(there), len(there)]


@by_codec
def test_where_nobody_contributes_the_sum_is_zero_after_one_short_message_each(
    codec: Codec,
) -> None:
    network, comms = network_of(3, 0)
    sums = [CompressedSum(codec, 100, 2) for _ in comms]
    running = start_all(comms, sums, [None] * 3)
    assert all(each.buffers[0].size == 8 for r in running for each in r.started[2:])
    complete(network, running)
    assert not results(sums, 102)[0].any()
    assert network.sent == 6


# -- faults ----------------------------------------------------------------------------------------


@by_codec
def test_what_arrives_late_after_a_fault_harms_no_redo(codec: Codec) -> None:
    for seed in range(20):
        network, comms = network_of(3, seed)
        sums = [CompressedSum(codec, 40, 1) for _ in comms]
        given = [np.full(41, r + 1, np.float32) for r in range(3)]
        running = start_all(comms, sums, given)
        for _ in range(seed):  # up to where some are through
            ready = [each for each in running if each.ready()]
            if not network.deliver_one() and ready:
                ready[0].proceed()
        old = [each for r in running for each in r.started]
        for sum_ in sums:
            sum_.abandon()
        smaller, survivors = network_of(2, seed)
        again = start_all(survivors, sums[:2], given[:2])
        for each in old:  # a stopped sender goes on, and writes where it was told to
            each.buffers[0][:] = 0xEE
        complete(smaller, again)
        assert (results(sums[:2], 41)[0] == 3).all()


def test_a_contribution_belongs_to_its_owner_again_once_it_is_started() -> None:
    network, comms = network_of(2, 0)
    sums = [CompressedSum(Plain(), 8, 1) for _ in comms]
    given = [np.ones(9, np.float32) for _ in comms]
    running = start_all(comms, sums, given)
    for contribution in given:
        contribution[:] = 666
    complete(network, running)
    assert (results(sums, 9)[0] == 2).all()


class Failing(Comm):
    """A communicator whose next sends fail, as after a revocation."""

    def Isend(self, buffer: np.ndarray, dest: int, tag: int) -> Request:
        if self.network.sent >= 1:
            raise ConnectionError("revoked")
        return super().Isend(buffer, dest, tag)


def test_buffers_of_a_start_that_fails_half_way_are_kept_and_not_used_again() -> None:
    network, _ = network_of(3, 0)
    sum_ = CompressedSum(Plain(), 6)
    before = len(compressed._QUARANTINE)
    with pytest.raises(ConnectionError):
        sum_.start(Failing(network, 0, 3), 0, np.ones(6, np.float32))
    kept = compressed._QUARANTINE[before:]
    assert len(kept) == 3  # two receives, and the send that was made
    good, comms = network_of(3, 0)
    # The fault is found elsewhere: nobody tells this sum of it.
    running = [Running(comms[0], sum_, sum_.start(comms[0], 0, np.ones(6, np.float32)))]
    for old in kept:
        for new in running[0].started:
            assert not np.shares_memory(old.buffers[0], new.buffers[0])
    others = [CompressedSum(Plain(), 6) for _ in range(2)]
    running += start_all(comms[1:], others, [np.ones(6, np.float32)] * 2)
    complete(good, running)
    assert (results([sum_, *others], 6)[0] == 3).all()


def test_buffers_serve_the_next_round_where_nothing_failed() -> None:
    network, comms = network_of(2, 0)
    sums = [CompressedSum(Half("bf16"), 8) for _ in comms]
    seen = []
    for _ in range(2):
        running = start_all(comms, sums, [np.ones(8, np.float32)] * 2)
        seen.append(running[0].started[0].buffers[0])
        complete(network, running)
    assert seen[0] is seen[1]


@pytest.mark.parametrize("ranges", [[(3, 2)], [(0, 5), (4, 6)], [(8, 11)]])
def test_plain_ranges_out_of_order_or_bounds_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="not ascending within 10 elements"):
        CompressedSum(Half("fp16"), 10, plain=ranges)


# -- arrays ----------------------------------------------------------------------------------------


@by_codec
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 3), (10,)])
def test_an_array_is_summed_part_by_part_by_those_that_are_still_there(
    codec: Codec, dtype: type, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_arrays, "PART_ELEMENTS", 10)
    network, comms = network_of(3, 0)
    elements = int(np.prod(shape, dtype=int))
    arrays = [
        (np.arange(elements) * (r + 1.0) + 1 / 3).astype(dtype).reshape(shape) for r in (0, 1)
    ]
    out = [np.full(shape, 666, dtype) for _ in comms]
    running = []
    for comm, array, into in zip(comms, [*arrays, None], out, strict=True):
        whole = CompressedArray(codec, array, into)
        running.append(Running(comm, whole, whole.start(comm)))
    complete(network, running)
    flat = [array.reshape(-1).astype(np.float32) for array in arrays]
    expected = expected_sum(codec, flat, elements, np.zeros(elements, np.bool_))
    for found in out:
        assert np.array_equal(found.reshape(-1), expected.astype(dtype))
