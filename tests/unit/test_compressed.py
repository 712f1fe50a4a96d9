"""Compressed sums: several ranks in one process, over messages that arrive in any order."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mpift.reduction import compressed, compressed_arrays
from mpift.reduction.codecs import Codec, Half, Plain, Threshold
from mpift.reduction.compressed import CompressedSum
from mpift.reduction.compressed_arrays import CompressedArray
from mpift.transport.lane import Started

CODECS = [Half("fp16"), Half("bf16"), Threshold(0.3), Plain()]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@dataclass(eq=False)
class Request:
    """One end of a message; an eager send is done before it has arrived."""

    buffer: np.ndarray
    done: bool = False


@dataclass
class Network:
    """Messages between ranks: in order between two ranks and of one tag, otherwise in any."""

    chance: random.Random
    sends: dict[tuple[int, int, int], deque[Request]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    receives: dict[tuple[int, int, int], deque[Request]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sent: int = 0

    def deliver_one(self) -> bool:
        """Move one message that both sides have posted; whether there was one."""
        ready = [way for way, posted in self.receives.items() if posted and self.sends[way]]
        if not ready:
            return False
        way = self.chance.choice(ready)
        send, receive = self.sends[way].popleft(), self.receives[way].popleft()
        assert send.buffer.size <= receive.buffer.size, "a message is longer than its buffer"
        receive.buffer[: send.buffer.size] = send.buffer
        send.done = receive.done = True
        return True


@dataclass
class Comm:
    """One rank's end of a network."""

    network: Network
    rank: int
    size: int

    def Isend(self, buffer: np.ndarray, dest: int, tag: int) -> Request:
        eager = self.network.chance.random() < 0.5
        request = Request(buffer.copy() if eager else buffer, done=eager)
        self.network.sends[self.rank, dest, tag].append(request)
        self.network.sent += 1
        return request

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        request = Request(buffer)
        self.network.receives[source, self.rank, tag].append(request)
        return request


@dataclass
class Running:
    """One rank's sum of one bucket, or of one array, under way."""

    comm: Comm
    sum: CompressedSum | CompressedArray
    started: Sequence[Started]

    def ready(self) -> bool:
        return bool(self.started) and all(each.request.done for each in self.started)

    def proceed(self) -> None:
        self.started = self.sum.proceed(self.comm)


def network_of(size: int, seed: int) -> tuple[Network, list[Comm]]:
    network = Network(random.Random(seed))
    return network, [Comm(network, rank, size) for rank in range(size)]


def run(network: Network, running: Sequence[Running], until: Callable[[], bool]) -> None:
    """Let messages arrive and ranks go on, in random order."""
    while not until():
        ready = [each for each in running if each.ready()]
        if ready and network.chance.random() < 0.5:
            network.chance.choice(ready).proceed()
        elif not network.deliver_one():
            assert ready, "nothing moves any more"
            network.chance.choice(ready).proceed()


def start_all(
    comms: Sequence[Comm],
    sums: Sequence[CompressedSum],
    contributions: Sequence[np.ndarray | None],
    tag: int = 0,
) -> list[Running]:
    return [
        Running(comm, sum_, sum_.start(comm, tag, contribution))
        for comm, sum_, contribution in zip(comms, sums, contributions, strict=True)
    ]


def complete(network: Network, running: Sequence[Running]) -> None:
    run(network, running, lambda: not any(each.started for each in running))


def complete_one(network: Network, running: Sequence[Running]) -> Running:
    """Go on until the first rank is through."""
    run(network, running, lambda: not all(each.started for each in running))
    return next(each for each in running if not each.started)


def results(sums: Sequence[CompressedSum], length: int) -> list[np.ndarray]:
    """All ranks' results, which have to have the same bits."""
    found = [np.full(length, 666, np.float32) for _ in sums]
    for sum_, out in zip(sums, found, strict=True):
        sum_.result(out)
    assert len({out.tobytes() for out in found}) == 1, "ranks hold different bits"
    return found


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


# -- error feedback --------------------------------------------------------------------------------


class TakesTheResidualOverAtStart(CompressedSum):
    def start(self, comm: Any, tag: int, contribution: np.ndarray | None) -> list[Started]:
        started = super().start(comm, tag, contribution)
        self.settle()
        return started


class ForgetsWhatTheSumLost(CompressedSum):
    def _add_values(self, buffers: Any) -> int:
        feedback, self._feedback = self._feedback, False
        length = super()._add_values(buffers)
        self._feedback = feedback
        return length


class ForgetsAfterAFault(CompressedSum):
    def abandon(self) -> None:
        super().abandon()
        self._unsettled = False


def nothing_is_lost(kind: type[CompressedSum], codec: Codec, rounds: int, seed: int) -> float:
    """Rounds with everything that can happen: faults that are redone, results that are handed over,
    ranks without a contribution, views that shrink. Checks that all results and what is still owed
    add up to all that was contributed; returns the largest residual."""
    elements, chance = 60, random.Random(seed)
    values = np.random.default_rng(seed)
    network, comms = network_of(4, seed)
    sums = [kind(codec, elements, 1) for _ in comms]
    contributed, delivered = np.zeros((2, elements))
    for number in range(rounds):
        given: list[np.ndarray | None] = [
            np.append(values.standard_normal(elements), 1).astype(np.float32) for _ in comms
        ]
        if chance.random() < 0.3:
            given[chance.randrange(len(given))] = None
        fate = chance.choice(["well", "redo", "hand over"])
        running = start_all(comms, sums, given)
        if fate == "redo":
            for _ in range(chance.randrange(10)):
                network.deliver_one()
            for sum_ in sums:
                sum_.abandon()
            network, comms = network_of(len(sums), seed + number)
            running = start_all(comms, sums, given)
        if fate == "hand over":
            first = complete_one(network, running)
            found = np.empty(elements + 1, np.float32)
            first.sum.result(found)
            for each in running:
                if each is not first:
                    each.sum.abandon()
            network, comms = network_of(len(sums), seed + number)
        else:
            complete(network, running)
            found = results(sums, elements + 1)[0]
        for sum_ in sums:
            sum_.settle()
        contributed += sum(np.float64(g[:-1]) for g in given if g is not None)
        delivered += found[:-1]
        if number == rounds // 2:  # the last rank leaves, and takes along what it owes
            owed = sums.pop().residual
            contributed -= 0 if owed is None else owed
            network, comms = network_of(len(sums), seed)
    owed = sum(np.float64(s.residual) for s in sums if s.residual is not None)
    assert np.allclose(delivered + owed, contributed, rtol=0, atol=rounds * 1e-5)
    return max(float(np.abs(s.residual).max()) for s in sums if s.residual is not None)


LOSSY = [Half("fp16"), Half("bf16"), Threshold(0.8), Threshold(4.0)]


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_all_that_was_contributed_arrives_or_is_still_owed_whatever_happens(codec: Codec) -> None:
    for seed in range(3):
        few = nothing_is_lost(CompressedSum, codec, 10, seed)
        many = nothing_is_lost(CompressedSum, codec, 80, seed)
        # What is owed does not grow with the rounds; a value waits until it reaches the threshold.
        assert many <= 4 * few
        if isinstance(codec, Threshold):
            assert many < codec.value


@pytest.mark.parametrize(
    ("broken", "codec"),
    [
        (TakesTheResidualOverAtStart, Half("bf16")),
        (TakesTheResidualOverAtStart, Threshold(0.8)),
        (ForgetsWhatTheSumLost, Half("bf16")),
        (ForgetsAfterAFault, Half("bf16")),
        (ForgetsAfterAFault, Threshold(0.8)),
    ],
)
def test_feedback_that_is_broken_is_found(broken: type[CompressedSum], codec: Codec) -> None:
    with pytest.raises(AssertionError):
        nothing_is_lost(broken, codec, 40, 0)


def test_without_feedback_nothing_is_owed() -> None:
    network, comms = network_of(2, 0)
    sums = [CompressedSum(Threshold(9.0), 4, feedback=False) for _ in comms]
    complete(network, start_all(comms, sums, [np.ones(4, np.float32)] * 2))
    for sum_ in sums:
        sum_.settle()
        assert sum_.residual is None


@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_what_is_not_finite_reaches_everybody_and_stays_in_no_residual(codec: Codec) -> None:
    network, comms = network_of(2, 0)
    sums = [CompressedSum(codec, 6) for _ in comms]
    huge = np.float32(3e38)
    given = [
        np.array([np.nan, np.inf, -np.inf, np.inf, huge, 7e4], np.float32),
        np.array([1, 1, 1, -np.inf, huge, 1], np.float32),
    ]
    complete(network, start_all(comms, sums, given))
    found = results(sums, 6)[0]
    assert np.array_equal(found[:5], [np.nan, np.inf, -np.inf, np.nan, np.inf], equal_nan=True)
    assert np.isinf(found[5]) == (codec.name == "fp16")
    for sum_ in sums:
        sum_.settle()
        assert sum_.residual is None or np.isfinite(sum_.residual).all()


def test_a_rank_that_adds_nothing_keeps_what_it_owes() -> None:
    network, comms = network_of(2, 0)
    sums = [CompressedSum(Threshold(2.0), 4) for _ in comms]
    for given in ([np.ones(4, np.float32)] * 2, [np.ones(4, np.float32), None]):
        complete(network, start_all(comms, sums, given))
        for sum_ in sums:
            sum_.settle()
    assert results(sums, 4)[0].tolist() == [2] * 4
    assert [s.residual.tolist() for s in sums if s.residual is not None] == [[0] * 4, [1] * 4]


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
