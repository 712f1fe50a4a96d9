"""A job's hold on its checkpoint directory: one writes to it at a time, in numbered generations.

The first rank claims the directory and refreshes the claim every few seconds; another job that
finds it alive keeps out. The claim is a courtesy to people: what makes overlaps harmless is that
block files are never overwritten and that a newer generation wins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from mpift.checkpoint.directory import Directory
from mpift.checkpoint.group import Group
from mpift.errors import CheckpointError

_REFRESH_SECONDS = 10.0
_LOOK_SECONDS = 0.5


class Tenancy:
    """``warn`` is told, on a thread of its own, when the claim can't be refreshed.

    Raises ``CheckpointError`` on all ranks if the directory can't be written to, or another job
    writes to it.
    """

    def __init__(self, group: Group, directory: Directory, warn: Callable[[str], None]) -> None:
        self._group = group
        self._directory = directory
        self._warn = warn
        self.generation = 0
        self.lost = ""  # why this job may not write any more, as far as this rank knows
        self._claiming = threading.Lock()  # the claim and its number change together
        self.begin_generation()
        self._over = threading.Event()
        threading.Thread(target=self._keep, name="mpift-tenancy", daemon=True).start()

    def begin_generation(self) -> None:
        """What is saved from now on is newer than all there is; all ranks call this."""
        while True:
            generation, problem = self._claim() if self._group.leads else (0, "")
            told = self._group.gather([generation, problem])
            problem = next((row[1] for row in told if row[1]), "")
            generation = max(int(row[0]) for row in told)
            if problem:
                raise CheckpointError(problem)
            if generation:  # else the rank that claimed it is lost: the next one does
                self.generation = generation
                return

    def _claim(self) -> tuple[int, str]:
        """The new generation, or why there is none."""
        try:
            self._directory.prepare()
            with self._claiming:
                generation = self._directory.claim(self._group.job)
                self.generation, self.lost = generation, ""
        except (CheckpointError, OSError) as error:
            return 0, str(error)
        return generation, ""

    def _keep(self) -> None:
        refreshed, led = time.monotonic(), self._group.leads
        while not self._over.wait(_LOOK_SECONDS):
            # At once when another rank has claimed it, which is lost: others would think so too.
            leads, due = self._group.leads, time.monotonic() >= refreshed + _REFRESH_SECONDS
            if leads and (due or not led):
                refreshed = time.monotonic()
                with self._claiming:
                    self._refresh()
            led = leads

    def _refresh(self) -> None:
        if self._over.is_set():
            return
        try:
            self._directory.refresh(self._group.job, self.generation)
        except OSError as error:
            self._warn(f"the claim on the directory can't be refreshed: {error}")
        except CheckpointError as error:  # another job took it for dead
            if not self.lost:
                self._warn(f"nothing is saved any more: {error}")
            self.lost = str(error)

    def end(self) -> None:
        """Others may have it."""
        with self._claiming:
            self._over.set()
            if self._group.leads:
                with contextlib.suppress(OSError):  # whoever comes sees that nobody is there
                    self._directory.release(self._group.job)
