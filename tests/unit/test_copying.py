"""What a snapshot copies: all of the share, or what differs from what its arena holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpift.checkpoint.arena import Arena
from mpift.checkpoint.blocks import DIGEST_BYTES, SPARSE_BLOCK_BYTES, digest_bytes, sample
from mpift.checkpoint.group import Seat
from mpift.checkpoint.snapshot import Snapshots
from mpift.checkpoint.state import as_bytes, flatten
from mpift.checkpoint.writing import pieces_of

ROWS = 40
SEAT = Seat(0, (0,), (0,), "history")


class Model(torch.nn.Module):
    """A tensor of ``ROWS`` blocks, and a buffer, which is a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.nn.Embedding(ROWS, SPARSE_BLOCK_BYTES // 4)
        self.table = table.requires_grad_(False)
        table.weight.zero_()
        self.register_buffer("seen", torch.zeros(3))

    def change(self, row: int, value: float) -> None:
        self.table.weight[row, 7] = value


class Taker:
    """Snapshots of a model in one arena, and what a writer would tell of them."""

    def __init__(self, path: Path) -> None:
        self.snapshots = Snapshots(lambda _: path, 1)
        self.model = Model()
        self.state: dict[str, Any] = {"model": self.model}
        self.version = 0

    def take(self, learn: bool = True) -> Arena:
        self.version += 1
        arena = self.snapshots.take(self.state, self.version, SEAT, 0).arena
        if learn:
            self.learn(self.version)
        return arena

    def learn(self, version: int) -> None:
        arena = self.arena
        contents = arena.contents()
        assert contents is not None
        pieces = pieces_of(contents, arena.data, contents.ranges)
        made = b"".join(digest_bytes(piece.data, piece.spec.dtype) for piece in pieces)
        self.snapshots.learn(version, made)

    @property
    def arena(self) -> Arena:
        arena = self.snapshots._arenas[0]
        assert arena is not None
        return arena

    def require_same(self) -> None:
        """The arena holds what the state does, and digests of that or none."""
        flat = flatten(self.state)
        tensors = (*flat.shared_tensors.values(), *flat.own_tensors.values())
        expected_bytes = np.concatenate([as_bytes(tensor) for tensor in tensors])
        assert np.array_equal(self.arena.data[: expected_bytes.nbytes], expected_bytes)
        rows = as_bytes(self.model.table.weight)
        digests = self.arena.digests()
        if digests:
            expected = [digest_bytes(r, "float32") for r in rows.reshape(ROWS, SPARSE_BLOCK_BYTES)]
            assert digests.startswith(b"".join(expected))
            assert len(digests) > ROWS * DIGEST_BYTES


@pytest.fixture
def taker(tmp_path: Path) -> Iterator[Taker]:
    made = Taker(tmp_path / "arena")
    yield made
    made.snapshots.close(keep=False)


def test_only_what_differs_is_copied_where_most_is_as_it_was(taker: Taker) -> None:
    arena = taker.take()
    assert arena.digests() == b""
    taker.model.change(3, 1.0)
    taker.model.seen += 1
    arena.data[5 * SPARSE_BLOCK_BYTES] = (
        77  # of a block that has not changed: this shows that it stays
    )
    taker.take()
    assert arena.data[5 * SPARSE_BLOCK_BYTES] == 77
    arena.data[5 * SPARSE_BLOCK_BYTES] = 0
    taker.require_same()
    assert arena.digests()


def test_what_is_tried_is_chosen_by_bytes_and_another_each_time() -> None:
    sizes = [1, 1000, 1] * 100
    ends = list(itertools.accumulate(sizes))
    tried = [sample(ends, 8, seed) for seed in range(50)]
    assert all(chosen == sorted(set(chosen)) and 0 < len(chosen) <= 8 for chosen in tried)
    found = {index for chosen in tried for index in chosen}
    assert len(found) > 80
    assert sum(sizes[index] for index in found) > 999 * len(found) * 0.9
    assert sample([], 8, seed=0) == sample([0, 0], 8, seed=0) == []
    assert sample([0, 5, 5], 8, seed=0) == [1]


def test_everything_is_copied_where_most_has_changed(taker: Taker) -> None:
    arena = taker.take()
    for row in range(ROWS):
        taker.model.change(row, 1.0)
    taker.take()
    assert arena.digests() == b""
    taker.require_same()


def test_everything_is_copied_as_long_as_no_digests_are_known(taker: Taker) -> None:
    arena = taker.take(learn=False)
    arena.data[0] = 77
    taker.take(learn=False)
    assert arena.digests() == b""
    taker.require_same()


def test_everything_is_copied_after_a_save_that_came_to_nothing(taker: Taker) -> None:
    arena = taker.take()
    taker.snapshots.doubt()
    arena.data[0] = 77
    taker.take()
    taker.require_same()


def test_digests_that_come_late_are_those_of_an_arena_that_is_no_more(taker: Taker) -> None:
    taker.take(learn=False)
    digests = b"".join(
        digest_bytes(piece, "float32")
        for piece in as_bytes(taker.model.table.weight).reshape(ROWS, SPARSE_BLOCK_BYTES)
    )
    taker.model.change(0, 1.0)
    taker.take(learn=False)
    taker.snapshots.learn(1, digests)  # of the one before
    taker.model.change(0, 0.0)
    taker.take(learn=False)
    taker.require_same()


def test_digests_of_another_cut_are_not_used(taker: Taker) -> None:
    taker.state["x"] = torch.zeros(5)
    taker.take()
    taker.state["x"] = torch.zeros(4)  # what follows lies elsewhere now, in the same arena
    taker.take(learn=False)
    assert taker.arena.digests() == b""
    taker.require_same()


def test_digests_that_were_put_back_by_another_thread_are_not_used(taker: Taker) -> None:
    taker.take()
    before = taker.snapshots._held[0]
    taker.model.change(0, 1.0)
    taker.take(learn=False)
    taker.snapshots._held[0] = before  # as by a ``learn`` that had begun before
    taker.model.change(0, 0.0)
    taker.take(learn=False)
    taker.require_same()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sets(st.integers(0, ROWS - 1)), st.booleans(), st.booleans())))
def test_whatever_changes_and_whatever_is_known_the_arena_holds_the_state(
    tmp_path: Path, steps: list[tuple[set[int], bool, bool]]
) -> None:
    taker = Taker(tmp_path / "arena")
    for number, (rows, learn, doubt) in enumerate(steps):
        for row in rows:
            taker.model.change(row, float(number + 1))
        taker.take(learn)
        taker.require_same()
        if doubt:
            taker.snapshots.doubt()
    taker.snapshots.close(keep=False)


def test_a_snapshot_that_ends_in_the_middle_leaves_nothing_that_is_known(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker.take()
    for row in range(6):
        taker.model.change(row * 6 + 1, 1.0)
    copyto = np.copyto

    def fail(target: Any, source: Any) -> None:
        copyto(target, source)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", fail)
        with pytest.raises(KeyboardInterrupt):
            taker.take()
    assert taker.arena.version == 0
    taker.model.change(1, 0.0)  # as it was, and as the arena no longer is
    taker.take(learn=False)
    taker.require_same()
