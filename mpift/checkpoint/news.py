"""What a manager knows of its saves: what is committed, what failed, what the script is to hear.

Written to from the group's thread, the writer's and a device's; read by the script's.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from mpift.checkpoint.group import Group
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.saves import Outcome
from mpift.core import events


class News:
    """``committed`` is the newest version known to be committed; ``failure`` why the last save
    failed, empty once a later one has succeeded; ``skipped`` the newest version that was to go to
    storage and was not begun."""

    def __init__(self, group: Group, directory: Path) -> None:
        self._group = group
        self._directory = directory
        self._lock = threading.Lock()
        self._problems: list[str] = []  # not told to the script yet
        self._failed_version = 0
        self.committed = self.skipped = 0
        self.failure = ""

    def warn(self, problem: str) -> None:
        """Something that the script is to hear at its next save."""
        with self._lock:
            self._problems.append(problem)

    def fail(self, version: int, reason: str) -> None:
        """A save has come to nothing."""
        step = order_of(version)[1]
        self.warn(f"step {step} was not saved: {reason}")
        if version >= self._failed_version:
            self.failure, self._failed_version = reason, version

    def told(self, outcome: Outcome) -> None:
        """What became of a save."""
        if outcome.summary is not None:
            self.committed = max(self.committed, outcome.version)
            if outcome.version > self._failed_version:
                self.failure = ""
        elif not outcome.version:
            self.warn(outcome.reason)
        elif not outcome.skipped:
            self.fail(outcome.version, outcome.reason)
        if self._group.leads and outcome.version and (outcome.summary or outcome.reason):
            self._report(outcome)

    def _report(self, outcome: Outcome) -> None:
        summary = outcome.summary
        if summary is None:
            failed = events.CheckpointSkipped if outcome.skipped else events.CheckpointFailed
            self._group.emit(failed, outcome.step, outcome.reason)
            return
        self._group.emit(
            events.CheckpointSaved,
            outcome.step,
            summary.blocks,
            summary.new_blocks,
            summary.state_bytes,
            summary.new_bytes,
        )

    def surface(self) -> None:
        """Tell the script, as warnings."""
        with self._lock:
            problems, self._problems = self._problems, []
        for problem in problems:
            warnings.warn(f"checkpoint in {self._directory}: {problem}", stacklevel=4)
