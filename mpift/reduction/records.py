"""Records: what the participants of a round gave their optimizers, for ranks that missed the round.

A rank that took no part has the round's result, but not what the script made of it (clipping, the
learning rate, a skipped step). It asks the others one after the other. Whoever ran its own code for
the round has a record, or will have one; whoever missed the round too says so. If all others of a
view say that, nobody is left who knows, and all that lack it go by the same rule: the result as it
is, with the settings of the round before. A rank that runs its own code but was late before asks
too, as its script's counters may be behind; where all that run theirs were late, the script of the
lowest member counts.

Records are bytes here. A part of the service's loop; ``fetch`` is called by the main thread.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpift.errors import MpiftError
from mpift.transport.messages import Kind, Message
from mpift.transport.parcels import Parcel
from mpift.transport.part import Post
from mpift.transport.world import World

_NOTHING = np.empty(0, np.uint8)
_AGAIN_SECONDS = 0.002


class Answer(enum.IntEnum):
    """What a rank says when it is asked for a record."""

    MISSED = 0  # it ran no code of its own for this round, and won't
    NOT_YET = 1
    HERE = 2
    LATE = 3  # it runs its own code, but was late, and asks itself
    AWAY = 4  # not yet, and it waits in an operation before: perhaps for the one that asks


class RecordWithheldError(MpiftError):
    """A rank will have the record only after an operation that it waits in. Whoever asked has to go
    on without the round, or both might wait for each other."""


@dataclass(slots=True)
class _Fetch:
    lane: int
    round: int
    own: bool
    found: np.ndarray | None = None
    done: threading.Event = field(default_factory=threading.Event)
    missed: set[int] = field(default_factory=set)  # members that said so, in this view
    late: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    withheld: bool = False
    to_ask: list[int] = field(default_factory=list)
    asked: int | None = None
    again_at: float = 0.0


class Records:
    """See the module's docstring. ``away``: whether this rank waits in an operation."""

    def __init__(self, post: Post, away: Callable[[], bool]) -> None:
        self._post = post
        self._away = away
        self._world: World
        self._sources: dict[int, Callable[[int], bool | None]] = {}
        self._kept: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()
        self._fetch: _Fetch | None = None
        post.mailbox.register(Kind.RECORD_WANTED, self._give)
        post.parcels.register(Kind.RECORD, self._take)

    def open(self, lane: int, is_own: Callable[[int], bool | None]) -> None:
        """Answer for ``lane`` too: ``is_own(round)`` says whether this rank runs its own code for a
        round; None if that is open."""
        self._sources[lane] = is_own

    # -- for the main thread -----------------------------------------------------------------------

    def put(self, lane: int, round_: int, record: np.ndarray, kept: int) -> None:
        """Keep ``record`` (uint8[n]) for the next ``kept`` rounds."""
        with self._lock:
            self._kept[lane, round_] = record
            for key in [k for k in self._kept if k[0] == lane and k[1] < round_ - kept]:
                del self._kept[key]

    def fetch(self, lane: int, round_: int, own: bool = False) -> np.ndarray | None:
        """The record of a completed round, from whoever has it; None if nobody is left who does.
        ``own``: this rank runs its own code for the round; None then says that this counts. Raises
        ``RecordWithheldError`` if others have to go through an operation first."""
        with self._lock:
            mine = self._kept.get((lane, round_))
        if mine is not None:
            return mine
        fetch = _Fetch(lane, round_, own)

        def begin() -> None:
            self._fetch = fetch
            self._restart()

        self._post.call(begin)
        fetch.done.wait()
        if fetch.withheld:
            raise RecordWithheldError(f"the record of round {round_} comes after an operation")
        return fetch.found

    # -- asking ------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Ask everybody of the present view, the next in rank order first."""
        fetch, view = self._fetch, self._world.view
        if fetch is None:
            return
        here = view.rank_of(self._world.member)
        fetch.missed, fetch.late, fetch.away = set(), set(), set()
        fetch.to_ask = [*view.members[here + 1 :], *view.members[:here]]
        self._ask_next()

    def _ask_next(self) -> None:
        fetch = self._fetch
        assert fetch is not None
        fetch.asked = None
        if fetch.to_ask:
            fetch.asked = fetch.to_ask.pop(0)
            text = f"{fetch.lane} {fetch.round}"
            self._post.mailbox.send(Kind.RECORD_WANTED, text, [fetch.asked])
            return
        here = self._world.member
        others = set(self._world.view.members) - {here}
        mine_counts = fetch.own and here < min(fetch.late, default=here + 1)
        if others <= (fetch.missed | fetch.late if mine_counts else fetch.missed):
            self._end(None)
        elif fetch.away and not fetch.own:
            fetch.withheld = True
            self._end(None)
        else:
            fetch.again_at = time.monotonic() + _AGAIN_SECONDS

    def _take(self, parcel: Parcel) -> None:
        lane, round_, answer = map(int, parcel.text.split())
        fetch = self._fetch
        asked = fetch is not None and (fetch.lane, fetch.round) == (lane, round_)
        if fetch is None or not asked or fetch.asked != parcel.sender:
            return
        if answer == Answer.HERE:
            # At once, for whoever asks next: the rank that gave it may die now.
            with self._lock:
                self._kept[lane, round_] = parcel.data
            self._end(parcel.data)
            return
        fetch.late.discard(parcel.sender)
        fetch.away.discard(parcel.sender)
        if answer == Answer.MISSED:
            fetch.missed.add(parcel.sender)
        elif answer == Answer.LATE:
            fetch.late.add(parcel.sender)
        elif answer == Answer.AWAY:
            fetch.away.add(parcel.sender)
        self._ask_next()

    def _end(self, found: np.ndarray | None) -> None:
        fetch, self._fetch = self._fetch, None
        assert fetch is not None
        fetch.found = found
        fetch.done.set()

    # -- answering ---------------------------------------------------------------------------------

    def _give(self, message: Message) -> None:
        self._post.hurry()
        lane, round_ = map(int, message.text.split())
        with self._lock:
            record = self._kept.get((lane, round_))
        answer = self._without(lane, round_) if record is None else Answer.HERE
        data = _NOTHING if record is None else record
        text = f"{lane} {round_} {int(answer)}"
        self._post.parcels.send(Kind.RECORD, message.sender, text, data)

    def _without(self, lane: int, round_: int) -> Answer:
        """Why there is no record of this round here."""
        fetch = self._fetch
        own = self._sources[lane](round_) if lane in self._sources else None
        if fetch is not None and fetch.own and (fetch.lane, fetch.round) == (lane, round_):
            return Answer.LATE
        if own is None:
            return Answer.NOT_YET
        if own:
            return Answer.AWAY if self._away() else Answer.NOT_YET
        return Answer.MISSED

    # -- the service's loop ------------------------------------------------------------------------

    @property
    def requests(self) -> Sequence[Any]:
        return ()

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def turn(self, now: float) -> None:
        fetch = self._fetch
        if fetch is not None:
            self._post.hurry()
        if fetch is None or fetch.asked is not None:
            return
        if now >= fetch.again_at:
            here = self._world.member
            asked = [m for m in self._world.view.members if m != here]
            fetch.to_ask = [m for m in asked if m not in fetch.missed]
            self._ask_next()

    def fault(self) -> None:
        pass

    def install(self, world: World) -> None:
        self._world = world
        self._restart()
