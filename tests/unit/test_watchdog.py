"""The watchdog on real processes: whom it kills, whom not, what it answers, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpift import memory
from mpift.core.hangs import Limits
from mpift.transport import processes, watchdog
from mpift.transport.inquiries import Answer, Fence, Inquire, Request, State, ask
from mpift.transport.liveness import Liveness
from mpift.transport.processes import ProcessHandle
from mpift.transport.watchdog import Keeper, Settings

TOKEN = "5ec4e7"
SETTINGS = Settings(
    Limits(
        hang_timeout_seconds=1.0,
        stop_timeout_seconds=0.5,
        busy_hang_factor=2.0,
        blocked_grace_seconds=0.2,
        orphan_timeout_seconds=0.5,
        tick_seconds=0.02,
    ),
    fence_wait_seconds=2.0,
    empty_timeout_seconds=10.0,
    linger_seconds=0.3,
)

# A rank that beats until it is told otherwise by a line on its standard input.
RANK = """
import ctypes, select, sys, time
from pathlib import Path
from mpift.transport import processes
from mpift.transport.liveness import Liveness
member = int(sys.argv[2])
slot = Liveness.open(Path(sys.argv[1])).slot(member)
slot.register(processes.identify(member))
slot.run()
while True:
    slot.beat()
    if not select.select([sys.stdin], [], [], 0.005)[0]:
        continue
    command = sys.stdin.readline().split()
    if command == ["hang"]:
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock
    elif command == ["compute"]:
        while True:
            pass
    elif command[:1] == ["block"]:
        slot.enter(float(command[1]), time.monotonic())
        time.sleep(1000)
    elif command[:1] == ["epoch"]:
        slot.progress(1, int(command[1]))
    elif command == ["leave"]:
        slot.left()
        break
    else:
        break
"""


def until(condition: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


class Node:
    """Ranks and their watchdog, all of one made-up job."""

    def __init__(self, folder: Path, size: int) -> None:
        self.liveness = Liveness.create(TOKEN, "node", range(size), folder)
        self.ranks: list[subprocess.Popen[str]] = []
        self.watchdogs: dict[int, int] = {}  # start times by pid
        self.started: list[subprocess.Popen[bytes]] = []

    def start_ranks(self, launcher: list[str] | None = None) -> None:
        command = [*(launcher or []), sys.executable, "-c", RANK, str(self.liveness.path)]
        for member in self.liveness.slots:
            self.ranks.append(
                subprocess.Popen([*command, str(member)], stdin=subprocess.PIPE, text=True)
            )
        until(
            lambda: all(s.registered and s.beats for s in self.liveness.slots.values()),
            "all ranks beat",
        )

    def start_watchdog(self, settings: Settings = SETTINGS, token: str = TOKEN) -> None:
        before = self.liveness.watchdog
        self.started.append(watchdog.start(self.liveness.path, token, settings))
        until(lambda: self.liveness.watchdog.pid not in (0, before.pid), "a watchdog comes up")
        self.note_watchdog()
        self.ticks(3)

    def note_watchdog(self) -> ProcessHandle:
        state = self.liveness.watchdog
        self.watchdogs[state.pid] = state.start_time
        return ProcessHandle(state.pid, state.start_time)

    def ticks(self, count: int) -> None:
        """Wait for so many more ticks of the watchdog."""
        goal = self.liveness.watchdog.ticks + count
        until(lambda: self.liveness.watchdog.ticks >= goal, f"{count} ticks")

    def tell(self, member: int, command: str) -> None:
        stdin = self.ranks[member].stdin
        assert stdin is not None
        stdin.write(command + "\n")
        stdin.flush()

    def signal(self, member: int, number: signal.Signals) -> None:
        self.ranks[member].send_signal(number)

    def ended(self, member: int) -> bool:
        return self.ranks[member].poll() is not None

    def alive(self) -> list[int]:
        return [m for m in range(len(self.ranks)) if not self.ended(m)]

    def ask(self, request: Request, token: str = TOKEN, seconds: float = 5.0) -> Answer | None:
        return ask(("127.0.0.1", self.liveness.watchdog.port), token, request, seconds)

    def state(self, member: int) -> State | None:
        answer = self.ask(Inquire(member))
        return answer.state if answer else None

    def verdict(self, member: int) -> str:
        return self.liveness.slot(member).verdict

    def watchdog_ended(self) -> bool:
        return not self.liveness.watchdog.alive

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(10)
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for process in self.started:
            process.wait(10)
        if self.liveness.watchdog.pid:
            self.watchdogs[self.liveness.watchdog.pid] = self.liveness.watchdog.start_time
        for pid, start_time in self.watchdogs.items():
            with contextlib.suppress(ProcessLookupError):
                ProcessHandle(pid, start_time).kill()
            until(lambda pid=pid, at=start_time: processes.has_ended(pid, at), "the end")
        self.liveness.close()


NodeOf = Callable[[int], Node]


@pytest.fixture
def node_of(tmp_path: Path) -> Iterator[NodeOf]:
    nodes: list[Node] = []

    def make(size: int) -> Node:
        nodes.append(Node(tmp_path, size))
        return nodes[-1]

    yield make
    for node in nodes:
        node.end()


@pytest.fixture
def pair(node_of: NodeOf) -> Node:
    """Two ranks and a watchdog."""
    node = node_of(2)
    node.start_ranks()
    node.start_watchdog()
    return node


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


# -- one and only one --------------------------------------------------------------------------


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


# -- questions ---------------------------------------------------------------------------------


def test_a_fence_kills_and_answers_once_the_rank_is_gone(pair: Node) -> None:
    answer = pair.ask(Fence(1, 3, "suspected by 0\nand 2"))
    assert answer == Answer(State.GONE, "fenced in epoch 3: suspected by 0 and 2")
    process = pair.liveness.slot(1).registered
    assert process is not None
    assert processes.has_ended(process.pid, process.start_time)
    assert pair.verdict(1) == answer.detail
    assert pair.alive() == [0]


def test_a_fence_of_an_older_view_is_refused(pair: Node) -> None:
    pair.tell(1, "epoch 4")
    until(lambda: pair.liveness.slot(1).epoch == 4, "the rank is in a newer view")
    answer = pair.ask(Fence(1, 3, "late"))
    assert answer == Answer(State.REFUSED, "it is in epoch 4, newer than 3")
    assert pair.state(1) == State.ALIVE


def test_members_of_other_nodes_are_unknown(pair: Node) -> None:
    assert pair.state(77) == State.UNKNOWN
    assert pair.ask(Fence(77, 1, "")) == pair.ask(Inquire(77))


def test_who_does_not_know_the_token_is_not_answered_and_fences_nobody(pair: Node) -> None:
    assert pair.ask(Inquire(0), token="guess") is None
    assert pair.ask(Fence(0, 9, "guess"), token="guess") is None
    pair.ticks(3)
    assert (pair.alive(), pair.state(0)) == ([0, 1], State.ALIVE)


def test_garbage_slow_and_many_connections_do_not_disturb(pair: Node) -> None:
    address = ("127.0.0.1", pair.liveness.watchdog.port)
    held = []
    try:
        for junk in (b"\0" * 100_000, b"\n" * 10, os.urandom(600), "é FENCE 0 1 x\n".encode()):
            with (
                socket.create_connection(address, 5) as connection,
                contextlib.suppress(ConnectionError),
            ):
                connection.sendall(junk)
                assert connection.recv(100) == b""  # closed without an answer
        for _ in range(150):  # more than are kept
            connection = socket.create_connection(address, 5)
            connection.send(b"abc")
            held.append(connection)
        assert pair.state(0) == State.ALIVE
        for connection in held:  # whoever says too little for too long is closed too
            connection.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(100) == b""
    finally:
        for connection in held:
            connection.close()
    pair.ticks(3)
    assert pair.alive() == [0, 1]


def test_the_asker_waits_no_longer_than_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        assert ask(mute.getsockname(), TOKEN, Inquire(0), 0.2) is None
        assert 0.15 < time.monotonic() - began < 1.0
        port = mute.getsockname()[1]
    assert ask(("127.0.0.1", port), TOKEN, Inquire(0), 0.2) is None


def test_an_answer_to_another_question_is_not_believed() -> None:
    """Whoever got the watchdog's port may replay what it once heard."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        answers = [b"0" * 64 + b" gone \n", b"gone\n", b"\xff" * 3000, b""]

        def reply() -> None:
            for answer in answers:
                connection, _ = impostor.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        replies = threading.Thread(target=reply)
        replies.start()
        for _ in answers:
            assert ask(impostor.getsockname(), TOKEN, Inquire(0), 5.0) is None
        replies.join(10)
