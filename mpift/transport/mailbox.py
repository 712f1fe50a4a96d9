"""Control messages of this rank: one receive from anybody, sends that nobody waits for.

A part of the service's loop, and used on its thread only. What comes in goes to the handler that
is registered for its kind; messages of another epoch than the receiver's are dropped, but for those
that hold for life (``messages.LASTING``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpift.transport import messages
from mpift.transport.lane import Started
from mpift.transport.messages import Kind, Message
from mpift.transport.world import World

Handler = Callable[[Message], None]


class Mailbox:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.requests: list[Any] = []  # the receive, then the sends
        self._world: World
        self._handlers: dict[Kind, Handler] = {}
        self._inbox: Started
        self._outbox: list[tuple[Started, Kind, int, _Countdown | None]] = []
        self._quarantine: list[Started] = []

    def register(self, kind: Kind, handler: Handler) -> None:
        """Call ``handler`` for every message of this kind."""
        self._handlers[kind] = handler

    def install(self, world: World) -> None:
        """Begin to receive in the world's present view."""
        self._world = world
        self._receive()

    def send(
        self,
        kind: Kind,
        text: str,
        members: Iterable[int],
        sent: threading.Event | None = None,
        only_newest: bool = False,
    ) -> None:
        """Send to these members of the view, this one left out; ``sent`` is set once all is on its
        way. ``only_newest``: none to those whom an earlier one of this kind has not left for yet.
        """
        world = self._world
        data = messages.encode(Message(kind, world.view.epoch, world.member, text))
        waiting = {m for _, k, m, _ in self._outbox if k is kind} if only_newest else set()
        others = [m for m in members if m != world.member and m not in waiting]
        counter = _Countdown(len(others), sent) if sent is not None else None
        for member in others:
            rank = world.view.rank_of(member)
            request = world.control.Isend(data, dest=rank, tag=messages.MESSAGE_TAG)
            started = Started(request, (data,), sends=True)
            self._outbox.append((started, kind, member, counter))
            self.requests.append(started.watched)

    def complete(self, positions: Sequence[int]) -> None:
        """The requests at these positions of ``requests`` have completed."""
        for position in sorted(positions, reverse=True):
            if position == 0:
                continue
            *_, counter = self._outbox.pop(position - 1)
            if counter is not None:
                counter.set()
        arrived = bytes(self._inbox.buffers[0]) if 0 in positions else None
        if arrived is not None:
            self._receive()
        self.requests[1:] = [started.watched for started, *_ in self._outbox]
        if arrived is not None:
            message = messages.decode(arrived)
            if message is not None:
                self.deliver(message)

    def deliver(self, message: Message) -> None:
        """Give a message to its handler, as if it had just arrived."""
        if message.kind not in self._handlers:
            return
        if message.epoch == self._world.view.epoch or message.kind in messages.LASTING:
            self._handlers[message.kind](message)

    def turn(self, now: float) -> None:
        pass

    def fault(self) -> None:
        """All that is under way is lost, and its buffers stay as they are."""
        self._quarantine += [self._inbox, *(started for started, *_ in self._outbox)]
        self._outbox = []
        self.requests = []

    def _receive(self) -> None:
        buffer = bytearray(messages.MESSAGE_BYTES)
        request = self._world.receive(self._world.control, buffer, messages.MESSAGE_TAG)
        self._inbox = Started(request, (buffer,))
        self.requests[:1] = [request]


class _Countdown:
    """Sets ``event`` once it was itself set ``count`` times."""

    def __init__(self, count: int, event: threading.Event) -> None:
        self._left = count
        self._event = event
        if count == 0:
            event.set()

    def set(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._event.set()
