"""Where results of rounds lie until they are applied, and where the open round is received.

A rank that is behind has several rounds to apply. Buffers are made when they are needed and used
again once their round was applied, so a rank that keeps up has two: the open round's, and the last
completed one's, which stays for a hand-over to a rank that lacks it. Used from two threads: the
service receives and completes, the main thread reads and releases.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from mpift.reduction.buckets import Layout


class Results:
    """The buffers of one layout's results."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._open: list[np.ndarray | None] = [None] * len(layout.buckets)
        self._spare: list[list[np.ndarray]] = [[] for _ in layout.buckets]
        self._rounds: dict[int, list[np.ndarray]] = {}  # completed and not released
        self._last: list[np.ndarray] = []  # of the last completed round
        self._last_round = -1

    def receive(self, bucket: int) -> np.ndarray:
        """Where ``bucket`` of the open round is received."""
        array = self._open[bucket]
        if array is None:
            with self._lock:
                spare = self._spare[bucket]
                array = spare.pop() if spare else self._fresh(bucket)
            self._open[bucket] = array
        return array

    def _fresh(self, bucket: int) -> np.ndarray:
        return self._layout.memory(self._layout.buckets[bucket])

    def renew(self, bucket: int) -> np.ndarray:
        """A buffer for the open round that nothing may still be written into."""
        self._open[bucket] = self._fresh(bucket)
        return self.receive(bucket)

    def complete(self, round_: int) -> None:
        """The open round is ``round_``, and all of it is here."""
        arrays = [self.receive(bucket) for bucket in range(len(self._open))]
        self._open = [None] * len(arrays)
        with self._lock:
            if self._last_round not in self._rounds:
                self._keep(self._last)
            self._last, self._last_round = arrays, round_
            self._rounds[round_] = arrays

    def of(self, round_: int) -> Sequence[np.ndarray]:
        """The result of a completed round, by bucket. Not to be written to."""
        return self._rounds[round_]

    def release(self, round_: int) -> None:
        """``round_`` was applied; nobody reads it any more but for a hand-over."""
        with self._lock:
            arrays = self._rounds.pop(round_)
            if round_ != self._last_round:
                self._keep(arrays)

    def _keep(self, arrays: Sequence[np.ndarray]) -> None:
        for spare, array in zip(self._spare, arrays, strict=False):
            spare.append(array)

    @property
    def last(self) -> Sequence[np.ndarray]:
        """The last completed round's result."""
        return self._last

    def relayout(self, layout: Layout) -> Results:
        """Buffers for another layout, which still know the last result of this one."""
        after = Results(layout)
        after._last = self._last
        after._rounds = {after._last_round: list(self._last)}  # never released: of other sizes
        return after
