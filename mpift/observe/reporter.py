"""What this process reports: events, as they happen, and what is thinned out on the way.

Reports of one kind that come many times a second are sent ten times at most; the last always is.
"""

from __future__ import annotations

import time
from typing import Any

from mpift.core import events
from mpift.observe import lines

_STEP_SECONDS = _VALUES_SECONDS = 0.1


class Reporter:
    """Reports as member ``member``, its rank at launch."""

    def __init__(self, member: int) -> None:
        self._member = member
        self._write = lines.subscriber()
        self._values: dict[str, Any] = {}
        self._values_sent = 0.0
        self._step_sent = (0.0, 0)  # when, in which epoch

    def emit(self, kind: type[events.Event], *values: Any) -> None:
        """Report an event: its class, and what it holds beyond time and member."""
        self._write(kind(time.time(), self._member, *values))

    def step_finished(self, step: int, epoch: int, size: int) -> None:
        """Report a finished step now and then, and always the first in a new view."""
        now = time.monotonic()
        if now - self._step_sent[0] > _STEP_SECONDS or epoch != self._step_sent[1]:
            self._step_sent = (now, epoch)
            self.emit(events.StepFinished, step, epoch, size)

    def values(self, values: dict[str, Any], wanted: bool) -> None:
        """Values of the script for the launcher's status line and summary; ``wanted`` if this rank
        is the one whose values count."""
        self._values |= values
        if time.monotonic() - self._values_sent > _VALUES_SECONDS:
            self.send_values(wanted)

    def send_values(self, wanted: bool) -> None:
        """Send the values that are held back, if any."""
        if self._values and wanted:
            self.emit(events.Reported, self._values)
        self._values = {}
        self._values_sent = time.monotonic()
