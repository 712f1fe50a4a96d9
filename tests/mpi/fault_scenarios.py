"""What ranks do in the training tests in which ranks die, or leave before the others."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mpift
import mpift.torch as hvd
from mpift import runtime
from tests.mpi.training_scenarios import build, identical, refusal_of, share


def train_with(kind: str, steps: int) -> dict[str, Any]:
    """Train under a fault schedule; are all live ranks alike at the end, with optimizer state?"""
    hvd.init(config=mpift.Config.load(bucket_bytes=2048, first_bucket_bytes=1024))
    model = build(hvd.rank())
    adam = kind == "adam"
    plain = (
        torch.optim.Adam(model.parameters(), lr=0.01)
        if adam
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    hvd.broadcast_parameters(model.state_dict())
    sizes = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = share(step, hvd.rank(), hvd.size())
        functional.cross_entropy(model(x), y).backward()
        if adam:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        sizes.append(hvd.size())
    alike = identical(model, optimizer)
    hvd.shutdown()
    return {"alike": alike, "sizes": sizes}


def sampled(samples: int, batch_size: int, workers: int) -> dict[str, Any]:
    """One epoch over numbered samples under a fault schedule; returns what was trained on."""
    hvd.init()
    data = torch.arange(samples)
    prefetch = workers * 2 * batch_size
    sampler = hvd.ElasticSampler(range(samples), seed=3, prefetch=prefetch)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data),
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
    )
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    trained: list[list[int]] = []
    for index, (numbers,) in enumerate(loader):
        optimizer.zero_grad()
        (weight * numbers.float().sum()).sum().backward()
        optimizer.step()
        sampler.record_batch(index, len(numbers))
        trained.append(numbers.tolist())
    lengths = hvd.allgather_object(len(trained))
    hvd.shutdown()
    return {"trained": trained, "lengths": lengths}


def die_before_training(victim: int, moment: str) -> dict[str, Any]:
    """A death after ``init``, at a moment at which no optimizer has gradients yet."""
    hvd.init()
    model, other = build(hvd.rank()), build(hvd.rank())
    victim_here = runtime.current().member == victim

    def maybe_die(now: str) -> None:
        if victim_here and moment == now:
            os.kill(os.getpid(), signal.SIGKILL)

    maybe_die("before the optimizer")
    time.sleep(0.3)  # so that the death is noticed while nothing is in flight
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    maybe_die("before the second optimizer")
    second = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    maybe_die("before the broadcast")
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_parameters(other.state_dict())
    for step in range(3):
        x, y = share(step, hvd.rank(), hvd.size())
        for net, opt in ((model, optimizer), (other, second)):
            opt.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            opt.step()
    found = {"size": hvd.size(), "alike": identical(model, optimizer) and identical(other, second)}
    hvd.shutdown()
    return found


def after_one_has_left() -> dict[str, Any]:
    """Rank 1 leaves early; the others average, and try to change their parameters."""
    hvd.init()
    model = build()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if hvd.rank() == 1:
        hvd.shutdown()
        return {}
    average = hvd.allreduce(torch.tensor(4.0)).item()
    for step in range(2):
        optimizer.zero_grad()
        x, y = share(step, hvd.rank(), hvd.size())
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    alike = len(set(hvd.allgather_object(hvd.digest(model.state_dict())))) == 1
    model[0].requires_grad_(False)
    refused = refusal_of(lambda: model(share(3, 0, 3)[0]).sum().backward())
    hvd.shutdown()
    return {"average": average, "alike": alike, "refused": refused}


def sampled_with_a_metric(samples: int) -> dict[str, Any]:
    """Rank 1 dies after a step, before the metric of that step is averaged."""
    hvd.init()
    sampler = hvd.ElasticSampler(range(samples), seed=3)
    loader = torch.utils.data.DataLoader(torch.arange(samples), batch_size=4, sampler=sampler)
    counts = nn.Parameter(torch.zeros(samples))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([counts], lr=1.0), op=hvd.Sum)
    for step, numbers in enumerate(loader):
        optimizer.zero_grad()
        (-counts[numbers].sum()).backward()
        optimizer.step()
        if step == 2 and hvd.rank() == 1 and hvd.size() == 3:
            time.sleep(0.3)  # the others have the round's result by then
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1))
    length = len(loader)
    hvd.shutdown()
    return {"counts": counts.tolist(), "length": length}


def objects_without_their_roots() -> dict[str, Any]:
    """Objects are broadcast while a lower rank dies, by a root that dies before it has given its
    own, and by one that has left."""
    hvd.init()
    here = runtime.current()
    if here.member == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [hvd.broadcast_object("x" * (here.member + 1), root_rank=3)]
    hvd.barrier()
    if here.member == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.append(hvd.broadcast_object(f"of {here.member}", root_rank=2))
        if here.member == 1:
            hvd.shutdown()
        else:
            found.append(hvd.broadcast_object(f"of {here.member}", root_rank=0))
            alone = torch.full((2,), float(here.member))
            hvd.broadcast_parameters({"alone": alone}, root_rank=0)
            found.append(alone.tolist())
    return {"found": found, "said": [str(warning.message) for warning in caught]}
