"""One rank of ``mpift bench checkpoint``: first the memory, then saves and restores in turn.

The memory comes first, with nothing else in the way; then rounds of saving, then rounds of reading
what the last saves have left.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed

import mpift.torch as hvd
from mpift.bench.checkpoint import Plan
from mpift.bench.checkpoint_state import State
from mpift.bench.checkpoint_turns import Figures, Reads, Writes, make_manager

_SAMPLE_SECONDS = 0.02


def contend(given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run on every rank: what ``given``, a ``Plan`` as a mapping, asks for, in ``folder``.

    Returns this rank's seconds by name, a number a round; sizes in bytes; what memory grew by; and
    how many bytes each read got from storage, None where the kernel does not tell. Raises
    ``MpiftError`` if what was read is not what was saved.
    """
    plan, place = Plan(**given), Path(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    hvd.init()
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=hvd.rank(), world_size=hvd.size()
    )
    state = State(plan.mib << 20)
    figures = Figures(state.size_bytes)
    saved = {"whole": place / "whole", "chain": place / "chain"}
    grown = _measure_memory(state, saved["whole"])
    writes = Writes(state, figures, place)
    writes.digests["whole"] = state.digest()
    figures.take_turns(writes.turns(), plan.rounds)
    writes.make_chain()
    reads = Reads(state, figures, writes, saved)
    figures.take_turns(reads.turns(), plan.rounds)
    reads.close()
    distributed.destroy_process_group()
    hvd.shutdown()
    return {
        "seconds": figures.seconds,
        "sizes": figures.sizes,
        "storage_bytes": figures.storage_bytes,
        "first_stall_seconds": writes.first_stall_seconds,
        "grown_bytes": grown,
        "state_bytes": state.size_bytes,
        "tensors": len(state.tensors()),
    }


def _measure_memory(state: State, place: Path) -> int:
    """Bytes that ranks and writer processes grow by at most while a manager is made, saves three
    times and restores; on rank 0. What it has saved last is left for the readers."""
    before = _memory_of(_processes())
    manager = make_manager(place)
    with _peak(_processes()) as peak:
        for step, change in enumerate((state.change, state.change, state.change_tenth)):
            change()
            manager.save(step + 1, state.objects, wait=True)
        state.change()
        manager.restore(state=state.objects)
    state.change()
    manager.save(4, state.objects, wait=True)
    manager.close()
    return peak[0] - before


def _processes() -> list[int]:
    """All ranks, and what they have started."""
    here = psutil.Process()
    mine = [process.pid for process in (here, *here.children(recursive=True))]
    return [pid for pids in hvd.allgather_object(mine) for pid in pids]


def _memory_of(pids: list[int]) -> int:
    """Bytes that these processes use together; what several share counts once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


@contextlib.contextmanager
def _peak(pids: list[int]) -> Iterator[list[int]]:
    """The most that ``pids`` used meanwhile, as far as samples of rank 0 show."""
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            peak[0] = max(peak[0], _memory_of(pids))

    sampler = threading.Thread(target=look, name="memory-sampler")
    if hvd.rank() == 0:
        sampler.start()
    try:
        yield peak
    finally:
        over.set()
        if hvd.rank() == 0:
            sampler.join()
