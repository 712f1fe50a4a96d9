"""Arenas and the RAM tier: what may be overwritten, and how ranks of a node agree without words."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpift.checkpoint.durable import Disk
from mpift.checkpoint.group import Seat
from mpift.checkpoint.manifest import version_of
from mpift.checkpoint.ram import RamTier, remove_stale
from mpift.checkpoint.saves import Capture
from mpift.checkpoint.slots import Slots
from mpift.checkpoint.writing import Workshop
from mpift.core.history import NO_HISTORY
from mpift.errors import CheckpointDamagedError
from tests.unit.fake_savers import Crew, FakeGroup


def version(step: int) -> int:
    return version_of((1, step))


class Inline:
    """A writer that does each job at once, or when it is told to."""

    def __init__(self) -> None:
        self.workshop = Workshop(Disk(), 1)
        self.held: list[Callable[[], None]] | None = None
        self.broken = ""

    def request(self, job: str, then: Callable[[Any, str], None], **arguments: Any) -> None:
        def do() -> None:
            if self.broken:
                then(None, self.broken)
            else:
                then(getattr(self.workshop, job)(**arguments), "")

        if self.held is not None:
            self.held.append(do)
        else:
            do()

    def release(self) -> None:
        held, self.held = self.held or [], None
        for do in held:
            do()


class Neighbour:
    """One of the ranks of a node, with its slots in ``folder``."""

    def __init__(self, crew: Crew, member: int, root: Path, folder: Path) -> None:
        self.member = member
        self.group = FakeGroup(crew, member)
        self.ram = RamTier(root, folder)
        self.ram.prepare()
        self.writer = Inline()
        self.slots = Slots(
            self.group,
            self.writer,  # type: ignore[arg-type]
            self.ram,
            lambda _, reason: self.problems.append(reason),
        )
        self.state = {"x": torch.zeros(8), "noise": torch.full((4,), float(member))}
        self.problems: list[str] = []

    def seat(self) -> Seat:
        view = self.group.crew.view
        return Seat(view.index(self.member), view, tuple(range(len(view))), NO_HISTORY, True)

    def snapshot(self, step: int) -> bool:
        """One that is kept in memory alone; whether there was a slot for it."""
        seat = self.seat()
        slot = self.slots.find(seat, wait=False)
        if slot is None:
            self.slots.skip(version(step))
            return False
        self.state["x"].fill_(step)

        def sealed(error: str) -> None:
            if error:
                self.problems.append(error)
            self.slots.free(version(step))

        self.slots.take(
            slot, self.state, version(step), seat, lambda capture: self.slots.seal(capture, sealed)
        )
        return True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture
def pair(root: Path, tmp_path: Path) -> list[Neighbour]:
    crew = Crew(2)
    return [Neighbour(crew, member, root, tmp_path) for member in (0, 1)]


def newest_step(ranks: list[Neighbour]) -> int:
    return ranks[0].ram.newest()[0] & 0xFFFF


def test_a_snapshot_counts_in_memory_once_all_ranks_of_the_node_have_sealed_it(
    pair: list[Neighbour],
) -> None:
    assert pair[0].snapshot(1)
    assert pair[0].ram.versions() == []
    assert pair[1].snapshot(1)
    assert pair[0].ram.versions() == [version(1)]
    made = pair[0].ram.manifest(pair[0].ram.newest()[1])
    assert made.step == 1
    assert made.world_size == 2


def test_a_slot_is_overwritten_only_while_the_other_one_is_whole(pair: list[Neighbour]) -> None:
    for step in range(1, 8):
        for rank in pair:
            assert rank.snapshot(step)
            whole = rank.ram.versions()
            assert len(whole) >= min(1, step - 1)
        assert newest_step(pair) == step
    assert sorted(pair[0].ram.versions()) == [version(6), version(7)]


def test_a_rank_takes_no_snapshot_while_its_last_one_is_not_whole(pair: list[Neighbour]) -> None:
    assert pair[0].snapshot(1)
    assert not pair[0].snapshot(2)
    assert pair[1].snapshot(1)  # late
    assert pair[1].snapshot(2)  # that comes to nothing, since the other one has left it out
    assert pair[0].snapshot(3)
    assert pair[1].snapshot(3)
    assert newest_step(pair) == 3


def test_ranks_that_skip_at_random_never_block_each_other_nor_lose_the_last_snapshot(
    pair: list[Neighbour],
) -> None:
    torch.manual_seed(0)
    last = 0
    for step in range(1, 60):
        busy = [bool(torch.rand(()) < 0.3) for _ in pair]
        for rank, is_busy in zip(pair, busy, strict=True):
            if is_busy:
                rank.slots.skip(version(step))
            else:
                rank.snapshot(step)
        assert newest_step(pair) >= last
        last = newest_step(pair)
    for step in (60, 61, 62):
        taken = [rank.snapshot(step) for rank in pair]
    assert taken == [True, True]
    assert newest_step(pair) == 62


def test_a_snapshot_that_a_lost_rank_has_not_sealed_keeps_nobody(pair: list[Neighbour]) -> None:
    for rank in pair:
        rank.snapshot(1)
    pair[0].snapshot(2)  # the other rank dies before it takes it
    pair[0].group.crew.install_quietly(0)
    assert pair[0].snapshot(3)
    assert newest_step(pair) == 3


def test_whoever_waits_for_a_slot_while_a_neighbour_is_lost_gets_one(
    pair: list[Neighbour],
) -> None:
    for rank in pair:
        rank.snapshot(1)
    first = pair[0]
    first.snapshot(2)
    found: list[int | None] = []
    waiter = threading.Thread(
        target=lambda: found.append(first.slots.find(first.seat(), wait=True)), daemon=True
    )
    waiter.start()
    first.group.crew.install_quietly(0)
    waiter.join(5)
    assert found


def test_a_seal_that_fails_is_told_and_keeps_nobody(pair: list[Neighbour]) -> None:
    for rank in pair:
        rank.snapshot(1)
    pair[1].writer.broken = "the writer process 7 ended (SIGKILL)"
    for rank in pair:
        rank.snapshot(2)
    pair[1].writer.broken = ""
    assert pair[1].problems == ["the writer process 7 ended (SIGKILL)"]
    assert newest_step(pair) == 1
    for step in (3, 4):
        assert [rank.snapshot(step) for rank in pair] == [True, True]
    assert newest_step(pair) == 4


def test_a_slot_that_is_written_to_storage_is_not_overwritten(pair: list[Neighbour]) -> None:
    for rank in pair:
        rank.snapshot(1)
        rank.snapshot(2)
    for rank in pair:
        rank.snapshot(2)
    assert newest_step(pair) == 2
    first = pair[0]
    slot = first.slots.find(first.seat(), wait=False)
    assert slot is not None
    first.slots._busy[version(1)] = slot  # the older one is on its way
    assert first.slots.find(first.seat(), wait=False) is None
    first.slots.free(version(1))
    assert first.slots.find(first.seat(), wait=False) == slot


def test_whoever_waits_for_a_slot_gets_it_once_it_is_free(root: Path, tmp_path: Path) -> None:
    alone = Neighbour(Crew(1), 0, root, tmp_path)
    alone.writer.held = []
    assert alone.snapshot(1)
    assert alone.slots.find(alone.seat(), wait=False) is None
    assert not alone.slots.wait(0.01)
    found: list[int | None] = []
    waiter = threading.Thread(
        target=lambda: found.append(alone.slots.find(alone.seat(), wait=True))
    )
    waiter.start()
    alone.writer.release()
    waiter.join(10)
    assert found == [1]  # the other one holds the newest
    assert alone.slots.wait(0)


def test_without_a_ram_tier_there_is_one_arena_that_is_free_when_its_save_is_over(
    root: Path,
) -> None:
    group, writer = FakeGroup(Crew(1), 0), Inline()
    slots = Slots(group, writer, None, lambda *_: None)  # type: ignore[arg-type]
    captures: list[Capture] = []
    seat = Seat(0, (0,), (0,), NO_HISTORY)
    try:
        assert slots.find(seat, wait=False) == 0
        slots.take(0, {"x": torch.ones(3)}, version(1), seat, captures.append)
        assert slots.paths(0) == [captures[0].arena]
        assert slots.find(seat, wait=False) is None
        slots.free(version(1))
        assert slots.find(seat, wait=False) == 0
    finally:
        slots.close(keep=True)  # there is nothing to keep it for
    assert not captures[0].arena.exists()


def test_memory_is_given_back_unless_it_is_to_be_kept(pair: list[Neighbour]) -> None:
    for rank in pair:
        rank.snapshot(1)
    pair[0].slots.close(keep=True)
    assert pair[0].ram.newest()[0] == version(1)
    pair[1].slots.close(keep=False)
    assert not pair[1].ram.folder.exists()


def test_a_changed_manifest_in_memory_is_damage(pair: list[Neighbour]) -> None:
    for rank in pair:
        rank.snapshot(1)
    _, slot = pair[0].ram.newest()
    path = pair[0].ram.slot(slot) / "manifest.json"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b'"step":1', b'"step":2'))
    with pytest.raises(CheckpointDamagedError, match=r"is not the manifest that COMMIT tells of"):
        pair[0].ram.manifest(slot)
    pair[0].ram.discard(version(1))
    pair[1].ram.discard(version(1))  # both say so, and nothing else is lost
    assert pair[0].ram.versions() == []
    with pytest.raises(CheckpointDamagedError, match="holds no whole snapshot"):
        pair[0].ram.manifest(slot)


def test_arenas_of_ranks_that_are_no_more_are_removed(pair: list[Neighbour]) -> None:
    for step in (1, 2):
        for rank in pair:
            rank.snapshot(step)
    pair[0].group.crew.install_quietly(0)
    for step in (3, 4):
        assert pair[0].snapshot(step)
    assert sorted(path.name for path in pair[0].ram.folder.rglob("*.arena")) == ["rank-0.arena"] * 2


def test_tiers_of_removed_directories_and_old_ones_are_cleared_away(
    root: Path, tmp_path: Path
) -> None:
    gone, old, young = (tmp_path / name for name in ("gone", "old", "young"))
    tiers = {}
    for folder in (gone, old, young):
        folder.mkdir()
        tiers[folder] = RamTier(folder, tmp_path)
    for tier in tiers.values():
        tier.prepare()
    gone.rmdir()
    long_ago = time.time() - 8 * 24 * 3600
    for path in (*tiers[old].folder.rglob("*"), tiers[old].folder):
        os.utime(path, (long_ago, long_ago))
    remove_stale(tmp_path)
    assert [tier.folder.exists() for tier in tiers.values()] == [False, False, True]


def test_each_checkpoint_directory_has_a_tier_of_its_own(tmp_path: Path) -> None:
    assert RamTier(tmp_path / "a", tmp_path).folder != RamTier(tmp_path / "b", tmp_path).folder
    assert RamTier(tmp_path / "a", tmp_path).folder == RamTier(tmp_path / "a", tmp_path).folder
