"""What ranks do in the tests of majority rounds in which nobody dies.

A rank is late by an event, not by a time: its own service thread takes part in the rounds that its
script is late for, so it waits until so many of them are complete.
"""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import torch
from torch import nn

import mpift.torch as hvd

LIMIT_SECONDS = 30.0
STRAGGLER = 2


def fall_behind(optimizer: Any, rounds: int) -> None:
    """Return when ``rounds`` more rounds are complete than this rank has applied."""
    target = optimizer.rounds_applied + rounds
    if not optimizer._mpift_reducer.workload.wait(target, LIMIT_SECONDS):
        raise TimeoutError(f"round {target - 1} was not completed without this rank")


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def distributed(model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def one_step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.full((3, 4), float(number + hvd.rank() + 1))).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def digest_of(model: nn.Module, optimizer: Any) -> str:
    return hvd.digest([model.state_dict(), optimizer.state_dict(), optimizer.rounds_applied])


def reports_of(optimizer: Any) -> list[dict[str, Any]]:
    """Each round as this rank saw it."""
    return [
        {
            "participants": report.participants,
            "size": report.size,
            "late": list(report.late),
            "replayed": report.replayed,
        }
        for report in optimizer.rounds
    ]


def five_behind(plain_loop: bool) -> dict[str, Any]:
    """The straggler is five rounds behind when the others have finished."""
    hvd.init()
    model, steps = linear(), 5
    optimizer = distributed(model, patience=0.0, max_lag=5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    optimizer.register_scheduler(scheduler)
    for number in range(steps) if plain_loop else hvd.rounds(range(steps)):
        if hvd.rank() == STRAGGLER and number == 0:
            fall_behind(optimizer, steps)
        one_step(model, optimizer, number)
        scheduler.step()  # does nothing: the rounds do it
    at_the_end = "" if plain_loop else digest_of(model, optimizer)
    hvd.shutdown()
    return {
        "digest": digest_of(model, optimizer),
        "at_the_end": at_the_end,
        "lr": [optimizer.param_groups[0]["lr"], scheduler.get_last_lr(), scheduler.last_epoch],
        "applied": optimizer.rounds_applied,
        "reports": reports_of(optimizer),
    }


def five_behind_in_rounds() -> dict[str, Any]:
    return five_behind(plain_loop=False)


def five_behind_in_a_plain_loop() -> dict[str, Any]:
    return five_behind(plain_loop=True)


def everybody_needed() -> dict[str, Any]:
    """quorum="all", and the straggler is late by far more than patience."""
    hvd.init()
    model = linear()
    optimizer = distributed(model, quorum="all", patience=0.0)
    for number in range(3):
        if hvd.rank() == STRAGGLER:
            time.sleep(0.2)
        one_step(model, optimizer, number)
    hvd.shutdown()
    return {"digest": digest_of(model, optimizer), "reports": reports_of(optimizer)}


def evaluation() -> dict[str, Any]:
    """Rank 0 does something else between two epochs, for longer than the others' patience."""
    hvd.init()
    model = linear()
    optimizer = distributed(model, patience=0.0)
    applied = 0
    for epoch in range(2):
        for number in hvd.rounds(range(8)):
            one_step(model, optimizer, 8 * epoch + number)
        if epoch == 0:
            applied = optimizer.rounds_applied
            if hvd.rank() == 0:
                fall_behind(optimizer, 3)
    at_the_end = digest_of(model, optimizer)
    hvd.shutdown()
    return {"at_the_end": at_the_end, "reports": reports_of(optimizer)[applied:]}


def steps_alone() -> str:
    """One rank makes its steps while the others wait in an operation, and then the other way round:
    what it was declined counts in their rounds, and must not hold them up."""
    hvd.init()
    model, steps = linear(), 12
    optimizer = distributed(model, lr=0.001, patience=0.01)
    for first in (True, False):
        for number in range(steps if first == (hvd.rank() == 0) else 0):
            one_step(model, optimizer, number)
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    return digest_of(model, optimizer)


def operation_a_step(plain_loop: bool) -> dict[str, Any]:
    """The loss is averaged after each step; the straggler is late once."""
    hvd.init()
    model, steps = linear(), 12
    optimizer = distributed(model, lr=0.001, patience=1.5)
    losses = []
    for number in range(steps) if plain_loop else hvd.rounds(range(steps)):
        if hvd.rank() == STRAGGLER and number == 4:
            fall_behind(optimizer, 1)
        losses.append(hvd.allreduce(one_step(model, optimizer, number)).item())
    hvd.shutdown()
    return {
        "digest": digest_of(model, optimizer),
        "losses": losses,
        "reports": reports_of(optimizer),
    }


def operation_a_step_in_rounds() -> dict[str, Any]:
    return operation_a_step(plain_loop=False)


def operation_a_step_in_a_plain_loop() -> dict[str, Any]:
    return operation_a_step(plain_loop=True)


def uneven_loops() -> list[str]:
    """Ranks have 3, 2 and 1 batches, and then leave."""
    digests = []
    for quorum, clip in (("majority", ""), (2, "skip"), (0.5, "step"), ("all", "skip")):
        hvd.init()
        model = linear()
        optimizer = distributed(model, quorum=quorum)
        for number in range(3 - hvd.rank()):
            clipped_step(model, optimizer, number, clip)
        hvd.shutdown()
        digests.append(digest_of(model, optimizer))
    return digests


def clipped_step(model: nn.Module, optimizer: Any, number: int, clip: str) -> None:
    if not clip:
        one_step(model, optimizer, number)
        return
    optimizer.zero_grad()
    model(torch.full((3, 4), float(number + hvd.rank() + 1))).sum().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize() if clip == "skip" else contextlib.nullcontext():
        optimizer.step()


def skipped_steps() -> dict[str, Any]:
    """A script that leaves out steps whose gradients aren't finite, as many do."""
    hvd.init()
    found = {}
    for clear in ("zero_grad", "by_hand"):
        model = linear()
        optimizer = distributed(model)
        changed = []
        for number in range(5):
            before = hvd.digest(model.state_dict())
            model.zero_grad() if clear == "by_hand" else optimizer.zero_grad()
            factor = 1.0 if number == 3 else float("nan")
            (factor * model(torch.ones(3, 4))).sum().backward()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                with optimizer.skip_synchronize():
                    optimizer.step()
            changed.append(hvd.digest(model.state_dict()) != before)
        found[clear] = [changed, optimizer.rounds_applied, digest_of(model, optimizer)]
    hvd.shutdown()
    return found


def unequal_optimizers() -> list[str]:
    """One optimizer makes four steps where the other makes one; the straggler is late between."""
    hvd.init()
    often, seldom = linear(), linear()
    options = {"patience": 0.0, "max_lag": 1, "lr": 0.001}
    first, second = distributed(often, **options), distributed(seldom, **options)
    for turn in range(4):
        for number in range(4):
            one_step(often, first, 4 * turn + number)
        if hvd.rank() == STRAGGLER and turn == 1:
            time.sleep(0.1)  # the others may be in either optimizer's rounds when it comes
        one_step(seldom, second, turn)
    hvd.shutdown()
    return [digest_of(often, first), digest_of(seldom, second)]


def scaled_alone() -> dict[str, Any]:
    """A round with a scaled gradient that nobody's script unscales, since all have left by then."""
    hvd.init()
    model = linear()
    before = model.weight.detach().clone()
    optimizer = distributed(model, lr=0.01, patience=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for number in range(5 if hvd.rank() == STRAGGLER else 4):
        if number == 4:
            time.sleep(0.1)  # the others have left
        optimizer.zero_grad()
        scaler.scale(model(torch.full((3, 4), 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    hvd.shutdown()
    return {
        "digest": digest_of(model, optimizer),
        "moved": float((model.weight.detach() - before).abs().max()),
    }


def straggler() -> dict[str, Any]:
    """The straggler is late for some rounds; what the rounds say of it."""
    hvd.init()
    model = linear()
    optimizer = distributed(model, patience=0.0)
    late_for = []
    for number in hvd.rounds(range(12)):
        if hvd.rank() == STRAGGLER and number < 10 and len(late_for) < 3:
            late_for.append(optimizer.rounds_applied)
            fall_behind(optimizer, 1)
        one_step(model, optimizer, number)
    late_for = hvd.broadcast_object(late_for, STRAGGLER)
    hvd.shutdown()
    return {"late_for": late_for, "reports": reports_of(optimizer)}


def averaged() -> list[float]:
    """Where the weight has come to, and where averages over the participants would bring it."""
    hvd.init()
    weight = nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("weight", weight)], patience=0.5)
    for number in hvd.rounds(range(6)):
        if hvd.rank() == STRAGGLER and number == 2:
            fall_behind(optimizer, 1)
        optimizer.zero_grad()
        (-(hvd.rank() + 1) * weight).sum().backward()
        optimizer.step()
    hvd.shutdown()
    means = {3: 2.0, 2: 1.5}  # of 1, 2 and 3, and without the straggler's 3
    return [weight.item(), sum(means[report.participants] for report in optimizer.rounds)]


def operation_before_step() -> list[Any]:
    """All have their gradients in place, and wait long in an operation before they step."""
    hvd.init()
    model = linear()
    optimizer = distributed(model, max_lag=1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        if hvd.rank() == STRAGGLER:
            time.sleep(0.5)  # for others to look whether they should make room
        hvd.barrier()
        optimizer.step()
    hvd.shutdown()
    return [digest_of(model, optimizer), [report["replayed"] for report in reports_of(optimizer)]]


def scheduler_kept() -> dict[str, Any]:
    """A registered scheduler can be saved and loaded like any other."""
    hvd.init()
    model = linear()
    optimizer = distributed(model)
    scheduler = optimizer.register_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    for number in range(3):
        one_step(model, optimizer, number)
    saved = io.BytesIO()
    torch.save(scheduler.state_dict(), saved)
    saved.seek(0)
    scheduler.load_state_dict(torch.load(saved, weights_only=False))
    scheduler.step()
    one_step(model, optimizer, 3)
    hvd.shutdown()
    return {"epochs": scheduler.last_epoch, "lr": optimizer.param_groups[0]["lr"]}
