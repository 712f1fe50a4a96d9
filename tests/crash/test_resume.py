"""Training that goes on from a checkpoint is the training that was never interrupted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpift.checkpoint import CheckpointManager
from mpift.checkpoint.state import as_bytes

STEPS, SAVED_AT = 12, 5


class Run:
    """A training script with all that a step depends on, random numbers of three kinds included."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002, the global one is what scripts use
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.4),
            torch.nn.Linear(16, 3),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.step = 0
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "step": self.step,
            "losses": self.losses,
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            shift = random.gauss(0.0, 1.0) + np.random.normal()  # noqa: NPY002
            inputs = torch.randn(8, 6) + shift
            self.optimizer.zero_grad()
            loss = self.model(inputs).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.losses.append(loss.item())

    def everything(self) -> dict[str, Any]:
        """All that it consists of, and what each generator gives next; tensors as their bytes."""
        generators = (random.random(), float(np.random.random()), torch.rand(3))  # noqa: NPY002
        return {
            "model": _plain(self.model.state_dict()),
            "optimizer": _plain(self.optimizer.state_dict()),
            "scheduler": _plain(self.scheduler.state_dict()),
            "losses": self.losses,
            "generators": _plain(generators),
        }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), as_bytes(value).tobytes()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def test_resumed_training_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = Run(seed=1)
    whole.train(STEPS)
    expected = whole.everything()

    first = Run(seed=1)
    with CheckpointManager(tmp_path, encode=True) as checkpoints:
        first.train(SAVED_AT)
        assert checkpoints.save(first.step, first.state)
        first.train(2)  # what is trained meanwhile is not in it
        assert checkpoints.wait(20.0)

    resumed = Run(seed=2)
    resumed.train(3)
    with CheckpointManager(tmp_path) as checkpoints:
        restored = checkpoints.restore(state=resumed.state)
        assert restored is not None
        resumed.step, resumed.losses = restored.values["step"], restored.values["losses"]
        assert resumed.step == SAVED_AT
        resumed.train(STEPS - SAVED_AT)
    assert resumed.everything() == expected


def test_going_back_in_the_same_process_repeats_the_same_steps(tmp_path: Path) -> None:
    run = Run(seed=3)
    with CheckpointManager(tmp_path, keep=3) as checkpoints:
        run.train(2)
        assert checkpoints.save(run.step, run.state, wait=True)
        run.train(4)
        assert checkpoints.save(run.step, run.state, wait=True)
        once = run.everything()
        restored = checkpoints.restore(2, run.state)
        assert restored is not None
        run.step, run.losses = restored.values["step"], restored.values["losses"]
        run.train(4)
        assert run.everything() == once
        # The same step again is of another generation, and the newest.
        assert checkpoints.save(run.step, run.state, wait=True)
        assert checkpoints.steps() == [2, 6, 6]


def test_a_followed_optimizer_saves_by_itself_what_resumes_the_same(tmp_path: Path) -> None:
    run = Run(seed=4)
    with CheckpointManager(tmp_path, every=3, when_busy="wait") as checkpoints:
        checkpoints.follow(run.optimizer, run.state)
        run.train(7)
        checkpoints.wait(20.0)
        assert checkpoints.committed_step == 6
    run.losses = []
    expected = run.everything()
    resumed = Run(seed=5)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(state={**resumed.state, "losses": []}) is not None
    # The hook is called within a step, so the scheduler has one step to go.
    resumed.scheduler.step()
    resumed.train(1)
    resumed.losses = []
    assert resumed.everything() == expected
