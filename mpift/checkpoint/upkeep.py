"""What the coordinator has done once a checkpoint is committed: its index, and cleaning up.

No checkpoint counts on either: what fails is told, and tried again after the next one. But a script
that waits for its saves waits for the index too, since it may copy the directory next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpift.checkpoint.group import Group
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.scribe import Scribe


class Upkeep:
    """``keep`` is how many of the newest checkpoints stay, and of which steps the others do;
    ``failed`` hears of failures, on the group's thread."""

    def __init__(
        self,
        group: Group,
        scribe: Scribe,
        root: Path,
        keep: tuple[int, int | None],
        failed: Callable[[str], None],
    ) -> None:
        self._group = group
        self._scribe = scribe
        self._root = root
        self._keep = keep
        self._failed = failed
        self.verified: int | None = None  # the version that was read whole from storage
        self.sweeps = True  # whether older checkpoints may be removed
        self._news = threading.Condition()
        self._indexing = 0

    def after(self, version: int, sweep: bool) -> None:
        """That version has just been committed; without ``sweep`` another is being written."""
        with self._news:
            self._indexing += 1
        self._request("index", "writing an index", self._indexed)
        if not sweep or not self.sweeps:
            return
        last = order_of(version)
        verified = last if self.verified is None else order_of(self.verified)
        keep, keep_every = self._keep
        self._request(
            *("sweep", "cleaning up", lambda: None),
            generation=last[0],
            last=last,
            keep=keep,
            keep_every=keep_every,
            verified=verified,
        )

    def wait(self, timeout: float | None) -> bool:
        """Wait until no index is being written here; returns whether that is so."""
        with self._group.waiting(), self._news:
            return self._news.wait_for(lambda: not self._indexing, timeout)

    def _indexed(self) -> None:
        with self._news:
            self._indexing -= 1
            self._news.notify_all()

    def _request(self, job: str, what: str, then: Callable[[], None], **arguments: Any) -> None:
        def done(_: Any, error: str) -> None:
            then()
            if error:
                self._group.call(lambda: self._failed(f"{what}: {error}"))

        self._scribe.request(job, done, root=self._root, **arguments)
