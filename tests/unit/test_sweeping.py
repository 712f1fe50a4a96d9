"""Old checkpoints are removed, by a job or from outside, and it never costs one that stays."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mpift.checkpoint.directory import MAINTENANCE, Directory, block_name
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.retention import Swept, collect, sweep
from mpift.errors import CheckpointError
from tests.unit.checkpoints import Saved, arrays, flip, save

# -- sweeping --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> list[Saved]:
    """Steps 1 to 4 of generation 1: ``w`` changes each time, ``frozen`` lies in step 1's file and
    ``late`` in that of step 2."""
    saved: list[Saved] = []
    for step in (1, 2, 3, 4):
        tensors = {**arrays(step, w=300), **arrays(99, frozen=600)}
        if step > 1:
            tensors |= arrays(98, late=300)
        saved.append(save(tmp_path, step, tensors, base=saved[-1] if saved else None))
    return saved


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_of(directory: Directory) -> list[int]:
    return [committed.step for committed in directory.committed()]


def blocks_of(*steps: int) -> list[str]:
    return [block_name(step, 0, 0, 0, 1) for step in steps]


def test_a_sweep_removes_old_checkpoints_and_the_files_that_only_they_used(
    tmp_path: Path, run: list[Saved]
) -> None:
    directory = Directory(tmp_path)
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    swept = sweep(directory, 1, (1, 4), keep=1, keep_every=None)
    after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert swept == Swept((1, 2, 3), 3 * 3 + 1, before - after)
    assert names(tmp_path / "steps") == ["0000000004"]
    # Only step 3's was not shared.
    assert names(tmp_path / "blocks") == blocks_of(1, 2, 4)
    directory.check(run[3].committed, thorough=True)
    assert sweep(directory, 1, (1, 4), 1, None) == Swept((), 0, 0)
    assert pickle.loads(pickle.dumps(swept)) == swept


def test_what_a_sweep_was_told_to_keep_stays_whole(tmp_path: Path, run: list[Saved]) -> None:
    directory = Directory(tmp_path)
    (run[0].committed.folder / "PIN.first").touch()
    swept = sweep(directory, 1, (1, 4), 1, 3, verified=(1, 2))
    assert swept.steps == ()
    assert sweep(directory, 1, (1, 4), 1, 3).steps == (2,)
    for committed in directory.committed():
        directory.check(committed, thorough=True)


def test_what_may_still_be_in_the_making_stays(tmp_path: Path, run: list[Saved]) -> None:
    directory = Directory(tmp_path)
    unused = [
        block_name(9, 0, 0, 0, 1),  # an older generation's
        block_name(3, 0, 0, 1, 2),  # this one's, of a step that was given up
        block_name(6, 0, 0, 0, 2),  # this one's, later than what is finished
        block_name(1, 0, 0, 0, 3),  # a later one's
        f"{block_name(3, 0, 0, 2, 2)}.0a1b2c3d.new",
        f"{block_name(6, 0, 0, 2, 2)}.0a1b2c3d.new",
        "notes.h5",
    ]
    for name in unused:
        (tmp_path / "blocks" / name).touch()
    save(tmp_path, 5, arrays(w=10), generation=2)
    swept = sweep(directory, 2, (2, 5), keep=9, keep_every=None)
    left = [name for name in unused if (tmp_path / "blocks" / name).exists()]
    assert left == [unused[2], unused[3], unused[5], unused[6]]
    assert swept == Swept((), 3, 0)


def test_folders_that_were_never_committed_go_unless_they_may_be_in_the_making(
    tmp_path: Path, run: list[Saved]
) -> None:
    directory = Directory(tmp_path)
    save(tmp_path, 5, arrays(w=10), generation=2)
    folders = {
        "0000000003.g2": False,  # before what is finished
        "0000000006.g1": False,  # an older generation's
        "0000000006.g2": True,
        "0000000007": True,  # perhaps this one's
        "0000000002": True,  # committed
        "0000000001.0a1b2c3d.new": False,  # was being removed
        "notes": True,
    }
    for name in folders:
        (tmp_path / "steps" / name).mkdir(exist_ok=True)
    (tmp_path / "steps" / "0000000001.0a1b2c3d.new" / "index.h5").touch()
    leftover = run[1].committed.folder / "COMMIT.0a1b2c3d.new"
    leftover.touch()
    sweep(directory, 2, (2, 5), 9, None)
    assert {name: (tmp_path / "steps" / name).exists() for name in folders} == folders
    assert not leftover.exists()
    assert steps_of(directory) == [1, 2, 3, 4, 5]


def test_without_a_finished_checkpoint_only_older_generations_are_cleaned_up(
    tmp_path: Path, run: list[Saved]
) -> None:
    for generation in (1, 2):
        (tmp_path / "blocks" / block_name(0, 0, 0, 0, generation)).touch()
    sweep(Directory(tmp_path), 2, None, 9, None)
    assert names(tmp_path / "blocks") == [block_name(0, 0, 0, 0, 2), *blocks_of(1, 2, 3, 4)]


def test_while_one_manifest_cannot_be_read_no_block_file_is_removed(
    tmp_path: Path, run: list[Saved]
) -> None:
    flip(run[1].committed.folder / "manifest.json", 20)
    directory = Directory(tmp_path)
    swept = sweep(directory, 1, (1, 4), 1, None)
    assert swept.steps == (1, 3)
    assert "no block file is removed" in swept.held
    assert str(run[1].committed.folder / "manifest.json") in swept.held
    assert names(tmp_path / "blocks") == blocks_of(1, 2, 3, 4)

    # So with a COMMIT that says nothing; once it is out of the way, the rest goes on.
    (run[1].committed.folder / "COMMIT").write_text("")
    assert "COMMIT" in sweep(directory, 1, (1, 4), 1, None).held
    directory.quarantine(run[1].committed.folder, "damaged")
    assert sweep(directory, 1, (1, 4), 1, None).held == ""
    assert names(tmp_path / "blocks") == blocks_of(1, 2, 4)


def test_a_damaged_checkpoint_does_not_push_a_whole_one_out(
    tmp_path: Path, run: list[Saved]
) -> None:
    directory = Directory(tmp_path)
    (tmp_path / "blocks" / blocks_of(4)[0]).unlink()
    assert sweep(directory, 1, (1, 4), 1, None).steps == (1, 2)
    assert steps_of(directory) == [3, 4]


def test_while_somebody_reads_nothing_is_removed(tmp_path: Path, run: list[Saved]) -> None:
    directory = Directory(tmp_path)
    with directory.reading():
        swept = sweep(directory, 1, (1, 4), 1, None)
    assert swept.steps == ()
    assert f"while process {os.getpid()} on host" in swept.held
    assert steps_of(directory) == [1, 2, 3, 4]


class AfterUnlink(Disk):
    """Something happens once the first file is gone."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = [then]

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self.then:
            self.then.pop()()


def test_a_reader_that_comes_during_a_sweep_keeps_the_files(
    tmp_path: Path, run: list[Saved]
) -> None:
    reading = Directory(tmp_path).reading()
    directory = Directory(tmp_path, AfterUnlink(reading.__enter__))
    swept = sweep(directory, 1, (1, 4), 1, None)
    reading.__exit__(None, None, None)
    assert swept.steps == (1, 2, 3)
    assert "files stay while process" in swept.held
    assert names(tmp_path / "blocks") == blocks_of(1, 2, 3, 4)
    assert sweep(Directory(tmp_path), 1, (1, 4), 1, None).files == 3 * 2 + 1


# -- crashes ---------------------------------------------------------------------------------------


class Crash(Exception):
    """The machine stopped."""


class CrashingDisk(Disk):
    """Stops before operation ``left``; removals and renames whose folders were not synced by then
    are undone if ``forget``."""

    def __init__(self, left: int, forget: bool, backup: Path) -> None:
        self.left = left
        self.forget = forget
        self.backup = backup
        self.undo: list[tuple[Path, Callable[[], object]]] = []

    def _operation(self) -> None:
        if self.left == 0:
            if self.forget:
                for _, undone in reversed(self.undo):
                    undone()
            raise Crash
        self.left -= 1

    def unlink(self, path: Path) -> None:
        self._operation()
        kept = self.backup / str(len(list(self.backup.iterdir())))
        os.link(path, kept)
        super().unlink(path)

        def again() -> None:
            path.parent.mkdir(exist_ok=True)
            os.link(kept, path)

        self.undo.append((path.parent, again))

    def rename(self, old: Path, new: Path) -> None:
        self._operation()
        super().rename(old, new)

        def back() -> None:
            new.mkdir(exist_ok=True)  # its own removal was not synced either
            new.replace(old)

        self.undo.append((old.parent, back))

    def sync_folder(self, path: Path) -> None:
        self._operation()
        super().sync_folder(path)
        self.undo = [(folder, undone) for folder, undone in self.undo if folder != path]


@pytest.mark.parametrize("forget", [False, True])
def test_wherever_a_sweep_is_cut_short_every_commit_has_all_its_blocks(
    tmp_path: Path, run: list[Saved], forget: bool
) -> None:
    (tmp_path / "blocks" / f"{block_name(2, 0, 0, 9, 1)}.0a1b2c3d.new").touch()
    (tmp_path / "steps" / "0000000002.g1").mkdir()
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path, whole)
    left = 0
    remaining: list[int] = []
    while True:
        root, backup = tmp_path / f"crash{left}", tmp_path / f"backup{left}"
        shutil.copytree(whole, root, copy_function=os.link)
        backup.mkdir()
        try:
            sweep(Directory(root, CrashingDisk(left, forget, backup)), 1, (1, 4), 2, None)
        except Crash:
            pass
        else:
            break
        directory = Directory(root)
        remaining.append(len(directory.committed()))
        assert steps_of(directory)[-2:] == [3, 4]
        for committed in directory.committed():
            assert list(directory.damage(committed)) == []
        # Whoever comes next cleans up.
        sweep(directory, 2, (1, 4), 2, None)
        assert names(root / "steps") == ["0000000003", "0000000004"]
        assert names(root / "blocks") == blocks_of(1, 2, 3, 4)
        left += 1
    assert remaining[0] == 4
    assert remaining[-1] == 2
    assert len(remaining) > 10


# -- from outside ----------------------------------------------------------------------------------


def test_collecting_refuses_while_a_job_lives_and_names_it(
    tmp_path: Path, run: list[Saved]
) -> None:
    directory = Directory(tmp_path)
    directory.claim("training")
    with pytest.raises(CheckpointError, match=f"by job training: process {os.getpid()}"):
        collect(directory, 1, None)
    directory.release("training")
    assert collect(directory, 1, None).steps == (1, 2, 3)
    assert directory.live() is None


def test_a_dry_run_foretells_what_a_collection_does(tmp_path: Path, run: list[Saved]) -> None:
    directory = Directory(tmp_path)
    # With nobody writing, nothing of it can be in the making.
    (tmp_path / "blocks" / block_name(9, 0, 0, 0, 1)).write_bytes(b"x" * 77)
    (tmp_path / "steps" / "0000000009").mkdir()
    (tmp_path / "steps" / "0000000009" / "index.h5").write_bytes(b"x" * 23)
    foretold = collect(directory, 2, None, dry_run=True)
    assert steps_of(directory) == [1, 2, 3, 4]
    assert collect(directory, 2, None) == foretold
    assert foretold.steps == (1, 2)
    assert foretold.files == 2 * 3 + 2
    assert names(tmp_path / "steps") == ["0000000003", "0000000004"]
    assert names(tmp_path / "blocks") == blocks_of(1, 2, 3, 4)


def test_collecting_without_a_number_keeps_all_checkpoints(
    tmp_path: Path, run: list[Saved]
) -> None:
    assert collect(Directory(tmp_path), None, None) == Swept((), 0, 0)


def test_collecting_keeps_the_newest_checkpoint_that_has_all_its_files(
    tmp_path: Path, run: list[Saved]
) -> None:
    os.truncate(_writable(tmp_path / "blocks" / blocks_of(4)[0]), 100)
    directory = Directory(tmp_path)
    assert collect(directory, 1, None).steps == (1, 2)
    directory.check(run[2].committed, thorough=True)


def test_two_who_clean_up_do_so_in_turn(
    tmp_path: Path, run: list[Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(tmp_path)
    directory.claim(MAINTENANCE)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        directory.release(MAINTENANCE)

    monkeypatch.setattr("mpift.checkpoint.directory.time.sleep", sleep)
    assert collect(Directory(tmp_path), 1, None).steps == (1, 2, 3)
    assert len(waits) == 1


def _writable(path: Path) -> Path:
    path.chmod(0o644)
    return path
