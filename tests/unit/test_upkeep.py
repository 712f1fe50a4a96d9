"""What follows a commit: who waits for an index, what fails of it, and what a writer leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from mpift.checkpoint import CheckpointManager
from mpift.checkpoint.directory import Directory
from mpift.checkpoint.group import Seat
from mpift.checkpoint.orders import Order
from mpift.checkpoint.snapshot import Snapshots
from mpift.checkpoint.upkeep import Upkeep
from tests.unit.fake_savers import Crew, FakeGroup, FakeScribe, version

SOON_SECONDS = 0.3


@pytest.fixture
def scribe() -> FakeScribe:
    return FakeScribe()


@pytest.fixture
def failed() -> list[str]:
    return []


@pytest.fixture
def crew() -> Crew:
    return Crew(1)


@pytest.fixture
def upkeep(crew: Crew, scribe: FakeScribe, failed: list[str], tmp_path: Path) -> Upkeep:
    group = FakeGroup(crew, 0)
    return Upkeep(group, scribe, tmp_path, (2, None), failed.append)  # type: ignore[arg-type]


def test_an_index_is_waited_for_and_cleaning_up_is_not(upkeep: Upkeep, scribe: FakeScribe) -> None:
    assert upkeep.wait(0)
    upkeep.after(version(1), sweep=True)
    assert scribe.names() == ["index", "sweep"]
    assert not upkeep.wait(0)
    scribe.take("index").end()
    assert upkeep.wait(0)


def test_what_fails_is_told_and_keeps_nobody(
    upkeep: Upkeep, crew: Crew, scribe: FakeScribe, failed: list[str]
) -> None:
    upkeep.after(version(1), sweep=True)
    scribe.take("index").end(error="no space")
    scribe.take("sweep").end(error="read-only")
    assert upkeep.wait(0)
    crew.run_calls()
    assert failed == ["writing an index: no space", "cleaning up: read-only"]


@pytest.mark.parametrize(("sweep", "sweeps"), [(False, True), (True, False)])
def test_nothing_is_removed_while_another_is_written_or_where_that_is_not_wanted(
    upkeep: Upkeep, scribe: FakeScribe, sweep: bool, sweeps: bool
) -> None:
    upkeep.sweeps = sweeps
    upkeep.after(version(1), sweep=sweep)
    assert scribe.names() == ["index"]


def test_the_end_waits_for_an_index_that_takes_long(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints")
    assert manager.save(1, {"x": torch.ones(3)}, wait=True)
    upkeep = manager._saves.upkeep
    upkeep._indexing += 1
    written = threading.Timer(SOON_SECONDS, upkeep._indexed)
    begin = time.monotonic()
    written.start()
    assert manager.wait(0, index=False)
    assert not manager.wait(0)
    manager.close()
    assert time.monotonic() >= begin + SOON_SECONDS
    written.join()


def test_a_writer_whose_parent_is_gone_before_it_answers_removes_its_arenas(tmp_path: Path) -> None:
    root, path = tmp_path / "checkpoints", tmp_path / "arena"
    Directory(root).prepare()
    snapshots = Snapshots(lambda _: path, 1)
    snapshots.take({"x": torch.ones(3)}, version(1), Seat(0, (0,), (0,), "history"), 0)
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    order = Order(root, (path,), version(1), "0000000001-w0-e0-a0-g1.h5", None)
    connection.send(("write", {"order": order}))
    connection.close()  # so that there is no one to answer
    parent = str(os.getpid())
    with theirs:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "mpift.checkpoint.writer",
                str(theirs.fileno()),
                "1",
                parent,
                "1",
            ],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert (root / "blocks" / order.name).exists()  # it was at work
    assert not path.exists()
    snapshots.close(keep=False)
