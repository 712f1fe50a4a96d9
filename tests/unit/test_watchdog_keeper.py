"""One watchdog on a node and only one: a second ends, and one that died or sticks is replaced."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpift.transport import processes, watchdog
from mpift.transport.watchdog import Keeper
from tests.unit.watched_nodes import SETTINGS, TOKEN, Node, NodeOf, node_of, pair, until

__all__ = ["node_of", "pair"]  # fixtures for these tests


def test_a_second_watchdog_ends_at_once(pair: Node) -> None:
    first = pair.liveness.watchdog
    second = subprocess.Popen(
        [sys.executable, "-c", SECOND, str(pair.liveness.path), SETTINGS.encoded()],
        env={**os.environ, watchdog.TOKEN_VARIABLE: TOKEN},
    )
    assert second.wait(10) == 0
    pair.ticks(3)
    assert dataclasses.replace(pair.liveness.watchdog, ticks=0) == dataclasses.replace(
        first, ticks=0
    )


# As the module does, but without leaving a process behind: its end can be waited for.
SECOND = "import os, sys; os.fork = lambda: 0; from mpift.transport.watchdog import main;"
SECOND += "sys.exit(main(sys.argv[1:]))"


def test_one_with_another_jobs_token_does_not_start(node_of: NodeOf) -> None:
    node = node_of(1)
    wrong = subprocess.run(
        [sys.executable, "-c", SECOND, str(node.liveness.path), SETTINGS.encoded()],
        env={**os.environ, watchdog.TOKEN_VARIABLE: "other"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert wrong.returncode == 2
    assert "MPIFT_JOB_TOKEN is not the token of" in wrong.stderr


def test_a_watchdog_that_died_is_started_again_at_the_same_port(pair: Node) -> None:
    first = pair.note_watchdog()
    port = pair.liveness.watchdog.port
    keeper = Keeper(pair.liveness, TOKEN, SETTINGS, turn=0)
    keeper.ensure(0.0)
    first.kill()
    until(pair.watchdog_ended, "it is dead")
    pair.signal(1, signal.SIGSTOP)
    keeper.ensure(0.5)  # sees the last ticks
    keeper.ensure(1.0)  # and that there are no more
    until(lambda: pair.liveness.watchdog.pid != first.pid, "another one comes up")
    assert pair.liveness.watchdog.port == port
    until(lambda: pair.ended(1), "it judges the ranks")
    assert pair.alive() == [0]
    keeper.ensure(1.5)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What keepers start, instead of starting it."""
    found: list[Path] = []

    class Ended:
        def poll(self) -> int:
            return 0

    monkeypatch.setattr(watchdog, "start", lambda path, *_: found.append(path) or Ended())
    return found


def test_one_whose_ticks_stand_still_is_killed_and_replaced(
    node_of: NodeOf, starts: list[Path]
) -> None:
    liveness = node_of(1).liveness
    asleep = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stat = processes.read_stat(asleep.pid)
        assert stat is not None
        here = processes.identify(0)
        liveness.watchdog_started(
            dataclasses.replace(here, pid=asleep.pid, start_time=stat.start_time), 1
        )
        keeper = Keeper(liveness, TOKEN, SETTINGS, turn=0)
        keeper.ensure(0.0)
        keeper.ensure(1000.0)  # the caller itself slept: that is not held against the watchdog
        for second in range(1, 4):
            liveness.watchdog_ticked()
            keeper.ensure(1000.0 + second)
        for half in range(1, 10):
            keeper.ensure(1003.0 + half / 2)
        assert (asleep.poll(), starts) == (None, [])
        keeper.ensure(1008.0)
        assert asleep.wait(10) == -signal.SIGKILL
        assert starts == [liveness.path]
    finally:
        asleep.kill()
        asleep.wait(10)
        assert asleep.stdin is not None
        asleep.stdin.close()


def test_the_ranks_take_turns_and_what_does_not_come_up_is_tried_ever_more_slowly(
    node_of: NodeOf, starts: list[Path]
) -> None:
    liveness = node_of(1).liveness
    first, second = (Keeper(liveness, TOKEN, SETTINGS, turn) for turn in (0, 1))
    second.ensure(0.0)
    assert starts == []
    first.ensure(0.0)
    assert len(starts) == 1
    second.ensure(1.0)
    assert len(starts) == 2
    times = []
    for half in range(1, 200):
        before = len(starts)
        first.ensure(half / 2)
        times += [half / 2] * (len(starts) - before)
    assert times == [5.0, 15.0, 35.0, 75.0]
