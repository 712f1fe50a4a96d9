"""Random training under random delays, stalls and deaths: one seed, one way of training.

Everything that has to be alike on all ranks (the way of training and who is to die) is drawn from
the seed, and what each rank is delayed by from the seed and its member id.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mpift
import mpift.torch as hvd
from mpift import runtime
from mpift.transport.injection import hold_interpreter_lock

EPOCHS, BATCHES, FEATURES = 2, 10, 12
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=50 * EPOCHS * BATCHES
    ),
}
COMPRESSIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "threshold": lambda: hvd.Compression.threshold(1e-3),
}


@dataclass(frozen=True)
class Way:
    """A way of training; the same on all ranks."""

    optimizer: str
    scheduler: str | None
    clip: str | None  # "step" after synchronize(), "skip" in skip_synchronize(), or not
    passes: int
    precision: str  # "float32", "bfloat16" or "scaler"
    second: bool  # another model, with an optimizer of its own
    rounds: bool  # goes through hvd.rounds, or plainly through the batches
    operation: bool  # averages the loss after every step
    rules: dict[str, Any]
    compression: str
    chaos: str
    kills: dict[int, float]  # member: seconds after the training began


def draw(seed: int, ranks: int) -> Way:
    rng = random.Random(seed)
    chaos, kills = [], {}
    victims = rng.sample(range(ranks), rng.choice([0, 1, 1, ranks - 2]) if ranks > 2 else 0)
    for victim in victims:
        point = rng.choice(["step", "bucket0", "bucket1", "stop", "time", "time"])
        at = rng.randrange(2, EPOCHS * BATCHES - 2)
        if point == "time":
            kills[victim] = rng.uniform(0.0, 1.5)
        else:
            chaos.append(
                f"stop:{victim}@{at}" if point == "stop" else f"kill:{victim}@{at}:{point}"
            )
    stalled = [member for member in range(ranks) if member not in victims]
    if rng.random() < 0.5:
        chaos.append(f"gil:{rng.choice(stalled)}@{rng.randrange(EPOCHS * BATCHES)}:0.3")
    precision = rng.choice(["float32", "float32", "bfloat16", "scaler"])
    return Way(
        optimizer=rng.choice(["sgd", "adam"]),
        scheduler=rng.choice([None, *SCHEDULERS]),
        clip=rng.choice([None, "step", "skip"]),
        passes=rng.choice([1, 1, 2]),
        precision=precision,
        second=rng.random() < 0.3,
        rounds=rng.random() < 0.5,
        operation=rng.random() < 0.25,
        rules={
            "late": rng.choice(["carry", "carry", "drop"]),
            "quorum": rng.choice(["majority", "majority", 2, 0.5]),
            "patience": rng.choice([0.0, 0.0, "adaptive", 0.02]),
            "max_lag": rng.randint(1, 4),
        },
        compression=rng.choice(["none", "none", *COMPRESSIONS]),
        chaos=",".join(chaos),
        kills=kills,
    )


class Net(nn.Module):
    """Two paths, of which a batch may use one; a gradient may be late within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 40), nn.Linear(FEATURES, 40)
        self.top = nn.Sequential(nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor, path: str, pause: Callable[[], None]) -> torch.Tensor:
        hidden = sum(layer(x) for name, layer in self.named_children() if name in path)
        hidden.register_hook(lambda _gradient: pause())
        return self.top(hidden)


class Delays:
    """What delays this rank: sleeps, and C calls that keep the interpreter's lock."""

    def __init__(self, seed: int, member: int) -> None:
        self._rng = random.Random(1000 * seed + member)
        self._share = self._rng.choice([0.0, 0.1, 0.3])

    def pause(self) -> None:
        if self._rng.random() < self._share:
            time.sleep(self._rng.expovariate(1 / 0.03))
        elif self._rng.random() < 0.01:
            hold_interpreter_lock(0.3)


class Trainer:
    """One model with its optimizer, trained in the given way."""

    def __init__(self, way: Way, seed: int, delays: Delays) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self._way, self._delays = way, delays
        parameters = self.model.parameters()
        plain: torch.optim.Optimizer
        if way.optimizer == "adam":
            plain = torch.optim.Adam(parameters, lr=0.01)
        else:
            plain = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(
            plain,
            self.model.named_parameters(),
            backward_passes_per_step=way.passes,
            compression=COMPRESSIONS[way.compression](),
            **way.rules,
        )
        self._scheduler = None
        if way.scheduler is not None:
            scheduler = SCHEDULERS[way.scheduler](self.optimizer)
            self._scheduler = self.optimizer.register_scheduler(scheduler)

    def digest(self) -> str:
        state = [self.model.state_dict(), self.optimizer.state_dict()]
        state.append([group["lr"] for group in self.optimizer.param_groups])
        if self._scheduler is not None:
            state.append([self._scheduler.last_epoch, self._scheduler.get_last_lr()])
        return f"{self.optimizer.rounds_applied} {hvd.digest(state)}"

    def backward(self, x: torch.Tensor, path: str, scaler: Any) -> torch.Tensor:
        half = self._way.precision == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            y = (x.sum(1) > 0).long() + (x[:, 0] > 0).long()
            loss = functional.cross_entropy(self.model(x, path, self._delays.pause), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    def step(self, scaler: Any) -> None:
        clip = self._way.clip
        if scaler is not None:
            if clip:
                scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            scaler.step(self.optimizer)
        elif clip is None:
            self.optimizer.step()
        else:
            self.optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            skips = (
                self.optimizer.skip_synchronize() if clip == "skip" else contextlib.nullcontext()
            )
            with skips:
                self.optimizer.step()
        for parameter in self.model.parameters():  # they are the script's own now
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))


def train(seed: int, ranks: int, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train as the seed says; returns what has to be the same on all ranks that live to the end."""
    way = draw(seed, ranks)
    if overrides:
        way = Way(**{**vars(way), **overrides})
    hvd.init(config=mpift.Config.load(bucket_bytes=2048, first_bucket_bytes=1024, chaos=way.chaos))
    member = runtime.current().member
    delays = Delays(seed, member)
    trainers = [Trainer(way, seed + number, delays) for number in range(1 + way.second)]
    scaler = None
    if way.precision == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    hvd.barrier()
    if member in way.kills:
        end = threading.Timer(way.kills[member], os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
    alike = True
    for epoch in range(EPOCHS):
        for batch in _batches(way, trainers[0].optimizer, epoch):
            loss = _one_step(way, trainers, scaler, seed, batch, member)
            delays.pause()
            if way.operation:
                hvd.allreduce(loss)
        if way.rounds:
            digests = hvd.allgather_object([trainer.digest() for trainer in trainers])
            alike = alike and all(each == digests[0] for each in digests)
    hvd.shutdown()
    return {
        "digests": [trainer.digest() for trainer in trainers],
        "finite": all(_is_finite(trainer.model) for trainer in trainers),
        "alike": alike,
    }


def _batches(way: Way, optimizer: Any, epoch: int) -> Iterator[int]:
    batches = range(epoch * BATCHES * way.passes, (epoch + 1) * BATCHES * way.passes)
    return hvd.rounds(batches, optimizer) if way.rounds else iter(batches)


def _one_step(
    way: Way, trainers: list[Trainer], scaler: Any, seed: int, batch: int, member: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * (1000 * seed + batch) + member)
    x = torch.randn(8, FEATURES, generator=generator)
    path = ("left right", "left", "right", "left right")[(batch + member * (batch % 3)) % 4]
    if scaler is not None and (batch + seed + member) % 17 == 0:
        x = x * float("inf")
    first = batch % way.passes == 0
    loss = torch.zeros(())
    for trainer in trainers:
        if first:
            trainer.optimizer.zero_grad(set_to_none=batch % 4 == 0)
        loss = trainer.backward(x, path, scaler)
        trainers[0]._delays.pause()
    if batch % way.passes == way.passes - 1:
        for trainer in trainers:
            trainer.step(scaler)
        if scaler is not None:
            scaler.update()
    return loss


def _is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
