"""The arenas of one manager: which may be overwritten, and which is still being written from.

Without a RAM tier there is one arena, free once what it holds is committed or given up. With one
there are the two slots of the tier; a snapshot there is sealed first, so that it counts in memory,
and goes on to storage from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpift import memory
from mpift.checkpoint.group import Group, Seat
from mpift.checkpoint.orders import Written
from mpift.checkpoint.ram import SLOTS, RamTier
from mpift.checkpoint.saves import Capture
from mpift.checkpoint.scribe import Scribe
from mpift.checkpoint.snapshot import Snapshots

_LOOK_SECONDS = 0.05


class Slots:
    """Its methods are the script's thread's, but ``free``. ``failed`` hears of snapshots that come
    to nothing: version, reason. So does ``lost`` before, of those that ``take`` had begun without
    an error. ``number`` tells this manager's arenas from those of the process's others, once it is
    set."""

    def __init__(
        self,
        group: Group,
        scribe: Scribe,
        ram: RamTier | None,
        failed: Callable[[int, str], None],
        lost: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self._group = group
        self._scribe = scribe
        self._ram = ram
        self._failed = failed
        self._lost = lost
        self._count = SLOTS if ram is not None else 1
        self._snapshots = Snapshots(lambda slot: self.path(group.member, slot), self._count)
        self._news = threading.Condition()
        self._busy: dict[int, int] = {}  # slot of each version that is under way
        self._views: tuple[int, tuple[int, ...]] = (-1, ())  # at the last look
        self.number = 0

    def path(self, member: int, slot: int) -> Path:
        """Where the arena of a rank of this node lies."""
        if self._ram is not None:
            return self._ram.arena(slot, member)
        what = f"arena-{member}-{self.number}"
        return memory.region_path(memory.default_folder(), self._group.region, what)

    def paths(self, member: int) -> list[Path]:
        return [self.path(member, slot) for slot in range(self._count)]

    def find(self, seat: Seat, wait: bool) -> int | None:
        """A slot that may be overwritten; None if there is none, and with ``wait`` once there is
        one."""
        with self._news:
            slot = self._look(seat)
            if slot is None and wait:
                with self._group.waiting():
                    while (slot := self._look(seat)) is None:
                        self._news.wait(_LOOK_SECONDS)  # other ranks' progress is in files
        return slot

    def _look(self, seat: Seat) -> int | None:
        # The script may see a view later than the group's thread; and it may come while this waits.
        views = self._group.epoch, seat.owners
        if self._ram is not None and views != self._views:
            self._ram.view_changed()
        self._views = views
        slot = 0 if self._ram is None else self._ram.choose()
        return None if slot in self._busy.values() else slot

    def take(
        self,
        slot: int,
        state: Mapping[str, Any],
        version: int,
        seat: Seat,
        whole: Callable[[Capture], None],
    ) -> None:
        """Copy this rank's share of ``state`` into ``slot``, then call ``whole``: at once, or on
        another thread once a device has copied its part. Raises ``CheckpointError`` for a state
        that can't be saved, ``DeviceError`` and ``OSError`` where there is no memory, or a device
        fails."""

        def begin() -> None:
            if self._ram is not None:
                members = tuple(seat.owners[share] for share in seat.neighbours)
                self._ram.begin(slot, version, self._group.member, members)

        try:
            taken = self._snapshots.take(state, version, seat, slot, begin)
        except BaseException as error:
            self.skip(version)  # nobody is to wait for this rank's
            self._failed(version, f"it could not be taken: {error}")
            raise
        with self._news:
            self._busy[version] = slot
        capture = Capture(version, taken.arena.path, taken.origin, seat.share)
        if taken.finish is None:
            whole(capture)
            return
        arguments = (taken.finish, capture, whole)
        threading.Thread(target=self._arrive, args=arguments, name="mpift-snapshot").start()

    def _arrive(
        self, finish: Callable[[], None], capture: Capture, whole: Callable[[Capture], None]
    ) -> None:
        try:
            finish()
        except RuntimeError as error:  # what torch makes of a device's fault
            reason = f"a device could not be read: {error}"
            self._lost(capture.version, reason)
            self.skip(capture.version)
            self._failed(capture.version, reason)
            self.free(capture.version)
        else:
            whole(capture)

    def skip(self, version: int) -> None:
        """This rank takes no snapshot of ``version``."""
        if self._ram is not None:
            self._ram.skip(version)

    def fence(self) -> None:
        """The script's tensors are about to be written to."""
        self._snapshots.fence()

    def stored(self, version: int, written: Written) -> None:
        """A snapshot is on storage. From any thread."""
        if written.digests:
            self._snapshots.learn(version, written.digests)

    def doubt(self) -> None:
        """What arenas hold may be damaged. From any thread."""
        self._snapshots.doubt()

    def seal(self, capture: Capture, then: Callable[[str], None]) -> None:
        """Let a snapshot count in memory, where there is a RAM tier; ``then`` gets the error, if
        there was one."""
        if self._ram is None:
            then("")
            return

        def sealed(digests: bytes | None, error: str) -> None:
            if digests:
                self._snapshots.learn(capture.version, digests)
            if error:
                self._snapshots.doubt()
                self.skip(capture.version)  # the others must not wait for it
            then(error)

        self._scribe.request(
            "seal",
            sealed,
            slot=capture.arena.parent,
            path=capture.arena,
            job_name=self._group.job,
            unix_time=time.time(),
        )

    def free(self, version: int, sound: bool = True) -> None:
        """What became of ``version`` is known; not ``sound`` if that may be by what its arena held.
        From any thread."""
        if not sound:
            self._snapshots.doubt()
        with self._news:
            self._busy.pop(version, None)
            self._news.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way; returns whether that is so."""
        with self._group.waiting(), self._news:
            return self._news.wait_for(lambda: not self._busy, timeout)

    def close(self, keep: bool) -> None:
        """Give the memory back; with ``keep`` the RAM tier stays for the next job."""
        keep = keep and self._ram is not None
        self._snapshots.close(keep)
        if self._ram is not None and not keep:
            self._ram.remove()
