"""``mpift bench step``: a training step with mpift against torch DDP and raw MPI, here and now.

Starts its own ranks on this machine and has them measure in alternation (``contenders``). A block's
time is that of its slowest rank; the figures are medians over the rounds. ``ratio_to_ddp`` is the
ratio of the medians, its spread that of the rounds' own ratios.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
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
from mpift.bench.models import MODELS, BenchModel
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.errors import ConfigError
from mpift.testing.ranks import run_ranks

# In the order of the table, with what each is.
CONTENDERS = {
    "local": "no communication",
    "mpift": "mpift DistributedOptimizer",
    "ddp_gloo": "torch DDP over gloo",
    "mpi": "raw MPI Allreduce of the same bytes",
}
# A bound on one step of the slowest contender.
_STEP_SECONDS_MAX = 3.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What was measured. ``seconds`` is one step by contender; ``steps`` those of one block.

    ``others_share`` is the part of the machine's cores that other processes used meanwhile, 0 to 1.
    """

    ranks: int
    model: BenchModel
    rounds: int
    steps: int
    threads: int
    seconds: Mapping[str, Spread]
    round_ratios: Spread
    others_share: float

    @property
    def ratio_to_ddp(self) -> float:
        """The median of mpift over that of DDP: below 1 is faster than DDP."""
        return self.seconds["mpift"].median / self.seconds["ddp_gloo"].median

    def as_json(self) -> dict[str, Any]:
        """Plain values: medians by name, their quartiles under ``spread``, and how it was run."""
        figures = {f"{name}_seconds": spread for name, spread in self.seconds.items()}
        spreads = {**figures, "ratio_to_ddp": self.round_ratios}
        return {
            "ranks": self.ranks,
            "model": self.model.name,
            "parameters": self.model.parameters,
            "bytes": self.model.gradient_bytes,
            **{name: spread.median for name, spread in figures.items()},
            "ratio_to_ddp": self.ratio_to_ddp,
            "spread": {name: asdict(spread) for name, spread in spreads.items()},
            "rounds": self.rounds,
            "steps": self.steps,
            "threads": self.threads,
            "others_share": self.others_share,
        }


def measure(ranks: int, model_name: str, rounds: int, steps: int) -> StepReport:
    """Start ``ranks`` ranks here and let the contenders take ``rounds`` turns of ``steps`` steps.

    Raises ``ConfigError`` for a model that there is not, ``MpiftError`` if a rank fails or all
    takes unreasonably long.
    """
    if model_name not in MODELS:
        raise ConfigError(f"there is no model {model_name!r}; there are: {', '.join(MODELS)}")
    # Here, since it loads torch.
    from mpift.bench.contenders import contend

    threads = threads_a_rank(ranks)
    others = Others()
    blocks = len(CONTENDERS) * (rounds + 1)
    with tempfile.TemporaryDirectory(prefix="mpift-bench-") as folder:
        outcome = run_ranks(
            ranks,
            contend,
            *(model_name, rounds, steps, str(Path(folder, "rendezvous"))),
            timeout_seconds=START_SECONDS + blocks * (steps + 2) * _STEP_SECONDS_MAX,
            environment=rank_environment(threads),
        )
    by_rank = [result["seconds"] for result in results_of(outcome, ranks)]
    return report(ranks, MODELS[model_name], steps, threads, by_rank, others.share())


def report(
    ranks: int,
    model: BenchModel,
    steps: int,
    threads: int,
    by_rank: Sequence[Mapping[str, Sequence[float]]],
    others_share: float,
) -> StepReport:
    """Put together what the ranks measured: for each, seconds by contender and round."""
    slowest = {
        name: [max(blocks) for blocks in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in CONTENDERS
    }
    seconds = {name: spread_of(rounds) for name, rounds in slowest.items()}
    paired = spread_of(ratios(slowest["mpift"], slowest["ddp_gloo"]))
    return StepReport(ranks, model, paired.runs, steps, threads, seconds, paired, others_share)
