"""Versions: ordered updates of one key, and their replication, as one member goes through them.

A key has a *primary*, which orders its updates, and a *backup*; both follow from the view. Rules:

* The primary applies one update after the other. Each makes a version: its number is one more than
  that of the version it was applied to.
* A version goes to the backup whole, with the last update of every client. It is *committed* once
  the backup says that it has it, and only then are its updates acknowledged and is it read. One
  version is on its way at a time; meanwhile newer ones are made, and the newest goes next. So some
  numbers are never read by anybody.
* Readers are no event: whoever asks gets ``committed``, which always is whole.
* An update whose base is more than ``staleness`` versions behind when its turn comes is refused.
* A new view: whoever was first in line among the old holders is the primary, since the order of
  members never changes and views only shrink. A backup that becomes the primary commits what it
  has; a new backup gets a copy, and nothing is committed before it has it. What waits for an answer
  is forgotten: clients ask again, with the same serial, and an update that is in the copy already
  is acknowledged, not applied twice.
* A primary without a version is the first one after both holders died: the key is lost, for good.

What a value is, and how an update is applied, is none of this module's business: ``Apply`` asks
somebody else, who answers with ``Applied``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Update:
    """A client's update. Its serials grow; ``base`` is the version that it was computed at."""

    client: int
    serial: int
    base: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Done:
    """The last update of ``client`` was ``serial``, and made version ``number``."""

    client: int
    serial: int
    number: int


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the key: all that whoever holds it needs to go on from it."""

    number: int
    value: Any
    done: tuple[Done, ...] = ()  # one a client that ever had an update applied

    def last_of(self, client: int) -> Done | None:
        """The last update of ``client`` that is in this version."""
        return next((done for done in self.done if done.client == client), None)


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pushed:
    """A client's update has arrived, perhaps not for the first time."""

    update: Update


@dataclass(frozen=True, slots=True)
class Applied:
    """What ``Apply`` came to."""

    value: Any


@dataclass(frozen=True, slots=True)
class Received:
    """The primary's newest version is here."""

    version: Version


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The backup has this version."""

    number: int


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """Who holds the key now; without a backup the view has one member."""

    primary: int
    backup: int | None


Event = Pushed | Applied | Received | Acknowledged | ViewChanged

# -- instructions ------------------------------------------------------------------------------


class Outcome(enum.IntEnum):
    """What became of an update."""

    COMMITTED = 0
    STALE = 1  # refused, and nothing changed
    LOST = 2  # the key is lost


@dataclass(frozen=True, slots=True)
class Apply:
    """Make the value that follows ``version``; one at a time."""

    version: Version
    update: Update


@dataclass(frozen=True, slots=True)
class Replicate:
    """Send ``version`` to the backup."""

    backup: int
    version: Version


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the primary that this version is here."""

    primary: int
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the client. ``number`` is the version that its update made, or the newest one if it was
    refused."""

    client: int
    serial: int
    outcome: Outcome
    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Both who held the key are gone."""


Instruction = Apply | Replicate | Acknowledge | Answer | Lost

# -- the machine -------------------------------------------------------------------------------

_NONE = -1


@dataclass(frozen=True, slots=True)
class Shard:
    """One member's state of one key. Invariant: ``acked`` <= ``committed`` <= ``held``."""

    member: int
    primary: int
    backup: int | None
    staleness: int | None  # None: no bound
    held: Version | None  # the newest
    committed: Version | None = None  # what readers get; only at the primary
    acked: int = _NONE  # the newest that the present backup is known to have
    flying: Version | None = None  # on its way to the backup
    queue: tuple[Update, ...] = ()
    applying: Update | None = None
    waiting: tuple[Done, ...] = ()  # applied, and not acknowledged to its client yet
    lost: bool = False

    @classmethod
    def founded(
        cls, member: int, primary: int, backup: int | None, first: Version, staleness: int | None
    ) -> Shard:
        """The state at the beginning: both holders have the ``first`` version."""
        held = first if member in (primary, backup) else None
        committed = first if member == primary else None
        return cls(member, primary, backup, staleness, held, committed, acked=first.number)

    def handle(self, event: Event) -> tuple[Shard, tuple[Instruction, ...]]:
        """The state after ``event``, and what to do."""
        match event:
            case Pushed(update):
                return self._pushed(update)
            case Applied(value):
                return self._applied(value)
            case Received(version):
                return self._received(version)
            case Acknowledged(number):
                return self._acknowledged(number)
            case ViewChanged(primary, backup):
                return self._changed(primary, backup)

    # -- updates -------------------------------------------------------------------------------

    def _pushed(self, update: Update) -> tuple[Shard, tuple[Instruction, ...]]:
        if self.lost or self.held is None or self.committed is None:
            return self, (Answer(update.client, update.serial, Outcome.LOST, _NONE),)
        done = self.held.last_of(update.client)
        if done is not None and update.serial < done.serial:
            return self, ()  # nobody waits for it any more
        if done is not None and update.serial == done.serial:
            if done.number <= self.committed.number:
                return self, (_committed(done),)
            rest = tuple(other for other in self.waiting if other.client != update.client)
            return replace(self, waiting=(*rest, done)), ()
        known = (*self.queue, *([self.applying] if self.applying else []))
        if any((o.client, o.serial) == (update.client, update.serial) for o in known):
            return self, ()
        return self._next((*self.queue, update))

    def _next(self, queue: tuple[Update, ...]) -> tuple[Shard, tuple[Instruction, ...]]:
        """With this queue: begin with its first update, past those that have become stale."""
        assert self.held is not None
        if self.applying is not None or not queue:
            return replace(self, queue=queue) if queue != self.queue else self, ()
        refused: list[Answer] = []
        while queue:
            update, queue = queue[0], queue[1:]
            behind = self.held.number - update.base
            if behind < 0 or (self.staleness is not None and behind > self.staleness):
                refused.append(
                    Answer(update.client, update.serial, Outcome.STALE, self.held.number)
                )
                continue
            state = replace(self, queue=queue, applying=update)
            return state, (*refused, Apply(self.held, update))
        return replace(self, queue=()), tuple(refused)

    def _applied(self, value: Any) -> tuple[Shard, tuple[Instruction, ...]]:
        update, held = self.applying, self.held
        assert update is not None
        assert held is not None
        mine = Done(update.client, update.serial, held.number + 1)
        others = tuple(done for done in held.done if done.client != update.client)
        version = Version(held.number + 1, value, (*others, mine))
        waiting = tuple(done for done in self.waiting if done.client != update.client)
        state = replace(self, held=version, applying=None, waiting=(*waiting, mine))
        state, spread = state._spread()
        state, more = state._next(state.queue)
        return state, (*spread, *more)

    # -- copies --------------------------------------------------------------------------------

    def _spread(self) -> tuple[Shard, tuple[Instruction, ...]]:
        """Let the backup have the newest version; without one it is committed at once."""
        assert self.held is not None
        if self.backup is None:
            return self._commit(self.held)
        if self.flying is not None or self.acked >= self.held.number:
            return self, ()
        return replace(self, flying=self.held), (Replicate(self.backup, self.held),)

    def _commit(self, version: Version) -> tuple[Shard, tuple[Instruction, ...]]:
        """The present backup has ``version``, or there is none."""
        through = tuple(done for done in self.waiting if done.number <= version.number)
        rest = tuple(done for done in self.waiting if done.number > version.number)
        state = replace(self, committed=version, acked=version.number, flying=None, waiting=rest)
        return state, tuple(_committed(done) for done in through)

    def _received(self, version: Version) -> tuple[Shard, tuple[Instruction, ...]]:
        newer = self.held is None or version.number > self.held.number
        state = replace(self, held=version) if newer else self
        return state, (Acknowledge(self.primary, version.number),)

    def _acknowledged(self, number: int) -> tuple[Shard, tuple[Instruction, ...]]:
        if self.flying is None or self.flying.number != number:
            return self, ()
        state, answers = self._commit(self.flying)
        state, more = state._spread()
        return state, (*answers, *more)

    # -- views ---------------------------------------------------------------------------------

    def _changed(self, primary: int, backup: int | None) -> tuple[Shard, tuple[Instruction, ...]]:
        state = replace(
            self,
            primary=primary,
            backup=backup,
            acked=self.acked if backup == self.backup and primary == self.primary else _NONE,
            flying=None,
            queue=(),
            waiting=(),
        )
        if primary != self.member or self.lost:
            return state, ()
        if self.held is None:
            return replace(state, lost=True), (Lost(),)
        if self.committed is None:
            state = replace(state, committed=self.held)
        return state._spread()


def _committed(done: Done) -> Answer:
    return Answer(done.client, done.serial, Outcome.COMMITTED, done.number)
