"""How long the service's loop rests between two looks at MPI: cores belong to the computation."""

from __future__ import annotations

import os
import time

# Polls without progress before the loop begins to sleep between them. A poll costs a few
# microseconds; sleeps leave the core to the computation that the reduction overlaps with.
_SPIN_POLLS = 20
_BUSY_SLEEP_SECONDS = 50e-6
# A collective that waits for a late rank: no need to look twenty thousand times a second.
_LONG_WAIT_SECONDS = 0.05
_LONG_SLEEP_SECONDS = 500e-6
# Somebody waits for this rank's word, or may soon.
_SOON_SECONDS = 500e-6
# This rank waits for another's word, and computes meanwhile: nothing is held up by looking late.
_COMPUTING_SECONDS = 2e-3
_HURRY_SECONDS = 0.02


class Pace:
    """``idle_seconds`` is the longest rest while nothing is under way."""

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._polls = 0
        self._hurry_until = 0.0
        self._busy_since: float | None = None

    def hurry(self, now: float) -> None:
        """Another rank may wait for this one's answers for a while."""
        self._hurry_until = now + _HURRY_SECONDS

    def progressed(self) -> None:
        """A collective has completed."""
        self._polls, self._busy_since = 0, None

    def nap(self, waited: bool) -> None:
        """A rest while something is in flight that MPI has to be looked at for. If it is ``waited``
        for, this rank has nothing else to do with its core: others may have it meanwhile, but a
        sleep would last many times what is left to wait."""
        self._polls += 1
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        waits_long = now - self._busy_since > _LONG_WAIT_SECONDS
        if self._polls <= _SPIN_POLLS or (waited and not waits_long):
            os.sched_yield()
            return
        time.sleep(_LONG_SLEEP_SECONDS if waits_long else _BUSY_SLEEP_SECONDS)

    def rest_seconds(self, now: float, urgent: bool, words: bool) -> float:
        """How long to wait for a wake-up while nothing is in flight, or nothing but ``words``."""
        if urgent or now < self._hurry_until:
            return min(_SOON_SECONDS, self._idle_seconds)
        return min(_COMPUTING_SECONDS, self._idle_seconds) if words else self._idle_seconds
