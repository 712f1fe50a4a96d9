"""What ranks do in the tests of majority rounds in which one of them dies at a chosen moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpift.torch as hvd
from mpift import runtime
from mpift.transport.messages import Kind, Message
from tests.mpi.majority_scenarios import (
    LIMIT_SECONDS,
    clipped_step,
    digest_of,
    distributed,
    fall_behind,
    linear,
    one_step,
    reports_of,
)


def wait_until(condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def the_second_time(act: Callable[[], None]) -> Callable[[], None]:
    """A function that does it when it is called for the second time."""
    calls = iter([False, True])

    def call() -> None:
        if next(calls):
            act()

    return call


class Watched(torch.optim.SGD):
    """SGD that calls ``before`` in its own step, replayed ones included."""

    before: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.before is not None:
            self.before()
        return super().step(closure)


def found(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    hvd.shutdown()
    return {"digest": digest_of(model, optimizer), "reports": reports_of(optimizer)}


def alone_in_a_round(model: nn.Module, optimizer: Any, clip: str = "step") -> None:
    """Three rounds with all ranks, and one with rank 0 only."""
    for number in range(3):
        clipped_step(model, optimizer, number, clip)
    hvd.barrier()
    if hvd.rank() == 0:
        clipped_step(model, optimizer, 3, clip)
    else:
        fall_behind(optimizer, 4 - optimizer.rounds_applied)


def giver_dies_between_two(folder: str) -> dict[str, Any]:
    """Rank 0 alone took part in a round, rank 1 has its record from it, and it dies before rank 2
    has asked."""
    hvd.init()
    go, done = Path(folder, "go"), Path(folder, "done")
    model = linear()
    plain = Watched(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), quorum=1, patience=0.0)
    processes = hvd.allgather_object(os.getpid())
    alone_in_a_round(model, optimizer)
    if hvd.rank() == 0:
        time.sleep(LIMIT_SECONDS)

    def replaying() -> None:
        plain.before = None
        if runtime.current().member == 2:
            done.touch()
            return
        os.kill(processes[0], signal.SIGKILL)
        service = runtime.current()._service
        assert wait_until(lambda: service.world.view.size == 2)
        go.touch()
        wait_until(done.exists, 1.0)  # it may as well have to wait for this rank

    plain.before = replaying
    if runtime.current().member == 2:
        assert wait_until(go.exists)
    for number in range(4, 8):
        clipped_step(model, optimizer, number, "step")
    return found(model, optimizer)


def die_in_the_transfer(kind: Kind) -> dict[str, Any]:
    """Rank 0 alone took part in a round, and the others want the record of it. Rank 0 dies as it
    sends it (``RECORD_WANTED``), or rank 2 as it is about to receive it (``RECORD``)."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Linear(1 << 20, 1)  # so that a record is under way for a while
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-9), quorum=1, patience=0.0
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 1 << 20), float(number + 1))).sum().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step(0)
    hvd.barrier()
    member, mailbox = runtime.current().member, runtime.current()._service.mailbox
    records = runtime.current().gradients.records

    def give_and_die(message: Message) -> None:
        records._give(message)
        die()

    if member == 0:
        step(1)
    if kind is Kind.RECORD and member == 2:
        mailbox.register(kind, lambda _message: die())
    if kind is Kind.RECORD_WANTED and member == 0:
        mailbox.register(kind, give_and_die)
        time.sleep(LIMIT_SECONDS)
    if member != 0:
        fall_behind(optimizer, 2 - optimizer.rounds_applied)
    for number in range(2, 5):
        step(number)
    return found(model, optimizer)


def giver_dies_in_the_transfer() -> dict[str, Any]:
    return die_in_the_transfer(Kind.RECORD_WANTED)


def taker_dies_in_the_transfer() -> dict[str, Any]:
    return die_in_the_transfer(Kind.RECORD)


def late_rank_dies_in_its_replay() -> dict[str, Any]:
    """Rank 2 is three rounds behind, and dies in the second of them."""
    hvd.init()
    model = linear()
    plain = Watched(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), patience=0.0)
    for number in hvd.rounds(range(10)):
        if number == 3:
            hvd.barrier()  # or a rank 2 that is slow to start finds this round done without it
            if runtime.current().member == 2:
                fall_behind(optimizer, 3)
                plain.before = the_second_time(die)
        one_step(model, optimizer, number)
    return found(model, optimizer)


def coordinator_dies_before_its_nudge() -> dict[str, Any]:
    """A quorum waits for rank 3, and the coordinator dies while its patience lasts."""
    hvd.init()
    model = linear()
    optimizer = distributed(model, patience=1.0)
    closings = runtime.current()._service.closings

    def wait_and_die() -> None:
        if wait_until(lambda: closings._lanes[1].deadline is not None):
            die()

    for number in hvd.rounds(range(6)):
        if number == 2 and runtime.current().member == 0:
            hvd.barrier()
            threading.Thread(target=wait_and_die, daemon=True).start()
        elif number == 2:
            hvd.barrier()
            if runtime.current().member == 3:
                fall_behind(optimizer, 1)
        one_step(model, optimizer, number)
    return found(model, optimizer)


def two_and_then_one() -> dict[str, Any]:
    """Two ranks without patience, often late; one dies."""
    hvd.init()
    model = linear()
    optimizer = distributed(model, lr=0.001, patience=0.0)
    for number in hvd.rounds(range(20)):
        if number % 3 == hvd.rank():
            time.sleep(0.02)
        if number == 12 and runtime.current().member == 1:
            die()
        one_step(model, optimizer, number)
    return found(model, optimizer)
