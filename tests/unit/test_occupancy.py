"""Who uses a checkpoint directory: the claims of jobs that write, and the processes that read."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from mpift.checkpoint.directory import MAINTENANCE, Directory, block_name
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.occupancy import LEASE_SECONDS, READER_SECONDS, Live
from mpift.errors import CheckpointError
from mpift.transport.processes import identify
from tests.unit.checkpoints import Refusing, arrays, save

# -- who is there ----------------------------------------------------------------------------------


def pretend(path: Path, age_seconds: float, **what: object) -> None:
    """A claim or reader of another process, touched that long ago."""
    me = identify(0)
    live = Live("other", me.host, me.node, me.pid, me.start_time, 7, 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(live), **what}))
    now = path.stat().st_mtime
    os.utime(path, (now - age_seconds, now - age_seconds))


def test_each_claim_begins_a_generation_after_all_that_left_something(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert directory.claim("a") == 1
    assert directory.claim("a") == 2
    directory.release("a")
    assert directory.live() is None
    assert list((tmp_path / "live").iterdir()) == []

    save(tmp_path, 5, arrays(w=10), generation=4)
    assert directory.claim("b") == 5
    directory.release("b")
    (tmp_path / "blocks" / f"{block_name(9, 0, 0, 0, 8)}.0a1b2c3d.new").touch()
    assert directory.claim("c") == 9
    live = directory.live()
    assert live is not None
    assert (live.job, live.pid, live.generation) == ("c", os.getpid(), 9)
    assert len(list((tmp_path / "live").iterdir())) == 1


def test_a_live_job_is_named_to_another_one_that_wants_to_write(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    generation = directory.claim("first")
    with pytest.raises(CheckpointError) as caught:
        directory.claim("second")
    for part in (str(tmp_path), "first", str(os.getpid()), socket.gethostname(), "last seen"):
        assert part in str(caught.value)
    directory.refresh("first", generation)  # still has it
    directory.release("second")  # has nothing
    assert directory.live() is not None


def test_the_claim_of_a_process_that_has_ended_does_not_count(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom mpift.checkpoint.directory import Directory\n"
        "print(Directory(pathlib.Path(sys.argv[1])).claim('gone'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1"]
    assert len(list((tmp_path / "live").iterdir())) == 1
    assert Directory(tmp_path).live() is None
    assert Directory(tmp_path).claim("next") == 2


def test_a_pid_that_another_process_has_now_is_not_the_job(tmp_path: Path) -> None:
    path = tmp_path / "live" / "0000000007.json"
    pretend(path, 0, start_time=identify(0).start_time + 1)
    assert Directory(tmp_path).claim("next") == 8


@pytest.mark.parametrize(("age", "alive"), [(-1.0, True), (1.0, False)])
def test_a_job_of_another_node_lives_as_long_as_it_refreshes_its_claim(
    tmp_path: Path, age: float, alive: bool
) -> None:
    path = tmp_path / "live" / "0000000007.json"
    pretend(path, LEASE_SECONDS + 10 * age, host="far", node="far/1", pid=4)
    directory = Directory(tmp_path)
    if alive:
        with pytest.raises(CheckpointError, match="process 4 on host far"):
            directory.claim("next")
    else:
        assert directory.claim("next") == 8


def test_a_claim_that_cannot_be_read_counts_as_alive_until_its_lease_is_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "live" / "0000000007.json"
    path.parent.mkdir()
    path.write_bytes(b"\0\0")
    with pytest.raises(CheckpointError, match="host unknown"):
        Directory(tmp_path).claim("next")
    old = path.stat().st_mtime - LEASE_SECONDS - 1
    os.utime(path, (old, old))
    assert Directory(tmp_path).claim("next") == 8


def test_a_job_that_lost_its_claim_is_told_when_it_refreshes(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    pretend(tmp_path / "live" / "0000000007.json", LEASE_SECONDS + 9, host="far", node="far/1")
    assert directory.claim("next") == 8
    with pytest.raises(CheckpointError, match=r"job next has it: process .* generation 8"):
        directory.refresh("other", 7)
    directory.release("next")
    with pytest.raises(CheckpointError, match="it is gone"):
        directory.refresh("next", 8)


def test_refreshing_makes_a_claim_young_again(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    path = tmp_path / "live" / f"{directory.claim('mine'):010d}.json"
    os.utime(path, (1e9, 1e9))
    directory.refresh("mine", 1)
    assert path.stat().st_mtime > 1.5e9


def test_whoever_refreshes_speaks_for_the_job_from_then_on(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    pretend(tmp_path / "live" / "0000000007.json", 0, start_time=1)  # its coordinator has died
    assert directory.live() is None
    directory.refresh("other", 7)
    live = directory.live()
    assert live is not None
    assert (live.job, live.pid, live.generation) == ("other", os.getpid(), 7)


def test_of_jobs_that_claim_at_the_same_time_one_gets_the_directory(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    got: list[tuple[str, int]] = []
    refused: list[str] = []

    def run(job: str) -> None:
        start.wait()
        try:
            got.append((job, Directory(tmp_path).claim(job)))
        except CheckpointError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=run, args=(f"job{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(refused) == 7
    assert all(f"by job {got[0][0]}" in text for text in refused)


class Interrupted(Disk):
    """Something else happens right before the first link."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = [meanwhile]

    def link(self, old: Path, new: Path) -> None:
        if self.meanwhile:
            self.meanwhile.pop()()
        super().link(old, new)


def test_a_job_that_came_and_went_during_a_claim_is_not_overlooked(tmp_path: Path) -> None:
    def other_job() -> None:
        other = Directory(tmp_path)
        assert other.claim("other") == 1
        save(tmp_path, 5, arrays(w=10), generation=1)
        other.release("other")

    assert Directory(tmp_path, Interrupted(other_job)).claim("mine") == 2


def test_a_newer_claim_that_was_made_meanwhile_wins(tmp_path: Path) -> None:
    def other_job() -> None:
        for generation in (1, 2):
            assert Directory(tmp_path).claim("other") == generation

    with pytest.raises(CheckpointError, match="by job other"):
        Directory(tmp_path, Interrupted(other_job)).claim("mine")
    assert len(list((tmp_path / "live").iterdir())) == 1


def test_a_job_waits_for_somebody_who_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(tmp_path)
    directory.claim(MAINTENANCE)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            directory.release(MAINTENANCE)

    monkeypatch.setattr("mpift.checkpoint.directory.time.sleep", sleep)
    Directory(tmp_path).claim("mine")
    assert len(waits) == 3


# -- readers ---------------------------------------------------------------------------------------


def test_a_reader_is_listed_while_it_reads(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.prepare()
    with directory.reading(), directory.reading():
        assert [reader.pid for reader in directory.readers()] == [os.getpid()] * 2
    assert directory.readers() == []
    assert list((tmp_path / "readers").iterdir()) == []


def test_readers_that_have_ended_do_not_count_and_are_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "readers"
    far = {"host": "far", "node": "far/1"}
    pretend(folder / "gone.json", 0, start_time=1)
    pretend(folder / "old.json", READER_SECONDS + 9, **far)
    pretend(folder / "young.json", READER_SECONDS - 60, **far)
    directory = Directory(tmp_path)
    assert [reader.host for reader in directory.readers()] == ["far"]
    directory.forget_readers()
    assert [path.name for path in folder.iterdir()] == ["young.json"]


def test_a_directory_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    with Directory(tmp_path, Refusing(errno.EROFS)).reading():
        assert Directory(tmp_path).readers() == []
    with Directory(tmp_path / "none").reading():
        assert not (tmp_path / "none").exists()
