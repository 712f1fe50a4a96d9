"""Which ranks of a node hang and have to be killed, so that MPI reports a death in their place.

Pure: the watchdog looks at the ranks at each tick and hands in what it saw; the judge answers with
whom to kill, and why. What it never does: judge a rank that has left, is traced by a debugger or
dumps core; count time in which nobody ran; count more than two ticks for one gap, however late the
watchdog itself woke.

=====================================  =============================================================
a rank                                 is killed once that lasted
=====================================  =============================================================
is stopped (SIGSTOP) while another     ``stop_timeout_seconds``; starts anew whenever another rank
of the node runs                       stops or continues: a job stops and continues one by one
inside a blocking MPI call             the call's own limit and ``blocked_grace_seconds``
stands still, without using the CPU    ``hang_timeout_seconds``
stands still, and uses the CPU         that times ``busy_hang_factor``: it may be a long compile
                                       that holds the interpreter's lock
has lost its launcher                  ``orphan_timeout_seconds``, even while all are stopped
=====================================  =============================================================
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

# One gap counts at most this many ticks. A cap and not a refusal: a watchdog that is always late
# still finds a hang, only later.
_GAP_TICKS_MAX = 2.0
# Below this share of a core a rank doesn't work. Threads that wait for the interpreter's lock look
# for it 200 times a second each, and one that computes on a crowded node gets a small share.
_BUSY_CPU_SHARE = 0.05

_STOPPED = "T"
_TRACED_STOP = "t"
_UNINTERRUPTIBLE = "D"  # may have been told to stop, and will when the disk answers


class Phase(enum.IntEnum):
    """Where a rank is in its life."""

    STARTING = 1  # its loop doesn't run yet: standing still is no fault
    RUNNING = 2
    LEFT = 3
    # It ended since its part of the job had to: it may not be taken for one that died.
    STOOD_DOWN = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """How long what is tolerated. ``tick_seconds`` is how often ``Judge.tick`` is called."""

    hang_timeout_seconds: float = 15.0
    stop_timeout_seconds: float = 1.0
    busy_hang_factor: float = 4.0
    blocked_grace_seconds: float = 5.0
    orphan_timeout_seconds: float = 30.0
    tick_seconds: float = 0.25


@dataclass(frozen=True, slots=True)
class Observation:
    """One live rank as the watchdog sees it at a tick.

    ``beats`` and ``blocked_since_seconds`` are what the rank stamps itself (the latter 0 outside of
    blocking calls); ``state`` is the kernel's letter; ``orphaned``: its launcher is gone. Where
    ``beats`` changed since the last tick, ``cpu_seconds`` is of no account.
    """

    member: int
    phase: Phase
    beats: int
    blocked_since_seconds: float = 0.0
    blocked_limit_seconds: float = 0.0
    state: str = "S"
    cpu_seconds: float = 0.0
    traced: bool = False
    dumping_core: bool = False
    orphaned: bool = False

    @property
    def exempt(self) -> bool:
        """Whether somebody looks into it, or the kernel still writes it down."""
        return self.traced or self.dumping_core or self.state == _TRACED_STOP


@dataclass(frozen=True, slots=True)
class Kill:
    """End this rank; ``reason`` is for those who survive it."""

    member: int
    reason: str


@dataclass(slots=True)
class _Record:
    """What the judge remembers of one rank; all durations in counted seconds."""

    activity: tuple[Phase, int, float]
    silent_seconds: float = 0.0
    cpu_seconds_before: float | None = None  # at the first tick of the silence
    stopped_seconds: float = 0.0
    orphaned_seconds: float = 0.0


class Judge:
    """Judges the ranks of one node; ``now`` is the watchdog's own monotonic clock in seconds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last_tick: float | None = None
        self._records: dict[int, _Record] = {}
        self._stopped: frozenset[int] = frozenset()
        self._condemned: set[int] = set()

    def silent_seconds(self, member: int) -> float:
        """Counted seconds since the rank last gave a sign of life; 0 for one never seen."""
        record = self._records.get(member)
        return record.silent_seconds if record is not None else 0.0

    def tick(self, now: float, live: Sequence[Observation]) -> list[Kill]:
        """Whom to kill, given all live ranks; a rank is named once."""
        gap = 0.0 if self._last_tick is None else max(0.0, now - self._last_tick)
        counted = min(gap, _GAP_TICKS_MAX * self._limits.tick_seconds)
        self._last_tick = now
        judged = [o for o in live if o.phase != Phase.LEFT and o.member not in self._condemned]
        awake = {o.state for o in judged} - {_STOPPED, _TRACED_STOP}
        stopped = frozenset(o.member for o in judged if o.state == _STOPPED)
        if stopped != self._stopped:
            self._stopped = stopped
            for record in self._records.values():
                record.stopped_seconds = 0.0
        kills = []
        for seen in judged:
            record = self._updated(seen, counted, awake)
            reason = self._reason(seen, record)
            if reason is not None:
                self._condemned.add(seen.member)
                kills.append(Kill(seen.member, reason))
        return kills

    def _updated(self, seen: Observation, counted: float, awake: set[str]) -> _Record:
        activity = (seen.phase, seen.beats, seen.blocked_since_seconds)
        record = self._records.get(seen.member)
        if record is None:
            record = self._records[seen.member] = _Record(activity)
        elif record.activity != activity or seen.exempt:
            record.activity = activity
            record.silent_seconds = record.stopped_seconds = 0.0
            record.cpu_seconds_before = None
        elif awake:
            record.silent_seconds += counted
            if seen.state == _STOPPED and awake != {_UNINTERRUPTIBLE}:
                record.stopped_seconds += counted
            if record.cpu_seconds_before is None:
                record.cpu_seconds_before = seen.cpu_seconds
        orphaned = seen.orphaned and not seen.exempt
        record.orphaned_seconds = record.orphaned_seconds + counted if orphaned else 0.0
        return record

    def _reason(self, seen: Observation, record: _Record) -> str | None:
        """Why this rank has to be killed, if so."""
        limits = self._limits
        if record.orphaned_seconds > limits.orphan_timeout_seconds:
            return (
                f"its launcher has been gone for {record.orphaned_seconds:.1f} s"
                f" (orphan_timeout={limits.orphan_timeout_seconds:g} s)"
            )
        if record.stopped_seconds > limits.stop_timeout_seconds:
            return (
                f"stopped (SIGSTOP?) for {record.stopped_seconds:.1f} s while other ranks of the"
                f" node ran (stop_timeout={limits.stop_timeout_seconds:g} s)"
            )
        if seen.blocked_since_seconds:
            limit = seen.blocked_limit_seconds
            if record.silent_seconds > limit + limits.blocked_grace_seconds:
                return (
                    f"inside a blocking MPI call for {record.silent_seconds:.1f} s, its limit is"
                    f" {limit:g} s"
                )
            return None
        if seen.phase == Phase.RUNNING and record.silent_seconds > limits.hang_timeout_seconds:
            return self._hang(seen, record)
        return None

    def _hang(self, seen: Observation, record: _Record) -> str | None:
        limits, silent = self._limits, record.silent_seconds
        used = seen.cpu_seconds - (record.cpu_seconds_before or 0.0)
        if used < _BUSY_CPU_SHARE * silent:
            return (
                f"its service loop stood still for {silent:.1f} s without using the CPU"
                f" (hang_timeout={limits.hang_timeout_seconds:g} s)"
            )
        if silent > limits.busy_hang_factor * limits.hang_timeout_seconds:
            return (
                f"its service loop stood still for {silent:.1f} s while it used the CPU"
                f" ({limits.busy_hang_factor:g} x hang_timeout={limits.hang_timeout_seconds:g} s)"
            )
        return None
