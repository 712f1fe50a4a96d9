"""Starts mpirun, follows it to its end, and leaves no process behind.

mpirun runs in a session of its own: a Ctrl-C in the terminal reaches this process alone, which then
ends the job in order: SIGTERM to mpirun, which ends the ranks of all hosts; after some seconds, or
at a second Ctrl-C, SIGKILL to mpirun and all that stood below it. If this process is killed, the
kernel kills mpirun, and the guards then end their ranks.

One thread, one loop over mpirun's two pipes and the signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import psutil

from mpift.core import events
from mpift.errors import TransportError
from mpift.launch.command import CommandLine
from mpift.launch.display import Display
from mpift.launch.story import Notice, Story
from mpift.launch.streams import Aborted, Item, Output, Splitter, Words
from mpift.launch.tracebacks import Tracebacks
from mpift.launch.verdict import Ending

STOP_SECONDS = 5.0  # for an orderly end after the first signal
# A job that a rank has stopped or aborted ends by itself as a rule; here is how long that may take.
STOPPED_SECONDS = 5.0
ABORTED_SECONDS = 0.5
# MPI's start waits for all ranks; once one has ended before it, the others get this long to prove
# that they don't.
START_SECONDS = 5.0
# mpirun has nothing left to do once all ranks have ended; then it gets this long.
ALL_ENDED_SECONDS = 10.0
_TICK_SECONDS = 0.1
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
# After these a rank has said all that it had to say, or will have in a moment.
_ENDS = (events.RankFailed, events.RankStopped, events.JobStopped, events.ProcessEnded)

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """One run of mpirun; feeds ``story`` and ``display``."""

    def __init__(
        self, line: CommandLine, story: Story, display: Display, hide_noise: bool = True
    ) -> None:
        self._line = line
        self._story = story
        self._display = display
        self._tracebacks = Tracebacks()
        self._splitters = {name: Splitter(hide_noise) for name in ("stdout", "stderr")}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []  # received, not yet acted on
        self._ended_by: int | None = None  # the signal that ended the job
        self._below: set[psutil.Process] = set()
        self._ending = False
        self._end_at = float("inf")
        self._kill_at = float("inf")
        self._gave_up_waiting = False
        self._vain_since = float("inf")

    def run(self) -> Ending:
        """Start the job and follow it; returns when mpirun and, if interrupted, all is gone."""
        with self._signals_caught():
            process = self._start()
            try:
                while process.poll() is None:
                    self._unless_unheard(process, lambda: self._turn(process))
                self._unless_unheard(process, self._drain)
            finally:
                self._clean_up(process)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        mpirun_code = 0 if self._gave_up_waiting else code
        return Ending(mpirun_code, self._ended_by, self._tracebacks.latest)

    # -- starting ------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        terminal = sys.stdin is None or sys.stdin.isatty()
        try:
            process = subprocess.Popen(
                self._line.arguments,
                env=self._line.environment,
                # A terminal stays with the user; a pipe or file goes to rank 0, as with mpirun.
                stdin=subprocess.DEVNULL if terminal else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            raise TransportError(
                f"{self._line.arguments[0]} cannot be started: {error.strerror}"
            ) from error
        _raise_file_limit()  # only now: the ranks keep theirs
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, name)
        return process

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._selector.register(reader, selectors.EVENT_READ)
        before: dict[int, Any] = {}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for caught in (*_ENDING, *_FORWARDED, signal.SIGCHLD):
            if caught == signal.SIGHUP and signal.getsignal(caught) == signal.SIG_IGN:
                continue  # started with nohup
            before[caught] = signal.signal(caught, self._note_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            self._selector.close()
            os.close(reader)
            os.close(writer)

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    # -- following -----------------------------------------------------------------------------

    def _unless_unheard(self, process: subprocess.Popen[bytes], act: Callable[[], None]) -> None:
        """Once nobody reads our output, end as any program then does, but in order."""
        try:
            act()
        except BrokenPipeError:
            _silence()
            if not self._ending:
                self._ended_by = int(signal.SIGPIPE)
                self._end(process)

    def _turn(self, process: subprocess.Popen[bytes]) -> None:
        for key, _ in self._selector.select(_TICK_SECONDS):
            if key.data is not None:
                self._read(key)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, _READ_BYTES)
        while self._signals:
            self._act_on(self._signals.pop(0), process)
        self._show(self._tracebacks.due(time.monotonic()))
        self._tell_repeats()
        self._keep_time(process)
        if not self._ending:
            self._display.status(self._story)

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Take in what a pipe has now; False if that is nothing."""
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(key.fileobj)
            return False
        self._take(key.data, self._splitters[key.data].feed(data))
        return True

    def _take(self, stream: str, items: Iterator[Item]) -> None:
        for item in items:
            match item:
                case Output():
                    self._display.keep(item)
                    self._show(self._tracebacks.take(item, time.monotonic()))
                    if item.stream == "stderr":
                        self._story.hear(item.member, item.text.decode("utf-8", "replace"))
                case Words(text):
                    self._display.words(text, stream)
                case Aborted(member):
                    self._tell(self._story.abort(member))
                case _:
                    self._follow(item)
        self._display.flush()

    def _follow(self, event: events.Event) -> None:
        if isinstance(event, _ENDS):
            self._show(self._tracebacks.ended(event.member, time.monotonic()))
        if not self._ending:  # how we ended a rank tells nothing about the job
            self._tell(self._story.handle(event))

    def _show(self, lines: Sequence[Output]) -> None:
        for line in lines:
            self._display.output(line)

    def _tell(self, notices: list[Notice]) -> None:
        for notice in notices:
            # Those that end with another's traceback are told of together.
            if notice.ended is None or not self._tracebacks.repeats(notice.ended):
                self._display.notice(notice)

    def _tell_repeats(self, now: float | None = None) -> None:
        for text in self._tracebacks.news(time.monotonic() if now is None else now):
            self._display.notice(Notice(text, warning=True))

    def _drain(self) -> None:
        """Take in what mpirun left in its pipes. No end is awaited: others may hold them open."""
        for key in [key for key in self._selector.get_map().values() if key.data is not None]:
            while self._read(key):
                pass
        for name, splitter in self._splitters.items():
            self._take(name, splitter.finish())
        self._show(self._tracebacks.finish(time.monotonic()))
        self._tell_repeats(now=float("inf"))

    # -- ending --------------------------------------------------------------------------------

    def _act_on(self, number: int, process: subprocess.Popen[bytes]) -> None:
        if number in _FORWARDED:
            process.send_signal(number)
        elif self._ended_by is None:
            self._ended_by = number
            self._display.notice(Notice("ending the job; once more to end it at once", True))
            self._end(process)
        else:
            self._kill(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._ending = True
        self._below |= _below(process.pid)
        process.terminate()
        self._kill_at = time.monotonic() + STOP_SECONDS

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self._below |= _below(process.pid)
        process.kill()
        self._kill_at = float("inf")

    def _keep_time(self, process: subprocess.Popen[bytes]) -> None:
        """End what does not end by itself."""
        now = time.monotonic()
        if now > self._kill_at:
            self._kill(process)
        if self._ending:
            return
        story = self._story
        self._check_start(now)
        all_ended = all(member.ended for member in story.members.values())
        if story.aborted is not None:
            self._end_at = min(self._end_at, now + ABORTED_SECONDS)
        elif story.stop is not None or story.given_up:
            self._end_at = min(self._end_at, now + STOPPED_SECONDS)
        elif all_ended:
            self._end_at = min(self._end_at, now + ALL_ENDED_SECONDS)
        if now > self._end_at:
            if all_ended:
                self._gave_up_waiting = True
                self._tell([Notice("all ranks have ended but mpirun has not: ending it", True)])
            self._end(process)

    def _check_start(self, now: float) -> None:
        """Stop a job that waits for a rank that will never come."""
        missing = self._story.waited_for_in_vain
        self._vain_since = min(self._vain_since, now) if missing else float("inf")
        if now > self._vain_since + START_SECONDS:
            self._story.start_given_up = True
            self._end_at = min(self._end_at, now)

    def _clean_up(self, process: subprocess.Popen[bytes]) -> None:
        """Whatever happened: afterwards neither mpirun nor what was seen below it runs."""
        if process.poll() is None:
            self._end(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            self._kill(process)
            process.wait()
        for left in self._below:
            with contextlib.suppress(psutil.Error):
                left.kill()
        psutil.wait_procs(self._below, timeout=STOP_SECONDS)


def _below(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()


def _silence() -> None:
    """Send further output nowhere, the interpreter's last flush included."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)


def _raise_file_limit() -> None:
    """With an output file for each rank and stream, the usual 1024 are soon used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
