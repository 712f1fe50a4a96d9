"""The machine that benchmarks run on: its cores, what ranks get there, and who else is at work."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from typing import Any

import psutil

from mpift.errors import MpiftError
from mpift.testing.ranks import Outcome

# Loading torch on every rank.
START_SECONDS = 60.0
# Keep freed memory: glibc hands large blocks back to the kernel, or not, by what was freed before,
# and a step that has to fault its gradients in again takes a third longer, whoever reduces them.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def threads_a_rank(ranks: int, cores: int | None = None) -> int:
    """Compute threads for each of ``ranks`` ranks that share ``cores`` (default: those here)."""
    return max(1, (cores or len(os.sched_getaffinity(0))) // ranks)


def rank_environment(threads: int) -> dict[str, str]:
    """What ranks of ``threads`` compute threads start with, to compare mpift, MPI and gloo."""
    return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", **_KEEP_MEMORY}


def results_of(outcome: Outcome, ranks: int) -> list[Mapping[str, Any]]:
    """What each rank found. Raises ``MpiftError`` if one of them failed."""
    if len(outcome.results) < ranks:
        raise MpiftError(f"{ranks - len(outcome.results)} of {ranks} ranks failed: {outcome}")
    return [outcome.results[member] for member in range(ranks)]


class Others:
    """All processes but this one and its children, from now on."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), _others_seconds()

    def share(self) -> float:
        """The part of the machine's cores that they have used, 0 to 1. Children count as others
        until they have ended."""
        core_seconds = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, _others_seconds() - self._before) / core_seconds


def _others_seconds() -> float:
    """CPU time that this machine has given to anybody but this process and its ended children."""
    everybody = psutil.cpu_times()
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(sum(everybody) - everybody.idle - everybody.iowait - own.ru_utime - own.ru_stime)
