"""Whenever a job or its machine stops, the newest checkpoint that was told to be saved is there.

An older state than the last may be what is left, if that one was not told to be saved; never
anything damaged, mixed, or that was not to be saved. And whoever comes next can work there.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mpift.checkpoint.directory import INDEX, Directory
from mpift.checkpoint.retention import collect
from mpift.testing.disks import TORN, CrashingDisk, Stopped
from tests.crash.lives import Job, Oracle, check, leftovers, reboot


class Watched(CrashingDisk):
    """Has a look at each moment, once it is told what to do then."""

    look: Callable[[str], None] | None = None

    def moment(self, what: str) -> None:
        if self.look is not None:
            self.look(what)


class Scene:
    """A folder for a checkpoint directory, for what crashes leave of it, and for memory."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkpoints"
        self.arenas = folder / "memory"
        self.root.mkdir(parents=True)
        self.arenas.mkdir()
        self.oracle = Oracle()
        self._folder = folder
        self._number = 0

    def job(self, disk: CrashingDisk, keep: int = 2) -> Job:
        return Job(disk.root, disk, self.arenas, self.oracle, keep)

    def fresh(self) -> Path:
        self._number += 1
        return self._folder / f"left-{self._number}"

    def crashed(self, disk: CrashingDisk, seed: int, torn: str) -> Path:
        """What a crash of the machine leaves."""
        place = self.fresh()
        disk.lost(place, random.Random(seed), torn)
        reboot(place)
        return place

    def killed(self) -> Path:
        """What the end of the job's processes leaves."""
        place = self.fresh()
        shutil.copytree(self.root, place)
        reboot(place)
        return place


def next_job_works(scene: Scene, root: Path) -> None:
    """Another job goes on, saves, and clears away what the one before it has left."""
    oracle = Oracle(dict(scene.oracle.begun))
    job = Job(root, CrashingDisk(root), scene.arenas, oracle)
    job.restore()
    job.save()
    job.close()
    assert check(root, oracle) == oracle.acknowledged[-1]
    assert leftovers(root) == []
    # Also where the job before it ended between a COMMIT and its index.
    assert all((found.folder / INDEX).exists() for found in Directory(root).committed())


def look_at_moments(scene: Scene, disk: Watched, every: int, torn: str = "") -> list[str]:
    """From now on, whatever the disk does is followed by what a crash there would leave, and in
    turns by what another job makes of that, or of what a killed process leaves. Returns the list to
    which the moments are added. ``every``: how many are passed over from one to the next, and one
    in as many of those is followed by the other job."""
    moments: list[str] = []

    def look(what: str) -> None:
        moments.append(what)
        number = len(moments)
        if number % every:
            return
        disk.look = None  # until all is found well: errors clean up after them on the same disk
        roots = [scene.crashed(disk, number, torn or TORN[number % len(TORN)])]
        if not torn:
            roots.append(scene.killed())
        for turn, root in enumerate(roots):
            check(root, scene.oracle)
            if torn or number % 4 == 2 * turn:
                next_job_works(scene, root)
            shutil.rmtree(root)
        disk.look = look

    disk.look = look
    return moments


def test_after_a_crash_at_any_moment_the_last_saved_step_is_there(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    disk = Watched(scene.root)
    job = scene.job(disk)
    job.save()
    moments = look_at_moments(scene, disk, every=1)
    job.save()
    job.save()
    job.close()
    assert scene.oracle.acknowledged == [(1, 1), (1, 2), (1, 3)]
    assert len(moments) > 60
    named = {"block_file_synced", "manifest_written", "before_commit", "committed", "index_written"}
    assert named < set(moments)


def test_saves_and_sweeps_may_overlap(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    disk = Watched(scene.root)
    job = scene.job(disk)
    job.save()
    moments = look_at_moments(scene, disk, every=3)
    job.save_overlapping(3)
    job.close()
    assert scene.oracle.acknowledged == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert moments.count("unlink COMMIT") == 2


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("torn", TORN)
@pytest.mark.parametrize("overlapping", [False, True])
def test_whatever_is_in_files_that_were_not_synced(
    tmp_path: Path, torn: str, overlapping: bool
) -> None:
    scene = Scene(tmp_path)
    disk = Watched(scene.root)
    job = scene.job(disk)
    job.save()
    moments = look_at_moments(scene, disk, 1, torn)
    if overlapping:
        job.save_overlapping(3)
    else:
        job.save()
        job.save()
    job.close()
    assert len(moments) > 60


def test_a_commit_that_is_not_synced_yet_does_not_let_a_collection_take_what_is(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    disk = CrashingDisk(scene.root)
    job = scene.job(disk)
    job.save()
    # Its process is killed when others can see the second COMMIT, and the disk does not have it.
    disk.go_on(stop_point="committed")
    with pytest.raises(Stopped):
        job.save()
    synced = disk.operations
    job.close()
    for ago in range(5):
        again = Scene(tmp_path / str(ago))
        disk = CrashingDisk(again.root)
        job = again.job(disk)
        job.save()
        disk.go_on(stop_at=synced - disk.operations - ago)
        with pytest.raises(Stopped):
            job.save()
        job.close()
        reboot(again.root)
        disk.go_on()
        collect(Directory(again.root, disk), keep=1, keep_every=None)
        for seed in range(8):
            check(again.crashed(disk, seed, "empty"), again.oracle)


def lives(scene: Scene, seed: int, count: int) -> int:
    """One job after the other in the same directory, each ended at a random moment, by itself or
    with its machine. Returns how many checkpoints were told to be saved."""
    choice = random.Random(seed)
    disk = CrashingDisk(scene.root)
    for _ in range(count):
        keep = choice.choice([1, 2, 3])
        disk.go_on(stop_at=choice.randrange(1, 120))
        job = None
        try:
            job = scene.job(disk, keep)
            job.restore()
            job.save()
            if choice.random() < 0.3:
                job.save_overlapping(2)
            job.save()
            if choice.random() < 0.3:
                job.restore()
            job.save()
        except Stopped:
            pass
        if job is not None:
            job.close()
        if choice.random() < 0.3:
            reboot(scene.root)
            disk.go_on(stop_at=choice.randrange(1, 30))
            with contextlib.suppress(Stopped):
                collect(Directory(disk.root, disk), choice.choice([1, 2, None]), None)
        if choice.random() < 0.7:
            left = scene.crashed(disk, choice.randrange(1 << 30), choice.choice(TORN))
            shutil.rmtree(scene.root)
            left.rename(scene.root)
            disk = CrashingDisk(scene.root)
        reboot(scene.root)
        check(scene.root, scene.oracle)
    return len(scene.oracle.acknowledged)


def test_job_after_job_is_killed_at_random_moments(tmp_path: Path) -> None:
    assert lives(Scene(tmp_path), seed=1, count=12) > 6


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 6))
def test_fifty_jobs_are_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    assert lives(Scene(tmp_path), seed, count=50) > 30
