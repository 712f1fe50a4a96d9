"""What ranks do in the tests on virtual nodes; no torch here, so that they start fast."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import mpift
from mpift import runtime


def meet() -> dict[str, Any]:
    """One allreduce, and who is where."""
    comm = mpift.Communicator()
    found = {
        "sum": comm.allreduce([10.0**comm.rank]).tolist(),
        "host": socket.gethostname(),
        "nodes": len(runtime.current().nodes),
        "neighbours": list(runtime.current().neighbours),
        "setting": os.environ.get("MPIFT_GATHER_SECONDS"),
    }
    comm.free()
    return found


def reduce_until_told(folder: str, seconds: float = 30.0) -> dict[str, Any]:
    """Allreduces, until there is a file ``stop`` in ``folder`` or the time is over.

    ``size-N`` appears there when a result of N ranks was seen. Returns each view's size with the
    time (``time.monotonic``, one clock on all nodes) at which it was first seen, the longest time
    between two results, and whether all ranks saw the same.
    """
    comm = mpift.Communicator()
    place = Path(folder)
    begin = before = time.monotonic()
    longest = 0.0
    seen: list[tuple[int, float]] = []
    results: list[int] = []
    while True:
        told = (place / "stop").exists() or before - begin > seconds
        alive, stops = comm.allreduce([1, int(told)]).tolist()
        now = time.monotonic()
        longest, before = max(longest, now - before), now
        results.append(alive)
        if not seen or seen[-1][0] != comm.size:
            seen.append((comm.size, now))
            (place / f"size-{comm.size}").touch()
        if stops:
            break
    digests = comm.allgather([hash(tuple(results))])
    comm.free()
    return {
        "sizes": [size for size, _ in seen],
        "seen_at": [at for _, at in seen],
        "longest_seconds": longest,
        "alike": len(set(digests.tolist())) == 1,
    }


def reduce_and_keep_words(folder: str, seconds: float = 30.0) -> dict[str, Any]:
    """The same; what a rank says on stderr is in ``words-MEMBER``, since nothing else comes through
    a cut link."""
    member = os.environ["OMPI_COMM_WORLD_RANK"]
    with (Path(folder) / f"words-{member}").open("wb") as words:
        os.dup2(words.fileno(), 2)
    return reduce_until_told(folder, seconds)


if __name__ == "__main__":
    reduce_until_told(sys.argv[1])
