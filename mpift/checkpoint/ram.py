"""The RAM tier: the newest snapshots, whole, in memory-backed files of every node.

A folder of two slots. In each, every rank of the node has its arena; the slot is a checkpoint once
all of them are sealed: then it has a manifest and a COMMIT file like one on storage, and is read
the same way. A slot is overwritten only while the other one is whole, so that a crash in the middle
leaves one. Nothing here is fsynced: it outlasts processes and jobs, not the machine.

Ranks of a node agree without messages: each goes by what it sees in the folder, and takes no
snapshot while its last one is neither whole nor given up. Who takes none leaves a mark, by which
the others know that nothing comes of theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from mpift import memory
from mpift.checkpoint import manifest
from mpift.checkpoint.directory import IDENTITY
from mpift.checkpoint.manifest import CommitRecord, Manifest
from mpift.errors import CheckpointDamagedError, CheckpointError

SLOTS = 2
_ROOT = "ROOT"  # the file that names the checkpoint directory a folder belongs to
_STALE_SECONDS = 7 * 24 * 3600.0


class RamTier:
    """The slots of the checkpoint directory ``root`` in ``folder``, which lies in memory."""

    def __init__(self, root: Path, folder: Path | None = None) -> None:
        parent = folder or memory.default_folder()
        identity = ""  # a directory that was removed and made anew is another one
        with contextlib.suppress(OSError):
            identity = (root / IDENTITY).read_text(encoding="utf-8")
        text = f"{root.resolve()}\0{identity}\0{os.geteuid()}"
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._root = root
        self.folder = parent / f"{memory.PREFIX}ram-{key}"
        self._pending = 0  # version of this rank's last snapshot, as long as it may become whole

    def prepare(self) -> None:
        """Make the folder, and remove what old jobs have left beside it."""
        remove_stale(self.folder.parent)
        for slot in range(SLOTS):
            self.slot(slot).mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            raise CheckpointError(f"{self.folder} belongs to user {status.st_uid}: remove it")
        (self.folder / _ROOT).write_text(str(self._root.resolve()), encoding="utf-8")

    def slot(self, number: int) -> Path:
        """The folder of a slot."""
        return self.folder / f"slot-{number}"

    def arena(self, number: int, member: int) -> Path:
        """Where a rank's arena of a slot lies."""
        return self.slot(number) / f"rank-{member}.arena"

    # -- taking snapshots --------------------------------------------------------------------------

    def choose(self) -> int | None:
        """The slot to overwrite: that without the newest whole snapshot. None while this rank's
        last one is under way."""
        versions = [self.version(slot) for slot in range(SLOTS)]
        if self._pending and self._pending not in versions and not self._given_up(self._pending):
            return None
        self._pending = 0
        return versions.index(min(versions))

    def begin(self, slot: int, version: int, member: int, members: Sequence[int]) -> None:
        """This slot is about to be overwritten: by ``member``, as by all of its node's."""
        self._pending = version
        place = self.slot(slot)
        (place / "COMMIT").unlink(missing_ok=True)
        part_path(place, member).unlink(missing_ok=True)
        wanted = {f"rank-{member}.arena" for member in members}
        for path in place.glob("rank-*.arena"):
            if path.name not in wanted:  # of ranks that are no more
                path.unlink(missing_ok=True)
        for path in self.folder.glob("skipped-*"):
            with contextlib.suppress(ValueError):
                if int(path.name.removeprefix("skipped-")) < min(self.versions(), default=0):
                    path.unlink(missing_ok=True)

    def skip(self, version: int) -> None:
        """This rank takes no snapshot of ``version``."""
        with contextlib.suppress(OSError):
            (self.folder / f"skipped-{version}").touch()

    def view_changed(self) -> None:
        """Nothing becomes whole any more that a lost rank has not sealed."""
        self._pending = 0

    def _given_up(self, version: int) -> bool:
        return (self.folder / f"skipped-{version}").exists()

    # -- reading -----------------------------------------------------------------------------------

    def version(self, slot: int) -> int:
        """Of the whole snapshot in a slot; 0 if there is none."""
        record = self._record(slot)
        return manifest.version_of(record.order) if record is not None else 0

    def versions(self) -> list[int]:
        """Of all whole snapshots."""
        return [version for slot in range(SLOTS) if (version := self.version(slot))]

    def newest(self) -> tuple[int, int]:
        """(version, slot) of the newest whole snapshot; version 0 if there is none."""
        return max((self.version(slot), slot) for slot in range(SLOTS))

    def manifest(self, slot: int) -> Manifest:
        """Raises ``CheckpointDamagedError`` if it is not what the slot's COMMIT says."""
        path = self.slot(slot) / "manifest.json"
        record = self._record(slot)
        if record is None:
            raise CheckpointDamagedError(f"{self.slot(slot)} holds no whole snapshot")
        data = path.read_bytes()
        if manifest.manifest_digest(data) != record.manifest:
            raise CheckpointDamagedError(f"{path} is not the manifest that COMMIT tells of")
        return manifest.decode(data, str(path))

    def _record(self, slot: int) -> CommitRecord | None:
        path = self.slot(slot) / "COMMIT"
        try:
            return CommitRecord.decode(path.read_bytes(), str(path))
        except (OSError, CheckpointDamagedError):
            return None

    def discard(self, version: int) -> None:
        """What the slot of a version holds is damaged; ranks of a node may all say so."""
        for slot in range(SLOTS):
            if self.version(slot) == version:
                (self.slot(slot) / "COMMIT").unlink(missing_ok=True)
        self._pending = 0

    def remove(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)


def part_path(slot: Path, member: int) -> Path:
    """What a rank says of its sealed arena in a slot."""
    return slot / f"part-{member}.json"


def remove_stale(parent: Path) -> None:
    """Remove RAM tiers of this user whose checkpoint directory is gone, or that nobody has written
    to for a week."""
    for folder in parent.glob(f"{memory.PREFIX}ram-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                continue
            root = Path((folder / _ROOT).read_text(encoding="utf-8"))
            last = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            if not root.is_dir() or time.time() - last > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
