"""One rank of ``mpift bench step``: the contenders, and the blocks in which they take turns.

Every contender trains its own copy of one model on the same batches. A *round* is one block of
steps of each; the order rotates from round to round, so that nobody always follows the same one.
All contenders live in one process for the whole run: idle, mpift looks at MPI a few times in
a hundred milliseconds, and gloo sleeps.

Raw MPI takes its turn on mpift's service thread, the only one that may be in MPI.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mpift.torch as hvd
from mpift import runtime
from mpift.bench.models import MODELS
from mpift.errors import MpiftError

# At the start of each block: another contender has had the caches.
_WARM_UP_STEPS = 2
_LEARNING_RATE = 1e-2
# How far the parameters of two contenders may lie apart, as a fraction of the way that they went:
# sums in another order, and the rounding of some hundred updates, stay far below it.
_SAME_WORK = 0.05

Block = Callable[[int], list[float]]


def contend(model_name: str, rounds: int, steps: int, rendezvous: str) -> dict[str, Any]:
    """Run on every rank: seconds of one step by contender, a number a round.

    Each is the median of ``steps`` steps on this rank. ``rendezvous`` is a file for gloo that does
    not exist yet. Raises ``MpiftError`` if the contenders did not do the same work.
    """
    model = MODELS[model_name]
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    hvd.init()
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=hvd.rank(), world_size=hvd.size()
    )
    original = model.build()
    trainers = {
        "local": _local(copy.deepcopy(original)),
        "mpift": _mpift(copy.deepcopy(original)),
        "ddp_gloo": _ddp(copy.deepcopy(original)),
    }
    batch = model.make_batch(seed=hvd.rank())
    blocks: dict[str, Block] = {
        name: _training(*trainer, batch) for name, trainer in trainers.items()
    }
    gradient = np.ones(model.parameters, np.float32)
    blocks["mpi"] = raw_allreduce(gradient, np.empty_like(gradient))
    seconds = take_turns(blocks, rounds, steps)
    _check_same_work(original, trainers["mpift"][0], trainers["ddp_gloo"][0])
    distributed.destroy_process_group()
    hvd.shutdown()
    return {"seconds": seconds, "torch": torch.__version__}


def take_turns(blocks: dict[str, Block], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of one step by name, a number a round: the median of a block of ``steps`` steps."""
    names = list(blocks)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # round -1 warms up: first touch of memory, DDP's buckets
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            hvd.barrier()
            timed = blocks[name](steps + _WARM_UP_STEPS)[_WARM_UP_STEPS:]
            if number >= 0:
                seconds[name].append(statistics.median(timed))
    return seconds


# -- the contenders ----------------------------------------------------------------------------


def _local(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)


def _mpift(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def _ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=_LEARNING_RATE)


def _training(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> Block:
    """Steps as scripts write them, each timed from the end of the one before."""
    inputs, labels = batch

    def block(steps: int) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            times.append(time.perf_counter())
        return np.diff(times).tolist()

    return block


def raw_allreduce(send: np.ndarray, receive: np.ndarray) -> Block:
    """Blocking ``Allreduce``, with nothing else to do."""

    def block(steps: int) -> list[float]:
        times: list[float] = []

        def on_service_thread() -> None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD.Dup()
            times.append(time.perf_counter())
            for _ in range(steps):
                comm.Allreduce(send, receive)
                times.append(time.perf_counter())
            comm.Free()

        runtime.current().on_service(on_service_thread)
        return np.diff(times).tolist()

    return block


def _check_same_work(
    original: torch.nn.Module, mpift: torch.nn.Module, ddp: torch.nn.Module
) -> None:
    apart, way = _difference(mpift, ddp), _difference(original, ddp)
    if not apart <= _SAME_WORK * way:  # the form that refuses NaN too
        raise MpiftError(
            f"parameters went {way:.3g} under DDP, and under mpift ended {apart:.3g} away from"
            " there after equal steps: the two did not do the same work, so their times cannot be"
            " compared"
        )


def _difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
