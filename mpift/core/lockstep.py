"""Lockstep: what all lanes have in common, and how they go on after a fault.

A *lane* is a stream of rounds that all members of a view go through in the same order; a round is a
fixed number of buckets, started in one fixed order everywhere. No bucket of round r+1 starts before
all of r completed here. So survivors of a fault differ by at most one round, and whoever is ahead
still holds the result that the others lack: if someone completed round r, its result is handed to
the others; if nobody did, r is reduced again from the kept contributions. Nothing is rolled back.

Machines are frozen values: ``handle`` returns the next state and the instructions to carry out, in
order. Events of an older epoch are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mpift.errors import MpiftError

_Kind = TypeVar("_Kind", bound="Lockstep")

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contributed:
    """This rank's part of ``bucket`` is in place and stays untouched until it was counted."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank has left its loop for good and contributes zeros from now on."""


@dataclass(frozen=True, slots=True)
class BucketCompleted:
    """The collective of ``bucket`` completed here; ``participants`` ranks gave real data."""

    epoch: int
    bucket: int
    participants: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """MPI reported an error: nothing of this epoch counts any more."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """A new view is agreed; ``completed[i]`` is the number of rounds that its rank i completed."""

    epoch: int
    completed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The result of ``round`` has arrived from (or left for) the others.

    ``reduced_in`` is the epoch that reduced it; ``last`` says that the lane ended with it."""

    epoch: int
    round: int
    reduced_in: int
    last: bool


# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start the collective of ``bucket``, with this rank's contribution or with zeros; ``late`` if
    the contribution was meant for an earlier round."""

    epoch: int
    round: int
    bucket: int
    real: bool
    late: bool = False


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send (as rank ``giver`` of the new view) or receive the result of ``round``."""

    epoch: int
    round: int
    giver: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """``round`` is complete here: give its result to whoever waits for it. ``counted`` are the
    buckets that hold a real contribution of this rank."""

    round: int
    reduced_in: int
    counted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Finish:
    """Everybody has joined: this lane ends."""

    reduced_in: int


# -- the machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lockstep:
    """One rank's state in one lane; its kinds are ``turns.Turns`` and ``rounds.Rounds``.

    While ``suspended`` nothing starts or completes."""

    buckets: int
    epoch: int = 0
    completed: int = 0  # rounds completed here, so also the number of the open round
    done: frozenset[int] = frozenset()  # buckets of the open round that completed in this epoch
    suspended: bool = False
    finished: bool = False

    def handle(self: _Kind, event: Any) -> tuple[_Kind, tuple[Any, ...]]:
        """The state after ``event``, and what to do, in order."""
        match event:
            case BucketCompleted(epoch, bucket, participants):
                if epoch != self.epoch or self.suspended:
                    return self, ()
                return replace(self, done=self.done | {bucket})._completed_one(bucket, participants)
            case Faulted():
                return replace(self, suspended=True), ()
            case Reconciled(epoch, completed):
                return self._reconcile(epoch, completed)
            case HandedOver(epoch, round_, reduced_in, last):
                if epoch != self.epoch:
                    return self, ()
                return self._take_over(round_, reduced_in, last)
        raise MpiftError(f"{type(self).__name__} knows no event {event}")

    # -- what the kinds decide -----------------------------------------------------------------

    def _start(self: _Kind) -> tuple[_Kind, tuple[Any, ...]]:
        """Start whatever may start now, in bucket order."""
        raise NotImplementedError

    def _completed_one(
        self: _Kind, bucket: int, participants: int
    ) -> tuple[_Kind, tuple[Any, ...]]:
        """``bucket`` has been added to ``done``."""
        raise NotImplementedError

    def _next_round(self: _Kind) -> _Kind:
        """The state with the next round open, after the open one completed."""
        raise NotImplementedError

    def _reopened(self: _Kind, epoch: int) -> _Kind:
        """The state with nothing of the open round started, in a new epoch."""
        raise NotImplementedError

    def _counted(self) -> frozenset[int]:
        """Buckets of the open round that hold a real contribution of this rank."""
        raise NotImplementedError

    # -- common ways ---------------------------------------------------------------------------

    def _complete_round(self: _Kind, reduced_in: int, last: bool) -> tuple[_Kind, tuple[Any, ...]]:
        counted = self._counted()
        after = replace(
            self._next_round(), completed=self.completed + 1, done=frozenset(), finished=last
        )
        if last:
            return after, (Finish(reduced_in),)
        state, starts = after._start()
        return state, (Deliver(self.completed, reduced_in, counted), *starts)

    def _reconcile(
        self: _Kind, epoch: int, completed: tuple[int, ...]
    ) -> tuple[_Kind, tuple[Any, ...]]:
        behind, ahead = min(completed), max(completed)
        if ahead - behind > 1:
            raise MpiftError(f"members of one view are at rounds {completed}: more than one apart")
        state = replace(self._reopened(epoch), epoch=epoch, done=frozenset())
        if ahead > behind:
            giver = completed.index(ahead)
            return replace(state, suspended=True), (HandOver(epoch, behind, giver),)
        return replace(state, suspended=False)._start()

    def _take_over(
        self: _Kind, round_: int, reduced_in: int, last: bool
    ) -> tuple[_Kind, tuple[Any, ...]]:
        state = replace(self, suspended=False)
        if state.completed == round_:
            return state._complete_round(reduced_in, last)
        return state._start()
