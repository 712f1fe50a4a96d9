"""Who a process is, and whether it is really gone.

MPI's word that a rank failed is not enough (a reset connection makes it report live ranks), so a
death counts once the operating system agrees: no process of that pid and start time on its node.

The start time is in clock ticks since boot, as ``/proc/PID/stat`` has it: unlike one in seconds
since 1970 it is the same number for every reader, and a stepped wall clock does not change it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ENDED_STATES = "ZXx"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of the job. ``node`` tells kernels and pid namespaces apart, not only names.

    ``start_time`` is in clock ticks since boot. ``launch_rank`` differs from ``member`` where the
    job is a part of a launch."""

    member: int
    launch_rank: int
    host: str
    node: str
    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What the kernel says of a process, from ``/proc/PID/stat``; see proc(5).

    ``state`` is the main thread's letter, ``start_time`` in clock ticks since boot."""

    state: str
    parent: int
    cpu_seconds: float
    threads: int
    start_time: int

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more. A main thread may end before the others do."""
        return self.state in _ENDED_STATES and self.threads <= 1


def read_stat(pid: int) -> ProcessStat | None:
    """What the kernel says of this process now; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in brackets, may itself hold spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split(None, 20)
    return ProcessStat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def exemptions(pid: int) -> tuple[bool, bool]:
    """Whether a process is traced by a debugger, and whether it dumps core; see proc(5)."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False, False
    traced = b"\nTracerPid:\t" in text and b"\nTracerPid:\t0\n" not in text
    return traced, b"\nCoreDumping:\t1\n" in text


def identify(member: int, launch_rank: int = 0) -> ProcessIdentity:
    """The identity of the calling process."""
    pid = os.getpid()
    stat = read_stat(pid)
    if stat is None:
        raise OSError(f"/proc/{pid}/stat is missing: mpift needs /proc to tell processes apart")
    host = socket.gethostname()
    return ProcessIdentity(member, launch_rank, host, f"{host}/{_kernel()}", pid, stat.start_time)


def _kernel() -> str:
    """What makes pids comparable: the boot of the kernel, and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def has_ended(pid: int, start_time: int) -> bool:
    """Whether the process of this node with that pid and start time has ended."""
    stat = read_stat(pid)
    return stat is None or stat.start_time != start_time or stat.ended


def is_gone(identity: ProcessIdentity, here: ProcessIdentity) -> bool | None:
    """Whether the process has ended; None if that can't be told from this node."""
    if identity.node != here.node:
        return None
    return has_ended(identity.pid, identity.start_time)


def confirmed_gone(candidates: Iterable[ProcessIdentity], here: ProcessIdentity) -> frozenset[int]:
    """Member ids of those that this node's kernel says are gone."""
    return frozenset(c.member for c in candidates if is_gone(c, here))


class ProcessHandle:
    """One live process of this node, held so that a signal can never reach another one.

    ``descriptor`` is its pidfd, readable once the process has ended; None where the kernel (before
    5.3), Python or a sandbox has none: then the start time is checked right before a signal.
    Raises ``ProcessLookupError`` if no such process lives.
    """

    __slots__ = ("descriptor", "pid", "start_time")

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self.start_time = start_time
        self.descriptor = _open_pidfd(pid)
        # Looked at only now: whatever has this start time is what the descriptor stands for.
        if has_ended(pid, start_time):
            self.close()
            raise ProcessLookupError(f"no process {pid} with start time {start_time}")

    def has_ended(self) -> bool:
        return has_ended(self.pid, self.start_time)

    def kill(self) -> None:
        """Send SIGKILL; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif not self.has_ended():
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def kill(pid: int, start_time: int) -> None:
    """Send SIGKILL to the process of this node with that pid and start time, if it lives."""
    with contextlib.suppress(ProcessLookupError):
        handle = ProcessHandle(pid, start_time)
        handle.kill()
        handle.close()


def _open_pidfd(pid: int) -> int | None:
    if not (hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")):
        return None  # Python was built against an older kernel's headers
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None
