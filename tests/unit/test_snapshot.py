"""Snapshots: whole or not at all, each rank its share, in memory that is reused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpift.checkpoint.arena import Arena
from mpift.checkpoint.group import Seat
from mpift.checkpoint.snapshot import Snapshots

OWNERS = (0, 1, 2, 3)


@pytest.fixture
def snapshots(tmp_path: Path) -> Iterator[Snapshots]:
    made = Snapshots(lambda slot: tmp_path / f"arena-{slot}", 1)
    yield made
    made.close(keep=False)


def seat(share: int = 0, whole: bool = False, neighbours: tuple[int, ...] = OWNERS) -> Seat:
    return Seat(share, OWNERS, neighbours, "history", whole)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))


def test_a_snapshot_that_ends_in_the_middle_is_not_whole_and_neither_is_the_one_before(
    snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": model()}
    snapshots.take(state, 1, seat(), 0)
    assert Arena.open(tmp_path / "arena-0").version == 1
    copied, copyto = itertools.count(), np.copyto

    def copy(target: Any, source: Any) -> None:
        if next(copied) == 2:
            raise KeyboardInterrupt
        copyto(target, source)

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", copy)
        with pytest.raises(KeyboardInterrupt):
            snapshots.take(state, 2, seat(), 0)
    torn = Arena.open(tmp_path / "arena-0")
    assert (torn.version, torn.contents()) == (0, None)
    snapshots.take(state, 3, seat(), 0)
    assert torn.version == 3


def blocks_of(folder: Path, share: int, state: dict[str, Any], **place: Any) -> list[int]:
    taker = Snapshots(lambda _: folder / f"arena-of-{share}", 1)
    contents = taker.take(state, 1, seat(share, **place), 0).arena.contents()
    assert contents is not None
    numbers = [number for number, *_ in contents.shared_blocks()]
    taker.close(keep=False)
    return numbers


def test_every_block_is_in_exactly_one_share(tmp_path: Path) -> None:
    state = {"model": model()}
    shares = [blocks_of(tmp_path, share, state) for share in range(len(OWNERS))]
    assert all(shares)
    assert sorted(itertools.chain(*shares)) == list(range(12))


def test_where_a_node_keeps_all_of_the_state_its_ranks_have_every_block_once(
    tmp_path: Path,
) -> None:
    state = {"model": model()}
    for neighbours in ((0, 1), (2, 3), (0, 3), (1,), OWNERS):
        held = [
            blocks_of(tmp_path, share, state, whole=True, neighbours=neighbours)
            for share in neighbours
        ]
        assert sorted(itertools.chain(*held)) == list(range(12))


def test_memory_is_reused_and_made_anew_only_for_a_larger_state(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    first = snapshots.take({"x": torch.ones(1000)}, 1, seat(), 0).arena
    for version, size in ((2, 10), (3, 1000)):
        assert snapshots.take({"x": torch.ones(size)}, version, seat(), 0).arena is first
    larger = snapshots.take({"x": torch.ones(100_000)}, 4, seat(), 0).arena
    assert larger is not first
    assert larger.version == Arena.open(tmp_path / "arena-0").version == 4
