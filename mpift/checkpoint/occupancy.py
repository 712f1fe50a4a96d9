"""Who uses a checkpoint directory: the one job that writes into it, and the processes that read.

A claim is a file ``live/GENERATION.json`` that says who made it; the newest one counts. It comes
into being by ``link()``, whole and only once, so of two processes that claim at the same time one
gets the generation and the other finds it taken. There is no lock that a crash could leave behind.

Whether a process still lives is asked of the kernel where it is this node's. Of another node's, the
age of its file decides, by the file system's own clock: the clocks of hosts need not agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mpift.checkpoint.durable import Disk, publish, publish_once, temporary
from mpift.errors import CheckpointError
from mpift.transport.processes import ProcessIdentity, identify, is_gone

# A job of another node that did not refresh its claim for this long has ended.
LEASE_SECONDS = 60.0
# Readers do not refresh: on another node one is believed this long.
READER_SECONDS = 3600.0

_CLAIM = re.compile(r"(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Live:
    """A process that uses the directory.

    ``job`` and ``generation`` are those of a claim; readers have none. ``start_time`` is in clock
    ticks since boot, ``unix_time`` that of the claim by its host's clock, and ``seen_unix_time`` is
    when its file was touched last, by the file system's.
    """

    job: str
    host: str
    node: str
    pid: int
    start_time: int
    generation: int
    unix_time: float
    seen_unix_time: float = 0.0

    def described(self) -> str:
        """Host, process and when it was last seen, for a message."""
        seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seen_unix_time))
        return f"process {self.pid} on host {self.host}, last seen {seen}"


def names_in(folder: Path) -> list[str]:
    """What is in a folder, sorted; nothing if there is none."""
    return sorted(path.name for path in folder.glob("*"))


def _here(job: str, generation: int) -> Live:
    me = identify(0)
    return Live(job, me.host, me.node, me.pid, me.start_time, generation, time.time())


def _read(path: Path) -> Live | None:
    """Who made the file; None if it is gone. Of a file that says nothing only its age is known."""
    try:
        seen = path.stat().st_mtime
        record = json.loads(path.read_bytes())
        return Live(**{**record, "seen_unix_time": seen})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Live("unknown", "unknown", "", 0, 0, 0, seen, seen)


def _encoded(live: Live) -> bytes:
    return json.dumps(asdict(live)).encode()


def _lives(found: Live, limit_seconds: float, folder: Path) -> bool:
    other = ProcessIdentity(0, 0, found.host, found.node, found.pid, found.start_time)
    gone = is_gone(other, identify(0))
    if gone is None:
        return _now(folder) - found.seen_unix_time < limit_seconds
    return not gone


def _now(folder: Path) -> float:
    """The time by the clock of the file system, where it can be asked."""
    probe = temporary(folder / "clock")
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


class Claims:
    """The claims of a directory, in a folder of their own."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    def newest(self) -> Live | None:
        """The claim that counts, whether its process lives or not."""
        while generations := self._generations():
            found = _read(self._path(max(generations)))
            if found is not None:
                return Live(**{**asdict(found), "generation": max(generations)})
        return None

    def alive(self, claim: Live) -> bool:
        return _lives(claim, LEASE_SECONDS, self._folder)

    def take(self, job: str, generation: int) -> bool:
        """Claim a generation; False if it is taken."""
        self._disk.make_folder(self._folder)
        try:
            publish_once(self._disk, self._path(generation), _encoded(_here(job, generation)))
        except FileExistsError:
            return False
        return True

    def refresh(self, job: str, generation: int) -> None:
        """Say that the job lives. Raises ``CheckpointError`` if the claim counts no more."""
        newest = self.newest()
        if newest is None or (newest.job, newest.generation) != (job, generation):
            now = "it is gone" if newest is None else f"job {newest.job} has it: "
            by = "" if newest is None else f"{newest.described()}, generation {newest.generation}"
            raise CheckpointError(
                f"the claim of job {job} on {self._folder.parent}, generation {generation}, is"
                f" lost: {now}{by}; this job must not write there before it has claimed it anew"
            )
        me = _here(job, generation)
        if (newest.node, newest.pid, newest.start_time) == (me.node, me.pid, me.start_time):
            os.utime(self._path(generation))
        else:  # another process speaks for the job from now on
            publish(self._disk, self._path(generation), _encoded(me))

    def drop(self, generation: int) -> None:
        self._disk.unlink(self._path(generation))

    def drop_older(self, generation: int) -> None:
        """Clear away what a newer claim has overtaken."""
        for older in self._generations():
            if older < generation:
                self.drop(older)

    def _generations(self) -> list[int]:
        found = (_CLAIM.fullmatch(name) for name in names_in(self._folder))
        return [int(match[1]) for match in found if match]

    def _path(self, generation: int) -> Path:
        return self._folder / f"{generation:010d}.json"


class Readers:
    """The processes that read from a directory, a file each in a folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be listed meanwhile. A directory that can't be written is read all the same."""
        me = _here("", 0)
        path = self._folder / f"{me.host}-{me.pid}-{secrets.token_hex(4)}.json"
        with contextlib.suppress(OSError):
            # Where there are no checkpoints nothing is to be protected, nor left behind.
            if (self._folder.parent / "steps").is_dir():
                self._disk.make_folder(self._folder)
                self._disk.mark(path, _encoded(me))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._disk.unlink(path)

    def live(self) -> list[Live]:
        return [found for _, found, lives in self._all() if lives]

    def clear(self) -> None:
        """Remove the files of readers that have ended."""
        for path, _, lives in self._all():
            if not lives:
                self._disk.unlink(path)

    def _all(self) -> Iterator[tuple[Path, Live, bool]]:
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("*.json")):
            found = _read(path)
            if found is not None:
                yield path, found, _lives(found, READER_SECONDS, self._folder)
