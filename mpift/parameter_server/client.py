"""The client's side: pushes and pulls of this rank, sent to whoever is the primary of each key.

A call goes to several servers, and is over when each key is answered. In a new view what is still
open is sent again, to those who are primaries now, under the same number, so that a push counts
once. A pull of a version that isn't there yet is asked for again, a little later each time: servers
keep no list of readers.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpift.core.membership import View
from mpift.core.versions import Outcome
from mpift.errors import KeyLostError, StalePushError, VersionTimeoutError
from mpift.parameter_server.letters import Letter
from mpift.parameter_server.placement import holders
from mpift.parameter_server.tables import Found, Table, Verb, grouped

_AGAIN_SECONDS = 0.001
_AGAIN_SECONDS_MAX = 0.05


class Versioned(NamedTuple):
    """A value, and its version's number."""

    value: Any
    version: int


class Pushed(NamedTuple):
    """What became of a push of several keys: by key the version that it made, and for those that
    were refused the error that says why."""

    versions: dict[str, int]
    stale: dict[str, StalePushError]


@dataclass(slots=True, eq=False)
class _Call:
    """One push or pull. ``asks`` has the base (push) or least version (pull) of each key that has
    no answer yet; ``payload`` the settings and update of each (push)."""

    verb: Verb
    number: int
    asks: dict[int, int]
    payload: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    answers: dict[int, tuple[int, int, np.ndarray | None]] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)  # keys to ask for once more
    newest: dict[int, int] = field(default_factory=dict)  # of those that weren't new enough
    again_at: float = 0.0
    pause_seconds: float = _AGAIN_SECONDS
    done: threading.Event = field(default_factory=threading.Event)


class Client:
    """``push`` and ``pull`` are called by any thread of the script, the rest on the service
    thread."""

    def __init__(
        self,
        table: Table,
        member: int,
        send: Callable[[int, Letter], None],
        call: Callable[[Callable[[], None]], None],
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._table = table
        self._member = member
        self._send = send
        self._call = call
        self._waiting = waiting
        self._numbers = itertools.count(1)
        self._pushing = threading.Lock()  # one push at a time: servers remember the last of each
        self._calls: dict[int, _Call] = {}
        self._view: View

    # -- for the script ----------------------------------------------------------------------------

    def push(self, items: dict[int, tuple[int, np.ndarray, np.ndarray]]) -> Pushed:
        """Push (base, settings, update) for each key; returns once all are answered. Raises
        ``KeyLostError`` then, if any key is lost."""
        with self._pushing:
            asks = {index: base for index, (base, _, _) in items.items()}
            payload = {index: (row, update) for index, (_, row, update) in items.items()}
            call = _Call(Verb.PUSH, next(self._numbers), asks, payload)
            self._carry_out(call, None)
        pushed = Pushed({}, {})
        for index, (outcome, number, _) in call.answers.items():
            name = self._table.keys[index].name
            if outcome == Outcome.COMMITTED:
                pushed.versions[name] = number
            elif outcome == Outcome.STALE:
                pushed.stale[name] = self._stale(name, items[index][0], number)
        self._check_lost(call, Outcome.LOST)
        return pushed

    def pull(self, least: dict[int, int], timeout: float) -> dict[int, tuple[np.ndarray, int]]:
        """By key (value, version): the newest, of at least the version given. Raises
        ``VersionTimeoutError`` if one isn't there after ``timeout`` seconds, and ``KeyLostError``
        if any key is lost."""
        call = _Call(Verb.PULL, next(self._numbers), dict(least))
        self._carry_out(call, timeout if max(least.values(), default=0) > 0 else None)
        self._check_lost(call, Found.LOST)
        found = {}
        for index, (_, number, array) in call.answers.items():
            key = self._table.keys[index]
            assert array is not None
            found[index] = (array.view(key.dtype).reshape(key.shape), number)
        return found

    def _carry_out(self, call: _Call, timeout: float | None) -> None:
        if not call.asks:
            return

        def begin() -> None:
            self._calls[call.number] = call
            self._ask(call, call.asks)

        self._call(begin)
        try:
            with self._waiting():
                done = call.done.wait(timeout)
        finally:
            # Also if the script is interrupted in the middle of it.
            self._call(lambda: self._withdraw(call))
        if not done:
            raise self._too_late(call, timeout)

    def _too_late(self, call: _Call, timeout: float | None) -> VersionTimeoutError:
        words = []
        for index, least in list(call.asks.items()):
            newest = call.newest.get(index)
            found = "its server has not answered" if newest is None else f"the newest is {newest}"
            words.append(f"version {least} of {self._table.keys[index].name!r} ({found})")
        return VersionTimeoutError(
            f"not there after {timeout} s: {', '.join(words)}; ask for an older version, or give a"
            " longer timeout"
        )

    def _withdraw(self, call: _Call) -> None:
        self._calls.pop(call.number, None)

    def _stale(self, name: str, base: int, newest: int) -> StalePushError:
        if base > newest:
            return StalePushError(
                f"the push to {name!r} was computed at version {base}, but the newest one is"
                f" {newest}: give the version that pull returned"
            )
        return StalePushError(
            f"the push to {name!r} was computed at version {base}, {newest - base} behind the"
            f" newest, {newest}; staleness={self._table.staleness} allows"
            f" {self._table.staleness}: pull, and compute it anew"
        )

    def _check_lost(self, call: _Call, lost: int) -> None:
        indices = sorted(index for index, (said, _, _) in call.answers.items() if said == lost)
        names = [self._table.keys[index].name for index in indices]
        if names:
            raise KeyLostError(tuple(names))

    # -- asking ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an answer is expected."""
        return bool(self._calls)

    def change(self, view: View) -> None:
        """A new view is in force: what has no answer is asked anew, in the order of the calls."""
        self._view = view
        for number in sorted(self._calls):
            call = self._calls[number]
            call.again.clear()
            self._ask(call, call.asks)

    def turn(self, now: float) -> None:
        """Ask once more for versions that weren't there."""
        for call in list(self._calls.values()):
            if call.again and now >= call.again_at:
                again, call.again = call.again, set()
                self._ask(call, again)

    def _ask(self, call: _Call, indices: Iterable[int]) -> None:
        by_primary: dict[int, list[int]] = defaultdict(list)
        for index in indices:
            primary, _ = holders(self._table.keys[index].name, self._view.members)
            by_primary[primary].append(index)
        for primary, mine in by_primary.items():
            numbers = [call.number]
            for index in mine:
                numbers += [index, call.asks[index]]
            arrays = []
            if call.verb is Verb.PUSH:
                settings = np.concatenate([call.payload[index][0] for index in mine])
                arrays = [settings, *(call.payload[index][1] for index in mine)]
            letter = Letter(self._member, self._table.number, call.verb, numbers, arrays)
            self._send(primary, letter)

    def handle(self, letter: Letter) -> None:
        """Take in a server's answer."""
        number, *rest = letter.numbers
        call = self._calls.get(number)
        if call is None:
            return
        arrays = iter(letter.arrays)
        for index, said, version in grouped(rest, 3):
            here = call.verb is Verb.PULL and said == Found.HERE
            array = next(arrays) if here else None
            if index not in call.asks:
                continue
            if call.verb is Verb.PULL and said == Found.NOT_YET:
                call.again.add(index)
                call.newest[index] = version
                continue
            call.answers[index] = (said, version, array)
            del call.asks[index]
        if call.again:
            call.again_at = time.monotonic() + call.pause_seconds
            call.pause_seconds = min(2 * call.pause_seconds, _AGAIN_SECONDS_MAX)
        if not call.asks:
            self._withdraw(call)
            call.done.set()
