"""The communicators of a job of MPI processes, and their rebuild after a fault.

``base`` is only ever shrunk; ``control`` carries messages between ranks, ``heartbeat`` signs of
life, and each lane has a communicator for its collectives, the only ones that are revoked. All of
them return errors. A start and a rebuild are loops: shrink, create, exchange, agree; whatever dies
in the middle of one attempt is left out of the next.
Only the service thread calls into this module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpift.config import Config
from mpift.core.membership import Outcome, View, judge
from mpift.transport import processes, startup
from mpift.transport.processes import ProcessIdentity
from mpift.transport.world import (
    MAX_LANES,
    LaneReport,
    LetterRequest,
    Rebuilt,
    Report,
    SendRequest,
    Witness,
)

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class _Remade:
    """What one attempt at a rebuild has made; it counts once all have agreed on it."""

    control: Any
    heartbeat: Any
    lane_comms: list[Any]
    reports: tuple[Report, ...]
    confirmed: frozenset[int]


class _Leaving:
    """This rank's part in the agreement of a view to leave."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._flag = np.ones(1, np.int32)
        ulfm = startup.ulfm_enabled(mpi)
        # A barrier tells of no death that comes while some have left it already.
        self._request = comm.Iagree(self._flag) if ulfm else comm.Ibarrier()
        self._failed: BaseException | None = None
        self._mpi = mpi

    def look(self) -> bool:
        return self._find(self._request.Test)

    def wait(self) -> bool:
        return self._find(self._request.Wait)

    def _find(self, how: Callable[[], bool]) -> bool:
        """Whether all are through; an error again and again, of which MPI tells once."""
        if self._failed is not None:
            raise self._failed
        try:
            done = how()
        except self._mpi.Exception as error:
            self._failed = error
            raise
        if done and not self._flag[0]:
            self._failed = self._mpi.Exception(self._mpi.ERR_REVOKED)
            raise self._failed
        return done


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
        self._leaving: _Leaving | None = None
        self._start(origin, lanes)
        self.view = View(0, tuple(sorted(self.identities)))
        # Communicators of older epochs: messages may still arrive on them, so they stay.
        self._retired: list[Any] = []

    def _start(self, origin: Any, lanes: int) -> None:
        """The first communicators, without those that have died already; as in a rebuild."""
        me = processes.identify(self.member, self._mpi.COMM_WORLD.rank)

        def meet(control: Any) -> list[ProcessIdentity]:
            everybody: list[ProcessIdentity] = control.allgather(me)
            self.control = control
            self.heartbeat, *self.lane_comms = self._copies(control, 1 + lanes)
            return everybody

        if startup.ulfm_enabled(self._mpi):
            self._base, everybody = self._agreed(origin, meet, lambda _point: None)
        else:
            self._base = self._mute(origin.Dup())
            everybody = meet(self._mute(origin.Dup()))
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
    ) -> Rebuilt | None:
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
        if self._all_were_through():
            return None
        self._leaving = None
        self._retired += [self.control, self.heartbeat, *self.lane_comms]
        old = self.view
        base, made = self._agreed(
            self._base, lambda control: self._remake(control, report, gone, witness), at
        )
        epoch = max(r.epoch for r in made.reports) + 1
        self.view = old.successor(epoch, (r.member for r in made.reports))
        self._base, self.control, self.heartbeat = base, made.control, made.heartbeat
        self.lane_comms = made.lane_comms
        lost = tuple(sorted(set(old.members) - set(self.view.members)))
        self.gone |= made.confirmed
        seconds = time.monotonic() - begin
        return Rebuilt(self.view, lost, made.confirmed, made.reports, seconds)

    def _agreed(
        self, base: Any, make: Callable[[Any], _Made], at: Callable[[str], object]
    ) -> tuple[Any, _Made]:
        """A shrunk ``base`` and what ``make`` made with a communicator of its members: the first of
        as many attempts as it takes that all who are left have seen through."""
        while True:
            at("shrink")
            try:
                base = self._mute(base.Shrink())
            except self._mpi.Exception:
                continue
            made = self._attempt(base, make, at)
            at("agree")
            if self._agree(base, made is not None) and made is not None:
                return base, made

    def _attempt(
        self, base: Any, make: Callable[[Any], _Made], at: Callable[[str], object]
    ) -> _Made | None:
        """All creation and exchange of one attempt; None if anything in it failed."""
        control = None
        at("split")
        with contextlib.suppress(self._mpi.Exception):
            control = self._mute(base.Split(0, base.rank))
        # Who has none could fetch nobody out of it: so all have one before any of them uses it.
        if not self._agree(base, control is not None) or control is None:
            return None
        try:
            return make(control)
        except self._mpi.Exception:
            # Others may be further on in it, waiting for this rank: fetch them out.
            with contextlib.suppress(self._mpi.Exception):
                control.Revoke()
            return None

    def _remake(
        self, control: Any, report: Report, gone: frozenset[int], witness: Witness
    ) -> _Remade:
        reports = self._exchange_reports(control, report)
        confirmed = self._confirm(control, reports, gone, witness)
        # No fewer than before: the first lanes are promised without a rebuild.
        count = max(len(self.lane_comms), *(len(r.lanes) for r in reports))
        heartbeat, *lanes = self._copies(control, 1 + count)
        return _Remade(control, heartbeat, lanes, reports, confirmed)

    def _copies(self, control: Any, count: int) -> list[Any]:
        return [self._mute(control.Dup()) for _ in range(count)]

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

    def all_through(self) -> bool:
        if self.view.size == 1:
            return True
        if self._leaving is None:
            self._leaving = _Leaving(self._mpi, self.control)
        return self._leaving.look()

    def _all_were_through(self) -> bool:
        """Whether the ranks have agreed to leave, before a rebuild that who has left would miss.

        Each view agrees on that once: those who ask to leave say yes, and whoever begins a rebuild
        without having asked says no. So that all who are left find the same.
        """
        if not startup.ulfm_enabled(self._mpi):
            return False
        if self._leaving is None:
            return self._agree(self.control, False)
        with contextlib.suppress(self._mpi.Exception):
            return self._leaving.wait()
        return False

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
