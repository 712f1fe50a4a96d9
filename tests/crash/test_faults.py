"""What storage and processes do to saves: it is told, training goes on, nothing older is lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpift import memory
from mpift.checkpoint import CheckpointManager, blockfile, tenancy
from mpift.checkpoint import group as groups
from mpift.checkpoint.directory import INDEX, Directory
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.occupancy import Claims
from mpift.errors import CheckpointError
from tests.crash.scenes import (
    FailingDisk,
    ScribeHere,
    Training,
    manager,
    restored_from,
    small_disk,
    told,
)

LIMIT_SECONDS = 20.0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    """Managers write to this one, in this process."""
    made = FailingDisk()
    monkeypatch.setattr(
        "mpift.checkpoint.manager.Scribe", lambda threads, orphans=False: ScribeHere(made)
    )
    return made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    try:
        with small_disk(tmp_path / "small", "6m") as place:
            yield place
    except PermissionError as error:
        pytest.skip(str(error))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def require_failed(checkpoints: CheckpointManager, training: Training, word: str) -> None:
    """A save that fails holds nothing up; the next one tells why, and what was saved is there."""
    before = checkpoints.committed_step
    failed = training.advance()
    with told() as warnings:
        assert checkpoints.save(failed, training.state)
        assert checkpoints.wait(LIMIT_SECONDS)
        assert checkpoints.committed_step == before
    assert warnings == []
    with told() as warnings:
        checkpoints._news.surface()
    (warning,) = warnings
    assert f"step {failed} was not saved" in warning
    assert word in warning


# -- a disk that refuses ---------------------------------------------------------------------------


def test_whichever_sync_fails_only_that_checkpoint_is_lost(
    tmp_path: Path, disk: FailingDisk
) -> None:
    training = Training()
    with manager(tmp_path) as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        disk.arm(0)
        assert checkpoints.save(training.advance(), training.state, wait=True)
        syncs, saved = disk.syncs, 0
        for number in range(1, syncs + 1):
            disk.arm(number)
            with told() as warnings:
                assert checkpoints.save(training.advance(), training.state)
                assert checkpoints.wait(LIMIT_SECONDS)
                checkpoints._news.surface()
            assert warnings
            assert all("EIO" in warning for warning in warnings)
            if checkpoints.committed_step == training.step:
                saved += 1
                assert all("writing an index" in warning for warning in warnings)
            # Before those two is that of COMMIT itself, which may be there nevertheless.
            restored = training.require(restored_from(tmp_path))
            assert restored == checkpoints.committed_step or number == syncs - 2
            disk.arm(0)
            assert checkpoints.save(training.advance(), training.state, wait=True)
            assert training.require(restored_from(tmp_path)) == training.step
    assert syncs > 8
    assert saved == 2
    directory = Directory(tmp_path)
    assert all(not list(directory.damage(committed)) for committed in directory.committed())
    assert all((committed.folder / INDEX).exists() for committed in directory.committed())


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_stays_broken_fails_the_job_at_its_end(
    tmp_path: Path, disk: FailingDisk, error: int
) -> None:
    training = Training()
    checkpoints = manager(tmp_path)
    assert checkpoints.save(training.advance(), training.state, wait=True)
    disk.arm(1, broken=True, error=error)
    for _ in range(3):
        require_failed(checkpoints, training, errno.errorcode[error])
    with pytest.raises(CheckpointError, match=rf"the last save .* {errno.errorcode[error]}"):
        checkpoints.close()
    assert training.require(restored_from(tmp_path)) == 1
    assert names(tmp_path / "blocks") == ["0000000001-w0-e0-a1-g1.h5"]


def test_a_full_disk_costs_no_checkpoint_that_is_there(small: Path) -> None:
    training = Training()
    with manager(small / "checkpoints") as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        ballast = small / "ballast"
        ballast.write_bytes(bytes((5 << 20) - (100 << 10)))
        require_failed(checkpoints, training, "make room there")
        require_failed(checkpoints, training, "make room there")
        assert training.require(restored_from(small / "checkpoints")) == 1
        ballast.unlink()
        assert checkpoints.save(training.advance(), training.state, wait=True)
        assert training.require(restored_from(small / "checkpoints")) == training.step


@pytest.mark.parametrize("left", [0, 4, 8, 60])
@pytest.mark.parametrize("encode", [False, True])
def test_a_disk_that_fills_up_in_the_middle_of_a_file(
    small: Path,
    disk: FailingDisk,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
    encode: bool,
) -> None:
    monkeypatch.setattr(blockfile, "_check_space", lambda path, blocks: None)
    training = Training()
    root = small / "checkpoints"
    with manager(root, encode=encode) as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        found = os.statvfs(small)
        free = found.f_bavail * found.f_frsize
        (small / "ballast").write_bytes(bytes(free - (left << 10)))
        require_failed(checkpoints, training, "")
        assert training.require(restored_from(root)) == 1
        assert names(root / "blocks") == ["0000000001-w0-e0-a1-g1.h5"]
        (small / "ballast").unlink()
        assert checkpoints.save(training.advance(), training.state, wait=True)
        assert training.require(restored_from(root)) == training.step


def test_a_file_system_that_becomes_read_only(small: Path) -> None:
    root = small / "checkpoints"
    training = Training()
    with manager(root) as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        require_failed(checkpoints, training, "Read-only file system")
        assert training.require(restored_from(root)) == 1
        subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
        assert checkpoints.save(training.advance(), training.state, wait=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(CheckpointError, match="the file system is read-only"):
        manager(root)


def test_a_directory_that_is_removed_is_missed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    training = Training()
    checkpoints = manager(root)
    assert checkpoints.save(training.advance(), training.state, wait=True)
    aside = root.rename(tmp_path / "aside")
    require_failed(checkpoints, training, "No such file or directory")
    # It was only moved: once it is back, all goes on.
    aside.rename(root)
    assert checkpoints.save(training.advance(), training.state, wait=True)
    assert training.require(restored_from(root)) == training.step
    shutil.rmtree(root)
    require_failed(checkpoints, training, "No such file or directory")
    with pytest.raises(CheckpointError, match=r"the last save .* No such file"):
        checkpoints.close()


def test_a_base_that_is_damaged_is_not_built_upon(tmp_path: Path) -> None:
    training = Training()
    with manager(tmp_path) as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        for path in (tmp_path / "steps").glob("*/manifest.json"):
            path.write_bytes(b"{}")
        os.kill(checkpoints._scribe.pid, signal.SIGKILL)
        until(lambda: not checkpoints._scribe.pid)
        # A new writer knows nothing of the old one's.
        assert checkpoints.save(training.advance(), training.state, wait=True)
        assert training.require(restored_from(tmp_path)) == 2


# -- another job -----------------------------------------------------------------------------------


def test_a_job_that_lost_its_directory_to_another_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "_REFRESH_SECONDS", 0.01)
    training = Training()
    checkpoints = manager(tmp_path)
    assert checkpoints.save(training.advance(), training.state, wait=True)
    assert Claims(tmp_path / "live", Disk()).take("another", 2)
    until(lambda: checkpoints._tenancy.lost)
    with told() as warnings:
        assert not checkpoints.save(training.advance(), training.state)
    assert any("job another has it" in warning for warning in warnings)
    with pytest.raises(CheckpointError, match="job another has it"):
        checkpoints.close()
    assert training.require(restored_from(tmp_path)) == 1


def test_waiting_for_late_ranks_in_a_restore_does_not_cost_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    with manager(tmp_path) as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        assert checkpoints.save(training.advance(), training.state, wait=True)
    monkeypatch.setattr(tenancy, "_REFRESH_SECONDS", 0.01)
    with manager(tmp_path) as checkpoints:
        refreshes: list[int] = []
        refresh = checkpoints._tenancy._directory.refresh

        def counted(job: str, generation: int) -> None:
            refreshes.append(generation)
            refresh(job, generation)

        monkeypatch.setattr(checkpoints._tenancy._directory, "refresh", counted)

        def slow(value: Any) -> list[Any]:
            before = len(refreshes)
            until(lambda: len(refreshes) > before + 1)
            return [value]

        monkeypatch.setattr(checkpoints._group, "gather", slow)
        restored = checkpoints.restore(1)
        assert training.require(restored) == 1
        training.step = 1
        assert checkpoints.save(training.advance(), training.state, wait=True)


# -- the writer process ----------------------------------------------------------------------------


def test_a_writer_that_is_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    training = Training()
    with manager(tmp_path) as checkpoints:
        assert checkpoints.save(training.advance(), training.state, wait=True)
        first = checkpoints._scribe.pid
        os.kill(first, signal.SIGSTOP)
        assert checkpoints.save(training.advance(), training.state)
        assert not checkpoints.wait(0.0)
        os.kill(first, signal.SIGKILL)
        assert checkpoints.wait(LIMIT_SECONDS)
        with told() as warnings:
            training.advance()
            assert checkpoints.save(training.step, training.state, wait=True)
        # What it had to do for the step before may have failed with it.
        assert "step 2 was not saved" in warnings[-1]
        assert f"the writer process {first} ended (SIGKILL)" in warnings[-1]
        assert checkpoints._scribe.pid not in (0, first)
        assert checkpoints.steps() == [1, 3]
    assert training.require(restored_from(tmp_path)) == 3


def test_if_the_last_save_failed_the_end_says_so(tmp_path: Path) -> None:
    training = Training()
    checkpoints = manager(tmp_path)
    assert checkpoints.save(training.advance(), training.state, wait=True)
    os.kill(checkpoints._scribe.pid, signal.SIGSTOP)
    assert checkpoints.save(training.advance(), training.state)
    os.kill(checkpoints._scribe.pid, signal.SIGKILL)
    with told() as warnings, pytest.raises(CheckpointError, match=r"the last save .*SIGKILL"):
        checkpoints.close()
    assert "step 2 was not saved" in warnings[-1]
    assert training.require(restored_from(tmp_path)) == 1
    assert not arenas()


# -- memory ----------------------------------------------------------------------------------------


def arenas() -> list[Path]:
    """Files in memory of managers in this process."""
    region = groups.current().region
    return sorted(memory.default_folder().glob(f"{memory.PREFIX}{region}-*"))


@pytest.mark.long
def test_a_hundred_saves_need_no_more_memory_than_ten(tmp_path: Path) -> None:
    training = Training()
    with manager(tmp_path, keep=2) as checkpoints:
        here, writer = psutil.Process(), psutil.Process(checkpoints._scribe.pid)
        for number in range(100):
            training.advance()
            training.states.clear()
            assert checkpoints.save(training.step, training.state, wait=True)
            if number == 10:
                (arena,) = arenas()
                size = arena.stat()
                before = [process.memory_info().rss for process in (here, writer)]
        assert arenas() == [arena]
        assert (arena.stat().st_ino, arena.stat().st_size) == (size.st_ino, size.st_size)
        grown = [p.memory_info().rss - b for p, b in zip((here, writer), before, strict=True)]
    assert max(grown) < 4 << 20, grown
    assert not arenas()
    assert len(names(tmp_path / "blocks")) < 10
