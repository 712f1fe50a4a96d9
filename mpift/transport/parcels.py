"""Parcels: messages with an array behind them, for what does not fit into a control message.

A header goes through the mailbox and names the tag that the bytes have on the same communicator:
each parcel another, so bytes whose header nobody took are not mistaken for a later parcel's. MPI
keeps the order of messages from one rank, and parcels from one rank are handed on in the order in
which it sent them. A part of the service's loop, and used on its thread only. What is under way
when a view ends is lost, as with messages: whoever needs an answer asks anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpift.transport.lane import Started
from mpift.transport.mailbox import Mailbox
from mpift.transport.messages import Kind, Message
from mpift.transport.world import World

# On the control communicator; what has one tag for all lies below. MPI promises 32767.
_TAGS = range(64, 32768)


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """What has arrived: ``data`` is uint8[n] and belongs to the receiver."""

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
        # Sends and receives in the order of their start: what a part of the loop does before this
        # one hears of its completed requests only adds to the end.
        self._moving: list[Started] = []
        self._tags = itertools.cycle(_TAGS)
        self._quarantine: list[Started] = []

    def register(self, kind: Kind, handler: Handler) -> None:
        """Call ``handler`` for every parcel of this kind, once all of it is here."""
        self._handlers[kind] = handler
        self._mailbox.register(kind, self._announced)

    def send(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        """Send ``text`` (at most 950 bytes in UTF-8) and ``data`` (contiguous, any dtype) to
        another member of the view. The array must not be written to before the parcel has left,
        which the sender does not learn: so hand in one that nobody writes to any more, or whose
        reading the receiver confirms. After a fault MPI may still read it much later."""
        if not data.flags.c_contiguous:
            raise ValueError("a parcel's array must be contiguous")
        flat = data.reshape(-1).view(np.uint8)
        tag = next(self._tags)
        self._mailbox.send(kind, f"{flat.nbytes} {tag} {text}", [member])
        if flat.nbytes:
            rank = self._world.view.rank_of(member)
            request = self._world.control.Isend(flat, dest=rank, tag=tag)
            self._moving.append(Started(request, (flat,), sends=True))

    def _announced(self, message: Message) -> None:
        size, tag, text = message.text.split(" ", 2)
        parcel = Parcel(message.kind, message.sender, text, np.empty(int(size), np.uint8))
        started = None
        if parcel.data.nbytes:
            rank = self._world.view.rank_of(message.sender)
            request = self._world.control.Irecv(parcel.data, source=rank, tag=int(tag))
            started = Started(request, (parcel.data,))
            self._moving.append(started)
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
        return [started.watched for started in self._moving]

    def complete(self, positions: Sequence[int]) -> None:
        done = {id(self._moving[position]) for position in positions}
        self._moving = [started for started in self._moving if id(started) not in done]
        for coming in self._coming:
            if id(coming.started) in done:
                coming.started = None
        self._hand_on()

    def turn(self, now: float) -> None:
        pass

    def fault(self) -> None:
        self._quarantine += self._moving
        self._coming, self._moving = [], []

    def install(self, world: World) -> None:
        self._world = world
