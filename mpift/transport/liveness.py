"""The mapped file through which the ranks of a node and their watchdog know of each other.

A header, then one slot a local rank. A slot is written by its rank alone, but for the verdict,
which the watchdog alone writes, as it does its own words of the header. Nobody locks anything: a
process that is stopped with a lock in its hand would stop all others too.

Why torn reads are harmless. Every number is one aligned word of 8 bytes, stored and loaded at once
(a cast memoryview copies a word by a single instruction), so a counter or a time is always some
value that was written. Where several words belong together, nothing wrong can come of a mixture:
an identity carries a seal over its words, and is not there until the seal fits; a call's limit is
stored before its start, and a limit is compared only after much more time than one look takes; of a
verdict the text is stored before its length, and it is read by people only.

Times are of CLOCK_MONOTONIC, which all processes of a node share. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpift import memory
from mpift.core.hangs import Phase
from mpift.errors import MpiftError
from mpift.transport import processes
from mpift.transport.processes import ProcessIdentity

VERDICT_BYTES_MAX = 200
# A file whose ranks have not all registered yet is younger.
STALE_SECONDS = 3600.0

_MAGIC = int.from_bytes(b"mpiftliv", "little")
_VERSION = 1
_WORD_BYTES = 8
# Multiples of a cache line, so that two ranks never write into one.
_HEADER_BYTES = 256
_SLOT_BYTES = 384

# Words of the header.
_MAGIC_WORD, _VERSION_WORD, _SLOTS_WORD = 0, 1, 2
_DIGEST_BYTES = slice(32, 64)
_WATCHDOG_PID, _WATCHDOG_START, _WATCHDOG_TICKS, _WATCHDOG_PORT = 8, 9, 10, 11

# Words of a slot. The member id is there from the file's creation.
_BEATS, _BLOCKED_SINCE, _BLOCKED_LIMIT, _PHASE, _STEP, _EPOCH = 0, 1, 2, 3, 4, 5
_MEMBER, _PID, _START, _PARENT, _SEAL = 8, 9, 10, 11, 12
_VERDICT_LENGTH = 16
_VERDICT_BYTES = slice(136, 136 + VERDICT_BYTES_MAX)

_PHASES = frozenset(Phase)


@dataclass(frozen=True, slots=True)
class Registered:
    """The process behind a slot; ``parent`` is its launcher, or the launcher's guard."""

    pid: int
    start_time: int
    parent: int


@dataclass(frozen=True, slots=True)
class WatchdogState:
    """The watchdog as it says itself: ``pid`` 0 if none ever ran, ``ticks`` grows while it lives,
    ``port`` is that of its TCP socket, 0 until there is one."""

    pid: int
    start_time: int
    ticks: int
    port: int

    @property
    def alive(self) -> bool:
        return self.pid != 0 and not processes.has_ended(self.pid, self.start_time)


class Slot:
    """One rank's part of the file."""

    __slots__ = ("_beats", "_bytes", "_floats", "_words")

    def __init__(self, view: memoryview) -> None:
        self._bytes = view
        self._words = view.cast("Q")  # a native format: others are copied byte by byte
        self._floats = view.cast("d")
        self._beats = self._words[_BEATS]

    # -- written by the rank -----------------------------------------------------------------------

    def register(self, identity: ProcessIdentity) -> None:
        """The calling process, which is ``identity``, is this rank; it is STARTING."""
        self._words[_PHASE] = Phase.STARTING
        self._words[_PID] = identity.pid
        self._words[_START] = identity.start_time
        self._words[_PARENT] = os.getppid()
        self._words[_SEAL] = self._seal()

    def run(self) -> None:
        """The loop runs: from now on standing still counts."""
        self._words[_PHASE] = Phase.RUNNING

    def beat(self) -> None:
        """A sign of life, to be given every few milliseconds; costs about 0.1 microseconds."""
        self._beats += 1
        self._words[_BEATS] = self._beats

    def progress(self, step: int, epoch: int) -> None:
        """How far the training is, and in which view."""
        self._words[_STEP] = step
        self._words[_EPOCH] = epoch

    def enter(self, limit_seconds: float, now: float) -> None:
        """No beats for a while: a blocking call begins, which may take ``limit_seconds``.

        ``now`` is of CLOCK_MONOTONIC. A second call before ``leave`` starts the time anew.
        """
        self._floats[_BLOCKED_LIMIT] = limit_seconds
        self._floats[_BLOCKED_SINCE] = now

    def leave(self) -> None:
        """The blocking call is over."""
        self._floats[_BLOCKED_SINCE] = 0.0

    def left(self) -> None:
        """This rank leaves the job in good order; from now on nobody judges it."""
        self._words[_PHASE] = Phase.LEFT

    def stood_down(self) -> None:
        """This rank ends because its part of the job does."""
        self._words[_PHASE] = Phase.STOOD_DOWN

    # -- written by the watchdog -------------------------------------------------------------------

    def condemn(self, verdict: str) -> None:
        """Say why this rank is killed, or how it ended; the first verdict stays."""
        if not self._words[_VERDICT_LENGTH]:
            text = verdict.encode()[:VERDICT_BYTES_MAX]
            start = _VERDICT_BYTES.start
            self._bytes[start : start + len(text)] = text
            self._words[_VERDICT_LENGTH] = len(text)

    # -- read by all -------------------------------------------------------------------------------

    @property
    def member(self) -> int:
        return self._words[_MEMBER]

    @property
    def registered(self) -> Registered | None:
        """The process of this rank; None until it has registered."""
        words = self._words
        seal = words[_SEAL]
        found = Registered(words[_PID], words[_START], words[_PARENT])
        return found if seal and seal == self._seal() else None

    @property
    def beats(self) -> int:
        return self._words[_BEATS]

    @property
    def blocked_since_seconds(self) -> float:
        """When the present blocking call began, of CLOCK_MONOTONIC; 0 outside of one."""
        return self._floats[_BLOCKED_SINCE]

    @property
    def blocked_limit_seconds(self) -> float:
        return self._floats[_BLOCKED_LIMIT]

    @property
    def phase(self) -> Phase:
        """STARTING for a slot that nobody has registered in."""
        word = self._words[_PHASE]
        return Phase(word) if word in _PHASES else Phase.STARTING

    @property
    def step(self) -> int:
        return self._words[_STEP]

    @property
    def epoch(self) -> int:
        return self._words[_EPOCH]

    @property
    def verdict(self) -> str:
        """Why the watchdog killed this rank, or how it ended; empty if nothing is known."""
        length = min(self._words[_VERDICT_LENGTH], VERDICT_BYTES_MAX)
        start = _VERDICT_BYTES.start
        text = bytes(self._bytes[start : start + length]).decode(errors="replace")
        return "".join(c if c.isprintable() else "?" for c in text)  # it goes to a terminal

    def _seal(self) -> int:
        """Of the identity's words; never 0."""
        return zlib.crc32(self._words[_MEMBER:_SEAL].tobytes()) | 1 << 32

    def release(self) -> None:
        for view in (self._words, self._floats, self._bytes):
            view.release()


class Liveness:
    """The file of one job on one node: ``slots`` by member id, and the watchdog's words."""

    def __init__(self, region: memory.Region) -> None:
        self._region = region
        self.path = region.path
        self._header = region.view[:_HEADER_BYTES]
        self._words = self._header.cast("Q")
        self._check()
        self.slots: dict[int, Slot] = {}
        for index in range(self._words[_SLOTS_WORD]):
            start = _HEADER_BYTES + index * _SLOT_BYTES
            slot = Slot(region.view[start : start + _SLOT_BYTES])
            self.slots[slot.member] = slot

    @classmethod
    def create(
        cls, token: str, node: str, members: Sequence[int], folder: Path | None = None
    ) -> Liveness:
        """The file of the job with this token on this node, made by whichever rank comes first.

        ``node`` is that of ``ProcessIdentity``, ``members`` the member ids on it. Raises
        ``MpiftError`` where there is no space, or the file is somebody else's or another job's.
        """
        folder = folder or memory.default_folder()
        job = memory.job_name(token, node)
        contents = _initial(token, members)
        path = memory.region_path(folder, job, "liveness")
        liveness = cls(memory.create_or_open(path, len(contents), contents))
        if list(liveness.slots) != list(members) or not liveness.is_of(token):
            found = list(liveness.slots)
            liveness.close()
            raise MpiftError(f"{path} is of members {found}, expected {list(members)}; remove it")
        return liveness

    @classmethod
    def open(cls, path: Path) -> Liveness:
        """The file at ``path``. Raises ``FileNotFoundError``, ``MpiftError`` if it isn't one."""
        return cls(memory.open_existing(path))

    def slot(self, member: int) -> Slot:
        """The slot of a member id of this node."""
        return self.slots[member]

    def is_of(self, token: str) -> bool:
        """Whether this is the file of the job with that token."""
        return bytes(self._header[_DIGEST_BYTES]) == _digest(token)

    # -- the watchdog ------------------------------------------------------------------------------

    @property
    def watchdog(self) -> WatchdogState:
        words = self._words
        return WatchdogState(
            words[_WATCHDOG_PID],
            words[_WATCHDOG_START],
            words[_WATCHDOG_TICKS],
            words[_WATCHDOG_PORT],
        )

    def watchdog_started(self, identity: ProcessIdentity, port: int) -> None:
        """The calling process is the watchdog, and listens on this port."""
        self._words[_WATCHDOG_PID] = identity.pid
        self._words[_WATCHDOG_START] = identity.start_time
        self._words[_WATCHDOG_PORT] = port

    def watchdog_ticked(self) -> None:
        self._words[_WATCHDOG_TICKS] += 1

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap the file; its slots can't be used any more."""
        for slot in self.slots.values():
            slot.release()
        self._words.release()
        self._header.release()
        self._region.close()

    def is_in_place(self) -> bool:
        """Whether the path still leads to this file."""
        return self._region.is_in_place()

    def unlink(self) -> None:
        """Remove the file; those who map it keep it."""
        self._region.unlink()

    def unlink_if_last(self, member: int) -> bool:
        """Remove the file if no watchdog will, and all ranks but ``member`` have left or ended;
        whether that was so."""
        others = [slot for other, slot in self.slots.items() if other != member]
        if self.watchdog.alive or any(_is_present(slot) for slot in others):
            return False
        self.unlink()
        return True

    def sweep(self) -> None:
        """Remove the liveness files in the same folder that nobody uses any more: of jobs of this
        user whose ranks and watchdog were killed together."""
        for path in self.path.parent.glob(self.path.name.replace(self._job, "*")):
            with contextlib.suppress(OSError, MpiftError):
                if time.time() - path.stat().st_mtime < STALE_SECONDS:
                    continue
                other = Liveness.open(path)
                if not other.watchdog.alive and not any(map(_is_present, other.slots.values())):
                    other.unlink()
                other.close()

    @property
    def _job(self) -> str:
        return self.path.name.removeprefix(memory.PREFIX).partition("-")[0]

    def _check(self) -> None:
        words, size_bytes = self._words, self._region.view.nbytes
        expected = _HEADER_BYTES + words[_SLOTS_WORD] * _SLOT_BYTES
        if (words[_MAGIC_WORD], words[_VERSION_WORD]) != (_MAGIC, _VERSION) or (
            size_bytes != expected
        ):
            raise MpiftError(
                f"{self.path} is not a liveness file of version {_VERSION} (magic"
                f" {words[_MAGIC_WORD]:#x}, version {words[_VERSION_WORD]}, {size_bytes} bytes):"
                " all ranks of a job need the same mpift; if no job runs, remove the file"
            )


def _is_present(slot: Slot) -> bool:
    process = slot.registered
    if process is None or slot.phase == Phase.LEFT:
        return False
    return not processes.has_ended(process.pid, process.start_time)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _initial(token: str, members: Sequence[int]) -> bytes:
    """The file before anybody has registered."""
    contents = bytearray(_HEADER_BYTES + len(members) * _SLOT_BYTES)
    struct.pack_into("=QQQ", contents, 0, _MAGIC, _VERSION, len(members))
    contents[_DIGEST_BYTES] = _digest(token)
    for index, member in enumerate(members):
        start = _HEADER_BYTES + index * _SLOT_BYTES
        struct.pack_into("=Q", contents, start + _MEMBER * _WORD_BYTES, member)
    return bytes(contents)
