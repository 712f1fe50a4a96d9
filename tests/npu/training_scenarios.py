"""What ranks do in the tests of training on a simulated NPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mpift.torch as hvd
from mpift import Config, runtime
from tests.mpi.majority_scenarios import fall_behind

NPU = {"MPIFT_NPU_BACKEND": "mpift.testing.npu", "MPIFT_SIMULATED_NPUS": "4"}
STEPS = 6


def simulated() -> Any:
    import mpift.testing.npu

    return mpift.testing.npu


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5)
    )


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Run:
    """One training run; ``before(step)`` is called in each step after the gradients are there."""

    def __init__(
        self,
        device: str,
        optimizer: str = "sgd",
        before: Callable[[int], None] = lambda _step: None,
        guarded: bool = True,
        **options: Any,
    ) -> None:
        self.device = hvd.device(device)
        self.model = network().to(self.device)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer_of(self.model, optimizer), self.model.named_parameters(), **options
        )
        self.calls = 0
        self._before = before
        guard = hvd.retry_on_device_fault(self.optimizer) if guarded else lambda step: step
        self._step = guard(self._plain_step)

    def _plain_step(self, step: int) -> float:
        self.calls += 1
        generator = torch.Generator().manual_seed(100 * step + runtime.current().member)
        images = torch.randn(4, 1, 4, 4, generator=generator).to(self.device)
        labels = torch.randint(5, (4,), generator=generator).to(self.device)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self._before(step)
        self.optimizer.step()
        return loss.item()

    def train(self, steps: int = STEPS) -> dict[str, Any]:
        for step in hvd.rounds(range(steps), self.optimizer):
            self._step(step)
        state = [parameter.detach().cpu() for parameter in self.model.parameters()]
        digest = hvd.digest([state, self.optimizer.state_dict()])
        verification = self.optimizer._mpift_reducer.verification
        return {
            "digest": digest,
            "alike": len(set(hvd.allgather_object(digest))) == 1,
            "finite": all(bool(torch.isfinite(tensor).all()) for tensor in state),
            "calls": self.calls,
            "repairs": verification.repairs,
            "missed": sum(report.replayed for report in self.optimizer.rounds),
            "rounds": self.optimizer.rounds_applied,
        }


def same_as_the_cpu(optimizer: str) -> list[dict[str, Any]]:
    return [Run(device, optimizer).train() for device in ("cpu", "npu")]


def start() -> None:
    """Torch's autograd counts the devices at the first backward, so they have to be there."""
    hvd.init()
    hvd.device("npu")


def with_sgd() -> list[dict[str, Any]]:
    start()
    return same_as_the_cpu("sgd")


def with_adam() -> list[dict[str, Any]]:
    return same_as_the_cpu("adam")


def compressed() -> list[dict[str, Any]]:
    """Narrowed on the device, or by the host."""
    kinds = (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compressor("fp16", 20))
    return [Run("npu", compression=kind).train() for kind in kinds]


def accumulated() -> list[dict[str, Any]]:
    """A predivide factor, and sums."""
    found = []
    for device in ("cpu", "npu"):
        run = Run(device, gradient_predivide_factor=2.0)
        found.append(run.train())
    return found


def fault_at_every_call(code: int, first: int, last: int, stride: int) -> list[dict[str, Any]]:
    """Rank 1's device fails ``after`` so many more calls, in one run after the other."""
    start()
    found = [Run("cpu").train()]
    for after in range(first, last, stride):
        struck: list[int] = []
        run = Run("npu")

        def strike(step: int, after: int = after, struck: list[int] = struck) -> None:
            if step == 2 and runtime.current().member == 1 and not struck:
                struck.append(step)
                device = run.device.index  # noqa: B023, called before the next is made
                simulated().set_uce(device, 3 if code == 507053 else 0)
                simulated().inject(code, after=after, device=device, sticky=code == 507053)

        run._before = strike
        found.append({"after": after, **run.train()})
        simulated().clear_faults(run.device.index)
    return found


def fault_in_the_first_step() -> dict[str, Any]:
    """Before the optimizer has a state: then there are no tensors to take over."""
    hvd.init()

    def strike(step: int) -> None:
        if step == 0 and runtime.current().member == 1:
            simulated().set_uce(1, 3)
            simulated().inject(507053, device=1)

    return Run("npu", before=strike).train()


def device_lost(guarded: bool) -> dict[str, Any]:
    hvd.init()

    def strike(step: int) -> None:
        if step == 2 and runtime.current().member == 1:
            simulated().inject(507010, device=1, lost=True)

    return Run("npu", before=strike, guarded=guarded).train()


def fails_again_and_again() -> dict[str, Any]:
    hvd.init()

    def strike(step: int) -> None:
        if step == 2 and runtime.current().member == 1:
            raise RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 507046")

    return Run("npu", before=strike).train()


def late_and_dying() -> dict[str, Any]:
    """Rank 1 is late, and rank 2 dies; nobody waits."""
    hvd.init()
    holder: list[Run] = []

    def happen(step: int) -> None:
        member = runtime.current().member
        if step == 1 and member == 1:
            fall_behind(holder[0].optimizer, 1)
        if step == 3:
            hvd.barrier()
            if member == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    run = Run("npu", before=lambda _step: None, patience=0.0)
    holder.append(run)
    for step in hvd.rounds(range(10), run.optimizer):
        happen(step)
        run._step(step)
    return run.train(0)


def hanging_device() -> dict[str, Any]:
    hvd.init(config=Config.load(stall_warning_seconds=1.0, stall_timeout=3.0))

    def hang(step: int) -> None:
        if step == 2 and runtime.current().member == 1:
            simulated().hang(1)

    return Run("npu", before=hang).train()


def memory_runs_out() -> dict[str, Any]:
    device, run = hvd.device("npu"), Run("npu")
    run.train(1)
    simulated().set_capacity(torch.npu.memory_allocated(), device.index)
    try:
        run.train(1)
    except torch.OutOfMemoryError as error:
        text = str(error)
    simulated().set_capacity(1 << 30, device.index)
    return {"text": text, "calls": run.calls}


def what_counted() -> dict[str, Any]:
    """Rank 1's device fails where a script looks at its loss, after the step. Each rank's gradient
    of step s adds one to an element of its own, so the parameter tells what counted."""
    start()
    device, member = hvd.device("npu"), runtime.current().member
    weight = nn.Parameter(torch.zeros(2, STEPS, device=device))
    plain = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("weight", weight)], op=hvd.Sum)
    struck: list[int] = []

    @hvd.retry_on_device_fault(optimizer)
    def one(step: int) -> None:
        optimizer.zero_grad()
        mine = torch.zeros(2, STEPS)
        mine[member, step] = -1.0
        (weight * mine.to(device)).sum().backward()
        optimizer.step()
        if step == 2 and member == 1 and not struck:
            struck.append(step)
            raise RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 507046")

    for step in hvd.rounds(range(STEPS), optimizer):
        one(step)
    return {"counted": weight.detach().cpu().tolist(), "rounds": optimizer.rounds_applied}


def what_hooks_see() -> dict[str, Any]:
    """Rank 1 has to take its state over; the hooks of rounds look at it meanwhile."""
    struck: list[int] = []

    def strike(step: int) -> None:
        if step == 2 and runtime.current().member == 1 and not struck:
            struck.append(step)
            simulated().set_uce(run.device.index, 3)
            simulated().inject(507053, device=run.device.index)

    run = Run("npu", before=strike)
    seen: list[bool] = []
    run.optimizer.after_round(
        lambda _round: seen.append(all(bool(p.any()) for p in run.model.parameters()))
    )
    return {**run.train(), "seen": seen, "struck": bool(struck)}
