"""All parameter servers of this process, as one part of the service's loop.

Brings letters to the server that they are for, lets both sides of each server know of new views,
and has the thread that applies updates. A letter for a server that this rank has yet to open is
kept until it has, or until the view ends.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpift.core.membership import View
from mpift.parameter_server.letters import Letter, Letters
from mpift.transport.part import Post
from mpift.transport.world import World


class Served(Protocol):
    """Both sides of one parameter server; called on the service thread only."""

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""

    def change(self, view: View) -> None:
        """A new view is in force; also called once at the beginning."""

    def handle(self, letter: Letter) -> None:
        """A letter has come."""

    def turn(self, now: float) -> None:
        """The loop comes round."""


class Hub:
    """A part; ``new_number`` and ``work`` may be called from other threads."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.requests: Sequence[Any] = ()
        self._letters = Letters(post.parcels, self._deliver)
        self._world: World
        self._served: dict[int, Served] = {}
        self._numbers = itertools.count()
        self._opened = 0  # servers with lower numbers are open or closed
        self._early: list[Letter] = []
        self._own: deque[Letter] = deque()  # to this rank itself
        self._delivering = False
        self._worker = Worker(post.call)
        self.work = self._worker.work

    def new_number(self) -> int:
        """The number of the next server; all ranks make theirs in the same order."""
        return next(self._numbers)

    def open(self, number: int, served: Served) -> None:
        """On the service thread: let ``served`` have what comes for the server of this number;
        numbers are opened in their order."""
        self._served[number] = served
        self._opened = number + 1
        served.change(self._world.view)
        early, self._early = self._early, []
        for letter in early:
            self._deliver(letter)

    def close(self, number: int) -> None:
        """On the service thread: nobody asks this server any more."""
        self._served.pop(number, None)

    def send(self, member: int, letter: Letter) -> None:
        """On the service thread; a letter to a member that is gone is dropped."""
        if member != self._world.member:
            if member in self._world.view.members:
                self._letters.send(member, letter)
            return
        self._own.append(letter)
        if not self._delivering:
            self._deliver_own()

    def _deliver_own(self) -> None:
        """One after the other, however deep the senders are in each other's calls."""
        self._delivering = True
        try:
            while self._own:
                self._deliver(self._own.popleft())
        finally:
            self._delivering = False

    def _deliver(self, letter: Letter) -> None:
        self.post.hurry()
        if letter.server >= self._opened:
            self._early.append(letter)
        elif letter.server in self._served:
            self._served[letter.server].handle(letter)

    # -- the service's loop ------------------------------------------------------------------------

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def turn(self, now: float) -> None:
        for served in self._served.values():
            served.turn(now)
            if served.busy:
                self.post.hurry()

    def fault(self) -> None:
        self._letters.forget()
        self._early.clear()
        self._own.clear()

    def install(self, world: World) -> None:
        self._world = world
        for served in self._served.values():
            served.change(world.view)


class Worker:
    """One thread, which does what it is given in that order. Batches, so that the thread of the
    loop is woken once for all updates of a letter."""

    def __init__(self, call: Callable[[Callable[[], None]], None]) -> None:
        self._call = call
        self._batches: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = (
            queue.SimpleQueue()
        )
        # A daemon, as the loop's thread is: both serve others up to the very end of the process.
        threading.Thread(target=self._run, name="mpift-updates", daemon=True).start()

    def work(self, batch: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do ``batch`` here, then ``then`` with its result on the service thread."""
        self._batches.put((batch, then))

    def _run(self) -> None:
        while True:
            batch, then = self._batches.get()
            try:
                result = batch()
            except BaseException as error:  # noqa: BLE001, it ends the process, loudly
                self._call(_raiser(error))
                return
            self._call(_with(then, result))


def _with(then: Callable[[Any], None], result: Any) -> Callable[[], None]:
    return lambda: then(result)


def _raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
