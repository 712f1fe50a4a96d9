"""Rounds: when a bucket may start, when a round is complete, and what happens to it after a fault.

One ``Rounds`` is the view that one rank has of one *lane*, a stream of reductions that all members
of a view go through in the same order. A round is a fixed number of buckets, started in one fixed
order everywhere. The rules:

* A bucket starts once this rank has contributed to it, or has joined (left its loop: zeros).
* No bucket of round r+1 starts before all of r completed here. So survivors of a fault differ by
  at most one round, and whoever is ahead still holds the result that the others lack.
* After a fault, if someone completed round r, its result is handed to the others; if nobody did,
  all buckets of r are reduced again from the kept contributions. Nothing is rolled back.
* A round whose first bucket has no participant is the last: everybody has joined.

The machine is a frozen value: ``handle`` returns the next state and the instructions to carry out,
in order. Events of an older epoch are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpift.errors import MpiftError

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contributed:
    """This rank's part of ``bucket`` is in place and stays untouched until the round completes."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank has left its loop and contributes zeros from now on."""


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

    ``reduced_in`` is the epoch that reduced it; ``last`` says that nobody took part in it."""

    epoch: int
    round: int
    reduced_in: int
    last: bool


Event = Contributed | Joined | BucketCompleted | Faulted | Reconciled | HandedOver

# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start the collective of ``bucket``, with this rank's contribution or with zeros."""

    epoch: int
    round: int
    bucket: int
    real: bool


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send (as rank ``giver`` of the new view) or receive the result of ``round``."""

    epoch: int
    round: int
    giver: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """``round`` is complete here: give its result to whoever waits for it."""

    round: int
    reduced_in: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Everybody has joined: this lane ends."""

    reduced_in: int


Instruction = Start | HandOver | Deliver | Finish

# -- the machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounds:
    """One rank's state in one lane. Invariants: ``done`` holds only started buckets;
    ``started`` <= ``buckets``; while ``suspended`` nothing starts or completes."""

    buckets: int
    # True: a bucket starts only after the one before it completed, since its size depends on it.
    in_turn: bool = False
    epoch: int = 0
    completed: int = 0  # rounds completed here, so also the number of the open round
    contributed: frozenset[int] = frozenset()
    started: int = 0  # buckets of the open round that were started in this epoch
    done: frozenset[int] = frozenset()
    joined: bool = False
    suspended: bool = False
    finished: bool = False

    def handle(self, event: Event) -> tuple[Rounds, tuple[Instruction, ...]]:
        """The state after ``event``, and what to do, in order."""
        match event:
            case Contributed(bucket):
                return self._contribute(bucket)._start()
            case Joined():
                return replace(self, joined=True)._start()
            case BucketCompleted(epoch, bucket, participants):
                if epoch != self.epoch or self.suspended:
                    return self, ()
                return self._complete_bucket(bucket, participants)
            case Faulted():
                return replace(self, suspended=True), ()
            case Reconciled(epoch, completed):
                return self._reconcile(epoch, completed)
            case HandedOver(epoch, round_, reduced_in, last):
                if epoch != self.epoch:
                    return self, ()
                return self._take_over(round_, reduced_in, last)

    def with_buckets(self, buckets: int) -> Rounds:
        """The same lane with another number of buckets from its open round on."""
        if self.contributed or self.started:
            raise MpiftError("the layout of a round cannot change after its first contribution")
        return replace(self, buckets=buckets)

    def _contribute(self, bucket: int) -> Rounds:
        if bucket in self.contributed or not 0 <= bucket < self.buckets:
            raise MpiftError(f"bucket {bucket} of round {self.completed} is contributed twice")
        return replace(self, contributed=self.contributed | {bucket})

    def _start(self) -> tuple[Rounds, tuple[Instruction, ...]]:
        """Start whatever may start now, in bucket order."""
        if self.suspended or self.finished:
            return self, ()
        starts: list[Instruction] = []
        bucket = self.started
        while bucket < self.buckets and self._may_start(bucket):
            real = (0 if self.in_turn else bucket) in self.contributed
            starts.append(Start(self.epoch, self.completed, bucket, real))
            bucket += 1
        return replace(self, started=bucket), tuple(starts)

    def _may_start(self, bucket: int) -> bool:
        if self.in_turn:
            # The first bucket's contribution stands for the whole operation.
            return (0 in self.contributed or self.joined) and len(self.done) == bucket
        if bucket in self.contributed:
            return True
        # A joined rank learns from the first bucket whether anybody goes on.
        return self.joined and (bucket == 0 or 0 in self.done)

    def _complete_bucket(
        self, bucket: int, participants: int
    ) -> tuple[Rounds, tuple[Instruction, ...]]:
        state = replace(self, done=self.done | {bucket})
        last = bucket == 0 and participants == 0
        if last or len(state.done) == state.buckets:
            return state._complete_round(self.epoch, last)
        return state._start()

    def _complete_round(
        self, reduced_in: int, last: bool
    ) -> tuple[Rounds, tuple[Instruction, ...]]:
        finished = replace(
            self,
            completed=self.completed + 1,
            contributed=frozenset(),
            started=0,
            done=frozenset(),
            finished=last,
        )
        if last:
            return finished, (Finish(reduced_in),)
        state, starts = finished._start()
        return state, (Deliver(self.completed, reduced_in), *starts)

    def _reconcile(
        self, epoch: int, completed: tuple[int, ...]
    ) -> tuple[Rounds, tuple[Instruction, ...]]:
        behind, ahead = min(completed), max(completed)
        if ahead - behind > 1:
            raise MpiftError(f"members of one view are at rounds {completed}: more than one apart")
        state = replace(self, epoch=epoch, started=0, done=frozenset())
        if ahead > behind:
            giver = completed.index(ahead)
            return replace(state, suspended=True), (HandOver(epoch, behind, giver),)
        return replace(state, suspended=False)._start()

    def _take_over(
        self, round_: int, reduced_in: int, last: bool
    ) -> tuple[Rounds, tuple[Instruction, ...]]:
        state = replace(self, suspended=False)
        if state.completed == round_:
            return state._complete_round(reduced_in, last)
        return state._start()
