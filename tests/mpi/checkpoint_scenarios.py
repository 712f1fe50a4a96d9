"""What ranks do in the tests of checkpoints: a small training with everything a state may hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import mpift
import mpift.torch as hvd
from mpift import runtime
from mpift.checkpoint import CheckpointManager

BATCH = 4
SAMPLES = 480


def shared_digest(parameters: dict[str, Any], optimizer_state: dict[str, Any]) -> str:
    """Of what all ranks hold alike; works on live objects and on what a checkpoint gives."""
    return hvd.digest([parameters, optimizer_state["state"], optimizer_state["param_groups"]])


class Training:
    """A model with dropout and BatchNorm, Adam, a scheduler that follows the rounds, and a sampler.

    ``seed`` is that of the weights, and of each rank's own noise."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        hvd.init(config=mpift.Config.load(**settings) if settings else None)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)
        )
        adam = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.optimizer = hvd.DistributedOptimizer(adam, self.model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.7)
        self.scheduler = self.optimizer.register_scheduler(scheduler)
        self.sampler = hvd.ElasticSampler(range(SAMPLES), seed=3)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.member = runtime.current().member
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(1000 * seed + self.member)
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = (self.x[:, :3].sum(1) > 0).long()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
        }

    def step(self) -> float:
        """One step on the next samples; its loss on this rank."""
        draw = iter(self.sampler)
        numbers = [next(draw) for _ in range(BATCH)]
        noise = 0.01 * random.random() + 0.01 * float(np.random.rand())  # noqa: NPY002, what scripts use
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.x[numbers] + noise), self.y[numbers])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def train(self, steps: int) -> float:
        """The mean loss of ``steps`` steps, over all ranks."""
        losses = torch.tensor([self.step() for _ in range(steps)])
        return float(hvd.allreduce(losses.mean()))

    def shared(self) -> str:
        return shared_digest(dict(self.model.named_parameters()), self.optimizer.state_dict())

    def everything_shared(self) -> str:
        return hvd.digest([self.shared(), self.scheduler.state_dict()])

    def own(self) -> str:
        """Of what belongs to this rank: buffers, generators, sampler."""
        version, numbers, _ = random.getstate()
        numpy_state: Any = np.random.get_state()  # noqa: NPY002, what scripts use
        return hvd.digest(
            [
                dict(self.model.named_buffers()),
                torch.get_rng_state(),
                [version, list(numbers)],
                [numpy_state[0], numpy_state[1].tolist(), numpy_state[2]],
                self.sampler.state_dict(),
            ]
        )

    def digests(self) -> dict[str, str]:
        return {"shared": self.everything_shared(), "own": self.own()}


def uninterrupted(folder: str, half: int) -> dict[str, Any]:
    """Train ``2 * half`` steps, with a save after each half that training does not wait for."""
    training = Training()
    with CheckpointManager(folder, every=half, keep=5, when_busy="wait") as manager:
        manager.follow(training.optimizer, training.state)
        first = training.train(half)
        at_half = training.digests()
        second = training.train(half)
        through = manager.wait(60)
        committed = manager.committed_step
        steps = manager.steps()
    end = training.digests()
    hvd.shutdown()
    return {
        "half": at_half,
        "end": end,
        "losses": [first, second],
        "through": through,
        "committed": committed,
        "steps": steps,
    }


def resumed(folder: str, half: int) -> dict[str, Any]:
    """Go back to the step in the middle with other weights and noise, and train on from there."""
    training = Training(seed=9)
    with CheckpointManager(folder, every=half, keep=5) as manager:
        manager.follow(training.optimizer, training.state)
        restored = manager.restore(half, training.state)
        assert restored is not None
        at_half = training.digests()
        loss = training.train(half)
        manager.wait(60)
        newest = manager.committed_step
        again = manager.restore(state=training.state)
        assert again is not None
    end = training.digests()
    hvd.shutdown()
    return {
        "half": at_half,
        "end": end,
        "loss": loss,
        "from": [restored.step, restored.source, restored.world_size],
        "newest": newest,
        "again": [again.step, again.world_size, again.blocks_read],
    }
