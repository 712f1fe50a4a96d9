"""What ranks do in the tests of verification: states are damaged, found, and repaired."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mpift
import mpift.torch as hvd
from mpift import runtime
from mpift.errors import InconsistentError
from mpift.transport.messages import Kind
from tests.mpi.majority_scenarios import fall_behind

DAMAGED, LATE = 2, 1


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def distributed(model: nn.Module, every: int = 1, **options: Any) -> Any:
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), verify_every=every, **options)


def backward(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(torch.full((3, 4), 0.1 * (number + hvd.rank() + 1))).sum().backward()


def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        backward(model, optimizer, number)
        optimizer.step()


def damage(tensor: torch.Tensor) -> None:
    """Flip a low bit of every element."""
    with torch.no_grad():
        tensor.view(torch.int32).bitwise_xor_(4)


def of(optimizer: Any) -> Any:
    return optimizer._mpift_reducer.verification


def is_here(member: int) -> bool:
    return runtime.current().member == member


def found(model: nn.Module, *optimizers: Any) -> dict[str, Any]:
    """Ends the training; digests, and what verification has counted."""
    hvd.shutdown()
    states = [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
    return {
        "digest": hvd.digest(states),
        "repairs": sum(of(optimizer).repairs for optimizer in optimizers),
        "examinations": sum(of(optimizer).examinations for optimizer in optimizers),
        "false_alarms": sum(of(optimizer).false_alarms for optimizer in optimizers),
        "checks": sum(of(optimizer).checks for optimizer in optimizers),
    }


# -- nobody dies -------------------------------------------------------------------------------


def flipped() -> dict[str, Any]:
    """A bit of a parameter, by the fault schedule."""
    hvd.init(config=mpift.Config.load(chaos=f"flip:{DAMAGED}@3"))
    model = net()
    optimizer = distributed(model, every=2)
    steps(model, optimizer, range(10))
    return found(model, optimizer)


def damaged_state() -> dict[str, Any]:
    """Optimizer state, the step count and the settings, on one rank and in one of two optimizers;
    of more than is hashed inline, with parameters that came later and one that isn't contiguous."""
    hvd.init()
    model, other = net(1 << 18), net()
    late = nn.Parameter(torch.ones(3, 5).t())
    optimizer, second = distributed(model), distributed(other)
    second.add_param_group({"params": [late]})
    for number in range(8):
        backward(model, optimizer, number)
        (other(torch.ones(1, 4)).sum() + late.sum()).backward()
        optimizer.step()
        second.step()
        second.zero_grad()
        if number == 2 and is_here(DAMAGED):
            of(second).settle()
            damage(second.state[late]["exp_avg"])
            damage(late.data)
            second.param_groups[0]["lr"] = 0.5
    summary = found(model, optimizer, second)
    summary["late"] = hvd.digest([late, second.param_groups[0]["lr"]])
    return summary


def temporarily_other() -> dict[str, Any]:
    """One rank's parameters are not its own when it takes a digest of them."""
    hvd.init()
    model = net()
    optimizer = distributed(model)
    swaps = iter([False, is_here(DAMAGED)])

    def swap(*_: Any) -> None:
        if next(swaps, False):
            with torch.no_grad():
                model[0].weight.neg_()

    handle = optimizer.register_step_post_hook(swap)
    steps(model, optimizer, range(1))
    backward(model, optimizer, 1)
    optimizer.step()
    if is_here(DAMAGED):
        with torch.no_grad():
            model[0].weight.neg_()
    handle.remove()
    hvd.barrier()
    steps(model, optimizer, range(2, 8))
    return found(model, optimizer)


def late_and_damaged() -> dict[str, Any]:
    """The rank that deviates is late for the round after which all examine their states."""
    hvd.init()
    model = net()
    optimizer = distributed(model, every=0, patience=0.0)
    steps(model, optimizer, range(1))
    hvd.barrier()
    if is_here(LATE):
        damage(model[0].bias.data)
        fall_behind(optimizer, 2)
    elif hvd.rank() == 0:
        steps(model, optimizer, range(1, 2))
        of(optimizer).request_examination()
    else:
        steps(model, optimizer, range(1, 2))
    steps(model, optimizer, range(2, 6))
    return found(model, optimizer)


def cannot_come() -> dict[str, Any]:
    """All but one wait in an operation before the step of the round that the other has replayed,
    and after which it waits for them."""
    hvd.init()
    model = net()
    optimizer = distributed(model, every=0, patience=0.0)
    steps(model, optimizer, range(1))
    hvd.barrier()
    if hvd.rank() == 0:
        of(optimizer).request_examination()
    if is_here(LATE):
        damage(model[0].bias.data)
        fall_behind(optimizer, 1)
    for number in range(1, 6):
        backward(model, optimizer, number)
        optimizer.synchronize()
        hvd.allreduce(torch.ones(1))
        optimizer.step()
    summary = found(model, optimizer)
    summary["declined"] = of(optimizer)._fruitless, len(of(optimizer)._declined)
    return summary


def scaled_and_skipped() -> dict[str, Any]:
    """Mixed precision with overflows, a frozen parameter, and rounds whose step is left out."""
    hvd.init()
    model = net()
    model[0].bias.requires_grad_(False)
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(8):
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), 0.1 * (number + hvd.rank() + 1))).sum()
        if number % 3 == 1 and hvd.rank() == 1:
            loss = loss * float("inf")
        if number % 4 == 3:
            scaler.scale(loss).backward()
            optimizer.synchronize()
            optimizer.zero_grad()  # left out
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return found(model, optimizer)


def notes() -> dict[str, Any]:
    """A script keeps notes in a parameter group of one rank; another has its keys in another order
    and was loaded with a scheduler's."""
    hvd.init()
    model = net()
    optimizer = distributed(model)
    if is_here(LATE):
        state = optimizer.state_dict()
        keys = [*state["param_groups"][0].items(), ("initial_lr", 0.1)]
        state["param_groups"][0] = dict(reversed(keys))
        optimizer.load_state_dict(state)
    for number in range(8):
        if is_here(DAMAGED):
            optimizer.param_groups[0]["last_loss"] = float(number)
        steps(model, optimizer, range(number, number + 1))
    return found(model, optimizer)


def until_examined(model: nn.Module, optimizer: Any, before: Callable[[], None]) -> None:
    """Steps until all have examined their states once more; the damaged rank does something before
    each."""
    examinations, number = of(optimizer).examinations, optimizer.rounds_applied
    for _ in range(60):
        if is_here(DAMAGED):
            before()
        steps(model, optimizer, range(number, number + 1))
        number += 1
        if of(optimizer).examinations > examinations:
            break


def other_settings() -> dict[str, Any]:
    """One rank has other settings again and again, oftener than a rank may be repaired: such as
    change nothing else, such as change the parameters too, and such as are gone when all look."""
    hvd.init(config=mpift.Config.load(max_repairs=1))
    model, other = net(), net()
    optimizer, unchecked = distributed(model), distributed(other, every=0)
    group = unchecked.param_groups[0]
    changes = [{"foreach": False}, {"foreach": False}, {"lr": 0.5}, {"lr": 0.25}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for change in changes:
            until_examined(
                model, optimizer, lambda change=change: optimizer.param_groups[0].update(change)
            )
        for number in range(0, 60, 20):
            group["lr"] = 0.5 if is_here(DAMAGED) else 0.01
            steps(other, unchecked, range(number, number + 1))
            group["lr"] = 0.01
            of(unchecked).request_examination()
            until_examined(other, unchecked, lambda: None)
    said = [str(warning.message) for warning in caught if "after round" in str(warning.message)]
    return {**found(model, optimizer), "unchecked": found(other, unchecked), "said": said}


def other_groups() -> dict[str, Any]:
    """One rank has the same parameters in two groups."""
    hvd.init(config=mpift.Config.load(max_repairs=1))
    model = net()
    whole = list(model.parameters())
    groups = [{"params": whole[:2]}, {"params": whole[2:]}] if is_here(DAMAGED) else whole
    plain = torch.optim.SGD(groups, lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), verify_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            until_examined(model, optimizer, lambda: None)
    said = [str(warning.message) for warning in caught if "after round" in str(warning.message)]
    hvd.shutdown()
    return {
        "digest": hvd.digest(model.state_dict()),
        "repairs": of(optimizer).repairs,
        "said": said,
    }


def refused(groups: dict[int, int]) -> str:
    """What is said where members (by what was done to them) hold states without a majority."""
    hvd.init()
    model = net()
    optimizer = distributed(model)
    steps(model, optimizer, range(2))
    for _ in range(groups.get(runtime.current().member, 0)):
        with torch.no_grad():
            model[2].weight.add_(0.5)
    said = ""
    try:
        steps(model, optimizer, range(2, 8))
    except InconsistentError as error:
        said = str(error)
    hvd.shutdown()
    return said


def two_against_two() -> str:
    return refused({2: 1, 3: 1})


def two_and_one_and_one() -> str:
    return refused({2: 1, 3: 2})


# -- somebody dies -----------------------------------------------------------------------------


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_after_the_other(ranks: int) -> dict[str, Any]:
    """The last member deviates again and again, the one before it dies while it is repaired, and
    the first dies as it gives its state to a third."""
    hvd.init(config=mpift.Config.load(max_repairs=1))
    offender, dies_repaired, repaired, donor = ranks - 1, ranks - 2, ranks - 3, 0
    transfer, mailbox = runtime.current().transfer, runtime.current()._service.mailbox
    model = net(1 << 20)  # so that several donors are asked
    optimizer = distributed(model)
    sizes = []

    def train(until: Callable[[], bool]) -> None:
        """Whoever sees it goes on until the round that all see it after."""
        number = optimizer.rounds_applied
        for _ in range(60):
            steps(model, optimizer, range(number, number + 1))
            number += 1
            if until():
                break
        sizes.append(hvd.size())

    train(lambda: optimizer.rounds_applied == 2)
    for _ in range(2):
        before = of(optimizer).examinations
        if is_here(offender):
            damage(model[0].weight.data)
        train(lambda before=before: of(optimizer).examinations > before)  # type: ignore[misc]
    for victim, prepare in (
        (dies_repaired, lambda: setattr(transfer, "fetch", die)),
        (repaired, lambda: None),
    ):
        before = of(optimizer).examinations
        if is_here(donor) and victim == repaired:
            runtime.current().on_service(lambda: mailbox.register(Kind.STRIPE_WANTED, die))
        if is_here(victim):
            prepare()
            damage(model[0].weight.data)
        train(lambda before=before: of(optimizer).examinations > before)  # type: ignore[misc]
    return {**found(model, optimizer), "sizes": sizes}
