"""``mpift bench allreduce``: mpift's gradient rounds against raw MPI and gloo, here and now.

Starts its own ranks on this machine and has them sum arrays of float32 in alternation
(``allreduce_ranks``). A block's time is that of its slowest rank; the figures are medians over the
rounds. Ratios are those of the medians, their spreads those of the rounds' own ratios. Afterwards
all contenders sum once more, and what they come to is compared with the sum itself.

Targets are told, met or missed; none fails the command.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpift.bench.machine import (
    START_SECONDS,
    Others,
    rank_environment,
    results_of,
    threads_a_rank,
)
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.bench.targets import Target
from mpift.errors import ConfigError, MpiftError
from mpift.testing.ranks import run_ranks

# In the order of the table, with what each is.
CONTENDERS = {
    "mpift": "mpift's round",
    "mpi": "raw MPI Allreduce",
    "gloo": "torch.distributed all_reduce over gloo",
    "memcpy": "copy in memory, all ranks at once",
    "with_copies": "mpift's round, with copies in and out",
}
# What mpift's round is compared with, in the order of the table.
PEERS = ("mpi", "gloo")
MIB, QUICK_MIB = (1, 16, 100), (1, 16)
ROUNDS, QUICK_ROUNDS = 7, 2
# What ratios are wanted at most, for arrays of this many bytes and more: below it fixed costs are
# most of a sum. With few ranks there is less that the others move and mpift doesn't.
TARGET_BYTES = 16 << 20
_BOUND, _BOUND_OF_FEW, _FEW_RANKS = 0.4, 0.7, 3
# A block sums about so much, in some repetitions.
_BLOCK_BYTES, _QUICK_BLOCK_BYTES = 128 << 20, 32 << 20
_REPETITIONS = range(3, 21)
# The first ones of a block, which are not timed.
_WARM_UP_REPETITIONS = 2
# What the slowest contender must manage at least, a rank.
_BYTES_A_SECOND_MIN = 50 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` blocks of each contender for arrays of each of ``sizes``, in bytes;
    ``block_bytes`` is about what one block sums."""

    ranks: int = 2
    sizes: Sequence[int] = tuple(mib << 20 for mib in MIB)
    rounds: int = ROUNDS
    block_bytes: int = _BLOCK_BYTES

    def repetitions(self, size: int) -> int:
        """Timed sums in one block."""
        return max(_REPETITIONS[0], min(_REPETITIONS[-1], self.block_bytes // size))

    @property
    def seconds_max(self) -> float:
        """No healthy run takes longer."""
        moved = sum(size * (self.repetitions(size) + _WARM_UP_REPETITIONS) for size in self.sizes)
        moved *= self.ranks * len(CONTENDERS) * (self.rounds + 1)
        return START_SECONDS + moved / _BYTES_A_SECOND_MIN


@dataclass(frozen=True, slots=True)
class Row:
    """Arrays of one size. ``seconds`` is one sum by contender, ``round_ratios`` are mpift's to each
    of ``PEERS``. ``reduction`` is how mpift summed: "node", in shared memory, or "mpi"."""

    bytes: int
    repetitions: int
    reduction: str
    seconds: Mapping[str, Spread]
    round_ratios: Mapping[str, Spread]

    def ratio_to(self, peer: str) -> float:
        """The median of mpift over that of ``peer``: below 1 is faster than it."""
        return self.seconds["mpift"].median / self.seconds[peer].median

    def targets(self, ranks: int) -> Iterator[Target]:
        """How far each was met; none where fixed costs are most of it."""
        bound = _BOUND_OF_FEW if ranks <= _FEW_RANKS else _BOUND
        for peer in PEERS if self.bytes >= TARGET_BYTES else ():
            yield Target(f"ratio_to_{peer}", f"mpift / {peer}", self.ratio_to(peer), bound)

    def as_json(self, ranks: int) -> dict[str, Any]:
        """Plain values; medians by name, their quartiles under ``spread``."""
        figures = {f"{name}_seconds": spread for name, spread in self.seconds.items()}
        spreads = figures | {f"ratio_to_{peer}": self.round_ratios[peer] for peer in PEERS}
        return {
            "bytes": self.bytes,
            **{name: spread.median for name, spread in figures.items()},
            **{f"ratio_to_{peer}": self.ratio_to(peer) for peer in PEERS},
            "targets": {target.name: target.as_json() for target in self.targets(ranks)},
            "spread": {name: asdict(spread) for name, spread in spreads.items()},
            "repetitions": self.repetitions,
            "reduction": self.reduction,
        }


@dataclass(frozen=True, slots=True)
class AllreduceReport:
    """What was measured, a row a size.

    ``others_share`` is the part of the machine's cores that other processes used meanwhile, 0 to 1.
    """

    plan: Plan
    threads: int
    rows: Sequence[Row]
    others_share: float

    @property
    def reduction(self) -> str:
        """How mpift summed: "node" if all sizes were summed so."""
        return "node" if all(row.reduction == "node" for row in self.rows) else "mpi"

    def as_json(self) -> dict[str, Any]:
        """Plain values: the rows, and how it was run."""
        return {
            "ranks": self.plan.ranks,
            "reduction": self.reduction,
            "rows": [row.as_json(self.plan.ranks) for row in self.rows],
            "rounds": self.plan.rounds,
            "threads": self.threads,
            "others_share": self.others_share,
        }


def make_plan(
    ranks: int,
    mib: Sequence[int] | None = None,
    rounds: int | None = None,
    quick: bool = False,
) -> Plan:
    """The plan for arrays of these sizes in MiB, or for the usual ones; ``quick`` has fewer and
    shorter blocks, and no large arrays unless they are asked for.

    Raises ``ConfigError`` for a size or a number of rounds that is none, or too few ranks.
    """
    if ranks < 2:
        raise ConfigError(f"{ranks} rank has nobody to sum with: take at least 2")
    chosen = (QUICK_MIB if quick else MIB) if mib is None else mib
    turns = (QUICK_ROUNDS if quick else ROUNDS) if rounds is None else rounds
    if not chosen or min(chosen) < 1:
        raise ConfigError(f"arrays have whole numbers of MiB, at least 1, not {list(chosen)}")
    if turns < 1:
        raise ConfigError(f"{turns} rounds have no median: take at least 1")
    sizes = tuple(size << 20 for size in sorted(set(chosen)))
    return Plan(ranks, sizes, turns, _QUICK_BLOCK_BYTES if quick else _BLOCK_BYTES)


def measure(plan: Plan) -> AllreduceReport:
    """Start the plan's ranks here and let the contenders take turns.

    Raises ``MpiftError`` if a rank fails, a sum is wrong, or all takes unreasonably long.
    """
    # Here, since it loads torch.
    from mpift.bench.allreduce_ranks import contend

    threads = threads_a_rank(plan.ranks)
    others = Others()
    with tempfile.TemporaryDirectory(prefix="mpift-bench-") as folder:
        outcome = run_ranks(
            plan.ranks,
            contend,
            asdict(plan),
            str(Path(folder, "rendezvous")),
            timeout_seconds=plan.seconds_max,
            environment=rank_environment(threads),
        )
    return report(plan, threads, results_of(outcome, plan.ranks), others.share())


def report(
    plan: Plan, threads: int, by_rank: Sequence[Mapping[str, Any]], others_share: float
) -> AllreduceReport:
    """Put together what the ranks measured: for each, what ``allreduce_ranks.contend`` returns.

    Raises ``MpiftError`` if a sum was wrong: then its time says nothing.
    """
    for words in (words for rank in by_rank for row in rank["rows"] for words in row["wrong"]):
        raise MpiftError(words)
    rows = []
    for number, size in enumerate(plan.sizes):
        found = [rank["rows"][number] for rank in by_rank]
        slowest = {
            name: [max(turn) for turn in zip(*(one["seconds"][name] for one in found), strict=True)]
            for name in CONTENDERS
        }
        rows.append(
            Row(
                size,
                plan.repetitions(size),
                found[0]["reduction"],
                {name: spread_of(turns) for name, turns in slowest.items()},
                {peer: spread_of(ratios(slowest["mpift"], slowest[peer])) for peer in PEERS},
            )
        )
    return AllreduceReport(plan, threads, rows, others_share)
