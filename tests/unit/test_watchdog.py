"""The watchdog on real processes: whom it kills, whom not, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpift import memory
from mpift.transport import processes
from mpift.transport.inquiries import Answer, Fence, Inquire, State
from tests.unit.watched_nodes import SETTINGS, TOKEN, Node, NodeOf, node_of, pair, until

__all__ = ["node_of", "pair"]  # fixtures for these tests


# -- hangs -------------------------------------------------------------------------------------


def test_a_stopped_rank_is_killed_while_the_other_runs_and_the_reason_is_told(pair: Node) -> None:
    pair.signal(1, signal.SIGSTOP)
    until(lambda: pair.state(1) == State.STOPPED, "the watchdog sees the stop")
    assert not pair.ended(1)
    until(lambda: pair.ended(1), "the stopped rank is killed")
    assert pair.ranks[1].returncode == -signal.SIGKILL
    assert "stop_timeout=0.5 s" in pair.verdict(1)
    until(lambda: pair.state(1) == State.GONE, "the watchdog knows")
    assert pair.ask(Inquire(1)) == Answer(State.GONE, pair.verdict(1))
    assert (pair.alive(), pair.verdict(0), pair.state(0)) == ([0], "", State.ALIVE)


def test_when_all_are_stopped_and_continue_one_by_one_nobody_is_killed(node_of: NodeOf) -> None:
    node = node_of(3)
    node.start_ranks()
    node.start_watchdog()
    for member in range(3):
        node.signal(member, signal.SIGSTOP)
    node.ticks(80)  # 1.6 s: past each limit
    for member in range(3):
        node.signal(member, signal.SIGCONT)
        time.sleep(0.3)  # all in all longer than stop_timeout
    node.ticks(20)
    assert node.alive() == [0, 1, 2]
    assert {node.state(m) for m in range(3)} == {State.ALIVE}


def test_one_that_sleeps_with_the_interpreters_lock_is_killed_after_the_hang_timeout(
    pair: Node,
) -> None:
    pair.tell(0, "hang")
    began = time.monotonic()
    until(lambda: pair.ended(0), "the hung rank is killed")
    assert time.monotonic() - began > 0.9
    assert "without using the CPU" in pair.verdict(0)
    assert pair.alive() == [1]


def test_one_that_computes_without_a_beat_is_given_longer(pair: Node) -> None:
    pair.tell(0, "compute")
    began = time.monotonic()
    until(lambda: pair.state(0) == State.SILENT, "the silence is told")
    until(lambda: pair.ended(0), "the busy rank is killed")
    assert time.monotonic() - began > 1.8
    assert "2 x hang_timeout=1 s" in pair.verdict(0)


def test_a_blocking_call_has_its_own_limit(node_of: NodeOf) -> None:
    node = node_of(2)
    node.start_ranks()
    node.start_watchdog()
    node.tell(0, "block 100")
    node.tell(1, "block 0.1")
    until(lambda: node.ended(1), "the one past its limit is killed")
    assert "its limit is 0.1 s" in node.verdict(1)
    node.ticks(60)  # 1.2 s: past hang_timeout
    assert node.alive() == [0]
    answer = node.ask(Inquire(0))
    assert answer is not None
    assert answer.state == State.ALIVE
    assert "blocking MPI call" in answer.detail


def test_a_watchdog_that_was_stopped_itself_forgives(pair: Node) -> None:
    """The job continues later than the watchdog, which has missed all of it."""
    own = pair.note_watchdog()
    os.kill(own.pid, signal.SIGSTOP)
    for member in (0, 1):
        pair.signal(member, signal.SIGSTOP)
    time.sleep(1.5)  # the scenario: past each limit
    os.kill(own.pid, signal.SIGCONT)
    time.sleep(0.1)
    for member in (0, 1):
        pair.signal(member, signal.SIGCONT)
    pair.ticks(20)
    assert pair.alive() == [0, 1]
    assert {pair.state(m) for m in (0, 1)} == {State.ALIVE}


def test_a_process_with_the_same_pid_but_another_start_time_is_let_alone(node_of: NodeOf) -> None:
    node = node_of(2)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stat = processes.read_stat(bystander.pid)
        assert stat is not None
        late = dataclasses.replace(
            processes.identify(1), pid=bystander.pid, start_time=stat.start_time - 1
        )
        node.liveness.slot(1).register(late)
        node.liveness.slot(1).run()
        node.liveness.slot(0).register(processes.identify(0))
        node.start_watchdog()
        assert node.ask(Fence(1, 9, "test")) == Answer(State.GONE)
        node.ticks(60)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)
        assert bystander.stdin is not None
        bystander.stdin.close()


def test_an_orphan_may_save_and_is_then_killed(node_of: NodeOf) -> None:
    node = node_of(1)
    waits = "import subprocess, sys; subprocess.call(sys.argv[1:])"
    node.start_ranks(launcher=[sys.executable, "-c", waits])
    node.start_watchdog()
    rank = node.liveness.slot(0).registered
    assert rank is not None
    assert rank.parent == node.ranks[0].pid
    node.ranks[0].kill()
    began = time.monotonic()
    until(lambda: processes.has_ended(rank.pid, rank.start_time), "no orphan survives")
    assert time.monotonic() - began > 0.4
    assert "orphan_timeout=0.5 s" in node.verdict(0)


# -- the end -----------------------------------------------------------------------------------


def test_when_all_have_left_it_removes_the_jobs_files_and_ends(pair: Node, tmp_path: Path) -> None:
    job = memory.job_name(TOKEN, "node")
    ours, ram = tmp_path / f"mpift-{job}-arena", tmp_path / f"mpift-ram-{job}"
    for path in (ours, ram):
        path.touch()
    os.kill(pair.liveness.watchdog.pid, signal.SIGTERM)  # it stays as long as there are ranks
    pair.tell(0, "leave")
    until(lambda: pair.state(0) == State.GONE, "the first is gone")
    assert pair.liveness.path.exists()
    pair.tell(1, "leave")
    until(pair.watchdog_ended, "the watchdog ends")
    assert list(tmp_path.iterdir()) == [ram]
    assert [pair.verdict(m) for m in (0, 1)] == ["", ""]


def test_one_that_vanishes_is_told_of_for_some_time_after_the_last_ranks_end(pair: Node) -> None:
    pair.tell(0, "leave")
    pair.tell(1, "vanish")
    until(lambda: not pair.liveness.path.exists(), "the files are removed")
    assert pair.ask(Inquire(1)) == Answer(State.GONE)
    # It has said that it leaves, which is before its process is gone.
    until(lambda: pair.ask(Inquire(0)) == Answer(State.GONE), "rank 0 is gone")
    pair.liveness.slots[1].stood_down()  # as if it had said so before it ended
    assert pair.ask(Inquire(1)) == Answer(State.STOOD_DOWN)
    until(pair.watchdog_ended, "the watchdog ends")


def test_without_any_rank_it_ends_too(node_of: NodeOf, tmp_path: Path) -> None:
    node = node_of(2)
    node.start_watchdog(dataclasses.replace(SETTINGS, empty_timeout_seconds=0.3))
    until(node.watchdog_ended, "the watchdog ends")
    assert list(tmp_path.iterdir()) == []
