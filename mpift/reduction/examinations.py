"""Where ranks compare their states: digests on their way to the coordinator, and meetings.

A part of the service's loop takes digests to the coordinator of the view, and has its lane's rounds
give the alarm if two differ. A round with an alarm leads to a *meeting* of all ranks on a lane of
operations that is used for nothing else: faults, redoing and ranks that have left are seen to there
as in any lane. It can't be the lane of the script's operations. A rank that is late replays a round
while it waits in such an operation, or while others do, who would then wait for each other.

A rank may be unable to come: its script waits in an operation, and has a round of its own to deal
with before the one after which the others meet, who may be those that it waits for. Such a rank
learns that they wait, and ``decline``s: nothing is compared then. A meeting counts only if all rows
are of the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpift.core import lockstep
from mpift.core.verification import Digest, Digests
from mpift.reduction.calls import result_of
from mpift.reduction.gradients import GradientRounds
from mpift.reduction.operations import Kind, Operation, Operations
from mpift.transport.messages import Kind as MessageKind
from mpift.transport.messages import Message
from mpift.transport.service import Service
from mpift.transport.world import World

# A rank waits this long in a meeting before it tells the others that it does.
_QUIET_SECONDS = 0.02
# Of a row: its size in bytes, member, lane, round, phase, whether the member has come.
_HEADER = 6


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks compare their states: after a round of a lane, in the ``phase``-th meeting."""

    lane: int
    round: int
    phase: int = 0


class Examinations:
    """See the module's docstring. ``on_service`` runs a function on the service thread and waits;
    ``waiting`` is a context around a wait for other ranks. A ``Part``."""

    requests: Sequence[Any] = ()

    def __init__(
        self,
        service: Service,
        member: int,
        on_service: Callable[[Callable[[], Any]], None],
        waiting: Callable[[], Any],
    ) -> None:
        self.joined = False  # this rank has left its loops
        self._service = service
        self._member = member
        self._on_service = on_service
        self._waiting = waiting
        self._meetings = Operations(member, lambda: None)
        self._lane = -1
        self._workloads: dict[int, GradientRounds] = {}
        self._unfinished: Operation | None = None
        self._waits_at: Place | None = None  # it waits there, and has said so
        self._awaited: dict[int, int] = {}  # by lane: the round after which others wait
        self._digests: Digests
        self._world: World
        service.mailbox.register(MessageKind.DIGEST, self._take_digest)
        service.mailbox.register(MessageKind.EXAMINATION, self._take_examination)
        on_service(lambda: service.attach(self))

    def open(self, lane: int, workload: GradientRounds) -> None:
        """Look after the rounds of ``lane`` too; all ranks open theirs in the same order."""

        def add() -> None:
            self._workloads[lane] = workload
            if self._lane < 0:
                self._lane = self._service.add_lane(self._meetings)

        self._on_service(add)

    # -- digests -----------------------------------------------------------------------------------

    def tell(self, lane: int, round_: int, value: int) -> None:
        """This rank's state after ``round_`` has a digest of ``value``, 64 bits. From any thread;
        nobody waits."""

        def send() -> None:
            view = self._world.view
            if view.coordinator == self._member:
                self._hear(Digest(self._member, lane, round_, value))
            else:
                text = f"{lane} {round_} {value}"
                self._service.mailbox.send(MessageKind.DIGEST, text, [view.coordinator])

        self._service.call(send)

    def _take_digest(self, message: Message) -> None:
        lane, round_, value = map(int, message.text.split())
        self._hear(Digest(message.sender, lane, round_, value))

    def _hear(self, digest: Digest) -> None:
        self._digests, mismatches = self._digests.handle(digest)
        for mismatch in mismatches:
            if mismatch.lane in self._workloads:
                self._workloads[mismatch.lane].request_examination(after=mismatch.round)

    # -- meetings ----------------------------------------------------------------------------------

    def meet(self, place: Place, row: np.ndarray) -> Mapping[int, np.ndarray] | None:
        """Exchange rows, uint8[n], with all ranks that are still in their loops; returns them by
        member. None if somebody can't come, or is elsewhere. Waits for ranks until they come or are
        gone."""
        return self._exchange(place, row, attends=True)

    def decline(self, lane: int, round_: int) -> None:
        """This rank can't come to the meeting after ``round_``. The others are there already."""
        self._exchange(Place(lane, round_), np.zeros(0, np.uint8), attends=False)

    def awaited(self, lane: int) -> int:
        """The round of ``lane`` after which others wait for this rank; -1 if nobody does."""
        return self._awaited.get(lane, -1)

    def _exchange(
        self, place: Place, row: np.ndarray, attends: bool
    ) -> Mapping[int, np.ndarray] | None:
        numbers = (row.nbytes, self._member, place.lane, place.round, place.phase, attends)
        head = np.array(numbers, np.int64).view(np.uint8)
        operation = Operation(Kind.ALLGATHER, np.concatenate([head, row]))

        def begin() -> None:
            self._meetings.begin(operation)
            self._service.lanes[self._lane].feed(self._world, lockstep.Contributed(0))

        if self._unfinished is not None:
            # The script caught an interrupt in the middle of it; it still has its turn.
            self._unfinished.done.wait()
        self._unfinished = operation
        self._service.call(begin)
        with self._waiting():
            if not operation.done.wait(_QUIET_SECONDS):
                self._service.call(lambda: self._say(place, operation))
                operation.done.wait()
        self._unfinished = self._waits_at = None
        self._forget(place)
        return self._rows(result_of(operation), place)

    def _rows(self, received: np.ndarray, place: Place) -> Mapping[int, np.ndarray] | None:
        rows, start, complete = {}, 0, True
        expected = [place.lane, place.round, place.phase, 1]
        while start < len(received):
            stop = start + 8 * _HEADER
            size, member, *where = received[start:stop].copy().view(np.int64).tolist()
            complete = complete and where == expected
            rows[member] = received[stop : stop + size]
            start = stop + size
        return rows if complete else None

    def _say(self, place: Place, operation: Operation) -> None:
        """On the service thread: the others may not know that this rank waits for them."""
        if not operation.done.is_set():
            self._waits_at = place
            text = f"{place.lane} {place.round}"
            members = self._world.view.members
            self._service.mailbox.send(MessageKind.EXAMINATION, text, members)

    def _take_examination(self, message: Message) -> None:
        lane, round_ = map(int, message.text.split())
        self._service.hurry()
        self._awaited[lane] = max(round_, self._awaited.get(lane, -1))

    def _forget(self, place: Place) -> None:
        if self._awaited.get(place.lane, -1) <= place.round:
            self._awaited.pop(place.lane, None)

    # -- the service's loop ------------------------------------------------------------------------

    def install(self, world: World) -> None:
        self._world = world
        self._digests = Digests(frozenset(world.view.members))
        place, operation = self._waits_at, self._unfinished
        if place is not None and operation is not None:
            self._say(place, operation)

    def fault(self) -> None:
        pass

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def turn(self, now: float) -> None:
        pass
