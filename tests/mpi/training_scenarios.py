"""What ranks do in the training tests: small models, known data, and every use of the optimizer."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import mpift.torch as hvd


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 20), nn.ReLU(), nn.Linear(20, 4)]
    return nn.Sequential(*layers)


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: 12 samples for each of ``size`` ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(12 * size, 12, generator=generator)
    return x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()


def share(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step, size)
    return x[rank * 12 : (rank + 1) * 12], y[rank * 12 : (rank + 1) * 12]


def identical(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> bool:
    state = [model.state_dict(), optimizer and optimizer.state_dict()]
    return len(set(hvd.allgather_object(hvd.digest(state)))) == 1


def parameters_of(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def distributed_run(steps: int = 8) -> dict[str, Any]:
    hvd.init()
    model = build(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = share(step, hvd.rank(), hvd.size())
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"parameters": parameters_of(model), "alike": identical(model, optimizer)}


def plain_run(ranks: int, steps: int = 8) -> list[float]:
    model = build(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step, ranks)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return parameters_of(model)


def refusal_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sizes_and_places() -> dict[str, Any]:
    hvd.init()
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
        "homogeneous": hvd.is_homogeneous(),
    }


def tensors() -> dict[str, Any]:
    hvd.init()
    rank = hvd.rank()
    half = torch.full((3,), 1.5 + rank, dtype=torch.bfloat16)
    in_place = torch.full((2,), float(rank))
    hvd.allreduce_(in_place, op=hvd.Sum)
    return {
        "average": hvd.allreduce(torch.tensor([1.0, 2.0]) * rank).tolist(),
        "integers": hvd.allreduce(torch.tensor([-3 - rank])).tolist(),
        "half": str(hvd.allreduce(half).dtype) + str(hvd.allreduce(half).tolist()),
        "scaled": hvd.allreduce(torch.tensor([4]), op=hvd.Sum, prescale_factor=0.5).tolist(),
        "scalar": hvd.allreduce(torch.tensor(float(rank)), op=hvd.Max).item(),
        "in_place": in_place.tolist(),
        "broadcast": hvd.broadcast(half, root_rank=1).tolist(),
        "gather": hvd.allgather(torch.full((rank + 1,), rank, dtype=torch.float16)).tolist(),
        "objects": hvd.allgather_object({"rank": rank}),
        "object": hvd.broadcast_object({"from": rank, "t": torch.ones(2)}, root_rank=1)["from"],
        "nothing": hvd.broadcast_object(None if rank else "", root_rank=0),
    }


def stays_what_it_was() -> dict[str, Any]:
    """Class, state dict, copies, pickles, schedulers made before and after."""
    hvd.init()
    model, other = build(), build()
    plain = torch.optim.Adam(other.parameters(), lr=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        same = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for net, opt in ((model, optimizer), (other, plain)):
            net(torch.ones(2, 12)).sum().backward()
            opt.step()
        before.step()
        after.step()
    state = optimizer.state_dict()
    plain.load_state_dict(state)
    optimizer.load_state_dict(plain.state_dict())
    copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    return {
        "same": same is optimizer,
        "instance": isinstance(optimizer, torch.optim.Adam),
        "name": type(optimizer).__name__,
        "keys": sorted(state["param_groups"][0]) == sorted(plain.state_dict()["param_groups"][0]),
        "lr": optimizer.param_groups[0]["lr"],
        "warnings": [str(w.message) for w in caught],
        "copied": type(copied) is torch.optim.Adam,
        "pickled": type(pickled) is torch.optim.Adam and len(pickled.state) == len(optimizer.state),
        "twice": refusal_of(lambda: hvd.DistributedOptimizer(optimizer)),
    }


def accumulation() -> dict[str, Any]:
    """Two backward passes a step equal one over both batches; a third is refused."""
    hvd.init()
    model, reference = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=2
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = share(0, hvd.rank(), hvd.size())
    for half in (slice(0, 6), slice(6, 12)):
        functional.cross_entropy(model(x[half]), y[half], reduction="sum").backward()
    optimizer.step()
    everything, labels = batch(0, hvd.size())
    loss = functional.cross_entropy(reference(everything), labels, reduction="sum") / hvd.size()
    loss.backward()
    plain.step()
    close = np.allclose(parameters_of(model), parameters_of(reference), atol=1e-6)

    def once_more() -> None:
        for _ in range(3):
            model(x).sum().backward()

    optimizer.zero_grad()
    return {"close": bool(close), "third": refusal_of(once_more)}


def closure_and_scaler() -> dict[str, Any]:
    """``step(closure)``; ``GradScaler`` with an overflow on one rank only."""
    hvd.init()
    model = build(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x, y = share(0, hvd.rank(), hvd.size())
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure).item()
    with_closure = identical(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        x, y = share(step, hvd.rank(), hvd.size())
        with torch.autocast("cpu", torch.bfloat16):
            loss_value = functional.cross_entropy(model(x), y)
        if step == 3 and hvd.rank() == 1:
            loss_value = loss_value * float("inf")
        scaler.scale(loss_value).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "loss": loss > 0,
        "with_closure": with_closure,
        "with_scaler": identical(model, optimizer),
        "finite": bool(np.isfinite(parameters_of(model)).all()),
        "scales": scales,
    }


class Branches(nn.Module):
    """Two branches, of which a step may use one, both or none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        y = x[:, :2] * self.scalar
        if "l" in use:
            y = y + self.left(x) * self.narrow
        if "r" in use:
            y = y + self.right(x) * self.wide.float()
        return y


def unused_and_mixed() -> dict[str, Any]:
    """Parameters that some or all ranks don't use in a step; mixed dtypes; a 0-d parameter."""
    hvd.init()
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    x = torch.ones(3, 4) * (hvd.rank() + 1)
    grads = {}
    for name, use in {
        "all_left": "l",
        "differs": "l" if hvd.rank() == 0 else "r",
        "nobody": "",
        "both": "lr",
    }.items():
        optimizer.zero_grad()
        if use or hvd.rank() == 0:
            model(x, use).sum().backward()
        optimizer.step()
        grads[name] = {
            key: None if p.grad is None else p.grad.double().reshape(-1)[:1].tolist()
            for key, p in model.named_parameters()
        }
    optimizer.step()  # without any backward since
    return {"alike": identical(model, optimizer), "grads": grads}


def changing_parameters() -> dict[str, Any]:
    """Frozen parameters, unfrozen later, and a group added later."""
    hvd.init()
    model, head = build(), nn.Linear(4, 2)
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def train(step: int, *heads: nn.Module) -> None:
        optimizer.zero_grad()
        x, _ = share(step, hvd.rank(), hvd.size())
        y = model(x)
        for layer in heads:
            y = layer(y)
        y.pow(2).sum().backward()
        optimizer.step()

    train(0)
    was_frozen = torch.equal(model[0].weight, frozen)
    model[0].requires_grad_(True)
    train(1)
    moved = not torch.equal(model[0].weight, frozen)
    torch.manual_seed(5)
    for parameter in head.parameters():
        nn.init.ones_(parameter)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.2})
    train(2, head)
    model[2].requires_grad_(False)
    train(3, head)
    return {
        "was_frozen": was_frozen,
        "moved": moved,
        "alike": identical(model, optimizer),
        "head_alike": identical(head),
    }


def two_optimizers() -> dict[str, Any]:
    """Two optimizers, as an adversarial pair has, each with its own rounds."""
    hvd.init()
    first, second = build(1), build(2)
    one = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    two = hvd.DistributedOptimizer(torch.optim.Adam(second.parameters(), lr=0.01))
    for step in range(4):
        x, y = share(step, hvd.rank(), hvd.size())
        for model, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            hvd.allreduce(torch.ones(2))  # between backward and step
            optimizer.step()
    return {"alike": identical(first, one) and identical(second, two), "epoch": hvd.epoch()}


def sums_and_factors() -> dict[str, Any]:
    hvd.init()
    found = {}
    for name, options in {
        "average": {},
        "sum": {"op": hvd.Sum},
        "predivided": {"gradient_predivide_factor": 4.0},
    }.items():
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)], **options)
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        kept = weight.grad
        weight.grad.mul_(2)  # users may do what they like with it
        with optimizer.skip_synchronize():
            optimizer.step()
        found[name] = [weight.tolist(), kept is weight.grad]
    return found


def mistakes() -> dict[str, Any]:
    hvd.init()
    model = build()
    names = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = {
        "doubled": refusal_of(lambda: hvd.DistributedOptimizer(sgd, [*names, names[0]])),
        "missing": refusal_of(lambda: hvd.DistributedOptimizer(sgd, names[1:])),
        "pairs": refusal_of(lambda: hvd.DistributedOptimizer(sgd, model.parameters())),
        "op": refusal_of(lambda: hvd.DistributedOptimizer(sgd, names, op=hvd.Max)),
        "compression": refusal_of(lambda: hvd.DistributedOptimizer(sgd, names, compression=int)),
        "passes": refusal_of(
            lambda: hvd.DistributedOptimizer(sgd, names, backward_passes_per_step=0)
        ),
    }
    optimizer = hvd.DistributedOptimizer(sgd, names)
    model(torch.ones(1, 12)).sum().backward()
    refused["zero_grad"] = refusal_of(optimizer.zero_grad)
    optimizer.step()
    embedding = nn.Embedding(5, 3, sparse=True)
    sparse = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))
    refused["sparse"] = refusal_of(lambda: embedding(torch.tensor([1])).sum().backward())
    embedding.weight.grad = torch.zeros(5, 3)
    sparse.step()
    dense = nn.Embedding(5, 3, sparse=True)
    as_dense = hvd.DistributedOptimizer(
        torch.optim.SGD(dense.parameters(), lr=0.1), sparse_as_dense=True
    )
    dense(torch.tensor([hvd.rank()])).sum().backward()
    as_dense.step()
    refused["as_dense"] = str(dense.weight.grad[:3].tolist())
    other = nn.Linear(2 + hvd.rank(), 1)
    refused["differs"] = refusal_of(
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    )
    return refused


def hooks_and_broadcast_state() -> dict[str, Any]:
    """Step hooks run once a step, also after the optimizer's state was loaded."""
    hvd.init()
    model = build()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 12)).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    other = {"b": torch.zeros(2, 3), "a": torch.zeros(3, 2)}
    mine = other if hvd.rank() else dict(reversed(other.items()))
    return {
        "calls": calls,
        "order": refusal_of(lambda: hvd.broadcast_parameters(mine)),
        "topk": missing_name(lambda: hvd.Compression.topk),
        "adasum": missing_name(lambda: hvd.Adasum),
    }


def missing_name(call: Callable[[], Any]) -> str:
    try:
        call()
    except AttributeError as error:
        return str(error)
    return "no error"
