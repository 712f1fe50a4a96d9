"""The guard of one rank: a small parent process that makes each end of the rank visible.

mpirun starts ``python -m mpift.launch.guard COMMAND ARGS...`` for each rank. MPI reports a process
that was ended by a signal to the other ranks, but not one that left with an exit code; so the guard
waits for the command, and when that failed, it ends itself by SIGKILL, which MPI does report.

The rules:

* Standard library only, no threads; the command keeps the guard's stdin, stdout and stderr.
* The rank writes its events to the descriptor in ``MPIFT_EVENT_FD``. Each goes to stderr in one
  atomic write, marked by ``EVENT_MARK``, so that the launcher finds it in the rank's output.
* No process outlives its guard, and no guard its launcher. mpirun makes the guard the leader of a
  process group, in which the command and what that starts stay: a failed rank's whole group is
  killed, helpers included, and so is the group of a guard whose launcher is gone.
* Signals that mpirun sends go to the whole group, so the guard only has to outlive them. Where it
  leads no group (started by hand), it forwards them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import time
from typing import NoReturn

from mpift.core import events
from mpift.launch.streams import EVENT_MARK
from mpift.transport import segments

EVENT_FD_VARIABLE = "MPIFT_EVENT_FD"
LAUNCHED_VARIABLE = "MPIFT_LAUNCHED"
NOT_STARTED = 127  # the shell's code for a command that can't be started

_PR_SET_PDEATHSIG = 1
# Caught, unlike SIGKILL, so that the command's helpers can be ended too.
_LAUNCHER_GONE = signal.SIGRTMIN
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# What a launcher's process is called; any other process with id 1 has adopted an orphan.
_LAUNCHERS = ("prterun", "prted", "prte", "mpirun", "mpiexec", "orted", "slurmstepd")

_libc = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> NoReturn:
    """Run ``command`` as this guard's rank; never returns."""
    if not command:
        print("usage: python -m mpift.launch.guard COMMAND ARGS...", file=sys.stderr)
        os._exit(2)
    _die_with_launcher()
    wakeup = _prepare_signals()
    reader, writer = os.pipe()
    child, problem = _start(command, writer)
    os.close(writer)
    if problem:
        _report_not_started(command[0], problem)
    status = _follow(child, reader, wakeup)
    code = os.waitstatus_to_exitcode(status)
    ended = events.ProcessEnded(
        time.time(), _member(), _host(), child, *((code, None) if code >= 0 else (None, -code))
    )
    _forward(events.encode(ended).encode())
    if code == 0:
        os._exit(0)
    _end_group()


# -- starting ----------------------------------------------------------------------------------


def _die_with_launcher() -> None:
    signal.signal(_LAUNCHER_GONE, lambda *_: _end_orphan())
    launcher = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, int(_LAUNCHER_GONE), 0, 0, 0)
    # The launcher may have gone before that call, or even before the one above.
    adopted = launcher == 1 and "PMIX_RANK" in os.environ and _name_of(1) not in _LAUNCHERS
    if os.getppid() != launcher or adopted:
        _end_orphan()


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _prepare_signals() -> int:
    """Let signals wake the loop; returns the descriptor that becomes readable then."""
    wakeup, written = os.pipe()
    os.set_blocking(written, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _FORWARDED:
        signal.signal(number, _outlive)
    return wakeup


_child = 0


def _outlive(number: int, _: object) -> None:
    if _child and os.getpgrp() != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(_child, number)


def _start(command: list[str], writer: int) -> tuple[int, str]:
    """Start the command; returns its process id, and why it could not be started, if so."""
    global _child
    os.set_inheritable(writer, True)
    environment = {**os.environ, EVENT_FD_VARIABLE: str(writer), LAUNCHED_VARIABLE: "1"}
    failure_reader, failure_writer = os.pipe()  # closed by a successful exec
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, environment, guard, failure_writer)
    _child = child
    os.close(failure_writer)
    number = os.read(failure_reader, 32)
    os.close(failure_reader)
    return child, os.strerror(int(number)) if number else ""


def _become(
    command: list[str], environment: dict[str, str], guard: int, failure_writer: int
) -> NoReturn:
    """In the child: turn into the command."""
    number = errno.ENOENT
    try:
        signal.set_wakeup_fd(-1)
        for each in (*_FORWARDED, signal.SIGCHLD, signal.SIGPIPE, _LAUNCHER_GONE):
            signal.signal(each, signal.SIG_DFL)  # Python starts with SIGPIPE ignored
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == guard:
            os.execvpe(command[0], command, environment)  # noqa: S606 - the user's command
    except OSError as error:
        number = error.errno or number
    finally:
        os.write(failure_writer, str(number).encode())
        os._exit(NOT_STARTED)


def _report_not_started(name: str, problem: str) -> None:
    reason = f"cannot start {name!r}: {problem}"
    event = events.RankFailed(time.time(), _member(), _host(), NOT_STARTED, reason)
    _forward(events.encode(event).encode())


# -- following ---------------------------------------------------------------------------------


def _follow(child: int, reader: int, wakeup: int) -> int:
    """Forward events until the child has ended; returns its wait status.

    A helper of the child may hold the pipe open for ever, so the end of the child is what counts.
    """
    os.set_blocking(reader, False)
    pending = b""
    reading = [wakeup, reader]
    while True:
        ended, status = os.waitpid(
            child, os.WNOHANG
        )  # before the pipe is emptied for the last time
        pending, open_ = _pass_on(reader, pending)
        if ended:
            return status
        if not open_:
            reading = [wakeup]
        select.select(reading, (), ())
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)


def _pass_on(reader: int, pending: bytes) -> tuple[bytes, bool]:
    """Forward what has come in whole lines; returns the rest, and whether more may come."""
    while True:
        try:
            more = os.read(reader, 65536)
        except BlockingIOError:
            return pending, True
        *lines, pending = (pending + more).split(b"\n")
        for line in lines:
            _forward(line)
        if not more:
            return pending, False


def _forward(record: bytes) -> None:
    """One event to stderr, whole."""
    text = EVENT_MARK + record
    if len(record) > events.LINE_BYTES_MAX:
        text = b"mpift: a report of %d bytes is too long" % len(record)
    try:
        os.write(2, text + b"\n")
    except BrokenPipeError:
        _end_orphan()  # nobody listens
    except OSError:
        pass


# -- ending ------------------------------------------------------------------------------------


def _end_orphan() -> NoReturn:
    """The launcher is gone: end this rank, and clean up after it, since nobody else will."""
    segments.remove(segments.of_group(os.getpgrp()))
    _end_group()


def _end_group() -> NoReturn:
    """End this rank in the way that MPI notices, with all that it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    if _child:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


def _member() -> int:
    """The rank at launch, as the events name it."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or 0)


def _host() -> str:
    return os.uname().nodename


if __name__ == "__main__":
    main(sys.argv[1:])
