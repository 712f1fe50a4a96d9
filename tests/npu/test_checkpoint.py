"""Checkpoints of states on the simulated NPU, in a process of its own: no MPI, no other ranks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpift.checkpoint import CheckpointManager
from mpift.checkpoint.state import random_states, set_random_states
from mpift.devices import backend
from mpift.errors import CheckpointError
from mpift.torch.state import write_bytes
from tests.npu.state_scenarios import Waiting
from tests.npu.training_scenarios import simulated

Make = Callable[..., CheckpointManager]
STEPS = 3


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "mpift.testing.npu")
    yield backend.select("npu", 0)
    simulated().reset()
    backend.select("npu", 0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Managers of one directory, closed in the end whatever has become of their saves."""
    made: list[CheckpointManager] = []

    def manager(**options: Any) -> CheckpointManager:
        made.append(CheckpointManager(tmp_path / "checkpoints", **options))
        return made[-1]

    yield manager
    for each in made:
        each._news.failure = ""
        each.close()


class Training:
    """A model with dropout and BatchNorm; each step draws from the device's generator too."""

    def __init__(self, device: str = "npu", seed: int = 0, capturable: bool = False) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.3)
        ).to(self.device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=0.1, capturable=capturable, foreach=False
        )
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def forward(self) -> torch.Tensor:
        noise = torch.rand(4, 6, device=self.device)
        return self.model(torch.randn(4, 6).to(self.device) + noise).square().sum()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def train(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step()

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.cpu().clone() for value in (*self.model.state_dict().values(), *moments)]

    def devices(self) -> list[str]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [v.device.type for v in (*self.model.state_dict().values(), *moments)]


def alike(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def saved_by(make: Make, training: Training, step: int = STEPS) -> list[torch.Tensor]:
    with make() as manager:
        assert manager.save(step, training.state, wait=True)
    return training.tensors()


# -- what is saved -----------------------------------------------------------------------------


def test_a_step_and_a_forward_right_after_a_save_change_nothing_of_what_is_saved(
    make: Make,
) -> None:
    training = Training()
    training.train()
    before = training.tensors()
    manager = make()
    simulated().set_copy_seconds(0.01)
    assert manager.save(STEPS, training.state)
    training.step()
    simulated().set_copy_seconds(0.0)
    assert manager.wait()
    assert not alike(training.tensors(), before)
    other = Training(seed=1)
    manager.restore(state=other.state)
    assert alike(other.tensors(), before)


def test_whatever_else_mpift_writes_waits_for_the_copy_too(make: Make) -> None:
    """A repair, a broadcast, a state taken from another rank: all by ``write_bytes``."""
    training = Training()
    manager = make()
    before = training.tensors()
    simulated().set_copy_seconds(0.01)
    assert manager.save(1, training.state)
    weight = training.model[1].weight  # not the first that is copied
    write_bytes(np.zeros(weight.nbytes, np.uint8), weight)
    simulated().set_copy_seconds(0.0)
    assert manager.wait()
    other = Training(seed=1)
    manager.restore(state=other.state)
    assert alike(other.tensors(), before)
    assert not weight.any()


def test_a_save_waits_for_no_device(make: Make) -> None:
    training = Training()
    training.train()
    manager = make()
    with Waiting() as waiting:
        assert manager.save(STEPS, training.state)
        assert not waiting.found
        training.model[0].weight.cpu()
        assert waiting.found  # it is seen
    assert manager.wait()


def test_training_goes_on_beside_the_copy_of_a_save(make: Make) -> None:
    """By events of the device: steps and copies together take little longer than the longer of
    both, not their sum."""
    width, layers, kernel = 64, 6, 0.004
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to("npu")
    manager = make()

    def forward(save: bool, step: int = 1) -> float:
        began, ended = (torch.npu.Event(enable_timing=True) for _ in range(2))
        inputs = torch.ones(1, width, device="npu")
        torch.npu.synchronize()
        began.record()
        if save:
            assert manager.save(step, {"model": model})
        simulated().set_kernel_seconds(kernel)
        with torch.no_grad():
            model(inputs)
        simulated().set_kernel_seconds(0.0)
        if save:
            manager._slots.fence()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    forward(save=True)
    assert manager.wait()
    computing = forward(save=False)
    copy = computing / (2 * layers)  # so that both last equally long
    simulated().set_copy_seconds(copy)
    together = forward(save=True, step=2)
    simulated().set_copy_seconds(0.0)
    serial = computing + 2 * layers * copy
    assert together / serial < 0.8, (together, computing, serial)
    assert manager.wait()


# -- what is restored --------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
def test_training_that_was_resumed_is_bit_for_bit_that_which_went_on(
    make: Make, capturable: bool
) -> None:
    training = Training(capturable=capturable)
    training.train()
    devices = training.devices()
    saved = saved_by(make, training)
    training.train()
    other = Training(seed=1, capturable=capturable)
    other.step()
    restored = make().restore(state=other.state)
    assert restored is not None
    assert alike(other.tensors(), saved)
    assert other.devices() == devices
    assert ("cpu" in devices) == (not capturable)  # where Adam counts its steps
    other.train()
    assert alike(other.tensors(), training.tensors())


def test_an_optimizer_without_state_gets_it_on_its_device(make: Make) -> None:
    training = Training()
    training.train()
    saved = saved_by(make, training)
    other = Training(seed=1)
    make().restore(state=other.state)
    assert alike(other.tensors(), saved)
    assert other.devices() == training.devices()


@pytest.mark.parametrize(("here", "there"), [("npu", "cpu"), ("cpu", "npu")])
def test_what_one_kind_of_device_has_saved_another_restores(
    make: Make, here: str, there: str
) -> None:
    training = Training(here)
    training.train()
    saved = saved_by(make, training)
    other = Training(there, seed=1)
    other.step()
    manager = make()
    assert manager.restore(state=other.state) is not None
    assert alike(other.tensors(), saved)
    assert set(other.devices()) == {there, "cpu"}
    loaded = manager.load(state=None)
    assert loaded is not None
    assert loaded.values["model"]["0.weight"].device.type == "cpu"


def test_only_what_was_chosen_is_restored(make: Make) -> None:
    training = Training()
    training.train()
    saved_by(make, training)
    other = Training(seed=1)
    bias = other.model[0].bias.cpu()
    make().restore(state=other.state, only=lambda name: name == "model/0.weight")
    assert torch.equal(other.model[0].weight.cpu(), training.model[0].weight.cpu())
    assert torch.equal(other.model[0].bias.cpu(), bias)
    assert not other.optimizer.state


def test_a_live_state_that_differs_in_a_few_bits_is_restored_whole(make: Make) -> None:
    training = Training()
    training.train()
    saved = saved_by(make, training)
    with torch.no_grad():
        training.model[0].weight[0, 0] += 1
        training.model[1].running_mean[1] += 1
    memory = training.model[0].weight.data_ptr()
    make().restore(state=training.state)
    assert alike(training.tensors(), saved)
    assert training.model[0].weight.data_ptr() == memory


def test_odd_tensors_of_a_device_are_saved_and_restored(make: Make) -> None:
    def odd(factor: int) -> dict[str, Any]:
        grid = torch.arange(12.0, device="npu").view(3, 4) * factor
        return {
            "values": [
                grid.t(),
                grid[::2],
                grid.bfloat16(),
                grid.to(torch.complex64).t(),
                torch.zeros(0, 3, device="npu"),
                torch.tensor(factor, device="npu"),
                torch.ones(5, dtype=torch.bool, device="npu:1"),
            ]
        }

    with make() as manager:
        assert manager.save(1, odd(3), wait=True)
    restored = make().restore(state=odd(2))
    assert restored is not None
    for found, expected in zip(restored.values["values"], odd(3)["values"], strict=True):
        assert found.device == expected.device
        assert torch.equal(found.cpu(), expected.cpu())


def test_the_generator_of_ones_own_device_goes_on_though_the_device_has_another_number() -> None:
    torch.npu.set_device(1)
    torch.npu.manual_seed(7)
    states = random_states()
    expected = torch.rand(3, device="npu").cpu()
    torch.npu.set_device(0)
    set_random_states(states)
    assert torch.equal(torch.rand(3, device="npu").cpu(), expected)


# -- what fails --------------------------------------------------------------------------------


def mend() -> None:
    torch.npu.restart_device(0)
    simulated().reset()


def heard(manager: CheckpointManager, step: int, training: Training) -> list[str]:
    """What the script is told at its next save, which succeeds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.save(step, training.state, wait=True)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("after", [0, 7, 17])
def test_a_device_that_fails_when_a_save_begins_costs_that_save_alone(
    make: Make, after: int
) -> None:
    training = Training()
    training.train()
    manager = make()
    assert manager.save(1, training.state, wait=True)
    simulated().inject(507046, after=after)
    manager.save(2, training.state)
    assert manager.wait()
    with pytest.raises(RuntimeError, match="507046"):
        training.train(9)
    mend()
    training.train()
    told = heard(manager, 3, training)
    assert any("step 2 was not saved" in text and "507046" in text for text in told), told
    assert manager.steps() == [1, 3]
    other = Training(seed=1)
    manager.restore(state=other.state)
    assert alike(other.tensors(), training.tensors())


def test_a_save_for_which_a_device_has_no_memory_costs_that_save_alone(make: Make) -> None:
    training = Training()
    training.train()
    manager = make()
    simulated().set_capacity(torch.npu.memory_allocated())
    assert not manager.save(1, training.state)
    simulated().reset()
    training.step()
    told = heard(manager, 2, training)
    assert any("step 1 was not saved" in text and "out of memory" in text for text in told), told
    assert manager.steps() == [2]


def test_a_save_for_which_there_is_no_pinned_memory_costs_that_save_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    manager = make()
    real = torch.empty

    def empty(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("cannot pin so much memory")
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        assert not manager.save(1, training.state)
    training.step()
    told = heard(manager, 2, training)
    assert any("step 1 was not saved" in text and "cannot pin" in text for text in told), told


@pytest.mark.parametrize("ram_every", [0, 1])
def test_a_device_that_stops_in_the_middle_of_a_copy_costs_that_save_alone(
    make: Make, ram_every: int, tmp_path: Path
) -> None:
    training = Training()
    training.train()
    manager = make(ram_every=ram_every, ram_directory=tmp_path if ram_every else None)
    assert manager.save(1, training.state, wait=True)
    simulated().set_copy_seconds(0.05)
    assert manager.save(2, training.state)
    torch.npu.stop_device(0)
    assert manager.wait()
    mend()
    training.train()
    told = heard(manager, 3, training)
    assert any("step 2 was not saved" in text and "FORCE STOP" in text for text in told), told
    other = Training(seed=1)
    manager.restore(state=other.state)
    assert alike(other.tensors(), training.tensors())


def test_what_failed_leaves_no_thread_and_no_region_behind(make: Make) -> None:
    training = Training()
    manager = make()
    simulated().set_copy_seconds(0.05)
    assert manager.save(1, training.state)
    torch.npu.stop_device(0)
    assert manager.wait()
    mend()
    for thread in threading.enumerate():
        if thread.name == "mpift-snapshot":
            thread.join(30)
            assert not thread.is_alive()
    paths = manager._slots.paths(0)
    with pytest.raises(CheckpointError, match="FORCE STOP"):
        manager.close()  # what was trained since the save before is saved nowhere
    assert not any(path.exists() for path in paths)
