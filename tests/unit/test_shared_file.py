"""One file for all ranks, as far as it goes without an h5py that has MPI."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from mpift.checkpoint import CheckpointManager, shared_file
from mpift.checkpoint.arena import Arena
from mpift.checkpoint.blocks import storage_dtype
from mpift.checkpoint.group import Seat
from mpift.checkpoint.manifest import version_of
from mpift.checkpoint.shared_file import _Head, _Mine, _Plan, _require_same, _together
from mpift.checkpoint.snapshot import Snapshots
from mpift.core.saving import Origin
from mpift.errors import CheckpointError

ORIGIN = Origin("history", "layout", (0, 1, 2))


class _Exchange:
    """A communicator on which this rank is 0 and the others say what they are told to."""

    rank = 0

    def __init__(self, *others: Any) -> None:
        self._others = others
        self.said: list[Any] = []

    def allgather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value, *self._others]


def _head(share: int, version: int = 7, **elements: tuple[int, int]) -> _Head:
    """Elements of shared and of own tensors by dtype."""
    kinds = {(d, own == 1): n for d, both in elements.items() for own, n in enumerate(both) if n}
    return _Head(version, ORIGIN, share, kinds, dict.fromkeys(elements, share + 1))


def test_without_mpi_in_h5py_it_says_what_was_found_and_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(h5py, "get_config", lambda: types.SimpleNamespace(mpi=False))
    with pytest.raises(CheckpointError, match=r"h5py 3\..*parallel-hdf5\.md.*make test-mpio"):
        shared_file.require()
    with pytest.raises(CheckpointError, match=r'layout="shared" needs'):
        CheckpointManager(tmp_path, layout="shared")
    assert not list(tmp_path.iterdir())


def test_an_h5py_with_mpi_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py, "get_config", lambda: types.SimpleNamespace(mpi=True))
    shared_file.require()


def test_shared_tensors_come_first_share_by_share_whatever_the_order_of_ranks() -> None:
    heads = [
        _head(1, float32=(10, 3), bfloat16=(5, 0)),
        _head(0, float32=(20, 4)),
        _head(2, bfloat16=(7, 1)),
    ]
    plans = [_Plan(heads, rank) for rank in range(3)]
    assert {tuple(plan.totals.items()) for plan in plans} == {(("bfloat16", 13), ("float32", 37))}
    assert [plan.starts["float32", False] for plan in plans] == [20, 0, 30]
    assert [plan.starts["float32", True] for plan in plans] == [34, 30, 37]
    assert [plan.starts["bfloat16", False] for plan in plans] == [0, 0, 5]
    assert plans[2].starts["bfloat16", True] == 12
    assert plans[0].size_bytes == 37 * 4 + 13 * 2


def test_all_ranks_write_as_often_as_the_one_with_the_most_slices() -> None:
    heads = [_head(0, float32=(1, 0)), _head(1, float32=(1, 0)), _head(2, int64=(1, 0))]
    assert _Plan(heads, 0).rounds == {"float32": 2, "int64": 3}


def test_snapshots_of_different_steps_or_states_are_refused() -> None:
    _require_same([_head(0), _head(1)])
    with pytest.raises(CheckpointError, match="of steps 7, 8 "):
        _require_same([_head(0), _head(1, version=8)])
    other = _Head(7, Origin("history", "another", (0, 1, 2)), 1, {}, {})
    with pytest.raises(CheckpointError, match="the same step, and the same"):
        _require_same([_head(0), other])


def test_what_fails_on_another_rank_fails_here_too_with_its_rank_and_reason() -> None:
    comm = _Exchange((None, "no space"), (None, "no space"), (None, "no such file"))
    with pytest.raises(CheckpointError) as raised:
        _together(comm, "writing it", lambda: "well")
    assert "writing it failed on rank 1, 2: no space; on rank 3: no such file" in str(raised.value)


def test_what_fails_here_is_told_to_the_others_before_it_is_raised() -> None:
    comm = _Exchange(("well", ""))

    def fail() -> None:
        raise ValueError

    with pytest.raises(CheckpointError, match=r"on rank 0: ValueError\(\)"):
        _together(comm, "writing it", fail)
    assert comm.said == [(None, "ValueError()")]


def test_a_rank_writes_in_slices_that_stay_within_one_kind_of_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_file, "SLICE_BYTES", 2 << 20)
    model = torch.nn.Linear(1024, 640)  # 2.5 MiB and 2560 bytes
    state = {"model": model, "mine": torch.zeros(300), "more": torch.zeros(3, dtype=torch.int64)}
    snapshots = Snapshots(lambda _: tmp_path / "arena", 1)
    snapshots.take(state, version_of((1, 7)), Seat(0, (0,), (0,), "history"), 0)
    mine = _Mine(tmp_path / "arena")
    found = [
        (slice_.kind, slice_.place, sum(map(len, slice_.blocks)))
        for slices in mine.slices.values()
        for slice_ in slices
    ]
    floats, own = ("float32", False), ("float32", True)
    assert [item for item in found if item[0] == floats] == [
        (floats, 0, 2 << 20),
        (floats, 1 << 19, (1 << 19) + 2560),
    ]
    assert (own, 0, 1200) in found
    assert mine.head.slices["float32"] == 3
    assert mine.head.elements[floats] == 1024 * 640 + 640
    plan = _Plan([mine.head], 0)
    offsets = {dtype: number << 30 for number, dtype in enumerate(plan.totals, 1)}
    stored = mine.stored("blocks/x.h5", plan, offsets)
    for dtype, total in plan.totals.items():
        end = offsets[dtype]
        for block in (block for block in stored if block.dataset == dtype):
            assert block.offset == end
            end += block.stored_bytes
        assert end == offsets[dtype] + total * storage_dtype(dtype).itemsize
    del mine
    snapshots.close(keep=False)


def test_a_snapshot_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    state = {"mine": torch.zeros(3)}
    snapshots = Snapshots(lambda _: tmp_path / "arena", 1)
    snapshots.take(state, version_of((1, 7)), Seat(0, (0,), (0,), "history"), 0)
    Arena.open(tmp_path / "arena").begin()
    with pytest.raises(CheckpointError, match="is not whole"):
        _Mine(tmp_path / "arena")
    snapshots.close(keep=False)
