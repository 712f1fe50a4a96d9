"""What a save stores of a state that hardly changes, or changes all over; and what follows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from mpift.checkpoint import CheckpointManager, copying
from mpift.checkpoint.arena import Arena
from mpift.checkpoint.blocks import SPARSE_BLOCK_BYTES, digest
from mpift.checkpoint.directory import INDEX, Directory
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.manifest import Manifest
from mpift.checkpoint.orders import Order
from mpift.checkpoint.part import Part
from mpift.checkpoint.state import as_bytes
from mpift.checkpoint.writing import Workshop, pieces_of
from mpift.errors import CheckpointError
from tests.unit.fake_savers import Crew, version
from tests.unit.test_slots_ram import Neighbour

ROWS = 64  # one block each


class Training:
    """A table of which a step changes some rows."""

    def __init__(self) -> None:
        table = torch.nn.Embedding(ROWS, SPARSE_BLOCK_BYTES // 4).requires_grad_(False)
        table.weight.zero_()
        self.table = table
        self.state: dict[str, Any] = {"table": table}

    def change(self, rows: range, value: float) -> torch.Tensor:
        """Returns what the table is then."""
        for row in rows:
            self.table.weight[row, 5] = value
        return self.table.weight.clone()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def manager(directory: Path) -> Iterator[CheckpointManager]:
    made = CheckpointManager(directory, keep=9, full_every=3, encode=False)
    yield made
    made._news.failure = ""
    made.close()


def manifest_of(directory: Path, step: int) -> Manifest:
    found = Directory(directory)
    return found.manifest(found.find(step))


def test_of_a_state_that_hardly_changes_only_that_is_stored(
    manager: CheckpointManager, directory: Path
) -> None:
    training = Training()
    wanted = {}
    for step in range(1, 4):
        wanted[step] = training.change(range(step, step + 2), float(step))
        assert manager.save(step, training.state, wait=True)
    assert manifest_of(directory, 1).new_blocks > ROWS
    for step in (2, 3):
        # Two rows, and the generators' states at most.
        assert 2 <= manifest_of(directory, step).new_blocks < 8
        restored = manager.restore(step)
        assert restored is not None
        assert torch.equal(restored.values["table"]["weight"], wanted[step])


def test_where_all_seems_to_be_new_all_is_stored_and_the_next_save_compares_again(
    manager: CheckpointManager, directory: Path
) -> None:
    training = Training()
    assert manager.save(1, training.state, wait=True)
    # All but one row, which is not among those that are tried.
    training.change(range(1), 1.0)
    wanted = training.change(range(2, ROWS), 1.0)
    assert manager.save(2, training.state, wait=True)
    assert manifest_of(directory, 2).new_blocks >= ROWS - 1
    training.change(range(1, 2), 1.0)
    assert manager.save(3, training.state, wait=True)
    assert manifest_of(directory, 3).new_blocks < 8
    restored = manager.restore(2)
    assert restored is not None
    assert torch.equal(restored.values["table"]["weight"], wanted)


def test_memory_that_was_damaged_meanwhile_costs_one_save_and_reaches_no_checkpoint(
    manager: CheckpointManager, directory: Path
) -> None:
    training = Training()
    for step in (1, 2):
        training.change(range(step, step + 1), 1.0)
        assert manager.save(step, training.state, wait=True)
    arena = Arena.open(manager._slots.path(0, 0))
    arena.data[10 * SPARSE_BLOCK_BYTES] ^= 1  # of a row that stays as it is, and isn't copied again
    wanted = training.change(range(3, 4), 1.0)
    assert manager.save(3, training.state, wait=True)
    training.change(range(4, 5), 1.0)
    with pytest.raises(CheckpointError, match="reads back other than it was written"):
        manager.save(4, training.state, wait=True)  # the first that is written whole
    assert manager.committed_step == 3
    for step in (5, 6, 7):  # the last of these is written whole, too
        newest = training.change(range(step, step + 1), 1.0)
        assert manager.save(step, training.state, wait=True)
    for step, expected in ((3, wanted), (7, newest)):
        restored = manager.restore(step)
        assert restored is not None
        assert torch.equal(restored.values["table"]["weight"], expected)
    assert list(Directory(directory).damage(Directory(directory).find(7))) == []


def test_large_blocks_that_rest_between_small_ones_that_change_are_stored_once(
    manager: CheckpointManager, directory: Path
) -> None:
    layers = [torch.nn.Embedding(1, SPARSE_BLOCK_BYTES // 4) for _ in range(33)]
    adapters = [torch.zeros(2, 16) for _ in layers]
    state: dict[str, Any] = {}
    for number, (layer, adapter) in enumerate(zip(layers, adapters, strict=True)):
        state |= {f"{number}": layer, f"{number} a": adapter[0], f"{number} b": adapter[1]}
    for step in (1, 2, 3):
        for adapter in adapters:
            adapter.add_(1)
        assert manager.save(step, state, wait=True)
        if step > 1:
            assert manifest_of(directory, step).changed_bytes < SPARSE_BLOCK_BYTES


def test_a_tensor_that_is_copied_to_be_read_is_copied_once(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = torch.zeros(300, 1000).t()
    assert manager.save(1, {"x": big}, wait=True)
    copied: list[int] = []

    def counted(tensor: torch.Tensor) -> Any:
        copied.append(tensor.numel())
        return as_bytes(tensor)

    monkeypatch.setattr(copying, "as_bytes", counted)
    big[0, 0] = 1
    assert manager.save(2, {"x": big}, wait=True)
    assert copied.count(big.numel()) == 1


def test_memory_that_is_damaged_under_a_snapshot_costs_no_later_one(
    directory: Path, tmp_path: Path
) -> None:
    training = Training()
    with CheckpointManager(directory, ram_every=1, ram_directory=tmp_path) as manager:

        def snapshots(first: int) -> None:
            for step in range(first, first + 4):
                training.change(range(step % 3, step % 3 + 1), float(step))
                manager._snapshot(step, training.state, persist=False)
                assert manager.wait()

        assert manager.save(1, training.state, wait=True)
        snapshots(2)
        for path in tmp_path.glob("*/slot-*/rank-0.arena"):
            Arena.open(path).data[10 * SPARSE_BLOCK_BYTES] ^= 1  # of a row that rests
        snapshots(6)
        with pytest.warns(UserWarning, match="is not kept in memory: .*is damaged"):
            manager._news.surface()
        snapshots(10)
        wanted = training.table.weight.clone()
        training.table.weight.zero_()
        restored = manager.restore(state=training.state)
        assert restored is not None
        assert (restored.step, restored.source) == (13, "memory")
        assert torch.equal(training.table.weight, wanted)


def test_memory_that_a_restore_found_damaged_is_copied_anew(
    directory: Path, tmp_path: Path
) -> None:
    training = Training()
    with CheckpointManager(directory, ram_every=1, ram_directory=tmp_path) as manager:
        assert manager.save(1, training.state, wait=True)
        for step in (2, 3, 4):
            manager._snapshot(step, training.state, persist=False)
            assert manager.wait()
        for path in tmp_path.glob("*/slot-*/rank-0.arena"):
            Arena.open(path).data[10 * SPARSE_BLOCK_BYTES] ^= 1
        training.table.weight.add_(1)
        with pytest.warns(UserWarning, match="the snapshot in memory is damaged"):
            restored = manager.restore(state=training.state)
        assert restored is not None
        assert (restored.step, restored.source) == (1, "storage")
        for step in (5, 6):
            manager._snapshot(step, training.state, persist=False)
            assert manager.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager._news.surface()
        restored = manager.restore(state=training.state)
        assert restored is not None
        assert (restored.step, restored.source) == (6, "memory")


class OverwritingDisk(Disk):
    """A snapshot is taken into the arena while it is being written from."""

    def __init__(self, overwrite: Callable[[], object]) -> None:
        self._overwrite = overwrite

    def sync(self, path: Path) -> None:
        super().sync(path)
        self._overwrite()


def test_what_was_overwritten_while_it_was_written_is_no_part_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    Directory(root).prepare()
    rank = Neighbour(Crew(1), 0, root, tmp_path)
    assert rank.snapshot(1)
    _, slot = rank.ram.newest()
    path = rank.slots.path(0, slot)
    arena = Arena.open(path)
    order = Order(root, (path,), version(1), "0000000001-w0-e0-a0-g1.h5", None)
    with pytest.raises(CheckpointError, match="overwritten while it was written"):
        Workshop(OverwritingDisk(arena.begin), 1).write(order)
    rank.slots.close(keep=False)


def test_an_arena_that_somebody_has_removed_is_made_anew(manager: CheckpointManager) -> None:
    for step in (1, 2, 3):
        assert manager.save(step, {"x": torch.full((3,), step)}, wait=True)
        manager._slots.path(0, 0).unlink()
    restored = manager.restore()
    assert restored is not None
    assert restored.values["x"].tolist() == [3, 3, 3]


def test_who_waits_for_a_save_finds_its_index(manager: CheckpointManager, directory: Path) -> None:
    training = Training()
    for step in range(1, 6):
        training.change(range(step, step + 1), float(step))
        assert manager.save(step, training.state, wait=True)
        with h5py.File(directory / "steps" / f"{step:010d}" / INDEX) as file:
            assert file["table/weight"][step, 5] == step


def test_a_share_is_taken_over_by_what_its_own_arena_holds(tmp_path: Path) -> None:
    """Not by the digests that were made of another arena, to seal that one of the same version."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    Directory(root).prepare()
    crew = Crew(2)
    ranks = [Neighbour(crew, member, root, tmp_path) for member in (0, 1)]
    assert all(rank.snapshot(1) for rank in ranks)
    workshop: Workshop = ranks[0].writer.workshop
    _, slot = ranks[0].ram.newest()
    for member, rank in enumerate(ranks):
        path = rank.slots.path(member, slot)
        name = f"0000000001-w0-e0-a{member}-g1.h5"
        part = Part.decode(workshop.write(Order(root, (path,), version(1), name, None)).part)
        arena = Arena.open(path)
        contents = arena.contents()
        assert contents is not None
        assert part.share == contents.share == member
        pieces = pieces_of(contents, arena.data, contents.ranges[:1])
        found = [block.digest for block in (*part.shared, *part.own)]
        assert found == [digest(piece.data, piece.spec.dtype) for piece in pieces]
    for rank in ranks:
        rank.slots.close(keep=False)


def test_what_no_snapshot_told_is_found_out_by_the_writer(tmp_path: Path) -> None:
    """An arena without digests, and nothing to compare with: they are made while it is written."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    Directory(root).prepare()
    rank = Neighbour(Crew(1), 0, root, tmp_path)
    assert rank.snapshot(1)
    _, slot = rank.ram.newest()
    path = rank.slots.path(0, slot)
    assert Arena.open(path).digests() == b""
    for number, encode in enumerate((False, True)):
        name = f"0000000001-w0-e0-a{number}-g1.h5"
        order = Order(root, (path,), version(1), name, None, encode=encode)
        written = Workshop(Disk(), 1).write(order)
        part = Part.decode(written.part)
        made = [block.digest for block in (*part.shared, *part.own)]
        assert all(made)
        assert written.digests.hex() == "".join(made)
    rank.slots.close(keep=False)
