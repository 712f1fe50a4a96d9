"""Real processes as the ranks of a made-up job on one node, with a real watchdog over them.

A rank beats until its test tells it to do something else. All that a node has started ends with it.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpift.core.hangs import Limits
from mpift.transport import processes, watchdog
from mpift.transport.inquiries import Answer, Inquire, Request, State, ask
from mpift.transport.liveness import Liveness
from mpift.transport.processes import ProcessHandle
from mpift.transport.watchdog import Settings

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
