"""``hvd.rounds(loader)``: a training loop that goes by rounds, not by this rank's own steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from mpift import runtime
from mpift.core.membership import View
from mpift.errors import GradientError
from mpift.torch.optimizer import DistributedMixin
from mpift.torch.replica import Replica
from mpift.torch.sampler import ElasticSampler

Batch = TypeVar("Batch")


def rounds(loader: Iterable[Batch], optimizer: Any = None) -> Iterator[Batch]:
    """The batches of ``loader``, less one for each round that this rank missed (times
    ``backward_passes_per_step``): a rank that was late stays at the same place of its epoch as the
    others. At the end of the loop all ranks meet: what is late still counts, all apply the same
    rounds, and after it their parameters have the same bits, so evaluate after it.

    All ranks must go through it equally often; whoever leaves it before its end leaves it alone.
    ``optimizer`` is needed if there are several: the one that makes a step with every batch. With
    an ``ElasticSampler`` in the loader, batches left out aren't loaded; others are, in vain.
    Raises ``GradientError`` if there is no distributed optimizer, or no telling which one.
    """
    reducer = _reducer_of(optimizer)
    replica: Replica = reducer.replica
    sampler = _sampler_of(loader)
    replica.forget_missed()
    batches = iter(loader)
    while True:
        _leave_out(batches, sampler, replica.take_missed(), reducer.passes_per_step)
        try:
            batch = next(batches)
        except StopIteration:
            break
        yield batch
    runtime.current().gradients.settle()
    replica.forget_missed()


def _leave_out(
    batches: Iterator[Any], sampler: ElasticSampler | None, missed: list[View], passes: int
) -> None:
    """Pass over what the missed rounds would have used."""
    for view in missed:
        if sampler is not None:
            sampler.miss_round(view)
            continue
        for _ in range(passes):
            next(batches, None)


def _reducer_of(optimizer: Any) -> Any:
    if optimizer is not None:
        if not isinstance(optimizer, DistributedMixin):
            raise GradientError(f"rounds() needs a distributed optimizer, not {optimizer!r}")
        return optimizer._mpift_reducer
    followers = runtime.current().gradients.followers
    if len(followers) != 1:
        raise GradientError(
            f"there are {len(followers)} distributed optimizers: make one before rounds() is"
            " called, and if there are several give the one that steps with every batch"
        )
    return followers[0]


def _sampler_of(loader: Any) -> ElasticSampler | None:
    """The loader's own ``ElasticSampler``, if it draws no further than the batch in training."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, ElasticSampler) and not sampler.prefetch else None
