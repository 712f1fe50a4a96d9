"""Sums in the memory of nodes: the same bits on all ranks, and everything counts once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpift.core.sharing import Kind, Stamp
from mpift.errors import GradientError, MpiftError
from mpift.reduction.codecs import Compressor
from mpift.reduction.compressed import CompressedSum
from tests.unit.node_cluster import Cluster, constant, gifts_of, layout_of

EXACT, ANYTHING = 0.0, math.inf  # tolerances
REAL = [Kind.REAL]
KINDS = [*Kind, Kind.REAL]
COMPRESSORS = [Compressor("fp16"), Compressor("bf16", 20), Compressor("threshold", 2.0)]
nodes_lists = st.lists(st.integers(0, 2), min_size=1, max_size=6)
seeds = st.integers(0, 1 << 30)


def check_sums(cluster: Cluster, rounds: int, tolerance: float = EXACT) -> None:
    """All ranks have the same bits, counts are exact, and so are values, up to ``tolerance``."""
    for round_ in range(rounds):
        pairs = zip(cluster.results(round_), cluster.expected(round_), strict=True)
        for bucket, (found, total) in zip(cluster.layout.buckets, pairs, strict=True):
            counts = slice(bucket.elements, None)
            assert found[counts].tolist() == total[counts].tolist()
            assert np.abs(found - total).max() <= tolerance


# -- rounds in which all is well -------------------------------------------------------------------


@settings(max_examples=40)
@given(nodes_lists, st.sampled_from(["float32", "float64"]), st.booleans(), st.booleans(), seeds)
def test_all_ranks_have_the_same_bits_of_the_plain_sum_of_what_was_given(
    nodes: list[int], dtype: str, whole: bool, pinned: bool, seed: int
) -> None:
    layout = layout_of([40, 3, 0, 150], dtype, pinned)
    cluster = Cluster(nodes, layout, gifts_of(seed, KINDS, whole), seed=seed)
    cluster.run(4)
    check_sums(cluster, 4, EXACT if whole else 1e-5)


@settings(max_examples=40)
@given(nodes_lists, st.sampled_from(COMPRESSORS), seeds)
def test_compressed_between_nodes_all_ranks_have_the_same_bits_and_counts_are_exact(
    nodes: list[int], compressor: Compressor, seed: int
) -> None:
    give = gifts_of(seed, KINDS, whole=True)
    cluster = Cluster(nodes, layout_of([40, 3, 0, 150]), give, compressor, seed)
    cluster.run(4)
    # Within a node nothing is lost.
    check_sums(cluster, 4, EXACT if len(set(nodes)) == 1 else ANYTHING)


def test_ranks_of_one_node_send_nothing_but_words() -> None:
    cluster = Cluster([0, 0, 0], layout_of([500]), gifts_of(0, REAL, whole=True))
    cluster.run(5)
    ends = [*cluster.network.sends, *cluster.network.receives]
    assert {tag for *_, tag in ends} == {32, 33}
    # Each tells the two others that its part is in place, and that its slice is summed.
    assert cluster.network.sent == 5 * 2 * 6
    check_sums(cluster, 5)


def test_where_nobody_contributes_nodes_tell_each_other_no_more_than_that() -> None:
    nothing = gifts_of(0, [Kind.NOTHING], whole=True)
    cluster = Cluster([0, 0, 1, 1], layout_of([500]), nothing, COMPRESSORS[0])
    cluster.run(1)
    assert cluster.network.sent == 2 * 4 + 4  # words of each node, and one message an owner
    check_sums(cluster, 1)


# -- error feedback --------------------------------------------------------------------------------


def error_of(compressor: Compressor, nodes: Sequence[int], deaths: Sequence[int]) -> float:
    """How far all results of 50 rounds together are from all that was given, where it is worst."""
    rounds = 50
    cluster = Cluster(nodes, layout_of([30, 100]), constant, compressor)
    for member in deaths:
        cluster.run(rounds, moves=300)
        cluster.lose([member])
    cluster.run(rounds)
    worst = 0.0
    for number, bucket in enumerate(cluster.layout.buckets):
        found = np.sum([np.float64(cluster.results(r)[number]) for r in range(rounds)], axis=0)
        total = np.sum([cluster.expected(r)[number] for r in range(rounds)], axis=0)
        assert found[bucket.elements :].tolist() == total[bucket.elements :].tolist()
        worst = max(worst, float(np.abs(found - total).max()))
    return worst


# What one message may lose of a value up to 8, which no sum here exceeds.
LOSSES = {"fp16": 8 / 2**11, "bf16": 8 / 2**8, "threshold": 2.0}


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize(
    ("nodes", "deaths"),
    [
        ((0, 0, 1, 1), ()),
        ((0, 0, 1), ()),
        ((0, 1, 0, 1, 0), (1, 4)),  # slices are cut anew, then not
        ((0, 0, 1, 1, 2), (4, 3)),  # a node disappears: more slices than before, then fewer
    ],
)
def test_what_a_message_loses_comes_with_later_ones_also_if_slices_are_cut_anew(
    compressor: Compressor, nodes: Sequence[int], deaths: Sequence[int]
) -> None:
    # What a node owes, and the loss in a sum; and at a death, what is owed with slices that move.
    messages = (len(set(nodes)) + 1) * (1 + len(deaths))
    assert error_of(compressor, nodes, deaths) <= messages * LOSSES[compressor.type]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_sums_that_forget_what_they_lost_are_found(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompressedSum, "settle", lambda self: None)
    assert error_of(compressor, (0, 0, 1, 1), ()) > 6 * LOSSES[compressor.type]


def test_what_is_owed_stays_with_its_elements_where_slices_are_cut_anew() -> None:
    def give(member, round_, bucket):  # type: ignore[no-untyped-def]
        return Kind.REAL, np.full(bucket.length, 15, np.float32)

    compressor = Compressor("threshold", 160.0)
    cluster = Cluster([0, 0, 0, 1, 1, 1], layout_of([96]), give, compressor)
    cluster.run(2)
    cluster.lose([5])  # two slices of 48 elements from now on, instead of three of 32
    cluster.run(4)
    found = [cluster.results(round_)[0][:96].tolist() for round_ in range(4)]
    assert found[:3] == [[0] * 96] * 3
    # Four times 45 of the first node: rank 0 has kept its slice, rank 1 the end of its.
    assert found[3] == [180] * 32 + [0] * 16 + [180] * 16 + [0] * 32


# -- faults ----------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=6),
    st.booleans(),
    st.sampled_from([Compressor(), *COMPRESSORS]),
    st.integers(1, 3),
    seeds,
)
def test_whoever_dies_at_any_moment_all_that_was_in_place_counts_once(
    nodes: list[int], pinned: bool, compressor: Compressor, faults: int, seed: int
) -> None:
    layout = layout_of([40, 3, 150], pinned=pinned)
    cluster = Cluster(nodes, layout, gifts_of(seed, KINDS, whole=True), compressor, seed)
    cluster.run(seed % 2)
    for _ in range(faults):
        cluster.run(6, moves=cluster.chance.randrange(150))
        living = [rank.world.member for rank in cluster.living]
        if len(living) > 1:
            cluster.lose(cluster.chance.sample(living, cluster.chance.randrange(1, len(living))))
    cluster.run(6)
    check_sums(cluster, 6, EXACT if compressor.type == "none" else ANYTHING)


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("kind", [Kind.REAL, Kind.ALARM])
def test_what_the_dead_had_in_place_counts_in_the_redo_and_not_in_the_next_round(
    nodes: Sequence[int], kind: Kind
) -> None:
    cluster = Cluster(nodes, layout_of([40, 90]), gifts_of(7, [kind], whole=True))
    cluster.run(1)
    victim = max(m for m, node in enumerate(nodes) if nodes.count(node) > 1)
    for _ in cluster.layout.buckets:
        cluster.living[victim].start()
    cluster.lose([victim])
    cluster.run(3)
    check_sums(cluster, 3)
    place = "participation" if kind is Kind.REAL else "alarm"
    for number, bucket in enumerate(cluster.layout.buckets):
        counts = [cluster.results(r)[number][getattr(bucket, place)] for r in range(3)]
        assert counts == [3, 3, 2]


def test_whoever_dies_before_its_first_gradient_has_left_nothing() -> None:
    cluster = Cluster([0, 0, 1, 1], layout_of([40, 90]), gifts_of(7, REAL, whole=True))
    cluster.living[3].start()
    cluster.lose([1, 3])
    cluster.run(2)
    check_sums(cluster, 2)
    places = [bucket.participation for bucket in cluster.layout.buckets]
    found = [array[place] for array, place in zip(cluster.results(0), places, strict=True)]
    assert found == [3, 2], "but what it had in place of the first bucket"


def test_what_the_dead_had_begun_of_a_later_round_counts_in_none() -> None:
    cluster = Cluster([0, 0, 0], layout_of([40]), gifts_of(7, REAL, whole=True))
    cluster.run(1)
    dead = cluster.living[2]
    # It alone had completed round 1, and its next gradient was in place: after another result.
    dead.arena.homes[0][:] = 1
    dead.arena.put(0, Stamp(2, Kind.REAL))
    cluster.lose([2])
    cluster.run(4)
    participation = cluster.layout.buckets[0].participation
    assert [cluster.results(r)[0][participation] for r in range(4)] == [3, 2, 2, 2]
    check_sums(cluster, 4)


@pytest.mark.parametrize("compressor", [Compressor(), COMPRESSORS[0]], ids=str)
def test_whoever_may_still_write_into_memory_makes_all_go_through_mpi_from_then_on(
    compressor: Compressor,
) -> None:
    sums = 2  # a round
    cluster = Cluster([0, 0, 1, 1], layout_of([40, 90]), gifts_of(7, REAL, True), compressor)
    cluster.run(2)
    assert all(rank.sums.shares for rank in cluster.living)
    cluster.lose([1], gone=False)
    cluster.run(4)
    plain = compressor.type == "none"
    assert not any(rank.sums.shares for rank in cluster.living)
    for rank, other in pairwise(cluster.living):
        assert not np.shares_memory(rank.results.receive(0), other.results.receive(0))
    assert cluster.lane.calls == 2 * sums * 3 * plain, "compressed sums are messages"
    cluster.lose([3])
    for rank in cluster.living:
        rank.world.gone |= {1}  # it has ended meanwhile, which makes memory no better
    cluster.run(6)
    assert not any(rank.sums.shares for rank in cluster.living)
    assert cluster.lane.calls == 2 * sums * 2 * plain
    check_sums(cluster, 6, EXACT if plain else ANYTHING)


def test_dead_members_whose_end_is_known_change_nothing() -> None:
    cluster = Cluster([0, 0, 0, 1, 1], layout_of([40]), gifts_of(7, REAL, whole=True))
    cluster.run(1)
    for member in (1, 3):
        cluster.lose([member])
        cluster.run(cluster.living[0].round + 1)
    assert cluster.lane.calls == 0
    assert all(rank.sums.shares for rank in cluster.living)
    check_sums(cluster, 3)


# -- disagreement ----------------------------------------------------------------------------------


def test_a_word_of_another_round_is_an_error() -> None:
    cluster = Cluster([0, 0], layout_of([40]), gifts_of(7, REAL, whole=True))
    ahead, behind = cluster.living
    ahead.round = 3
    ahead.start()
    behind.start()
    while cluster.network.deliver_one():
        pass
    with pytest.raises(GradientError, match="is at round 3 of bucket 0, this one at round 0"):
        behind.proceed(0)


def test_memory_that_is_not_what_the_word_said_is_an_error() -> None:
    cluster = Cluster([0, 0], layout_of([40]), gifts_of(7, REAL, whole=True))
    for rank in cluster.living:
        rank.start()
    while cluster.network.deliver_one():
        pass
    cluster.living[1].arena.put(0, Stamp(5, Kind.REAL))
    with pytest.raises(MpiftError, match=r"member 1 said .* round 0 .* holds round 5"):
        cluster.living[0].proceed(0)


def test_sums_within_a_node_are_added_in_order_of_member_id_whoever_is_first() -> None:
    """Which float32 shows: in another order the sum is another one."""
    values = {0: 1.0, 1: 2.0**24, 2: -(2.0**24)}
    for seed in range(10):
        cluster = Cluster(
            [0, 0, 0],
            layout_of([40]),
            lambda m, _, bucket: (Kind.REAL, np.full(bucket.length, values[m], np.float32)),
            seed=seed,
        )
        cluster.run(1)
        assert (cluster.results(0)[0] == 0).all()
