"""Who a process is, and whether it is really gone.

MPI's word that a rank failed is not enough (a reset connection makes it report live ranks), so a
death counts once the operating system agrees: no process of that pid and start time on its node.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

# Seconds. Two readings of one process's start time may differ by the kernel's clock tick.
_START_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of the job. ``node`` tells kernels and pid namespaces apart, not only names.

    ``launch_rank`` differs from ``member`` where the job is a part of a launch."""

    member: int
    launch_rank: int
    host: str
    node: str
    pid: int
    start_time: float


def identify(member: int, launch_rank: int = 0) -> ProcessIdentity:
    """The identity of the calling process."""
    process = psutil.Process()
    host = socket.gethostname()
    node = f"{host}/{_kernel()}"
    start = process.create_time()
    return ProcessIdentity(member, launch_rank, host, node, process.pid, start)


def _kernel() -> str:
    """What makes pids comparable: the boot of the kernel, and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def is_gone(identity: ProcessIdentity, here: ProcessIdentity) -> bool | None:
    """Whether the process has ended; None if that can't be told from this node."""
    if identity.node != here.node:
        return None
    try:
        process = psutil.Process(identity.pid)
        if abs(process.create_time() - identity.start_time) > _START_TOLERANCE:
            return True  # the pid was given to another process
        return bool(process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True


def confirmed_gone(candidates: Iterable[ProcessIdentity], here: ProcessIdentity) -> frozenset[int]:
    """Member ids of those that this node's kernel says are gone."""
    return frozenset(c.member for c in candidates if is_gone(c, here))
