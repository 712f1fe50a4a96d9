"""What a rank looks at before it votes for a checkpoint, and a coordinator before a commit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from mpift.checkpoint.arena import Arena
from mpift.checkpoint.directory import Directory
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.group import Seat
from mpift.checkpoint.manifest import order_of, version_of
from mpift.checkpoint.orders import Order
from mpift.checkpoint.part import Part
from mpift.checkpoint.snapshot import Snapshots
from mpift.checkpoint.writing import Workshop
from mpift.errors import CheckpointError

MEMBERS = (0, 1)
VERSION = version_of((1, 4))


class TwoRanks:
    """Two shares of one snapshot, written; and what they would do next."""

    def __init__(self, root: Path, arenas: Path) -> None:
        self.root = root
        Directory(root).prepare()
        self.workshop = Workshop(Disk(), 1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        self._snapshots = [
            Snapshots(lambda _, member=member: arenas / f"arena-{member}", 1) for member in MEMBERS
        ]
        self.parts = []
        for member in MEMBERS:
            seat = Seat(member, MEMBERS, MEMBERS, "history")
            arena = self._snapshots[member].take({"model": model}, VERSION, seat, 0).arena
            self.parts.append(self.write(member, arena, 0))
        self.arenas = [arenas / f"arena-{member}" for member in MEMBERS]

    def write(self, member: int, arena: Arena, attempt: int) -> Part:
        name = f"0000000004-w{member}-e0-a{attempt}-g1.h5"
        order = Order(self.root, (arena.path,), VERSION, name, None, encode=False)
        return Part.decode(self.workshop.write(order).part)

    def assemble(self) -> tuple[str, str]:
        parts = [part.encode() for part in self.parts]
        return self.workshop.assemble(self.root, parts, "job", 0.0)

    def check(self, folder: str, found: str, part: Part | None, version: int = VERSION) -> None:
        data = part.encode() if part is not None else None
        self.workshop.check(self.root, folder, found, version, data)

    def close(self) -> None:
        for snapshots in self._snapshots:
            snapshots.close(keep=False)


@pytest.fixture
def ranks(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = TwoRanks(tmp_path / "root", tmp_path)
    yield made
    made.close()


def other(part: Part) -> Part:
    """The same part, but for what one of its blocks holds."""
    block = part.shared[0]._replace(digest="0" * 32)
    return dataclasses.replace(part, shared=(block, *part.shared[1:]))


def test_a_rank_votes_for_what_has_its_blocks_as_it_wrote_them(ranks: TwoRanks) -> None:
    folder, found = ranks.assemble()
    for part in (*ranks.parts, None):  # who has written nothing has nothing to compare
        ranks.check(folder, found, part)


def test_a_rank_does_not_vote_for_other_blocks_than_it_wrote(ranks: TwoRanks) -> None:
    folder, found = ranks.assemble()
    with pytest.raises(CheckpointError, match="something else of this rank's blocks"):
        ranks.check(folder, found, other(ranks.parts[0]))


def test_a_rank_does_not_vote_for_another_history_than_its_snapshot_s(ranks: TwoRanks) -> None:
    origin = ranks.parts[0].origin._replace(history="another")
    folder, found = ranks.assemble()
    with pytest.raises(CheckpointError, match="of another history"):
        ranks.check(folder, found, dataclasses.replace(ranks.parts[0], origin=origin))


def test_a_rank_votes_where_a_neighbour_wrote_the_same_blocks_into_another_file(
    ranks: TwoRanks,
) -> None:
    slow = ranks.parts[0]
    ranks.parts[0] = ranks.write(0, Arena.open(ranks.arenas[0]), 1)
    assert ranks.parts[0].files != slow.files
    folder, found = ranks.assemble()
    ranks.check(folder, found, slow)


def test_a_rank_does_not_vote_for_a_manifest_that_was_not_announced(ranks: TwoRanks) -> None:
    folder, found = ranks.assemble()
    with pytest.raises(CheckpointError, match="not the manifest that was announced"):
        ranks.check(folder, "0" * 64, None)
    with pytest.raises(CheckpointError, match="is of step 4, not of the one announced"):
        ranks.check(folder, found, None, VERSION + 1)


@pytest.mark.parametrize("harm", ["missing", "cut short"])
def test_what_refers_to_a_file_that_is_gone_or_cut_is_neither_voted_for_nor_committed(
    ranks: TwoRanks, harm: str
) -> None:
    folder, found = ranks.assemble()
    path = ranks.root / ranks.parts[0].files[0].name
    if harm == "missing":
        path.unlink()
    else:
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="is gone, or has another size"):
        ranks.check(folder, found, None)
    with pytest.raises(CheckpointError, match="is gone, or has another size"):
        ranks.workshop.publish(ranks.root, folder, found, VERSION)
    assert Directory(ranks.root).committed() == []


def test_a_commit_that_says_the_same_may_be_made_twice_and_no_other_one_replaces_it(
    ranks: TwoRanks,
) -> None:
    folder, found = ranks.assemble()
    first = ranks.workshop.publish(ranks.root, folder, found, VERSION)
    assert ranks.workshop.publish(ranks.root, folder, found, VERSION) == first
    (committed,) = Directory(ranks.root).committed()
    assert committed.order == order_of(VERSION)
    commit = ranks.root / "steps" / folder / "COMMIT"
    commit.write_bytes(commit.read_bytes().replace(found.encode(), b"0" * 64))
    before = commit.read_bytes()
    with pytest.raises(CheckpointError, match="says something else already"):
        ranks.workshop.publish(ranks.root, folder, found, VERSION)
    assert commit.read_bytes() == before


def test_parts_of_two_histories_make_no_manifest(ranks: TwoRanks) -> None:
    origin = ranks.parts[1].origin._replace(history="another")
    ranks.parts[1] = dataclasses.replace(ranks.parts[1], origin=origin)
    with pytest.raises(CheckpointError, match="parts of different snapshots"):
        ranks.assemble()


def test_parts_that_leave_a_block_out_or_have_it_twice_make_no_manifest(ranks: TwoRanks) -> None:
    first = ranks.parts[0]
    ranks.parts = [first]
    with pytest.raises(CheckpointError, match="are in no part"):
        ranks.assemble()
    ranks.parts = [first, first]
    with pytest.raises(CheckpointError, match="does not fit in with the others"):
        ranks.assemble()
