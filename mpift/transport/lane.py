"""A lane: one stream of rounds, carried out on one communicator.

A pure machine (``core.turns`` or ``core.rounds``) decides, a ``Workload`` knows the data, and the
lane keeps the requests between them. A buffer of an incomplete request is neither touched nor
freed: after a fault such requests go, with their buffers, into a quarantine that is never emptied,
because a stopped sender may write into them long after a revocation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpift.core import lockstep, rounds
from mpift.core.closing import Quorum
from mpift.core.lockstep import Lockstep
from mpift.transport.world import LaneReport, Report, SendRequest, World


class Rules(Protocol):
    """What a lane's rounds go by when somebody is late."""

    @property
    def quorum(self) -> Quorum:
        """ "majority", "all", a number of ranks or a fraction of the view."""

    @property
    def patience(self) -> float | str:
        """Seconds, or "adaptive"."""


@dataclass(slots=True)
class Started:
    """A collective or message under way: its request and every buffer that MPI may read or write.
    ``sends``: it is a message to another rank. ``bulk``: MPI has to be looked at again and again
    for it to move, unlike a word, which only has to arrive."""

    request: Any
    buffers: tuple[Any, ...]
    sends: bool = False
    bulk: bool = True

    @property
    def watched(self) -> Any:
        """The request as ``World.test_some`` takes it."""
        return SendRequest(self.request) if self.sends else self.request


class Workload(Protocol):
    """The data side of a lane. Called on the service thread only."""

    @property
    def buckets(self) -> int:
        """Buckets of the open round."""

    @property
    def rules(self) -> Rules | None:
        """How to treat ranks that are late; None: everybody is waited for."""

    def machine(self, epoch: int) -> Lockstep:
        """The lane's state at its beginning."""

    def start(self, world: World, comm: Any, start: lockstep.Start) -> Sequence[Started]:
        """Begin to reduce a bucket; empty if nothing needs to move (it is complete at once)."""

    def proceed(self, world: World, comm: Any, bucket: int) -> Sequence[Started]:
        """All that was started for ``bucket`` has completed: what follows; empty if nothing."""

    def participants(self, bucket: int) -> int:
        """How many ranks gave real data, read from the completed collective."""

    def deliver(self, deliver: lockstep.Deliver) -> None:
        """The round is complete: hand its result to whoever waits."""

    def note_late(self, round_: int, late: Sequence[int]) -> None:
        """The round is closed without these members."""

    def drop(self, buckets: frozenset[int]) -> None:
        """What was put in place there was too late and counts nowhere."""

    def give_back(self, buckets: frozenset[int]) -> None:
        """The main thread goes on without a round; these buckets are its own again."""

    def report(self) -> tuple[int, int, int]:
        """(bytes, status, participants) of the last completed round, for a hand-over."""

    def result_to_give(self) -> Sequence[np.ndarray]:
        """The last completed round's result."""

    def result_to_take(self, giver: LaneReport, wanted: bool) -> Sequence[np.ndarray]:
        """Fresh buffers for the giver's result; ``wanted`` unless this rank has it already."""

    def abandon(self, buckets: Sequence[int]) -> None:
        """The collectives of these buckets will never complete: use none of their buffers again."""


@dataclass(frozen=True, slots=True, eq=False)
class _HandOver:
    instruction: lockstep.HandOver
    giver: LaneReport


class Lane:
    """One lane of this rank; see the module's docstring."""

    def __init__(
        self,
        index: int,
        workload: Workload,
        epoch: int,
        on_start: Callable[[int, int], object],
        announce: Callable[[int, rounds.Announce], None],
    ) -> None:
        self.index = index
        self.workload = workload
        self.rounds: Any = workload.machine(epoch)
        self.requests: list[Any] = []
        self.quarantine: list[Started] = []
        self._keys: list[tuple[int, int] | _HandOver] = []  # beside requests: (epoch, bucket)
        self._started: list[Started] = []
        self._on_start = on_start
        self._announce = announce
        self._events: deque[Any] = deque()
        self._reports: tuple[Report, ...] = ()
        self._reduced_in = 0

    @property
    def moves(self) -> bool:
        """Whether something under way has to be looked at again and again."""
        return any(started.bulk for started in self._started)

    def report(self) -> LaneReport:
        """Where this rank stands in this lane."""
        size, status, participants = self.workload.report()
        state = self.rounds
        return LaneReport(
            state.completed, self._reduced_in, int(state.finished), size, status, participants
        )

    def feed(self, world: World, event: Any) -> None:
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

    def _carry_out(self, world: World, instruction: Any) -> None:
        match instruction:
            case lockstep.Start():
                self._start(world, instruction)
            case lockstep.HandOver():
                self._hand_over(world, instruction)
            case lockstep.Deliver():
                self._reduced_in = instruction.reduced_in
                self.workload.deliver(instruction)
            case lockstep.Finish(reduced_in):
                self._reduced_in = reduced_in
            case rounds.Drop(buckets):
                self.workload.drop(buckets)
            case rounds.GiveBack(buckets):
                self.workload.give_back(buckets)
            case rounds.Announce():
                self._announce(self.index, instruction)

    def _start(self, world: World, start: lockstep.Start) -> None:
        started = self.workload.start(world, world.lane_comms[self.index], start)
        if not started:
            self._events.append(self._completed(start.epoch, start.bucket))
            return
        self._track(started, (start.epoch, start.bucket))
        self._on_start(start.round, start.bucket)

    def _track(self, started: Sequence[Started], key: tuple[int, int] | _HandOver) -> None:
        self.requests += [each.watched for each in started]
        self._keys += [key] * len(started)
        self._started += started

    def _completed(self, epoch: int, bucket: int) -> lockstep.BucketCompleted:
        return lockstep.BucketCompleted(epoch, bucket, self.workload.participants(bucket))

    def _hand_over(self, world: World, instruction: lockstep.HandOver) -> None:
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
            self._track([Started(request, (buffer,))], pending)
        if not buffers:
            self._events.append(self._handed_over(pending))

    def _handed_over(self, pending: _HandOver) -> lockstep.HandedOver:
        return lockstep.HandedOver(
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
        for key in dict.fromkeys(keys):
            if key in self._keys:
                continue  # not all of it yet
            if isinstance(key, _HandOver):
                self.feed(world, self._handed_over(key))
                continue
            epoch, bucket = key
            more = self.workload.proceed(world, world.lane_comms[self.index], bucket)
            if more:
                self._track(more, key)
            else:
                self.feed(world, self._completed(epoch, bucket))

    def fault(self, world: World) -> None:
        """Everything in flight is lost; its buffers are kept untouched for life."""
        self.quarantine += self._started
        buckets = list(dict.fromkeys(key[1] for key in self._keys if isinstance(key, tuple)))
        if any(isinstance(key, _HandOver) for key in self._keys):  # received into all results
            buckets = list(range(self.workload.buckets))
        self.workload.abandon(buckets)
        self.requests, self._keys, self._started = [], [], []
        self._events.clear()
        self.feed(world, lockstep.Faulted())

    def reconcile(self, world: World, reports: tuple[Report, ...]) -> None:
        """A new view is agreed; go on in it. Members that don't know the lane yet stand at 0."""
        padded = tuple(_with_lane(report, self.index) for report in reports)
        self._reports = padded
        completed = tuple(report.lanes[self.index].completed for report in padded)
        self.feed(world, lockstep.Reconciled(world.view.epoch, completed))


def _with_lane(report: Report, index: int) -> Report:
    missing = index + 1 - len(report.lanes)
    return Report(report.member, report.epoch, report.lanes + (LaneReport(),) * max(0, missing))
