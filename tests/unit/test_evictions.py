"""How a rank whose part of the job ends sees to it that the others know, without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from mpift.config import Config
from mpift.core.membership import initial_view
from mpift.transport.evictions import Evictions
from mpift.transport.messages import Kind, Message
from mpift.transport.processes import ProcessIdentity

WORD = "1 the others are behind a cut"


class EndedError(Exception):
    """This rank has ended itself."""


class Mailbox:
    """All that is sent has left at once."""

    def __init__(self) -> None:
        self.handlers: dict[Kind, Any] = {}
        self.sent: list[tuple[Kind, list[int]]] = []

    def register(self, kind: Kind, handler: Any) -> None:
        self.handlers[kind] = handler

    def send(
        self,
        kind: Kind,
        text: str,
        members: Iterable[int],
        sent: threading.Event | None = None,
        only_newest: bool = False,
    ) -> None:
        self.sent.append((kind, list(members)))
        if sent is not None:
            sent.set()


def end(code: int, reason: str) -> NoReturn:
    raise EndedError(code, reason)


@pytest.fixture
def evictions() -> Evictions:
    """Of member 1 of 4, each on its own node; it suspects member 2, and is told by member 0 that
    this part of the job ends."""
    identities = {m: ProcessIdentity(m, m, f"n{m}", f"n{m}", 1, 1) for m in range(4)}
    world = SimpleNamespace(member=1, view=initial_view(4), identities=identities)
    service = SimpleNamespace(world=world, mailbox=Mailbox(), fencing=SimpleNamespace())
    made = Evictions(service, Config(heartbeat_interval=3.0), lambda _: 0.0, end)  # type: ignore[arg-type]
    made.missed(2, for_good=False)
    take_end(made, 0)
    return made


def take_end(evictions: Evictions, sender: int) -> None:
    mailbox: Any = evictions._service.mailbox
    mailbox.handlers[Kind.END](Message(Kind.END, 0, sender, WORD))


def test_a_rank_ends_only_once_all_that_can_answer_have_said_that_they_end(
    evictions: Evictions,
) -> None:
    mailbox: Any = evictions._service.mailbox
    assert mailbox.sent[-1] == (Kind.END, [0, 1, 2, 3])
    evictions.turn(time.monotonic())
    take_end(evictions, 3)  # not of 2, which is silent
    with pytest.raises(EndedError):
        evictions.turn(time.monotonic())


def test_a_rank_that_ends_waits_for_no_answer_longer_than_a_second(evictions: Evictions) -> None:
    evictions.turn(time.monotonic())
    with pytest.raises(EndedError):
        evictions.turn(time.monotonic() + 1.1)


def test_a_rank_that_ends_and_meets_a_fault_does_so_at_once(evictions: Evictions) -> None:
    with pytest.raises(EndedError):
        evictions.fault()
