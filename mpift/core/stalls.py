"""Who is alive and makes no progress while others wait for it.

A rank is *stalled* while its script waits for nobody, completes nothing, and some other rank's
script waits. Waiting ranks are never to blame; where all wait, they wait for each other in
different places, which is told of all of them. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank says of itself: its step, whether its script waits, and all rounds completed."""

    step: int
    waiting: bool
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class Stalled:
    """``member`` has stood at ``step`` for ``seconds``; ``evict`` once that is past the limit."""

    member: int
    step: int
    seconds: float
    evict: bool


@dataclass(slots=True)
class _Since:
    """One rank's present stall."""

    standing: Standing
    since: float
    told: bool = False


class StallInspector:
    """``warning_seconds`` of a stall are told once; ``limit_seconds`` of it, unless 0, evict."""

    def __init__(self, warning_seconds: float, limit_seconds: float) -> None:
        self._warning_seconds = warning_seconds
        self._limit_seconds = limit_seconds
        self._stalls: dict[int, _Since] = {}

    def observe(self, now: float, ranks: Mapping[int, Standing]) -> list[Stalled]:
        """What is due at ``now`` (monotonic seconds) of all ranks of the view."""
        some_wait = any(standing.waiting for standing in ranks.values())
        all_wait = all(standing.waiting for standing in ranks.values())
        due = []
        for member, standing in ranks.items():
            known = self._stalls.get(member)
            if not some_wait or (standing.waiting and not all_wait):
                self._stalls.pop(member, None)
            elif known is None or known.standing != standing:
                self._stalls[member] = _Since(standing, now)
            else:
                found = self._judge(member, known, now)
                if found is not None:
                    due.append(found)
        return due

    def _judge(self, member: int, stall: _Since, now: float) -> Stalled | None:
        seconds = now - stall.since
        evict = 0 < self._limit_seconds <= seconds and not stall.standing.waiting
        if not evict and (stall.told or seconds < self._warning_seconds):
            return None
        stall.told = True
        return Stalled(member, stall.standing.step, seconds, evict)

    def forget(self) -> None:
        """A new view: everybody starts afresh."""
        self._stalls.clear()
