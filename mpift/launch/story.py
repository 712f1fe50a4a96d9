"""The story of a job as its events tell it: who runs, who died of what, what that cost. Pure.

Events come from many ranks through several pipes, so their order of arrival means little: what is
asked for is worked out from the records when it is asked for. ``verdict`` judges the end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpift.core import events
from mpift.core.chaos import FATAL
from mpift.errors import ExitCode
from mpift.launch.last_words import exception_of, last_words, signal_name
from mpift.observe.lines import in_words

_STDERR_LINES_KEPT = 100
_TEXT_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Notice:
    """One line for the user; a ``warning`` is shown even to those who want quiet. ``ended``: the
    rank whose bad end it tells, if it does."""

    text: str
    warning: bool = False
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one member ended badly. ``traceback`` has what it last said, if no traceback.

    ``injected`` failures are rehearsals: the fault schedule asked for them.
    """

    rank: int
    host: str
    reason: str
    exit_code: int | None
    signal: int | None
    time: float
    traceback: str
    injected: bool = False

    @property
    def where(self) -> str:
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


@dataclass(frozen=True, slots=True)
class Recovery:
    """An injected fault; ``seconds`` from it to the first step without the victim, None so far."""

    fault: events.FaultInjected
    seconds: float | None


@dataclass(slots=True)
class Member:
    """One rank of the launch, for life."""

    host: str = ""
    starting: bool = False  # waits in MPI's start for all others
    started: bool = False
    faults: list[events.FaultInjected] = field(default_factory=list)
    verdict: str = ""  # why it was killed, as those say who went on without it
    failed: events.RankFailed | None = None
    left: events.RankLeft | None = None
    ended: events.ProcessEnded | None = None
    stopped: events.RankStopped | events.JobStopped | None = None
    last_step: int = -1
    lost: bool = False  # some view goes on without it
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=_STDERR_LINES_KEPT))

    @property
    def struck(self) -> events.FaultInjected | None:
        """The injected fault that it came to its end by, if there was any."""
        fatal = [fault for fault in self.faults if _verb(fault) in FATAL]
        others = [] if self.ended_well or (self.ended is None and not self.lost) else self.faults
        return next(iter([*fatal, *others[-1:]]), None)

    @property
    def ended_well(self) -> bool:
        """Its process left with 0; or, where nobody saw that, it said that it was through."""
        if self.failed or self.stopped:
            return False
        return self.ended.exit_code == 0 if self.ended else self.left is not None


class Story:
    """All that is known of a job of ``ranks`` members, for which ``scheduled`` faults are due."""

    def __init__(self, ranks: int, scheduled: Sequence[str] = ()) -> None:
        self.ranks = ranks
        self.scheduled = tuple(scheduled)
        self.members = {member: Member() for member in range(ranks)}
        self.size = ranks
        self.started = False
        self.step = -1
        self.values: dict[str, Any] = {}
        self.stop: events.JobStopped | None = None
        self.start_given_up = False  # by the launcher: MPI waits for ranks that have ended
        self.aborted: int | None = None  # the member that called MPI_Abort first
        self._views: dict[int, events.ViewChanged] = {}
        self._first_step: dict[int, float] = {}  # by epoch
        self._told_recoveries = 0
        self._suspected: set[int] = set()  # told of in the present view
        self.keys_lost: set[str] = set()  # of parameter servers
        self.repairs = 0  # of ranks' states
        self.device_faults = 0
        self.checkpoints_saved = self.checkpoints_failed = 0
        self.restored_step: int | None = None

    def member(self, number: int) -> Member:
        """Members that MPI itself spawned later are taken in as they show up."""
        return self.members.setdefault(number, Member())

    # -- events in -----------------------------------------------------------------------------

    def hear(self, member: int, line: str) -> None:
        """A line that a member wrote to stderr: last words of a script that reports none."""
        self.member(member).stderr.append(line)

    def abort(self, member: int) -> list[Notice]:
        """A member called MPI_Abort."""
        if self.aborted is not None:
            return []
        self.aborted = member
        return [Notice(f"rank {member} aborts the job (MPI_Abort)", warning=True)]

    def handle(self, event: events.Event) -> list[Notice]:
        """Take the event in; returns what is worth a line."""
        return [*self._record(event), *self._recovered()]

    def _record(self, event: events.Event) -> list[Notice]:
        member = self.member(event.member)
        member.host = getattr(event, "host", "") or member.host
        match event:
            case events.RankStarting() | events.RankStarted():
                member.starting = True
                member.started = isinstance(event, events.RankStarted)
                self.started = self.started or member.started
            case events.FaultInjected():
                member.faults.append(event)
                return [Notice(f"chaos: {event.fault} strikes rank {event.member}")]
            case events.ViewChanged():
                return self._record_view(event)
            case events.Suspected() | events.HeardAgain() | events.Evicted():
                return self._record_suspect(event)
            case events.StepFinished():
                self._record_step(event, member)
            case events.Reported():
                self.values.update(event.values)
            case events.RankFailed() | events.RankStopped() | events.JobStopped():
                return self._record_last_words(event, member)
            case events.RankLeft():
                member.left = event
            case events.ProcessEnded():
                return self._record_end(event, member)
            case _:
                return self._record_news(event)
        return []

    def _record_news(self, event: events.Event) -> list[Notice]:
        """What is shown as it is, and at most counted."""
        warning = True
        match event:
            case events.HealthChanged(band=band):
                warning = band != "healthy"
            case events.ReductionChosen():
                warning = False
            case events.RankRepaired():
                self.repairs += 1
            case events.DeviceFailed():
                self.device_faults += 1
            case events.CheckpointSaved():
                self.checkpoints_saved += 1
                warning = False
            case events.CheckpointFailed():
                self.checkpoints_failed += 1
            case events.CheckpointRestored():
                self.restored_step = event.step
                warning = False
            case events.KeysLost(keys=keys):
                self.keys_lost |= set(keys)
        return [Notice(_short(in_words(event) or ""), warning)]

    def _record_last_words(
        self, event: events.RankFailed | events.RankStopped | events.JobStopped, member: Member
    ) -> list[Notice]:
        if isinstance(event, events.RankFailed):
            member.failed = event
        else:
            member.stopped = event
        if not isinstance(event, events.JobStopped):
            return [_ends(self.failure(event.member))]
        if self.stop is None or event.time < self.stop.time:
            self.stop = event
        return [Notice(f"rank {event.member} stops the job: {event.reason}", warning=True)]

    def _record_view(self, event: events.ViewChanged) -> list[Notice]:
        self._views[event.epoch] = event
        if event.epoch == max(self._views):
            self.size = len(event.members)
        for number, reason in itertools.zip_longest(event.lost, event.reasons, fillvalue=""):
            member = self.member(int(number))
            member.lost, member.verdict = True, reason or member.verdict
        self._suspected.clear()
        if not event.lost:
            return []
        gone = ", ".join(map(str, sorted(event.lost)))
        ranks = "ranks" if len(event.lost) > 1 else "rank"
        on = f"{len(event.members)} go on" if len(event.members) > 1 else "1 goes on"
        reasons = "; ".join(dict.fromkeys(filter(None, event.reasons)))
        why = f" ({_short(reasons)})" if reasons else ""
        return [Notice(f"lost {ranks} {gone}{why}; {on}, rebuilt in {event.rebuild_seconds:.3f} s")]

    def _record_suspect(
        self, event: events.Suspected | events.HeardAgain | events.Evicted
    ) -> list[Notice]:
        """What several observers tell of one rank is said once."""
        if isinstance(event, events.Evicted):
            self.member(event.evicted).verdict = event.reason
        elif (event.suspect in self._suspected) == isinstance(event, events.Suspected):
            return []
        else:
            self._suspected ^= {event.suspect}
        return [Notice(in_words(event) or "", warning=True)]

    def _record_step(self, event: events.StepFinished, member: Member) -> None:
        member.last_step = max(member.last_step, event.step)
        self.step = max(self.step, event.step)
        first = self._first_step.get(event.epoch)
        self._first_step[event.epoch] = event.time if first is None else min(first, event.time)

    def _record_end(self, event: events.ProcessEnded, member: Member) -> list[Notice]:
        told = member.failed or member.struck or member.stopped
        member.ended = event
        if event.exit_code == 0 or told:
            return []
        return [_ends(self.failure(event.member))]

    def _recovered(self) -> list[Notice]:
        done = [r for r in self.recoveries() if r.seconds is not None]
        news = done[self._told_recoveries :]
        self._told_recoveries = len(done)
        return [Notice(f"recovered from {r.fault.fault} in {r.seconds:.3f} s") for r in news]

    @property
    def waited_for_in_vain(self) -> list[int]:
        """Members that have ended without starting MPI while others wait for them there."""
        waiting = any(m.starting and not (m.started or m.ended) for m in self.members.values())
        missing = [n for n, m in self.members.items() if m.ended and not m.started]
        return missing if waiting else []

    @property
    def given_up(self) -> bool:
        """Whether the coordinator of the newest view has stopped: all that it reaches do then, and
        of ranks behind a cut no end will ever be heard."""
        newest = self._views[max(self._views)].members if self._views else tuple(self.members)
        return bool(newest) and self.member(min(newest)).stopped is not None

    # -- what it adds up to --------------------------------------------------------------------

    def recoveries(self) -> list[Recovery]:
        """Each injected fault and what it cost, by time of the fault."""
        faults = [fault for m in self.members.values() for fault in m.faults]
        return [
            Recovery(f, self._recovery_seconds(f)) for f in sorted(faults, key=lambda f: f.time)
        ]

    @property
    def never_struck(self) -> tuple[str, ...]:
        """Scheduled faults whose place the job never came to."""
        struck = {fault.fault for member in self.members.values() for fault in member.faults}
        return tuple(fault for fault in self.scheduled if fault not in struck)

    @property
    def rebuild_seconds(self) -> list[float]:
        """What each rebuild after a loss took, in their order."""
        views = sorted(self._views.values(), key=lambda view: view.epoch)
        return [view.rebuild_seconds for view in views if view.lost]

    def _recovery_seconds(self, fault: events.FaultInjected) -> float | None:
        without = [e for e, view in self._views.items() if fault.member not in view.members]
        if without:
            recovered_in = min(without)
        elif _verb(fault) not in FATAL:
            return None  # it is still there
        else:
            # Nobody reported the view that followed: any newer than those before the fault.
            seen = {e: view.time for e, view in self._views.items()} | self._first_step
            recovered_in = max((e for e, t in seen.items() if t <= fault.time), default=0) + 1
        steps = [time for epoch, time in self._first_step.items() if epoch >= recovered_in]
        return max(0.0, min(steps) - fault.time) if steps else None

    @property
    def under_way(self) -> bool:
        """Whether there is progress to show."""
        return self.step != -1 or bool(self.values)

    @property
    def steps(self) -> int:
        """Steps that the job finished."""
        applied = (m.left.steps_applied for m in self.members.values() if m.left)
        return max(self.step + 1, max(applied, default=0))

    @property
    def steps_lost(self) -> int:
        """Steps that ranks which left normally had called for and did not get, or jumped over."""
        lost = 0
        for member in self.members.values():
            if member.left and member.ended_well:
                own = member.left.steps_applied - member.left.rounds_missed
                lost += member.left.steps_called - own
                lost += max(0, member.last_step + 1 - member.left.steps_applied)
        return lost

    def failure(self, number: int) -> Failure:
        """Why this member ended, or is about to end, badly."""
        member = self.members[number]
        known = (member.struck, member.failed, member.stopped, member.ended)
        time = min((event.time for event in known if event), default=float("inf"))
        code = member.ended.exit_code if member.ended else None
        number_of_signal = member.ended.signal if member.ended else None
        if member.failed:
            code = member.failed.exit_code if code is None else code
        trace = member.failed.traceback if member.failed else ""
        return Failure(
            rank=number,
            host=member.host,
            reason=_reason(member),
            exit_code=code,
            signal=number_of_signal,
            time=time,
            traceback=trace.rstrip() or last_words(member.stderr),
            injected=member.struck is not None and member.failed is None,
        )


# -- words -------------------------------------------------------------------------------------


def _ends(failure: Failure) -> Notice:
    return Notice(f"{failure.where} failed: {failure.reason}", warning=True, ended=failure.rank)


def _reason(member: Member) -> str:
    if member.failed:
        return _short(member.failed.reason)
    if member.struck:
        said = f"; {_short(member.verdict)}" if member.verdict else ""
        return f"fault schedule: {member.struck.fault}{said}"
    if member.stopped:
        return _short(member.stopped.reason)
    if member.ended is None:
        return "nobody saw its end: was its node lost?"
    if member.verdict:
        return _short(member.verdict)
    if member.ended.signal is not None:
        return f"ended by {signal_name(member.ended.signal)}"
    said = exception_of(member.stderr)
    if said:
        return _short(said)
    code = member.ended.exit_code or 0
    if code > 128:  # a shell's way to say that its command was ended by a signal
        return f"exit code {code} ({signal_name(code - 128)})"
    return f"exit code {code}"


def _verb(fault: events.FaultInjected) -> str:
    return fault.fault.partition(":")[0]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_CHARS_MAX else line[:_TEXT_CHARS_MAX] + "..."


def stop_code(stop: events.JobStopped) -> int:
    """The exit code that a stopped job leaves with: its own, but never success."""
    return stop.exit_code or ExitCode.SCRIPT_FAILED
