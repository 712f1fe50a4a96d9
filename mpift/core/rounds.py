"""Rounds: majority reduction of gradients, as one rank goes through it.

A round reduces one gradient of each participant. The rules of *claims*, what this rank puts into a
bucket of the open round, real data or zeros:

* A bucket is claimed once a round and epoch, in bucket order; a rebuild re-opens all claims, and
  what was claimed real before is claimed real again.
* What is in place is claimed real at once. What is not is claimed as zeros when the coordinator
  says so (``Nudged``: the others have waited long enough, or this rank is away), or when no more
  can come (the rest of the same gradient was counted in an earlier round).
* What was put in place too late for its round is *late*: it counts in the next one (``carry``), or
  not at all. It is known to be late only when the round completed here, since a fault in between
  re-opens the claim.
* A rank may fall behind by ``max_lag`` rounds; then the group waits for it: it obeys no nudge until
  its main thread has applied a round.
* Where most ranks are away, nobody need wait for a round (``Declined``): what is in place but not
  claimed goes back to the main thread; what is claimed counts when the round is closed, and until
  then nothing else may be put in its place.

``Announce`` tells the coordinator where this rank stands; ``core.closing`` is its side. Without
late ranks nothing waits for an answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from mpift.core.lockstep import Contributed, Joined, Lockstep, Start
from mpift.errors import MpiftError

# -- events, besides those of ``lockstep`` -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Applied:
    """The main thread has applied all rounds below ``rounds``; its next gradient is for that."""

    rounds: int


@dataclass(frozen=True, slots=True)
class CarryNothing:
    """From now on late gradients are dropped."""


@dataclass(frozen=True, slots=True)
class WentAway:
    """The main thread does something else, in which others may have to wait for it."""


@dataclass(frozen=True, slots=True)
class CameBack:
    """The main thread is back in its loop."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The main thread waits until what is in place was counted; it has no more for now."""


@dataclass(frozen=True, slots=True)
class Nudged:
    """The coordinator closes ``round``: zeros for what isn't in place."""

    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class Declined:
    """Most ranks are away: nobody opens ``round`` now, and its step need not wait for it."""

    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """All ranks have agreed to complete every round below ``rounds``, with what is in place."""

    rounds: int


@dataclass(frozen=True, slots=True)
class Ended:
    """All ranks have joined: ``last`` is the round with which the lane ends, its result unused."""

    epoch: int
    last: int


# -- instructions ------------------------------------------------------------------------------


class Standing(enum.IntEnum):
    """Where a rank stands, for the coordinator."""

    COMPUTING = 0
    ARRIVED = 1  # all that it has for the open round is in place
    AWAY = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the coordinator; ``round`` is the first one that this rank has nothing claimed in."""

    epoch: int
    standing: Standing
    round: int


@dataclass(frozen=True, slots=True)
class Drop:
    """What is in place in these ``buckets`` was too late, and late gradients don't count."""

    buckets: frozenset[int]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The main thread may go on without a round. ``buckets`` are its own again, with what is in
    them; the rest of what it had put in place is claimed, and counts when the round closes."""

    buckets: frozenset[int]


# -- the machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounds(Lockstep):
    """One rank's state in a lane of gradients. ``done`` holds only claimed buckets."""

    max_lag: int = 0
    carry: bool = True
    applied: int = 0
    waiting: frozenset[int] = frozenset()  # in place, and not claimed since
    held: frozenset[int] = frozenset()  # claimed real for the open round, in whatever epoch
    late: bool = False  # these are of a gradient that was meant for an earlier round
    claims: tuple[bool, ...] = ()  # of the open round, in this epoch
    nudged: int = -1  # highest round that was nudged in this epoch
    flush: int = 0  # rounds below this are completed with what is there
    last: int | None = None
    awaited: bool = False
    away: bool = False
    joined: bool = False
    announced: tuple[Standing, int] = (Standing.COMPUTING, -1)

    def handle(self, event: Any) -> tuple[Rounds, tuple[Any, ...]]:
        state, instructions = self._handle(event)
        announced, words = state._announce()
        return announced, (*instructions, *words)

    def _handle(self, event: Any) -> tuple[Rounds, tuple[Any, ...]]:  # noqa: C901, one match
        match event:
            case Contributed(bucket):
                return self._contribute(bucket)
            case Applied(rounds):
                return self._apply(rounds)._start()
            case Nudged(epoch, round_):
                if epoch != self.epoch:
                    return self, ()
                return replace(self, nudged=max(self.nudged, round_))._start()
            case Declined(epoch, round_):
                if (epoch, round_) != (self.epoch, self.completed) or not self.awaited:
                    return self, ()
                return self._give_back()
            case Awaited():
                return replace(self, awaited=True)._start()
            case CarryNothing():
                return replace(self, carry=False), ()
            case WentAway():
                return replace(self, away=True), ()
            case CameBack():
                return replace(self, away=False), ()
            case Joined():
                return replace(self, joined=True), ()
            case Flushed(rounds):
                return replace(self, flush=max(self.flush, rounds))._start()
            case Ended(epoch, last):
                if epoch != self.epoch:
                    return self, ()
                return replace(self, last=last)._start()
        return Lockstep.handle(self, event)

    @property
    def settled(self) -> bool:
        """Whether nothing that was put in place is still to be counted."""
        return not (self.waiting or self.held)

    def with_buckets(self, buckets: int) -> Rounds:
        """The same lane with another number of buckets from its open round on."""
        if self.claims or not self.settled:
            raise MpiftError("the layout of a round cannot change after its first contribution")
        return replace(self, buckets=buckets)

    # -- claims --------------------------------------------------------------------------------

    def _contribute(self, bucket: int) -> tuple[Rounds, tuple[Any, ...]]:
        if bucket in self.held | self.waiting or not 0 <= bucket < self.buckets:
            raise MpiftError(f"bucket {bucket} of round {self.completed} is contributed twice")
        if not self.carry and self.applied < self.completed:
            return self, (Drop(frozenset({bucket})),)
        late = self.late or self.applied < self.completed
        return replace(self, waiting=self.waiting | {bucket}, late=late)._start()

    def _start(self) -> tuple[Rounds, tuple[Any, ...]]:
        state, starts = self, []
        while not (state.suspended or state.finished) and len(state.claims) < state.buckets:
            bucket = len(state.claims)
            real = bucket in state.held | state.waiting
            if not (state._has_room() and (real or state._closed())):
                break
            if bucket in state.waiting and bucket not in state.held:
                state = replace(state, waiting=state.waiting - {bucket}, held=state.held | {bucket})
            state = replace(state, claims=(*state.claims, real))
            late = real and state.late
            starts.append(Start(state.epoch, state.completed, bucket, real, late))
        return state, tuple(starts)

    def _has_room(self) -> bool:
        """Whether a place in the ring of results is free; the last round's result is not kept."""
        return self.completed - self.applied <= self.max_lag or self.completed == self.last

    def _closed(self) -> bool:
        """Whether nothing more comes from this rank for the open round."""
        lag = self.completed - self.applied
        nudged = self.nudged >= self.completed and lag < self.max_lag
        flushed = self.flush > self.completed
        ending = self.last is not None and self.last >= self.completed
        return nudged or flushed or ending or (self.awaited and not self.settled)

    def _give_back(self) -> tuple[Rounds, tuple[Any, ...]]:
        back = replace(self, waiting=frozenset(), late=True, awaited=False)
        return back, (GiveBack(self.waiting),)

    def _apply(self, rounds: int) -> Rounds:
        behind = not self.settled or rounds < self.completed
        return replace(
            self,
            applied=rounds,
            awaited=self.awaited and not self.settled,
            late=self.late and behind,
        )

    # -- the open round ------------------------------------------------------------------------

    def _completed_one(self, bucket: int, participants: int) -> tuple[Rounds, tuple[Any, ...]]:
        if len(self.done) < self.buckets:
            return self, ()
        return self._complete_round(self.epoch, self.completed == self.last)

    def _complete_round(self, reduced_in: int, last: bool) -> tuple[Rounds, tuple[Any, ...]]:
        after, instructions = Lockstep._complete_round(self, reduced_in, last)
        if self.carry or not self.waiting:
            return after, instructions
        return after, (*instructions, Drop(self.waiting))

    def _next_round(self) -> Rounds:
        waiting = self.waiting if self.carry else frozenset[int]()
        return replace(self, waiting=waiting, held=frozenset(), late=bool(waiting), claims=())

    def _reopened(self, epoch: int) -> Rounds:
        return replace(self, claims=(), nudged=-1, last=None, announced=(Standing.COMPUTING, -1))

    def _counted(self) -> frozenset[int]:
        return self.held

    # -- words to the coordinator --------------------------------------------------------------

    def _announce(self) -> tuple[Rounds, tuple[Any, ...]]:
        if self.suspended or self.finished:
            return self, ()
        if self.joined:
            word = (Standing.LEFT, self.completed + (not self.settled))
        elif self.awaited and not self.settled:
            word = (Standing.ARRIVED, self.completed)
        elif self.away:
            word = (Standing.AWAY, self.completed)
        else:
            word = (Standing.COMPUTING, self.completed)
        if self._known(word):
            return self, ()
        return replace(self, announced=word), (Announce(self.epoch, *word),)

    def _known(self, word: tuple[Standing, int]) -> bool:
        """Whether the coordinator knows as much: rounds pass, and it sees that by itself."""
        standing, round_ = word
        before, at = self.announced
        if standing is Standing.COMPUTING:
            counted = before is Standing.ARRIVED and at < round_
            return before is standing or counted
        return before is standing and (standing is Standing.AWAY or at == round_)
