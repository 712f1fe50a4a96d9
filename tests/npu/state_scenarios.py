"""What ranks do in the tests of states on a simulated NPU: everything but gradients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpift
import mpift.torch as hvd
from mpift import runtime
from mpift.checkpoint import CheckpointManager
from mpift.parameter_server import Versioned
from tests.mpi.majority_scenarios import fall_behind
from tests.npu.training_scenarios import simulated

FOLDER_VARIABLE = "MPIFT_TEST_FOLDER"
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)


def net(device: torch.device, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)).to(device)


def distributed(model: nn.Module, **options: Any) -> Any:
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def backward(model: nn.Module, optimizer: Any, number: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    device = next(model.parameters()).device
    value = factor * 0.1 * (number + hvd.rank() + 1)
    model(torch.full((3, 4), value, device=device)).sum().backward()


def state_digest(model: nn.Module, optimizer: Any) -> str:
    return hvd.digest([model.state_dict(), optimizer.state_dict()])


def devices_of(optimizer: Any) -> list[str]:
    """Of the tensors of an optimizer's state, by what they are."""
    found = (item for state in optimizer.state.values() for item in state.items())
    return sorted({f"{key} {value.device.type}" for key, value in found})


class Waiting(TorchDispatchMode):
    """What this thread asks of torch that it has to wait for: copies to the host that don't go to
    pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "_local_scalar_dense" in name and args[0].device.type == "npu":
            self.found.append(name)
        if "_to_copy" in name and args[0].device.type == "npu" and result.device.type == "cpu":
            self.found.append(name)
        if name.startswith("aten.copy_") and args[0].device.type == "cpu":
            asynchronous = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            if args[1].device.type == "npu" and not (asynchronous and args[0].is_pinned()):
                self.found.append(name)
        return result


# -- operations --------------------------------------------------------------------------------


def shapes(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(runtime.current().member)
    values = torch.randint(1, 7, (6, 4), generator=generator).to(dtype)
    return {
        "matrix": values,
        "transposed": values.t(),
        "strided": values[::2],
        "scalar": values[0, 0],
        "empty": values[:0],
    }


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "allreduce": hvd.allreduce,
    "sum": lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2.0),
    "max": lambda t: hvd.allreduce(t, op=hvd.Max),
    "allreduce_": hvd.allreduce_,
    "broadcast": lambda t: hvd.broadcast(t, 1),
    "broadcast_": lambda t: hvd.broadcast_(t, 1),
    "allgather": hvd.allgather,
}


def operations() -> list[str]:
    """What differs from the same on the CPU."""
    hvd.init()
    device = hvd.device("npu")
    wrong = []
    for dtype in DTYPES:
        for shape, here in shapes(dtype).items():
            # Made of the whole, so that strides are the same.
            there = torch.empty_strided(
                here.size(), here.stride(), dtype=dtype, device=device
            ).copy_(here)
            if hvd.digest(there) != hvd.digest(here):
                wrong.append(f"digest of {dtype} {shape}")
            for name, operation in OPERATIONS.items():
                expected, found = operation(here.clone()), operation(there.clone())
                same = found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
                if not same or found.device != device:
                    wrong.append(f"{name} of {dtype} {shape}: {found} for {expected}")
    return wrong


def objects() -> dict[str, Any]:
    """Ranks start alike; what comes from another rank is of no device."""
    hvd.init()
    device = hvd.device("npu")
    mine = {"x": torch.full((2,), float(hvd.rank()), device=device), "name": hvd.rank()}
    sent, gathered = hvd.broadcast_object(mine, 1), hvd.allgather_object(mine)
    model = net(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    for number in range(1 + hvd.rank()):
        backward(model, optimizer, number)
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    on_cpu = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return {
        "sent": [str(sent["x"].device), sent["x"].tolist(), sent["name"]],
        "gathered": [[str(each["x"].device), each["x"].tolist()] for each in gathered],
        "alike": len(set(hvd.allgather_object(state_digest(model, optimizer)))) == 1,
        "as_on_cpu": hvd.digest(on_cpu) == hvd.digest(model.state_dict()),
        "devices": devices_of(optimizer),
        "lr": optimizer.param_groups[0]["lr"],
    }


# -- states that stay alike --------------------------------------------------------------------


def flipped() -> dict[str, Any]:
    """A bit of a parameter on rank 2's device, by the fault schedule."""
    hvd.init(config=mpift.Config.load(chaos="flip:2@3"))
    model = net(hvd.device("npu"))
    optimizer = distributed(model, verify_every=1)
    for number in range(8):
        backward(model, optimizer, number)
        optimizer.step()
    verification = optimizer._mpift_reducer.verification
    hvd.shutdown()
    return {
        "digest": state_digest(model, optimizer),
        "repairs": verification.repairs,
        "false_alarms": verification.false_alarms,
        "checks": verification.checks,
        "devices": devices_of(optimizer),
    }


def checked_beside() -> dict[str, Any]:
    """What the training thread waits for when its state is checked."""
    hvd.init()
    model = net(hvd.device("npu"))
    optimizer = distributed(model, verify_every=0)
    verification = optimizer._mpift_reducer.verification
    waiting = Waiting()
    for number in range(3):
        backward(model, optimizer, number)
        optimizer.step()
        verification.every = 1
        with waiting:
            verification.round_applied(number, alarm=False)
        verification.every = 0
    found = list(waiting.found)
    with waiting:
        model[0].weight.cpu()
    seen = len(waiting.found) > len(found)
    hvd.shutdown()
    return {"checks": verification.checks, "waited_for": found, "seen": seen}


def fault_in_a_check() -> dict[str, Any]:
    """Rank 1's device fails while its state is read for a check: the next step is the one that
    finds out, and it is made again."""
    hvd.init()
    device = hvd.device("npu")
    model = net(device)
    optimizer = distributed(model, verify_every=1, quorum="all")
    verification = optimizer._mpift_reducer.verification
    calls, errors, held = [], [], threading.Event()

    @hvd.retry_on_device_fault(optimizer)
    def step(number: int) -> None:
        calls.append(number)
        backward(model, optimizer, number)
        optimizer.step()

    for number in range(8):
        strikes = number == 2 and runtime.current().member == 1
        if strikes:  # the helper comes to the next check when the fault is there
            verification._helper.submit(held.wait)
        step(number)
        if strikes:
            simulated().inject(507046, device=device.index, sticky=False)
            held.set()
            errors.append(str(verification._hashing.exception()))
    hvd.shutdown()
    return {"digest": state_digest(model, optimizer), "calls": calls, "errors": errors}


def late_and_clipped() -> dict[str, Any]:
    """The last rank is late, and replays rounds with gradients that the others' scripts have
    clipped."""
    hvd.init()
    model = net(hvd.device("npu"))
    optimizer = distributed(model, patience=0.0, max_lag=3)
    for number in hvd.rounds(range(8), optimizer):
        if hvd.rank() == hvd.size() - 1 and number in (1, 5):
            fall_behind(optimizer, 2)
        backward(model, optimizer, number, factor=100.0)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.shutdown()
    return {
        "digest": state_digest(model, optimizer),
        "replayed": sum(report.replayed for report in optimizer.rounds),
        "devices": devices_of(optimizer),
    }


# -- checkpoints -------------------------------------------------------------------------------


def saved_while_late() -> dict[str, Any]:
    """The last rank is late when a checkpoint is due, and saves while it catches up."""
    folder = os.environ[FOLDER_VARIABLE]
    hvd.init()
    device = hvd.device("npu")
    model = nn.Sequential(net(device), nn.BatchNorm1d(1).to(device))
    optimizer = distributed(model, patience=0.0, max_lag=3)
    manager = CheckpointManager(folder, every=4, when_busy="wait", keep=4)
    manager.follow(optimizer, {"model": model, "optimizer": optimizer})
    at: dict[int, str] = {}
    optimizer.after_round(lambda done: at.setdefault(done, trained_digest(model, optimizer)))
    for number in hvd.rounds(range(9), optimizer):
        if hvd.rank() == hvd.size() - 1 and number == 2:
            fall_behind(optimizer, 3)
        backward(model, optimizer, number)
        optimizer.step()
    manager.close()
    other = nn.Sequential(net(device), nn.BatchNorm1d(1).to(device))
    second = distributed(other)
    again = CheckpointManager(folder)
    found = {}
    for step in again.steps():
        again.restore(step, {"model": other, "optimizer": second})
        found[step] = trained_digest(other, second) == at[step]
    hvd.shutdown()  # closes the manager, too
    return {
        "steps": found,
        "replayed": sum(report.replayed for report in optimizer.rounds),
        "devices": devices_of(second),
    }


def trained_digest(model: nn.Module, optimizer: Any) -> str:
    return hvd.digest([dict(model.named_parameters()), optimizer.state_dict()])


# -- versions in memory ------------------------------------------------------------------------


def commits() -> dict[str, Any]:
    """Commits while training on a stream of the script's own; back to one; a rank that deviates."""
    hvd.init()
    device = hvd.device("npu")
    model = nn.Sequential(net(device), nn.BatchNorm1d(1).to(device))
    optimizer = distributed(model, quorum="all")
    state = hvd.elastic.TorchState(model, optimizer, kept=torch.zeros(2, device=device), batch=0)
    simulated().set_copy_seconds(0.02)  # the hasher is sure to come before the copy is there
    with torch.npu.stream(torch.npu.Stream()):
        for batch in range(3):
            backward(model, optimizer, batch)
            optimizer.step()
            state.batch = batch
            state.kept.add_(1.0)
            state.commit(wait=True)
        simulated().set_copy_seconds(0.0)
        committed, version = state_digest(model, optimizer), state.version
        backward(model, optimizer, 3)
        optimizer.step()
        state.kept.add_(1.0)
        moved = state_digest(model, optimizer)
        state.restore()
        restored = state_digest(model, optimizer)  # in this stream's order, as all of torch's work
    found = {
        "decided": version == 3000,
        "back": moved != committed and restored == committed,
        "kept": [str(state.kept.device) == str(device), state.kept.tolist()],
        "devices": devices_of(optimizer),
    }
    if hvd.rank() == 0:
        with torch.no_grad():
            model[0][0].weight.add_(1.0)
    state.sync()  # with a state that another rank holds
    found["alike"] = len(set(hvd.allgather_object(trained_digest(model, optimizer)))) == 1
    found["parameters"] = sorted({str(p.device) == str(device) for p in model.parameters()})
    found["kept after sync"] = [str(state.kept.device) == str(device), state.kept.tolist()]
    hvd.shutdown()
    return found


# -- mixed precision ---------------------------------------------------------------------------


def scaled(overflow_on: int) -> dict[str, Any]:
    """With an overflow on one rank, in the third step."""
    device = hvd.device("npu")
    model = net(device)
    optimizer = distributed(model, quorum="all")
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
    moved = []
    for number in range(6):
        before = hvd.digest(model.state_dict())
        optimizer.zero_grad()
        factor = float("inf") if number == 2 and hvd.rank() == overflow_on else 1.0
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = model(torch.full((3, 4), 0.1 * (number + hvd.rank() + 1), device=device))
        scaler.scale(out.float().sum() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved.append(hvd.digest(model.state_dict()) != before)
    return {
        "moved": moved,
        "scale": scaler.get_scale(),
        "alike": len(set(hvd.allgather_object(state_digest(model, optimizer)))) == 1,
        "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
    }


def mixed_precision() -> list[dict[str, Any]]:
    hvd.init()
    found = [scaled(overflow_on) for overflow_on in (0, 1)]
    hvd.shutdown()
    return found


# -- a parameter server ------------------------------------------------------------------------


def through_a_server() -> dict[str, Any]:
    """Rank 0 alone pushes, so the result is that of the plain optimizer."""
    hvd.init()
    device = hvd.device("npu")
    model, plain = net(device), net(device)
    optimizer = hvd.AsyncDistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    example = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        for number in range(5):
            for each, its in ((model, optimizer), (plain, example)):
                backward(each, its, number)
                its.step()
    hvd.barrier()
    optimizer.pull()
    server = hvd.ParameterServer({"x": torch.ones(3, device=device), "n": 1})
    hvd.barrier()
    if hvd.rank() == 1:
        server.push("x", torch.full((3,), 2.0, device=device), 0)
    hvd.barrier()
    pulled: Versioned = server.pull("x")
    close = all(
        torch.allclose(mine, its, rtol=1e-5)
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True)
    )
    found = {
        "digest": hvd.digest(model.state_dict()),
        "as_plain": close,
        "on_device": all(p.device == device for p in model.parameters()),
        "pulled": [str(pulled.value.device), pulled.value.tolist(), pulled.version],
    }
    server.close()
    optimizer.close()
    hvd.shutdown()
    return found
