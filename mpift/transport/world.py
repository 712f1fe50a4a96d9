"""The communicators of a job, and their rebuild after a fault.

``base`` is only ever shrunk; ``control`` carries messages between ranks, ``heartbeat`` signs of
life, and each lane has a communicator for its collectives, the only ones that are revoked. All of
them return errors. A rebuild is a loop: shrink,
create, exchange reports, agree; whatever dies in the middle of one attempt is left out of the next.
Only the service thread calls into this module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpift.config import Config
from mpift.core.membership import Outcome, View, judge
from mpift.transport import processes, startup
from mpift.transport.processes import ProcessIdentity

# A report has a fixed length, so lanes are bounded; one lane is one optimizer's gradients.
MAX_LANES = 64


@dataclass(frozen=True, slots=True)
class LaneReport:
    """Where one rank stands in one lane, and what it could hand over."""

    completed: int = 0
    reduced_in: int = 0  # epoch that reduced the last completed round
    finished: int = 0  # 1: it was the lane's last, nobody took part
    result_bytes: int = 0
    status: int = 0  # the workload's own word on its last result
    participants: int = 0  # where the result itself does not tell


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others in a rebuild."""

    member: int
    epoch: int
    lanes: tuple[LaneReport, ...]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild agreed on; ``reports`` is in the new view's rank order."""

    view: View
    lost: tuple[int, ...]
    confirmed: frozenset[int]
    reports: tuple[Report, ...]
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SendRequest:
    """The request of a message to another rank. Where that fails, Open MPI may not be through with
    the request: it aborts this rank ("Send error after request freed") if it was freed meanwhile.
    So a failed one is never freed; the death that it tells of is noticed elsewhere."""

    request: Any


@dataclass(frozen=True, slots=True, eq=False)
class LetterRequest:
    """The request of a receive from any rank, of something that tells by itself whether it has come
    whole, in a buffer that was empty before."""

    request: Any


class Witness(Protocol):
    """Who can say that processes are gone, and see to it."""

    def gone(self, candidates: Sequence[ProcessIdentity], kill: bool) -> frozenset[int]:
        """Member ids of those that are gone for certain, looked at until all are, or until
        ``fence_timeout``; with ``kill`` those that can be are killed first."""


class World(Protocol):
    """What the service needs of its surroundings; ``MpiWorld`` and ``SoloWorld`` provide it."""

    member: int
    view: View
    launch_size: int  # ranks at launch; member ids are below it
    identities: dict[int, ProcessIdentity]
    gone: frozenset[int]  # members whose end is confirmed; the same on all ranks of a view
    warnings: list[str]
    # Set by ``finalize`` where mpi4py will call MPI_Finalize at the interpreter's end all the same,
    # and that would wait for the dead.
    finalize_would_hang: bool
    control: Any
    heartbeat: Any
    lane_comms: list[Any]  # one a lane; may be ahead of the lanes that are in use

    def test_some(self, requests: Sequence[Any]) -> list[int]:
        """Indices of the requests that completed; raises one of ``errors`` on a fault, but not
        before the letters that were found with it are told."""

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """What a call into this world raises at a fault."""

    def rebuild(
        self,
        report: Report,
        gone: frozenset[int],
        witness: Witness,
        at: Callable[[str], object],
    ) -> Rebuilt:
        """Make communicators of the survivors; ``at`` is called at the named points inside."""

    def receive(self, comm: Any, buffer: bytearray, tag: int) -> Any:
        """The request of a receive on ``comm`` from any rank."""

    def operator(self, name: str) -> Any:
        """The reduction operator for "sum", "min", "max" or "product"."""

    def finalize(self) -> None:
        """End MPI where a normal exit needs it."""

    def abort(self, code: int) -> None:
        """End all processes of the job."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What one attempt at a rebuild has made; it counts once all have agreed on it."""

    control: Any
    heartbeat: Any
    lane_comms: list[Any]
    reports: tuple[Report, ...]
    confirmed: frozenset[int]


class MpiWorld:
    """A world of MPI processes. Built, used and ended on the service thread."""

    def __init__(self, given: Any, config: Config, lanes: int) -> None:
        self._mpi, self.warnings = startup.load_mpi(config.mpi_threads)
        self._finalizes = not (startup.loaded_by_script() or startup.ulfm_enabled(self._mpi))
        self._config = config
        self.finalize_would_hang = False
        origin = given if given is not None else self._mpi.COMM_WORLD
        for comm in (self._mpi.COMM_SELF, self._mpi.COMM_WORLD, origin):
            self._mute(comm)
        self.launch_size: int = origin.size
        self.member: int = origin.rank
        self.identities: dict[int, ProcessIdentity] = {}
        self.gone: frozenset[int] = frozenset()
        self._met: BaseException | None = None  # a fault that is yet to be raised
        self._start(origin, lanes)
        self.view = View(0, tuple(sorted(self.identities)))
        # Communicators of older epochs: messages may still arrive on them, so they stay.
        self._retired: list[Any] = []

    def _start(self, origin: Any, lanes: int) -> None:
        """The first communicators, without those that have died already; as in a rebuild."""
        ulfm = startup.ulfm_enabled(self._mpi)
        launch_rank = self._mpi.COMM_WORLD.rank
        base = origin
        while True:
            base = self._mute(base.Shrink() if ulfm else base.Dup())
            good = False
            with contextlib.suppress(self._mpi.Exception):
                self.control = self._mute(base.Split(0, base.rank))
                everybody = self.control.allgather(processes.identify(self.member, launch_rank))
                self.heartbeat = self._mute(self.control.Dup())
                self.lane_comms = [self._mute(self.control.Dup()) for _ in range(lanes)]
                good = True
            if not ulfm or self._agree(base, good):
                break
        self._base = base
        self.identities = {identity.member: identity for identity in everybody}

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        return (self._mpi.Exception,)

    def _mute(self, comm: Any) -> Any:
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    def test_some(self, requests: Sequence[Any]) -> list[int]:
        if self._met is not None:
            met, self._met = self._met, None
            raise met
        rest = [i for i, request in enumerate(requests) if not isinstance(request, SendRequest)]
        plain = [getattr(requests[i], "request", requests[i]) for i in rest]
        try:
            found = self._mpi.Request.Testsome(plain) or []
        except self._mpi.Exception as error:
            letters = [isinstance(requests[i], LetterRequest) for i in rest]
            found = self._found_beside_a_fault(plain, letters)
            if not found:
                raise
            self._met = error
        done = [rest[i] for i in found]
        for i, send in enumerate(requests):
            if isinstance(send, SendRequest):
                status = self._mpi.Status()
                if send.request.Get_status(status) and not status.Get_error():
                    send.request.Test()
                    done.append(i)
        return done

    def _found_beside_a_fault(self, requests: Sequence[Any], letters: Sequence[bool]) -> list[int]:
        """Letters that the look which met a fault has found. Open MPI has freed these requests, and
        will not tell of them again: a rank's last word is often found together with its end. Of
        others it may have freed those that failed, too, and one cannot tell which."""
        if not startup.ulfm_enabled(self._mpi):  # of other MPIs that is not known
            return []
        null = self._mpi.REQUEST_NULL
        pairs = enumerate(zip(requests, letters, strict=True))
        return [i for i, (request, letter) in pairs if letter and request == null]

    def receive(self, comm: Any, buffer: bytearray, tag: int) -> Any:
        return LetterRequest(comm.Irecv(buffer, self._mpi.ANY_SOURCE, tag))

    def operator(self, name: str) -> Any:
        return {
            "sum": self._mpi.SUM,
            "min": self._mpi.MIN,
            "max": self._mpi.MAX,
            "product": self._mpi.PROD,
        }[name]

    # -- rebuild -------------------------------------------------------------------------------

    def rebuild(
        self,
        report: Report,
        gone: frozenset[int],
        witness: Witness,
        at: Callable[[str], object],
    ) -> Rebuilt:
        """See ``World``. ``gone`` are members that announced their end.

        Loops until an attempt is agreed on by all who are left. It has no time limit of its own:
        a thread outside MPI watches it.
        """
        begin, self._met = time.monotonic(), None
        time.sleep(self._config.gather_seconds)
        # Only where collectives run. A message that is still on its way when its communicator is
        # revoked makes Open MPI abort its sender ("Send error after request freed").
        for comm in self.lane_comms:
            with contextlib.suppress(self._mpi.Exception):
                comm.Revoke()
        self._retired += [self.control, self.heartbeat, *self.lane_comms]
        old, base = self.view, self._base
        while True:
            at("shrink")
            try:
                base = self._mute(base.Shrink())
            except self._mpi.Exception:
                continue
            attempt = self._attempt(base, report, gone, witness, at)
            at("agree")
            if self._agree(base, attempt is not None) and attempt is not None:
                break
        epoch = max(r.epoch for r in attempt.reports) + 1
        self.view = old.successor(epoch, (r.member for r in attempt.reports))
        self._base, self.control, self.heartbeat = base, attempt.control, attempt.heartbeat
        self.lane_comms = attempt.lane_comms
        lost = tuple(sorted(set(old.members) - set(self.view.members)))
        self.gone |= attempt.confirmed
        seconds = time.monotonic() - begin
        return Rebuilt(self.view, lost, attempt.confirmed, attempt.reports, seconds)

    def _attempt(
        self,
        base: Any,
        report: Report,
        gone: frozenset[int],
        witness: Witness,
        at: Callable[[str], object],
    ) -> _Attempt | None:
        """All creation and exchange of one attempt; None if anything in it failed."""
        control = None
        try:
            at("split")
            control = self._mute(base.Split(0, base.rank))
            reports = self._exchange_reports(control, report)
            confirmed = self._confirm(control, reports, gone, witness)
            # No fewer than before: the first lanes are promised without a rebuild.
            count = max(len(self.lane_comms), *(len(r.lanes) for r in reports))
            heartbeat, *lanes = (self._mute(control.Dup()) for _ in range(1 + count))
            return _Attempt(control, heartbeat, lanes, reports, confirmed)
        except self._mpi.Exception:
            if control is not None:
                # Others may be further on in it, waiting for this rank: fetch them out.
                with contextlib.suppress(self._mpi.Exception):
                    control.Revoke()
            return None

    def _agree(self, base: Any, good: bool) -> bool:
        try:
            return bool(base.Agree(int(good)))
        except self._mpi.Exception:
            return False

    def _exchange_reports(self, control: Any, report: Report) -> tuple[Report, ...]:
        mine = _pack(report)
        everybody = np.empty((control.size, mine.size), np.int64)
        control.Allgather(mine, everybody)
        return tuple(_unpack(row) for row in everybody)

    def _confirm(
        self,
        control: Any,
        reports: Sequence[Report],
        gone: frozenset[int],
        witness: Witness,
    ) -> frozenset[int]:
        """Members whose end somebody knows for sure, the same set on every survivor.

        A majority also sees to it that those whom MPI left out although they live do end.
        """
        present = {r.member for r in reports}
        missing = [m for m in self.view.members if m not in present]
        mine = self._witnessed_here(present, missing)
        confirmed = self._exchange_ends(control, gone & set(missing), mine, witness, kill=False)
        verdict = judge(self.view, present, confirmed, 1)
        if verdict.outcome is Outcome.GO_ON and not set(missing) <= confirmed:
            left = [identity for identity in mine if identity.member not in confirmed]
            confirmed = self._exchange_ends(control, confirmed, left, witness, kill=True)
        return confirmed

    def _witnessed_here(self, present: set[int], missing: list[int]) -> list[ProcessIdentity]:
        """The missing ones that this rank looks after: those of its node, and for the first rank
        also those of nodes where nobody is left."""
        here = self.identities[self.member].node
        inhabited = {self.identities[m].node for m in present}
        first = self.member == min(present)
        found = [self.identities[m] for m in missing]
        return [i for i in found if i.node == here or (first and i.node not in inhabited)]

    def _exchange_ends(
        self,
        control: Any,
        known: frozenset[int],
        mine: list[ProcessIdentity],
        witness: Witness,
        kill: bool,
    ) -> frozenset[int]:
        open_ = [identity for identity in mine if identity.member not in known]
        flags = np.zeros(self.launch_size, np.int64)
        flags[list(known | witness.gone(open_, kill))] = 1
        everybody = np.empty_like(flags)
        control.Allreduce(flags, everybody, self._mpi.MAX)
        return frozenset(np.flatnonzero(everybody).tolist())

    # -- the end -------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Without ULFM MPI must be finalized, by mpi4py where the script has loaded it; else it is
        not: the ranks have agreed to end, and a finalize would wait for those that have died."""
        lost = self.view.size < self.launch_size
        if self._finalizes and not lost:
            startup.finalize(self._mpi)
        self.finalize_would_hang = lost and startup.loaded_by_script()

    def abort(self, code: int) -> None:
        self._mpi.COMM_WORLD.Abort(code)


_LANE_FIELDS = 6


def _pack(report: Report) -> np.ndarray:
    """Fixed length: [member, epoch, lanes, then six numbers a lane]."""
    row = np.zeros(3 + _LANE_FIELDS * MAX_LANES, np.int64)
    row[:3] = report.member, report.epoch, len(report.lanes)
    for index, lane in enumerate(report.lanes):
        start = 3 + _LANE_FIELDS * index
        row[start : start + _LANE_FIELDS] = (
            lane.completed,
            lane.reduced_in,
            lane.finished,
            lane.result_bytes,
            lane.status,
            lane.participants,
        )
    return row


def _unpack(row: np.ndarray) -> Report:
    member, epoch, lanes = (int(value) for value in row[:3])
    table = row[3 : 3 + _LANE_FIELDS * lanes].reshape(lanes, _LANE_FIELDS)
    return Report(member, epoch, tuple(LaneReport(*map(int, line)) for line in table))
