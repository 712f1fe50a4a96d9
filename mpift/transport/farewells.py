"""Last words: what a rank says to the others before it ends with a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpift.transport.mailbox import Mailbox
from mpift.transport.messages import Kind, Message
from mpift.transport.world import World


class Farewells:
    """Sends and collects them; ``call`` runs a function on the service thread."""

    requests: tuple[Any, ...] = ()

    def __init__(self, mailbox: Mailbox, call: Callable[[Callable[[], None]], None]) -> None:
        self.heard: dict[int, str] = {}  # by member
        self._mailbox = mailbox
        self._call = call
        self._world: World
        mailbox.register(Kind.FAREWELL, self._take)

    def say(self, text: str, timeout: float = 0.2) -> bool:
        """Tell all others why this rank is about to die; waits until that is sent, or not at all
        if the loop cannot. Returns whether all others have said the same by then: a fault that
        strikes everybody. For any thread but the service's."""
        sent = threading.Event()
        members = self._world.view.members
        self._call(lambda: self._mailbox.send(Kind.FAREWELL, text, members, sent))
        deadline = time.monotonic() + timeout
        sent.wait(timeout)
        while not (alone := self._all_said()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return alone

    def _all_said(self) -> bool:
        return set(self._world.view.members) <= {self._world.member, *self.heard}

    def _take(self, message: Message) -> None:
        self.heard[message.sender] = message.text

    # -- the service's loop ------------------------------------------------------------------------

    def install(self, world: World) -> None:
        self._world = world

    def complete(self, positions: object) -> None:
        pass

    def turn(self, now: float) -> None:
        pass

    def fault(self) -> None:
        pass
