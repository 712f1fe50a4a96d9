"""The file through which a node's ranks and its watchdog know of each other."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpift import memory
from mpift.core.hangs import Phase
from mpift.errors import MpiftError
from mpift.transport import processes
from mpift.transport.liveness import STALE_SECONDS, VERDICT_BYTES_MAX, Liveness

MEMBERS = (4, 5, 7)


@pytest.fixture
def liveness(tmp_path: Path) -> Iterator[Liveness]:
    made = Liveness.create("token", "node", MEMBERS, tmp_path)
    yield made
    made.close()


def test_what_a_rank_writes_another_process_reads(liveness: Liveness) -> None:
    slot = liveness.slot(5)
    assert slot.registered is None
    assert (slot.phase, slot.verdict, slot.blocked_since_seconds) == (Phase.STARTING, "", 0)
    here = processes.identify(5)
    slot.register(here)
    slot.run()
    slot.progress(12, 3)
    slot.enter(30.5, 1000.25)
    for _ in range(3):
        slot.beat()
    reader = (
        "import sys; from pathlib import Path; from mpift.transport.liveness import Liveness;"
        "s = Liveness.open(Path(sys.argv[1])).slot(5); r = s.registered;"
        "print(s.member, r.pid, r.start_time, r.parent, s.beats, s.step, s.epoch, s.phase.name,"
        " s.blocked_since_seconds, s.blocked_limit_seconds)"
    )
    read = subprocess.check_output(
        [sys.executable, "-c", reader, str(liveness.path)], text=True, timeout=60
    )
    expected = f"5 {here.pid} {here.start_time} {os.getppid()} 3 12 3 RUNNING 1000.25 30.5"
    assert read.split() == expected.split()
    slot.leave()
    slot.left()
    assert (slot.blocked_since_seconds, slot.phase) == (0, Phase.LEFT)
    assert [liveness.slot(m).beats for m in MEMBERS] == [0, 3, 0]


def test_all_ranks_of_a_node_share_one_file(tmp_path: Path, liveness: Liveness) -> None:
    again = Liveness.create("token", "node", MEMBERS, tmp_path)
    liveness.slot(7).beat()
    assert again.slot(7).beats == 1
    assert again.path == liveness.path
    again.close()


def test_jobs_and_nodes_have_files_of_their_own_and_no_name_holds_the_token(
    tmp_path: Path, liveness: Liveness
) -> None:
    others = [Liveness.create(*key, MEMBERS, tmp_path) for key in (("2", "node"), ("token", "2"))]
    assert len({liveness.path, *(other.path for other in others)}) == 3
    assert "token" not in liveness.path.name
    assert liveness.is_of("token")
    assert not liveness.is_of("2")
    for other in others:
        other.close()


def test_other_members_in_the_same_file_are_refused(tmp_path: Path, liveness: Liveness) -> None:
    with pytest.raises(MpiftError, match=r"of members \[4, 5, 7\], expected \[4, 5\]"):
        Liveness.create("token", "node", (4, 5), tmp_path)


@pytest.mark.parametrize("spoil", [b"not one of ours, but as long as a header" * 10, b"short" * 60])
def test_a_file_that_is_not_one_is_refused(tmp_path: Path, spoil: bytes) -> None:
    path = tmp_path / "mpift-job-liveness"
    memory.create(path, len(spoil) // 8 * 8, spoil[: len(spoil) // 8 * 8]).close()
    with pytest.raises(MpiftError, match="not a liveness file of version 1"):
        Liveness.open(path)


def test_an_identity_is_there_only_once_all_of_it_is(liveness: Liveness) -> None:
    liveness.slot(4).register(processes.identify(4))
    assert liveness.slot(4).registered is not None
    pid_offset = 256 + 9 * 8  # of the first slot, after the header
    with liveness.path.open("r+b") as file:
        os.pwrite(file.fileno(), struct.pack("=Q", os.getpid() + 1), pid_offset)
    assert liveness.slot(4).registered is None


def test_the_first_verdict_stays_and_a_long_one_is_cut(liveness: Liveness) -> None:
    slot = liveness.slot(5)
    slot.condemn("ä" * 300)
    slot.condemn("another one")
    assert slot.verdict == "ä" * (VERDICT_BYTES_MAX // 2)
    assert liveness.slot(7).verdict == ""


def test_the_watchdog_is_known_by_its_process_ticks_and_port(liveness: Liveness) -> None:
    assert not liveness.watchdog.alive
    here = processes.identify(0)
    liveness.watchdog_started(here, 5555)
    liveness.watchdog_ticked()
    assert liveness.watchdog.alive
    assert (liveness.watchdog.ticks, liveness.watchdog.port) == (1, 5555)
    liveness.watchdog_started(dataclasses.replace(here, start_time=here.start_time + 1), 5555)
    assert not liveness.watchdog.alive


def test_without_a_watchdog_the_last_rank_to_leave_removes_the_file(liveness: Liveness) -> None:
    here = processes.identify(4)
    for member in MEMBERS:
        liveness.slot(member).register(here)
    liveness.slot(4).left()
    liveness.unlink_if_last(4)
    assert liveness.path.exists()
    liveness.slot(5).register(dataclasses.replace(here, start_time=1))  # it has ended
    liveness.slot(7).left()
    liveness.unlink_if_last(7)
    assert not liveness.path.exists()


def test_a_watchdog_that_lives_is_left_to_remove_the_file(liveness: Liveness) -> None:
    liveness.watchdog_started(processes.identify(0), 1)
    liveness.unlink_if_last(4)
    assert liveness.path.exists()


def test_a_closed_file_can_be_neither_read_nor_written(tmp_path: Path) -> None:
    liveness = Liveness.create("token", "elsewhere", (0,), tmp_path)
    slot = liveness.slot(0)
    liveness.close()
    with pytest.raises(ValueError, match="released"):
        slot.beat()


def test_files_that_nobody_uses_any_more_are_swept_and_others_are_left(tmp_path: Path) -> None:
    old = time.time() - 2 * STALE_SECONDS
    mine = Liveness.create("mine", "node", (0,), tmp_path)
    mine.slots[0].register(processes.identify(0))
    dead = Liveness.create("dead", "node", (0,), tmp_path)
    words = [sys.executable, "-c", "import os; print(os.getpid())"]
    child = subprocess.run(words, capture_output=True, check=True)
    gone = dataclasses.replace(processes.identify(0), pid=int(child.stdout))
    dead.slots[0].register(gone)
    busy = Liveness.create("busy", "node", (0,), tmp_path)
    busy.slots[0].register(processes.identify(0))
    young = Liveness.create("young", "node", (0,), tmp_path)
    (tmp_path / "mpift-strange-liveness").write_bytes(b"what is this")
    for path in (mine.path, dead.path, busy.path, tmp_path / "mpift-strange-liveness"):
        os.utime(path, (old, old))
    mine.sweep()
    assert [each.is_in_place() for each in (mine, dead, busy, young)] == [True, False, True, True]
    assert (tmp_path / "mpift-strange-liveness").exists()
    for each in (mine, dead, busy, young):
        each.close()
