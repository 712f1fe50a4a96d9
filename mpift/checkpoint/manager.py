"""``CheckpointManager``: saves and restores for a training script, alone or as part of a job.

A save holds training for one copy in memory; the rest is done by the writer process. It counts once
it is committed: a majority of the ranks has read it back, and its COMMIT file is on storage. What
fails meanwhile costs that checkpoint alone; it is told at the next step and at the end.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mpift.checkpoint import group as groups
from mpift.checkpoint.arguments import check_arguments, check_options
from mpift.checkpoint.directory import Directory
from mpift.checkpoint.following import follow
from mpift.checkpoint.manifest import order_of, version_of
from mpift.checkpoint.news import News
from mpift.checkpoint.ram import RamTier
from mpift.checkpoint.restoring import Restored, Restoring, Wish
from mpift.checkpoint.saves import Capture, Outcome, Rules, Saves
from mpift.checkpoint.scribe import Scribe
from mpift.checkpoint.slots import Slots
from mpift.checkpoint.state import current
from mpift.checkpoint.tenancy import Tenancy
from mpift.core import events
from mpift.errors import CheckpointError, MpiftError, StaleVersionError


class CheckpointManager:
    """Checkpoints of a training run in ``directory``; all ranks of a job make theirs in the same
    order, and call its methods together.

    A *state* is a dictionary of names to objects: modules, optimizers, schedulers, anything with a
    ``state_dict``, plain values, and functions that give one when a snapshot is taken. Parameters,
    optimizer state and schedulers, which all ranks hold alike, are written once, by all ranks
    together; buffers, random number generators and the rest are every rank's own.

    ``every``: steps between two saves, for ``due`` and ``follow`` (default: the setting
    ``checkpoint_every``). ``directory`` is shared by all nodes (default: the setting
    ``checkpoint_directory``). ``keep`` newest checkpoints stay, and those whose step is a multiple
    of ``keep_every``, and pinned ones. ``encode``: compress floats without loss: True, False, or
    "auto" (where storage is slower than that). ``when_busy``: what a save does while the one before
    is still being written: "skip" or "wait". ``ram_every``: steps between two snapshots that are
    kept in memory, in ``ram_directory`` (default ``/dev/shm``); 0 for none. ``layout``: "blocks",
    or "shared" for one file that all ranks write at once through parallel HDF5, while training
    waits. ``full_every``, ``compact_below``, ``timeout_seconds``: see ``saves.Rules``.

    Raises ``CheckpointError`` on all ranks if the directory can't be written to, or another job
    or manager writes to it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        encode: bool | str = "auto",
        when_busy: str = "skip",
        ram_every: int = 0,
        ram_directory: str | os.PathLike[str] | None = None,
        full_every: int = 50,
        compact_below: float = 0.5,
        timeout_seconds: float = 600.0,
        layout: str = "blocks",
    ) -> None:
        check_options(every, when_busy, layout)
        rules = Rules(encode, keep, keep_every, full_every, compact_below, timeout_seconds)
        self._group = group = groups.current()
        config = group.config
        self.directory = Path(directory or config.checkpoint_directory).absolute()
        groups.require_unused(self.directory)
        self.every = every or config.checkpoint_every or 1
        self._waits = when_busy == "wait"
        self._files = Directory(self.directory)
        self._together = None
        if layout == "shared":
            from mpift.checkpoint.together import Together  # loads HDF5

            self._together = Together(group, self._files.disk, self.directory)
        self._ram_every = ram_every
        self._news = News(group, self.directory)
        self._last = 0  # the newest version that this rank was asked to save
        # Steps of a followed optimizer, and those that were made before its first.
        self._count: Callable[[], int] = lambda: 0
        self._offset, self.closed = 0, False
        self._patience_seconds = timeout_seconds  # at the end
        self._pid = os.getpid()
        self._tenancy = Tenancy(group, self._files, self._news.warn)
        self._ram = None
        if ram_every:
            self._ram = RamTier(self.directory, Path(ram_directory) if ram_directory else None)
            self._ram.prepare()
        # Ranks of a node share its cores.
        threads = max(1, (os.cpu_count() or 1) // len(group.seat(whole=False).neighbours))
        self._scribe = Scribe(threads, orphans=group.alone and self._ram is None)
        self._scribe.start()
        self._slots = Slots(group, self._scribe, self._ram, self._skip, self._news.fail)
        self._saves = Saves(
            *(group, self._scribe, self.directory, rules),
            *(self._slots.paths, self._told, self._slots.stored),
        )
        self._restoring = Restoring(group, self._files, self._ram)
        # Checkpoints that this run has not begun with, and would push out.
        self._not_ours = len(self._files.committed()) >= keep
        self._open()
        groups.opened(self)
        atexit.register(_close_at_exit, weakref.ref(self))

    def _open(self) -> None:
        done = threading.Event()

        def open_here() -> None:
            self._saves.number = self._slots.number = self._group.open(self._saves)
            done.set()

        self._group.call(open_here)
        done.wait()

    # -- saving ------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether ``step`` is one to save at."""
        return step % self.every == 0

    def save(self, step: int, state: Mapping[str, Any], wait: bool = False) -> bool:
        """Save ``state`` as it is now, after ``step`` steps; returns whether that was begun (and
        with ``wait``, whether it is committed), or skipped since the one before is not through.

        Raises ``StaleVersionError`` if this or a newer step was saved since the last restore,
        ``CheckpointError`` for a state that can't be saved and, with ``wait``, if saving fails.
        """
        check_arguments(step, state)
        self._news.surface()
        begun = self._snapshot(step, state, persist=True)
        if wait and begun and self.wait() and self.committed_step != step:
            raise CheckpointError(f"step {step} was not saved: {self._news.failure or 'given up'}")
        return begun

    @property
    def committed_step(self) -> int | None:
        """The newest step that is known to be committed, or was restored from storage."""
        return order_of(self._news.committed)[1] if self._news.committed else None

    def _snapshot(self, step: int, state: Mapping[str, Any], persist: bool) -> bool:
        version = version_of((self._tenancy.generation, step))
        if version <= self._last:
            raise StaleVersionError(
                f"step {step} can't be saved: step {order_of(self._last)[1]} was saved, skipped or"
                " refused before; give a later one, or restore an older one first"
            )
        self._group.strike(step, "snapshot")
        seat = self._group.seat(whole=self._ram is not None)
        slot = None if self._tenancy.lost else self._slots.find(seat, self._waits)
        if self._together is not None and not self._together.ready(slot is not None):
            slot = None
        if slot is None:
            self._last = version
            self._slots.skip(version)
            if persist:
                self._news.failure = self._tenancy.lost or self._news.failure
                busy = (
                    "the checkpoint before it is still being written (save less often, or with"
                    ' when_busy="wait")'
                )
                self._news.skipped = version
                self._skip(version, self._tenancy.lost or busy)
            return False
        if persist and self._not_ours:
            self._not_ours, self._saves.upkeep.sweeps = False, False
            self._news.warn(
                "this run has begun without restore(), so what was there is kept, and nothing is"
                " removed; restore() first, or save to another directory"
            )
        whole = functools.partial(self._captured, persist=persist)
        try:
            self._slots.take(slot, state, version, seat, whole)
        except CheckpointError:
            raise  # what the script gave
        except (MpiftError, OSError) as error:  # there is no memory for it: training goes on
            self._news.fail(version, str(error))
            return False
        finally:
            self._last = version
        return True

    def _skip(self, version: int, reason: str) -> None:
        """Let the others know that this rank has no snapshot."""
        self._group.call(lambda: self._saves.skipped(version, reason))

    def _captured(self, capture: Capture, persist: bool) -> None:
        """The snapshot is whole: let it count in memory, and go on to storage."""
        step = order_of(capture.version)[1]
        self._group.strike(step, "captured")
        written, problem = None, ""
        if persist and self._together is not None:
            written, problem = self._together.write(capture)

        def sealed(error: str) -> None:
            if error:
                self._news.warn(f"step {step} is not kept in memory: {error}")
            if persist:
                self._group.call(lambda: self._saves.captured(capture, written, problem))
            else:
                self._slots.free(capture.version)

        self._slots.seal(capture, sealed)

    def wait(self, timeout: float | None = None, index: bool = True) -> bool:
        """Wait until all saves that were begun have come to an end, at most ``timeout`` seconds;
        returns whether they have. ``index.h5`` comes after the COMMIT; not with ``index=False``."""
        begin = time.monotonic()
        ended = self._slots.wait(timeout)
        left = None if timeout is None else max(0.0, begin + timeout - time.monotonic())
        return ended and (not index or self._saves.upkeep.wait(left))

    def _told(self, outcome: Outcome) -> None:
        """On the group's thread."""
        self._news.told(outcome)
        self._slots.free(outcome.version, sound=outcome.summary is not None or outcome.skipped)

    # -- following an optimizer --------------------------------------------------------------------

    def follow(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Save ``state`` by itself from now on, after every ``every``-th step of ``optimizer`` (and
        to memory after every ``ram_every``-th).

        With a distributed optimizer steps are its rounds, and a rank that was late saves while it
        catches up: all ranks save the same. What a script changes after ``step()``, as it does a
        ``GradScaler`` by ``update()``, is saved as it was before; call ``save`` instead then.
        """

        def stepped(applied: int) -> None:
            step = self._offset + applied
            persist = self.due(step)
            if persist or (self._ram_every and step % self._ram_every == 0):
                self._news.surface()
                self._snapshot(step, state, persist)

        self._count = follow(optimizer, stepped)

    # -- restoring ---------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        only: Callable[[str], bool] | None = None,
        strict: bool = True,
        rng: bool = True,
    ) -> Restored | None:
        """Go back to the checkpoint of ``step``, or to the newest that is whole; None if there is
        none. With a ``state`` its objects are restored in place, reading only what differs;
        ``only``, ``strict`` and ``rng`` are as in ``adopt.adopt``.

        A damaged checkpoint is moved to ``quarantine/`` with a loud message, and the one before it
        taken. Raises ``CheckpointError`` on all ranks if one can't restore it; the state may be a
        mixture then and must not be trained on.
        """
        self._group.settle()
        self._slots.doubt()
        restored = self._read(step, state, only, strict, rng)
        if restored is None:
            return None
        self._not_ours, self._saves.upkeep.sweeps = False, True
        version = restored.version
        if any(self._group.gather(version != self._last)):
            self._tenancy.begin_generation()
            self._last = 0
        self._offset = restored.step - self._count()
        if restored.source == "storage":
            self._group.call(lambda: self._saves.restored(version))
            self._news.committed = version
        if self._group.leads:
            self._group.emit(
                events.CheckpointRestored,
                restored.step,
                restored.source,
                restored.world_size,
                restored.bytes_read,
            )
        return restored

    def load(
        self,
        step: int | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        only: Callable[[str], bool] | None = None,
        strict: bool = True,
    ) -> Restored | None:
        """As ``restore``, but the run stays where it is: for an evaluation, or to begin with what
        another run has learned. Random number generators are left alone."""
        return self._read(step, state, only, strict, rng=False)

    def _read(
        self,
        step: int | None,
        state: Mapping[str, Any] | None,
        only: Callable[[str], bool] | None,
        strict: bool,
        rng: bool,
    ) -> Restored | None:
        check_arguments(step, state)
        self.wait()
        self._slots.fence()
        seat = self._group.seat(whole=self._ram is not None)
        live = current(state) if state is not None else None
        return self._restoring.restore(Wish(step, live, only, strict, rng), seat)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that there are, from the oldest to the newest."""
        return [committed.step for committed in self._files.committed()]

    def pin(self, step: int, name: str = "pinned") -> None:
        """Keep this checkpoint for good: under a ``name`` such as "best", which is taken from the
        one that had it. Any rank may call it. Raises ``CheckpointError`` if there is none."""
        self.wait()  # it may be the one that is being written
        self._files.pin(step, name)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the saves that are under way, and give memory and directory back.

        Raises ``CheckpointError`` if the last save has failed: what was trained since is not saved.
        """
        if self.closed or os.getpid() != self._pid:  # a forked child has nothing to give back
            return
        if not self._slots.wait(self._patience_seconds):
            self._news.fail(self._last, f"it is not through after {self._patience_seconds:g} s")
        self._saves.upkeep.wait(self._patience_seconds)
        self.closed = True
        self._group.call(lambda: self._group.close(self._saves))
        self._scribe.close()
        # What only memory has is left there for the next job.
        newest = self._ram.newest()[0] if self._ram is not None else 0
        self._slots.close(keep=newest > self._news.committed)
        self._tenancy.end()
        if self._news.skipped > self._news.committed:
            step = order_of(self._news.skipped)[1]
            self._news.warn(f"the last save, of step {step}, was skipped")
        try:
            self._news.surface()
        finally:  # also where warnings are errors
            why = self._news.failure or self._tenancy.lost
            if why:
                raise CheckpointError(f"the last save to {self.directory} failed: {why}")

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except MpiftError:
            if error is None:
                raise


def _close_at_exit(reference: weakref.ref[CheckpointManager]) -> None:
    manager = reference()
    if manager is None or manager.closed or os.getpid() != manager._pid:
        return
    try:
        manager.close()
    except Exception as error:  # noqa: BLE001, whatever it is, something was not saved
        print(f"mpift: {error}", file=sys.stderr, flush=True)
        manager._group.fail_at_exit()
