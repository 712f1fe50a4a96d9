"""Parcels: messages with an array behind them, for what does not fit into a control message.

A header goes through the mailbox, the bytes follow it on the same communicator with a tag of their
own. MPI keeps the order of messages from one rank, so headers and bytes pair up by counting, and
parcels from one rank are handed on in the order in which it sent them. A part of the service's
loop, and used on its thread only. What is under way when a view ends is lost, as with messages:
whoever needs an answer asks anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpift.transport.lane import Started
from mpift.transport.mailbox import Mailbox
from mpift.transport.messages import Kind, Message
from mpift.transport.world import World

_TAG = 4  # on the control communicator; messages, records and the alarm have others


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """What has arrived: ``text`` is at most 1000 bytes in UTF-8, ``data`` is uint8[n] and belongs
    to the receiver."""

    kind: Kind
    sender: int
    text: str
    data: np.ndarray


Handler = Callable[[Parcel], None]


@dataclass(slots=True, eq=False)
class _Coming:
    """A parcel whose header is here; ``started`` until its bytes are too."""

    parcel: Parcel
    started: Started | None


class Parcels:
    """See the module's docstring."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._world: World
        self._handlers: dict[Kind, Handler] = {}
        self._coming: list[_Coming] = []  # in the order of their headers
        self._going: list[Started] = []
        self._quarantine: list[Started] = []

    def register(self, kind: Kind, handler: Handler) -> None:
        """Call ``handler`` for every parcel of this kind, once all of it is here."""
        self._handlers[kind] = handler
        self._mailbox.register(kind, self._announced)

    def send(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        """Send ``data`` (contiguous, any dtype) to another member of the view. It must not be
        written to before the parcel has left, which the sender does not learn: so hand in an array
        that nobody writes to any more, or whose reading the receiver confirms."""
        if not data.flags.c_contiguous:
            raise ValueError("a parcel's array must be contiguous")
        flat = data.reshape(-1).view(np.uint8)
        self._mailbox.send(kind, f"{flat.nbytes} {text}", [member])
        if flat.nbytes:
            rank = self._world.view.rank_of(member)
            request = self._world.control.Isend(flat, dest=rank, tag=_TAG)
            self._going.append(Started(request, (flat,), sends=True))

    def _announced(self, message: Message) -> None:
        size, _, text = message.text.partition(" ")
        parcel = Parcel(message.kind, message.sender, text, np.empty(int(size), np.uint8))
        started = None
        if parcel.data.nbytes:
            rank = self._world.view.rank_of(message.sender)
            request = self._world.control.Irecv(parcel.data, source=rank, tag=_TAG)
            started = Started(request, (parcel.data,))
        self._coming.append(_Coming(parcel, started))
        self._hand_on()

    def _hand_on(self) -> None:
        """Give away what is here, but nothing before an earlier parcel of the same sender."""
        waiting: set[int] = set()
        for coming in tuple(self._coming):
            parcel = coming.parcel
            if coming.started is not None:
                waiting.add(parcel.sender)
            elif parcel.sender not in waiting:
                self._coming.remove(coming)
                self._handlers[parcel.kind](parcel)

    # -- the service's loop ------------------------------------------------------------------------

    @property
    def requests(self) -> Sequence[Any]:
        coming = [c.started.request for c in self._coming if c.started is not None]
        return [*coming, *(started.watched for started in self._going)]

    def complete(self, positions: Sequence[int]) -> None:
        moving = [c for c in self._coming if c.started is not None]
        done = set(positions)
        self._going = [g for i, g in enumerate(self._going) if len(moving) + i not in done]
        for position, coming in enumerate(moving):
            if position in done:
                coming.started = None
        self._hand_on()

    def turn(self, now: float) -> None:
        pass

    def fault(self) -> None:
        lost = [c.started for c in self._coming if c.started is not None]
        self._quarantine += [*lost, *self._going]
        self._coming, self._going = [], []

    def install(self, world: World) -> None:
        self._world = world
