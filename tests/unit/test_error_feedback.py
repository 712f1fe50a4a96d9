"""What compression loses: it is owed, and arrives with later sums, whatever happens meanwhile."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpift.reduction.codecs import Codec, Half, Threshold
from mpift.reduction.compressed import CompressedSum
from mpift.transport.lane import Started
from tests.unit.any_order import network_of
from tests.unit.compressed_sums import complete, complete_one, results, start_all


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
