"""Gradient rounds: the workload of a lane that reduces one optimizer's buckets.

The main thread fills contributions and waits for rounds; the service thread starts collectives and
delivers. Between the two stands only ``contribute`` (a bucket is in place) and ``wait``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpift.core import rounds
from mpift.errors import GradientError
from mpift.reduction.buckets import Buffers, Layout
from mpift.transport.lane import Started
from mpift.transport.world import LaneReport, World


class GradientRounds:
    """A ``Workload`` over the buckets of ``layout``."""

    in_turn = False

    def __init__(self, layout: Layout) -> None:
        self.buffers = Buffers(layout)
        self._open = 0  # number of the open round, on the service thread
        # Contributions that MPI may still read: replaced before the next round fills them.
        self._read_on: set[int] = set()
        self._delivered = threading.Condition()
        self._last_round, self._last_epoch = -1, -1
        # The last completed round's result, for those that lack it: kept even when the layout
        # changes after it.
        self._kept: list[np.ndarray] = []

    @property
    def buckets(self) -> int:
        return len(self.buffers.layout.buckets)

    def relayout(self, layout: Layout) -> None:
        """Another layout from the open round on; on the service thread, between rounds."""
        self.buffers = Buffers(layout)
        self._read_on.clear()

    # -- for the main thread -----------------------------------------------------------------------

    def wait(self, round_: int) -> int:
        """Wait until ``round_`` is complete here; returns the epoch that reduced it.

        The wait has no limit of its own: a hung rank is the watchdog's affair.
        """
        with self._delivered:
            self._delivered.wait_for(lambda: self._last_round >= round_)
            return self._last_epoch

    def result(self, round_: int, bucket: int) -> np.ndarray:
        """The sum over all participants, counts included. Not to be written to."""
        return self.buffers.result(round_, bucket)

    # -- for the lane ------------------------------------------------------------------------------

    def start(self, world: World, comm: Any, start: rounds.Start) -> Started:
        buffers = self.buffers
        send = buffers.contributions[start.bucket] if start.real else buffers.zeros(start.bucket)
        receive = buffers.result(start.round, start.bucket)
        request = comm.Iallreduce(send, receive, world.operator("sum"))
        return Started(request, (send, receive))

    def participants(self, bucket: int) -> int:
        result = self.buffers.result(self._open, bucket)
        return round(float(result[self.buffers.layout.buckets[bucket].participation]))

    def deliver(self, round_: int, reduced_in: int) -> None:
        for bucket in self._read_on:
            self.buffers.replace_contribution(bucket)
        self._read_on.clear()
        self._kept = [self.buffers.result(round_, bucket) for bucket in range(self.buckets)]
        self._open = round_ + 1
        with self._delivered:
            self._last_round, self._last_epoch = round_, reduced_in
            self._delivered.notify_all()

    def report(self) -> tuple[int, int, int]:
        return sum(result.nbytes for result in self._kept), 0, 0

    def result_to_give(self) -> Sequence[np.ndarray]:
        return self._kept

    def result_to_take(self, giver: LaneReport, wanted: bool) -> Sequence[np.ndarray]:
        if not wanted:
            return [np.empty_like(result) for result in self._kept]
        fresh = [self.buffers.replace_result(self._open, b) for b in range(self.buckets)]
        expected = sum(result.nbytes for result in fresh)
        if giver.result_bytes != expected:
            raise GradientError(
                f"a result of {giver.result_bytes} bytes is handed over, {expected} are expected:"
                " ranks have different parameters"
            )
        return fresh

    def abandon(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self._read_on.add(bucket)
            self.buffers.replace_result(self._open, bucket)
            self.buffers.drop_zeros(bucket)
