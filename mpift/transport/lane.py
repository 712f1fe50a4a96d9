"""A lane: one stream of rounds, carried out on one communicator.

The pure machine of ``core.rounds`` decides, a ``Workload`` knows the data, and the lane keeps the
requests between them. A buffer of an incomplete request is neither touched nor freed: after a fault
such requests go, with their buffers, into a quarantine that is never emptied, because a stopped
sender may write into them long after a revocation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpift.core import rounds
from mpift.core.rounds import Rounds
from mpift.transport.world import LaneReport, Report, World


@dataclass(slots=True)
class Started:
    """A collective under way: its request and every buffer that MPI may read or write."""

    request: Any
    buffers: tuple[Any, ...]


class Workload(Protocol):
    """The data side of a lane. Called on the service thread only."""

    @property
    def buckets(self) -> int:
        """Buckets of the open round."""

    @property
    def in_turn(self) -> bool:
        """Whether a bucket starts only after the one before it completed."""

    def start(self, world: World, comm: Any, start: rounds.Start) -> Started | None:
        """Begin the collective; None if this bucket needs none (it is complete at once)."""

    def participants(self, bucket: int) -> int:
        """How many ranks gave real data, read from the completed collective."""

    def deliver(self, round_: int, reduced_in: int) -> None:
        """The round is complete: hand its result to whoever waits."""

    def report(self) -> tuple[int, int, int]:
        """(bytes, status, participants) of the last completed round, for a hand-over."""

    def result_to_give(self) -> Sequence[np.ndarray]:
        """The last completed round's result."""

    def result_to_take(self, giver: LaneReport, wanted: bool) -> Sequence[np.ndarray]:
        """Fresh buffers for the giver's result; ``wanted`` unless this rank has it already."""

    def abandon(self, buckets: Sequence[int]) -> None:
        """The collectives of these buckets will never complete: use none of their buffers again."""


@dataclass(slots=True)
class _HandOver:
    instruction: rounds.HandOver
    giver: LaneReport


class Lane:
    """One lane of this rank; see the module's docstring."""

    def __init__(
        self, index: int, workload: Workload, on_start: Callable[[int, int], None]
    ) -> None:
        self.index = index
        self.workload = workload
        self.rounds = Rounds(workload.buckets, workload.in_turn)
        self.requests: list[Any] = []
        self.quarantine: list[Started] = []
        self._keys: list[tuple[int, int] | _HandOver] = []  # beside requests: (epoch, bucket)
        self._started: list[Started] = []
        self._on_start = on_start
        self._events: deque[rounds.Event] = deque()
        self._reports: tuple[Report, ...] = ()
        self._reduced_in = 0

    def report(self) -> LaneReport:
        """Where this rank stands in this lane."""
        size, status, participants = self.workload.report()
        state = self.rounds
        return LaneReport(
            state.completed, self._reduced_in, int(state.finished), size, status, participants
        )

    def feed(self, world: World, event: rounds.Event) -> None:
        """Give ``event`` to the machine and carry out what it says, and what follows from that."""
        self._events.append(event)
        while self._events:
            event = self._events.popleft()
            self.rounds, instructions = self.rounds.handle(event)
            for instruction in instructions:
                self._carry_out(world, instruction)

    def set_buckets(self, buckets: int) -> None:
        """Change the number of buckets, between rounds."""
        self.rounds = self.rounds.with_buckets(buckets)

    # -- instructions --------------------------------------------------------------------------

    def _carry_out(self, world: World, instruction: rounds.Instruction) -> None:
        match instruction:
            case rounds.Start():
                self._start(world, instruction)
            case rounds.HandOver():
                self._hand_over(world, instruction)
            case rounds.Deliver(round_, reduced_in):
                self._reduced_in = reduced_in
                self.workload.deliver(round_, reduced_in)
            case rounds.Finish(reduced_in):
                self._reduced_in = reduced_in

    def _start(self, world: World, start: rounds.Start) -> None:
        started = self.workload.start(world, world.lane_comms[self.index], start)
        if started is None:
            self._events.append(self._completed(start.epoch, start.bucket))
            return
        self._track(started, (start.epoch, start.bucket))
        self._on_start(start.round, start.bucket)

    def _track(self, started: Started, key: tuple[int, int] | _HandOver) -> None:
        self.requests.append(started.request)
        self._keys.append(key)
        self._started.append(started)

    def _completed(self, epoch: int, bucket: int) -> rounds.BucketCompleted:
        return rounds.BucketCompleted(epoch, bucket, self.workload.participants(bucket))

    def _hand_over(self, world: World, instruction: rounds.HandOver) -> None:
        giver = self._reports[instruction.giver].lanes[self.index]
        if world.view.members[instruction.giver] == world.member:
            buffers = self.workload.result_to_give()
        else:
            wanted = self.rounds.completed == instruction.round
            buffers = self.workload.result_to_take(giver, wanted)
        comm = world.lane_comms[self.index]
        pending = _HandOver(instruction, giver)
        for buffer in buffers:
            request = comm.Ibcast(buffer, root=instruction.giver)
            self._track(Started(request, (buffer,)), pending)
        if not buffers:
            self._events.append(self._handed_over(pending))

    def _handed_over(self, pending: _HandOver) -> rounds.HandedOver:
        return rounds.HandedOver(
            pending.instruction.epoch,
            pending.instruction.round,
            pending.giver.reduced_in,
            bool(pending.giver.finished),
        )

    # -- completions and faults ----------------------------------------------------------------

    def complete(self, world: World, positions: Sequence[int]) -> None:
        """The requests at these positions of ``requests`` have completed."""
        keys = [self._keys[position] for position in positions]
        for position in sorted(positions, reverse=True):
            del self.requests[position], self._keys[position], self._started[position]
        for key in keys:
            if isinstance(key, tuple):
                self.feed(world, self._completed(*key))
            elif not any(other is key for other in self._keys):
                self.feed(world, self._handed_over(key))

    def fault(self, world: World) -> None:
        """Everything in flight is lost; its buffers are kept untouched for life."""
        self.quarantine += self._started
        buckets = [key[1] for key in self._keys if isinstance(key, tuple)]
        if len(buckets) < len(self._keys):  # a hand-over was being received, into all results
            buckets = list(range(self.workload.buckets))
        self.workload.abandon(buckets)
        self.requests, self._keys, self._started = [], [], []
        self._events.clear()
        self.feed(world, rounds.Faulted())

    def reconcile(self, world: World, reports: tuple[Report, ...]) -> None:
        """A new view is agreed; go on in it. Members that don't know the lane yet stand at 0."""
        padded = tuple(_with_lane(report, self.index) for report in reports)
        self._reports = padded
        completed = tuple(report.lanes[self.index].completed for report in padded)
        self.feed(world, rounds.Reconciled(world.view.epoch, completed))


def _with_lane(report: Report, index: int) -> Report:
    missing = index + 1 - len(report.lanes)
    return Report(report.member, report.epoch, report.lanes + (LaneReport(),) * max(0, missing))
