"""Regions of shared memory: made whole, private, and removed without touching others'."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from mpift import memory
from mpift.errors import MpiftError


def test_what_one_map_writes_another_one_sees(tmp_path: Path) -> None:
    path = memory.region_path(tmp_path, "job", "arena")
    made = memory.create(path, 8192, b"first")
    opened = memory.open_existing(path)
    made.view[5:9] = b"then"
    assert bytes(opened.view[:10]) == b"firstthen\0"
    assert opened.view.nbytes == 8192
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    for region in (made, opened):
        region.close()


def test_a_region_is_never_created_over_another(tmp_path: Path) -> None:
    path = tmp_path / "mpift-job-arena"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        memory.create(path, 100)
    assert path.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_that_come_at_once_one_creates_and_the_others_open(tmp_path: Path) -> None:
    path = tmp_path / "mpift-job-arena"
    together = threading.Barrier(8)
    regions: list[memory.Region] = []

    def come(index: int) -> None:
        together.wait()
        regions.append(memory.create_or_open(path, 64, b"by %d" % index))

    threads = [threading.Thread(target=come, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(regions) == 8
    assert len({bytes(region.view) for region in regions}) == 1
    assert all(region.is_in_place() for region in regions)
    assert list(tmp_path.iterdir()) == [path]
    for region in regions:
        region.close()


def test_more_than_there_is_room_for_is_refused_with_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "mpift-job-arena"
    with pytest.raises(MpiftError, match=r"arena needs 1152921504606846976 bytes .* only \d+ free"):
        memory.create(path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_the_space_is_taken_when_the_region_is_made(tmp_path: Path) -> None:
    region = memory.create(tmp_path / "mpift-job-arena", 1 << 20)
    assert region.path.stat().st_blocks * 512 >= 1 << 20
    region.close()


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    memory.create(tmp_path / "mpift-job-real", 64).close()
    link = tmp_path / "mpift-job-link"
    link.symlink_to(tmp_path / "mpift-job-real")
    with pytest.raises(MpiftError, match="symbolic link"):
        memory.open_existing(link)
    with pytest.raises(FileExistsError):
        memory.create(link, 64)


def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mpift-job-arena"
    memory.create(path, 64).close()
    path.chmod(0o666)
    with pytest.raises(MpiftError, match=r"mode 0600, found: owner .* mode 0666"):
        memory.open_existing(path)


def test_an_empty_file_and_a_folder_are_refused_and_a_missing_one_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "folder").mkdir()
    for name in ("empty", "folder"):
        with pytest.raises(MpiftError, match=name):
            memory.open_existing(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        memory.open_existing(tmp_path / "nothing")


def test_a_region_that_was_replaced_is_not_removed_by_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "mpift-job-arena"
    older = memory.create(path, 64)
    older.unlink()
    newer = memory.create(path, 64)
    older.unlink()
    assert newer.is_in_place()
    assert not older.is_in_place()
    newer.unlink()
    assert not path.exists()
    for region in (older, newer):
        region.close()


def test_the_end_of_a_job_removes_its_regions_and_nobody_elses(tmp_path: Path) -> None:
    ours = memory.job_name("token", "node")
    for name in (f"mpift-{ours}-liveness", f"mpift-{ours}-arena.1234.new"):
        (tmp_path / name).touch()
    kept = {f"mpift-ram-{ours}", f"mpift-{memory.job_name('other', 'node')}-liveness", "mpift"}
    for name in kept:
        (tmp_path / name).touch()
    memory.remove_job_of(tmp_path / f"mpift-{ours}-liveness")
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_jobs_name_does_not_give_its_token_away_and_differs_by_node() -> None:
    name = memory.job_name("5ec4e7", "node")
    assert "5ec4e7" not in name
    assert len(name) == 16
    assert name == memory.job_name("5ec4e7", "node") != memory.job_name("5ec4e7", "other")


def test_the_default_folder_can_be_written_to() -> None:
    assert os.access(memory.default_folder(), os.W_OK)


def test_without_shared_memory_the_temporary_folder_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(memory.tempfile, "tempdir", str(tmp_path))
    assert memory.default_folder() == tmp_path
