"""``mpift bench checkpoint``: saving and restoring against plain files and torch, here and now.

Starts its own ranks on this machine (``checkpoint_ranks``), which hold one model and its Adam state
alike and take turns in saving and restoring it: mpift, plain writes and reads of the same bytes,
``torch.save`` and ``torch.distributed.checkpoint``. All ranks begin at the same moment; a time is
that of the slowest rank, a figure the median over the rounds.

``memory_limit_bytes`` is what must be there in any case: the state on all ranks, and one more copy
of it in the arenas. ``peak_bytes`` is the state on all ranks and what memory grew by beyond it, in
ranks and writer processes, while a manager was made, saved and restored. Memory that processes
share counts once, the page cache not at all. Targets are told, met or missed; none fails the
command.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpift.bench.machine import START_SECONDS, results_of, threads_a_rank
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.bench.targets import Target
from mpift.errors import ConfigError
from mpift.testing.ranks import run_ranks

# In the order of the table, with what each is; dcp is torch.distributed.checkpoint.
WRITES = {
    "memcpy": "copy of a share in memory",
    "stall": "save: training held",
    "full": "save until committed: all new",
    "incremental": "save until committed: 10 % new",
    "index": "index.h5, after the commit: all new",
    "encoded_full": "save encoded until committed: all new",
    "raw_write": "plain write and fsync of a share",
    "torch_save": "torch.save and fsync, one rank",
    "dcp_save": "dcp.save",
    "dcp_async_stall": "dcp.async_save: training held",
}
READS = {
    "raw_read": "plain read of the whole state",
    "restore": "restore: all differs",
    "restore_chain": "restore of increments: all differs",
    "restore_incremental": "restore: 10 % differs",
    "torch_load": "torch.load, every rank",
    "dcp_load": "dcp.load",
}
# What is compared: name, above, below, the bound of the ratio, and whether the bound itself is
# still good enough.
TARGETS = (
    ("stall_to_memcpy", "stall_seconds", "memcpy_seconds", 1.3, True),
    ("stall_to_dcp_async", "stall_seconds", "dcp_async_stall_seconds", 1.0, False),
    ("full_to_raw_write", "full_seconds", "raw_write_seconds", 1.5, True),
    ("incremental_to_full", "incremental_seconds", "full_seconds", 0.2, True),
    ("incremental_to_full_bytes", "incremental_bytes", "full_bytes", 0.12, True),
    ("restore_to_raw_read", "restore_seconds", "raw_read_seconds", 1.5, True),
    ("restore_to_torch_load", "restore_seconds", "torch_load_seconds", 1.0, True),
    ("chain_to_restore", "restore_chain_seconds", "restore_seconds", 1.05, True),
    ("incremental_to_restore", "restore_incremental_seconds", "restore_seconds", 0.3, True),
    ("peak_to_limit", "peak_bytes", "memory_limit_bytes", 1.1, True),
)
MIB, QUICK_MIB = 500, 64
# Below this the model's smallest tensors would be most of it.
_MIB_MIN = 16
# All that lies in the directory at the same time, as a multiple of the state.
_DISK_FACTOR = 12
# A process also reads the code that it loads; of the state, so much may come from storage in a read
# that counts as one from the page cache.
_STORAGE_SHARE_MAX = 0.01
# What storage must manage at least.
_MIB_A_SECOND_MIN = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` turns of everybody with ``mib`` MiB of state on each rank, in a new folder below
    ``directory`` (default: the working directory), which is removed afterwards unless ``keep``."""

    ranks: int = 2
    mib: int = MIB
    rounds: int = 5
    directory: str = "."
    keep: bool = False

    @property
    def seconds_max(self) -> float:
        """No healthy run takes longer."""
        moved = (len(WRITES) + len(READS)) * (self.rounds + 1) * self.mib
        return START_SECONDS + moved / _MIB_A_SECOND_MIN


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What was measured. ``seconds`` by what was done; ``sizes`` in bytes, as a save adds them to
    the directory, index and manifest included; ``first_stall_seconds`` is the stall of a manager's
    first save, which makes the arena. ``page_cache`` says by name of a read whether storage was
    read in it. ``round_ratios`` are those of ``TARGETS`` that are ratios of times, of neighbours in
    time. ``load_average`` is that of this machine when it began."""

    plan: Plan
    threads: int
    tensors: int
    state_bytes: int
    seconds: Mapping[str, Spread]
    first_stall_seconds: float
    sizes: Mapping[str, int]
    peak_bytes: int
    page_cache: Mapping[str, str]
    round_ratios: Mapping[str, Spread]
    folder: str
    load_average: float

    @property
    def memory_limit_bytes(self) -> int:
        """The state on all ranks, and the arenas, which hold it once more together."""
        return (self.plan.ranks + 1) * self.state_bytes

    def figures(self) -> dict[str, float]:
        """What targets are about, by name."""
        return {
            **{f"{name}_seconds": spread.median for name, spread in self.seconds.items()},
            **self.sizes,
            "peak_bytes": self.peak_bytes,
            "memory_limit_bytes": self.memory_limit_bytes,
        }

    def targets(self) -> Iterator[Target]:
        """How far each was met, by the medians."""
        figures = self.figures()
        for name, above, below, bound, inclusive in TARGETS:
            ratio = figures[above] / figures[below]
            yield Target(name, f"{above} / {below}", ratio, bound, inclusive)

    def as_json(self) -> dict[str, Any]:
        """Plain values: medians by name, sizes, targets, the spread, and how it was run."""
        return {
            "ranks": self.plan.ranks,
            "state_bytes": self.state_bytes,
            "tensors": self.tensors,
            **self.figures(),
            "first_stall_seconds": self.first_stall_seconds,
            **{f"{name}_page_cache": word for name, word in self.page_cache.items()},
            "targets": {target.name: target.as_json() for target in self.targets()},
            "spread": {
                **{f"{name}_seconds": asdict(spread) for name, spread in self.seconds.items()},
                **{name: asdict(spread) for name, spread in self.round_ratios.items()},
            },
            "rounds": self.plan.rounds,
            "threads": self.threads,
            "folder": self.folder,
            "load_average": self.load_average,
        }


def make_plan(
    ranks: int,
    mib: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    keep: bool = False,
    quick: bool = False,
) -> Plan:
    """The plan for this much state on each rank; ``quick`` has less of it and fewer rounds.

    Raises ``ConfigError`` for too little state, or a directory that is not there.
    """
    wanted = mib if mib is not None else QUICK_MIB if quick else MIB
    if wanted < _MIB_MIN:
        raise ConfigError(f"{wanted} MiB of state say nothing: take at least {_MIB_MIN}")
    folder = Path(directory or ".").absolute()
    if not folder.is_dir():
        raise ConfigError(f"there is no directory {folder} to write checkpoints to: make it first")
    return Plan(ranks, wanted, 3 if quick else 5, str(folder), keep)


def measure(plan: Plan) -> CheckpointReport:
    """Start the plan's ranks here and let them save and restore.

    Raises ``ConfigError`` if the directory has too little space, ``MpiftError`` if a rank fails, a
    restored state is not what was saved, or all takes unreasonably long.
    """
    # Here, since it loads torch.
    from mpift.bench.checkpoint_ranks import contend

    free, needed = shutil.disk_usage(plan.directory).free, _DISK_FACTOR * plan.mib << 20
    if free < needed:
        raise ConfigError(
            f"{plan.directory} has {free >> 20} MiB free, and {needed >> 20} are needed for"
            f" {plan.mib} MiB of state: choose another with --directory, or less with --mib"
        )
    threads = threads_a_rank(plan.ranks)
    load_average = os.getloadavg()[0]
    folder = tempfile.mkdtemp(prefix="mpift-bench-", dir=plan.directory)
    try:
        outcome = run_ranks(
            plan.ranks,
            contend,
            asdict(plan),
            folder,
            timeout_seconds=plan.seconds_max,
            environment={"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"},
        )
    finally:
        if not plan.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return report(plan, threads, folder, load_average, results_of(outcome, plan.ranks))


def report(
    plan: Plan,
    threads: int,
    folder: str,
    load_average: float,
    by_rank: Sequence[Mapping[str, Any]],
) -> CheckpointReport:
    """Put together what the ranks measured: for each, what ``checkpoint_ranks.contend`` returns.
    What concerns all ranks is told by the first."""
    found = by_rank[0]
    slowest = {
        name: [max(turn) for turn in zip(*(rank["seconds"][name] for rank in by_rank), strict=True)]
        for name in (*WRITES, *READS)
    }
    times = {f"{name}_seconds": turns for name, turns in slowest.items()}
    page_cache_max = round(plan.rounds * found["state_bytes"] * _STORAGE_SHARE_MAX)
    return CheckpointReport(
        plan,
        threads,
        found["tensors"],
        found["state_bytes"],
        {name: spread_of(turns) for name, turns in slowest.items()},
        max(rank["first_stall_seconds"] for rank in by_rank),
        {name: round(statistics.median(sizes)) for name, sizes in found["sizes"].items()},
        plan.ranks * found["state_bytes"] + found["grown_bytes"],
        {
            name: _page_cache([rank["storage_bytes"][name] for rank in by_rank], page_cache_max)
            for name in READS
        },
        {
            name: spread_of(ratios(times[above], times[below]))
            for name, above, below, _, _ in TARGETS
            if above in times
        },
        folder,
        load_average,
    )


def _page_cache(storage_bytes: Sequence[int | None], warm_max: int) -> str:
    """Whether a read came from the page cache, by what each rank got from storage in it."""
    known = [count for count in storage_bytes if count is not None]
    if len(known) < len(storage_bytes):
        return "unknown"
    return "warm" if max(known) <= warm_max else "not warm"
