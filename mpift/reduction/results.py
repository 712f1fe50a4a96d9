"""Where results of rounds lie until they are applied, and where the open round is received.

A rank that is behind has several rounds to apply. Buffers are made when they are needed and used
again once their round was applied, so a rank that keeps up has two: the open round's, and the last
completed one's, which stays for a hand-over to a rank that lacks it. Results in memory that the
node shares lie there until a later round's come to lie in the same place; what is not applied by
then is copied first (``vacate``). Used from two threads: the service receives, vacates and
completes, the main thread reads and releases.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpift.reduction.buckets import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """The sum of a bucket of the open round. If a fault makes it be summed again, that is another:
    two are equal only if they are the same."""

    bucket: int
    result: np.ndarray


class Results:
    """The buffers of one layout's results from ``first`` on, the open round. ``shared`` are places
    of which rounds take turns, each by bucket."""

    def __init__(
        self, layout: Layout, first: int = 0, shared: Sequence[Sequence[np.ndarray]] = ()
    ) -> None:
        self._layout = layout
        self._shared = [layout.places(place) for place in shared]
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held while somebody reads what could be vacated
        self._round = first
        self._open: list[np.ndarray | None] = [None] * len(layout.buckets)
        self._spare: list[list[np.ndarray]] = [[] for _ in layout.buckets]
        self._rounds: dict[int, list[np.ndarray]] = {}  # completed and not released
        self._last: list[np.ndarray] = []  # of the last completed round
        self._last_round = first - 1

    def receive(self, bucket: int) -> np.ndarray:
        """Where ``bucket`` of the open round is received."""
        array = self._open[bucket]
        if array is None:
            array = self._place(self._round, bucket)
            if array is None:
                array = self._private(bucket)
            self._open[bucket] = array
        return array

    def _place(self, round_: int, bucket: int) -> np.ndarray | None:
        return self._shared[round_ % len(self._shared)][bucket] if self._shared else None

    def _private(self, bucket: int) -> np.ndarray:
        with self._lock:
            spare = self._spare[bucket]
            return spare.pop() if spare else self._fresh(bucket)

    def _fresh(self, bucket: int) -> np.ndarray:
        return self._layout.memory(self._layout.buckets[bucket])

    def vacate(self, bucket: int) -> None:
        """The open round's ``bucket`` is about to be written: keep what lies there unapplied."""
        place = self._place(self._round, bucket)
        if place is None:
            return
        for arrays in list(self._rounds.values()):
            if bucket < len(arrays) and arrays[bucket] is place:
                with self._reading:  # nobody reads on in what is written over
                    copy = self._private(bucket)
                    np.copyto(copy, place)
                    arrays[bucket] = copy

    def leave_shared(self) -> None:
        """From now on nothing lies in shared places; what does is copied."""
        shared, self._shared = self._shared, []
        with self._reading:
            for arrays in (self._last, *list(self._rounds.values())):
                for bucket, array in enumerate(arrays):
                    if any(place[bucket] is array for place in shared):
                        arrays[bucket] = array.copy()
        self._open = [None] * len(self._open)

    def renew(self, bucket: int) -> np.ndarray:
        """A buffer of this rank's own for the open round, that nothing may still be written to."""
        fresh = self._open[bucket] = self._fresh(bucket)
        return fresh

    def forget(self, bucket: int) -> None:
        """What was to be received may still be written to by MPI: use that buffer no more."""
        self._open[bucket] = None

    def complete(self, round_: int) -> None:
        """The open round is ``round_``, and all of it is here."""
        arrays = [self.receive(bucket) for bucket in range(len(self._open))]
        self._open = [None] * len(arrays)
        with self._lock:
            if self._last_round not in self._rounds:
                self._keep(self._last)
            self._last, self._last_round = arrays, round_
            self._rounds[round_] = arrays
        self._round = round_ + 1

    def held(self) -> threading.Lock:
        """While it is held, nothing that lies in shared places is written over by a later round."""
        return self._reading

    @contextlib.contextmanager
    def reading(self, round_: int) -> Iterator[Sequence[np.ndarray]]:
        """The result of a completed round, by bucket, which stays what it is inside. Not to be
        written to."""
        with self._reading:
            yield self._rounds[round_]

    def release(self, round_: int) -> None:
        """``round_`` was applied; nobody reads it any more but for a hand-over."""
        with self._lock:
            arrays = self._rounds.pop(round_)
            if round_ != self._last_round:
                self._keep(arrays)

    def _keep(self, arrays: Sequence[np.ndarray]) -> None:
        for bucket, (spare, array) in enumerate(zip(self._spare, arrays, strict=False)):
            if not any(place[bucket] is array for place in self._shared):
                spare.append(array)

    @property
    def last(self) -> Sequence[np.ndarray]:
        """The last completed round's result."""
        return self._last

    def relayout(self, layout: Layout, shared: Sequence[Sequence[np.ndarray]] = ()) -> Results:
        """Buffers for another layout, which still know the last result of this one."""
        after = Results(layout, self._round, shared)
        after._last = [array.copy() for array in self._last]  # or the old places stay for its sake
        after._rounds = {after._last_round: list(after._last)}  # never released: of other sizes
        return after
