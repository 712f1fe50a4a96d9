"""A small process, one a node, that turns hangs into deaths, which MPI reports.

It looks at the ranks' slots in the liveness file four times a second, and at what the kernel says
of those whose counter stands still; ``core/hangs.py`` judges. It answers other nodes' questions
about its ranks, and ends ranks whose launcher is gone. When the last rank is gone it removes the
job's mapped files, answers for some seconds more (a node's only rank may have died), and ends.

It kills nothing but processes that registered in a slot and whose start time fitted when it first
saw them, and says why in the slot before it does. It writes to no terminal, makes no MPI call,
needs the standard library alone, outlives every signal that a launcher sends, and never removes a
RAM tier. A lock on the liveness file keeps it the only one; ``Keeper`` is how the ranks keep it
alive.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mpift import memory
from mpift.core.hangs import Judge, Limits, Observation, Phase
from mpift.transport import inquiries, processes, segments
from mpift.transport.inquiries import Answer, Fence, Request, State
from mpift.transport.liveness import Liveness, Slot
from mpift.transport.processes import ProcessHandle

TOKEN_VARIABLE = "MPIFT_JOB_TOKEN"  # not in the arguments: those everybody can read

_PARENT_LOOK_SECONDS = 1.0
_STILL_LOOK_SECONDS = 0.5
_SILENT_SECONDS = 1.0  # standing still for longer is told to who asks

# Of ``Keeper``.
_STILL_SECONDS = 5.0
_PATIENCE_SECONDS_MAX = 60.0
_CALL_GAP_SECONDS_MAX = 1.0
_TURN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """``address`` is the numeric one to listen on. ``fence_wait_seconds``: how long an answer waits
    for a killed rank's end; ``empty_timeout_seconds``: how long ranks have to register;
    ``linger_seconds``: how long it answers after the last rank's end, if one died."""

    limits: Limits = dataclasses.field(default_factory=Limits)
    address: str = "127.0.0.1"
    fence_wait_seconds: float = 5.0
    empty_timeout_seconds: float = 60.0
    linger_seconds: float = 5.0

    def encoded(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decoded(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "limits": Limits(**values["limits"])})


# -- in the ranks ------------------------------------------------------------------------------


def start(path: Path, token: str, settings: Settings) -> subprocess.Popen[bytes]:
    """Start the watchdog of the liveness file at ``path``; doesn't wait for it.

    The returned process ends at once, having left the watchdog behind as nobody's child: a script
    that waits for its own children doesn't meet it. If one runs already, the second ends too.
    """
    package = str(Path(__file__).resolve().parents[2])  # wherever this very mpift was found
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, TOKEN_VARIABLE: token, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-m", "mpift.transport.watchdog", str(path), settings.encoded()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
    )


class Keeper:
    """Keeps the node's watchdog running; each local rank has one, ``turn`` 0, 1, 2...

    The rank with turn 0 starts it; another one does if it has been gone for ``turn`` seconds. One
    whose ticks stand still for 5 s is killed first. All durations are of the caller's own undelayed
    time. What doesn't come up is tried again, ever more slowly.
    """

    def __init__(self, liveness: Liveness, token: str, settings: Settings, turn: int) -> None:
        self._liveness = liveness
        self._token = token
        self._settings = settings
        self._turn_seconds = turn * _TURN_SECONDS
        self._wait_seconds = self._turn_seconds
        self._patience_seconds = _STILL_SECONDS
        self._last_call: float | None = None
        self._ticks = liveness.watchdog.ticks
        self._still_seconds = 0.0
        self._started: subprocess.Popen[bytes] | None = None

    def ensure(self, now: float) -> None:
        """To be called about twice a second. Raises ``OSError`` if no process can be started."""
        gap = 0.0 if self._last_call is None else now - self._last_call
        self._last_call = now
        if self._started is not None and self._started.poll() is not None:
            self._started = None
        watchdog = self._liveness.watchdog
        if watchdog.ticks != self._ticks:
            self._ticks = watchdog.ticks
            self._still_seconds = 0.0
            self._wait_seconds = self._turn_seconds
            self._patience_seconds = _STILL_SECONDS
            return
        self._still_seconds += min(gap, _CALL_GAP_SECONDS_MAX)
        if watchdog.alive:
            if self._still_seconds < _STILL_SECONDS:
                return
            processes.kill(watchdog.pid, watchdog.start_time)
        elif self._still_seconds < self._wait_seconds:
            return
        self._still_seconds = 0.0
        self._wait_seconds = self._patience_seconds
        self._patience_seconds = min(2 * self._patience_seconds, _PATIENCE_SECONDS_MAX)
        self._started = start(self._liveness.path, self._token, self._settings)


# -- the process itself ------------------------------------------------------------------------


class _Rank:
    """A slot as the watchdog knows it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.handle: ProcessHandle | None = None
        self.parent = 0
        self.gone = False
        self._beats = -1
        self._moved = True
        self._looked_at = 0.0
        self._look = _Look()

    @property
    def over(self) -> bool:
        """Whether nothing more is to come of it; a process may live on after it has left."""
        return self.gone or self.slot.phase == Phase.LEFT

    @property
    def live(self) -> bool:
        return self.handle is not None and not self.gone

    def observe(self, now: float) -> Observation | None:
        """What there is to see of a live rank; None if it has ended."""
        slot = self.slot
        beats = slot.beats
        moved, moved_before = beats != self._beats, self._moved
        self._beats, self._moved = beats, moved
        # Asking the kernel is what costs: a rank that beats runs, and needs no look but for its
        # parent; one that has just fallen silent, or is stopped, is looked at each time.
        age = now - self._looked_at
        if moved:
            due = age >= _PARENT_LOOK_SECONDS
        else:
            due = moved_before or self._look.state in "Tt" or age >= _STILL_LOOK_SECONDS
        if due:
            self._looked_at = now
            look = self._look_now(moved)
            if look is None:
                return None
            self._look = look
        look = self._look
        return Observation(
            slot.member,
            slot.phase,
            beats,
            slot.blocked_since_seconds,
            slot.blocked_limit_seconds,
            "R" if moved and not due else look.state,
            look.cpu_seconds,
            look.traced,
            look.dumping_core,
            look.orphaned,
        )

    def _look_now(self, moved: bool) -> _Look | None:
        handle = self.handle
        assert handle is not None
        stat = processes.read_stat(handle.pid)
        if stat is None or stat.start_time != handle.start_time or stat.ended:
            return None
        orphaned = stat.parent != self.parent
        judged = orphaned or not moved
        traced, dumping_core = processes.exemptions(handle.pid) if judged else (False, False)
        return _Look(stat.state, stat.cpu_seconds, traced, dumping_core, orphaned)


@dataclass(frozen=True, slots=True)
class _Look:
    """The kernel's part of an observation."""

    state: str = "R"
    cpu_seconds: float = 0.0
    traced: bool = False
    dumping_core: bool = False
    orphaned: bool = False


class _Watchdog:
    """The loop; ``ranks`` by member id."""

    def __init__(self, liveness: Liveness, token: str, settings: Settings) -> None:
        self._liveness = liveness
        self._settings = settings
        self._judge = Judge(settings.limits)
        self._ranks = {member: _Rank(slot) for member, slot in liveness.slots.items()}
        self._some_died = False  # without having said that they leave
        self._segments = ""  # where Open MPI's files of this job are, for the end
        self._selector = selectors.DefaultSelector()
        self._server = inquiries.Server(
            self._selector,
            inquiries.listen(settings.address, liveness.watchdog.port),
            token,
            self._answer,
            settings.fence_wait_seconds,
        )
        liveness.watchdog_started(processes.identify(0), self._server.port)

    def run(self) -> None:
        """Until all ranks are gone."""
        tick_seconds = self._settings.limits.tick_seconds
        began = next_tick = time.monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                if isinstance(key.data, _Rank):
                    self._has_gone(key.data)
                else:
                    self._server.handle(key.data, time.monotonic())
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + tick_seconds
                self._tick(now)
                if self._is_over(now - began):
                    break
            self._server.attend(now)
        self._end()

    def _tick(self, now: float) -> None:
        live = []
        for rank in self._ranks.values():
            if rank.handle is None and not rank.gone:
                self._adopt(rank)
            if rank.live:
                seen = rank.observe(now)
                if seen is None:
                    self._has_gone(rank)
                else:
                    live.append(seen)
        for kill in self._judge.tick(now, live):
            self._kill(self._ranks[kill.member], kill.reason)
        self._liveness.watchdog_ticked()

    def _adopt(self, rank: _Rank) -> None:
        """Take charge of a rank that has registered."""
        process = rank.slot.registered
        if process is None:
            return
        try:
            rank.handle = ProcessHandle(process.pid, process.start_time)
        except ProcessLookupError:
            self._has_gone(rank)
            return
        rank.parent = process.parent
        self._segments = self._segments or segments.of_process(process.pid)
        if rank.handle.descriptor is not None:
            self._selector.register(rank.handle.descriptor, selectors.EVENT_READ, rank)

    def _has_gone(self, rank: _Rank) -> None:
        if rank.gone:
            return
        rank.gone = True
        self._some_died = self._some_died or rank.slot.phase != Phase.LEFT
        if rank.handle is not None:
            if rank.handle.descriptor is not None:
                self._selector.unregister(rank.handle.descriptor)
            rank.handle.close()

    def _kill(self, rank: _Rank, reason: str) -> None:
        assert rank.handle is not None
        rank.slot.condemn(reason)
        rank.handle.kill()

    def _answer(self, request: Request, last: bool) -> Answer | None:
        rank = self._ranks.get(request.member)
        if rank is not None and rank.handle is None and not rank.gone:
            self._adopt(rank)
        if rank is None or (rank.handle is None and not rank.gone):
            return Answer(State.UNKNOWN, f"member {request.member} has not registered here")
        if rank.handle is not None and rank.handle.has_ended():
            self._has_gone(rank)
        if rank.gone:
            stood_down = rank.slot.phase == Phase.STOOD_DOWN
            return Answer(State.STOOD_DOWN if stood_down else State.GONE, rank.slot.verdict)
        if isinstance(request, Fence):
            epoch = rank.slot.epoch
            if epoch > request.epoch:
                return Answer(State.REFUSED, f"it is in epoch {epoch}, newer than {request.epoch}")
            self._kill(rank, f"fenced in epoch {request.epoch}: {request.reason}")
            if not last:
                return None
        return self._seen_of(rank)

    def _seen_of(self, rank: _Rank) -> Answer:
        handle, member = rank.handle, rank.slot.member
        assert handle is not None
        stat = processes.read_stat(handle.pid)
        silent = self._judge.silent_seconds(member)
        if any(processes.exemptions(handle.pid)):
            return Answer(State.ALIVE, "held by a debugger, or dumping core")
        if stat is not None and stat.state == "T":
            return Answer(State.STOPPED, "stopped")
        if rank.slot.phase != Phase.RUNNING:
            return Answer(State.ALIVE, rank.slot.phase.name.lower())
        if rank.slot.blocked_since_seconds:
            return Answer(State.ALIVE, f"inside a blocking MPI call for {silent:.1f} s")
        state = State.SILENT if silent > _SILENT_SECONDS else State.ALIVE
        return Answer(state, f"last sign of life {silent:.1f} s ago")

    def _is_over(self, age_seconds: float) -> bool:
        """Whether everybody is gone; who has not registered yet is waited for a while."""
        ranks = self._ranks.values()
        if any(rank.live and not rank.over for rank in ranks):
            return False
        return (
            all(rank.over for rank in ranks) or age_seconds > self._settings.empty_timeout_seconds
        )

    def _end(self) -> None:
        if self._liveness.is_in_place():
            memory.remove_job_of(self._liveness.path)
        segments.remove(self._segments)
        if self._some_died:
            end = time.monotonic() + self._settings.linger_seconds
            while (now := time.monotonic()) < end:
                for key, _ in self._selector.select(min(end - now, 1.0)):
                    self._server.handle(key.data, now)
                self._server.attend(now)
        self._server.close()


def main(arguments: list[str]) -> int:
    """``python -m mpift.transport.watchdog LIVENESS_PATH SETTINGS``; returns the exit status."""
    path, settings = Path(arguments[0]), Settings.decoded(arguments[1])
    token = os.environ.get(TOKEN_VARIABLE, "")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except (BlockingIOError, FileNotFoundError):
        return 0  # another one is there already, or the job is over
    liveness = Liveness.open(path)
    if not liveness.is_of(token):
        print(f"{TOKEN_VARIABLE} is not the token of {path}", file=sys.stderr)
        return 2
    _Watchdog(liveness, token, settings).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
