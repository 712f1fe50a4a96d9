"""Turns: operations that all members of a view call in the same order, one after the other.

Every round is one operation. Its buckets follow in turn: one starts only after the one before it
completed, since its size depends on it. The first bucket's contribution stands for the whole. A
rank that has joined takes part with nothing, and learns from the first bucket whether anybody goes
on: an operation that nobody called is the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpift.core.lockstep import Contributed, Joined, Lockstep, Start
from mpift.errors import MpiftError


@dataclass(frozen=True, slots=True)
class Turns(Lockstep):
    """One rank's state in the lane of operations. ``done`` holds only started buckets."""

    contributed: bool = False
    started: int = 0  # buckets of the open round that were started in this epoch
    joined: bool = False

    def handle(self, event: Any) -> tuple[Turns, tuple[Any, ...]]:
        match event:
            case Contributed(bucket):
                if self.contributed or bucket != 0:
                    raise MpiftError(f"operation {self.completed} is contributed to twice")
                return replace(self, contributed=True)._start()
            case Joined():
                return replace(self, joined=True)._start()
        # No super(): a dataclass with slots is another class than the one it was written in.
        return Lockstep.handle(self, event)

    def _start(self) -> tuple[Turns, tuple[Any, ...]]:
        may = self.contributed or self.joined
        if self.suspended or self.finished or not may or len(self.done) != self.started:
            return self, ()
        if self.started == self.buckets:
            return self, ()
        start = Start(self.epoch, self.completed, self.started, self.contributed)
        return replace(self, started=self.started + 1), (start,)

    def _completed_one(self, bucket: int, participants: int) -> tuple[Turns, tuple[Any, ...]]:
        last = bucket == 0 and participants == 0
        if last or len(self.done) == self.buckets:
            return self._complete_round(self.epoch, last)
        return self._start()

    def _next_round(self) -> Turns:
        return replace(self, contributed=False, started=0)

    def _reopened(self, epoch: int) -> Turns:
        return replace(self, started=0)

    def _counted(self) -> frozenset[int]:
        return frozenset(range(self.buckets)) if self.contributed else frozenset()
