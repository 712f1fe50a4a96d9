"""A directory of checkpoints: what is committed, what of it is whole, and who may write there.

    blocks/STEP-wMEMBER-eEPOCH-aATTEMPT-gGENERATION.h5   block files, never modified
    steps/STEP/{manifest.json,COMMIT}                    COMMIT comes last: it is the decision
    steps/STEP/index.h5                                  after it, for programs without mpift
    steps/STEP.gGENERATION/                              the same step, committed again later
    live/GENERATION.json                                 the job that writes (``occupancy``)
    readers/HOST-PID-RANDOM.json                         processes that read
    quarantine/                                          damaged checkpoints that were moved away

A checkpoint's order is (generation, step): a generation begins whenever a job claims the directory,
so the steps of a run that went back are newer than the higher ones that it left behind. A folder
without COMMIT is no checkpoint. Nothing here modifies a committed checkpoint but by moving it away.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mpift.checkpoint.damage import Advance, file_damage
from mpift.checkpoint.durable import Disk, publish, publish_once, temporary
from mpift.checkpoint.manifest import CommitRecord, Decoded, Manifest, manifest_digest
from mpift.checkpoint.occupancy import LEASE_SECONDS, Claims, Live, Readers, names_in
from mpift.errors import CheckpointDamagedError, CheckpointError

# Whoever cleans up claims the directory under this name; a job that starts meanwhile waits.
MAINTENANCE = "mpift ckpt gc"
_MAINTENANCE_POLL_SECONDS = 0.05

_STEP = re.compile(r"(\d{10,})(?:\.g(\d+))?")
_BLOCKS = re.compile(r"(\d{10,})-w\d+-e\d+-a\d+-g(\d+)\.h5")
_PIN = "PIN."
INDEX = "index.h5"
IDENTITY = "ID"  # a file that tells a directory from a later one of that path

_REMEDIES = {
    errno.EROFS: "the file system is read-only: choose another checkpoint directory",
    errno.EACCES: "permission is denied: let this user write there, or choose another directory",
    errno.EPERM: "the operation is not permitted: let this user write there, or choose another",
    errno.EEXIST: "a file is in the way: remove it, or choose another directory",
    errno.ENOTDIR: "a file is in the way: remove it, or choose another directory",
    errno.ENOSPC: "no space is left on the device: free some, or choose another directory",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another directory",
}


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that was committed; whether it is whole is for ``Directory.check`` to say."""

    step: int
    order: tuple[int, int]  # (generation, step): the greater, the newer
    folder: Path
    record: CommitRecord
    pins: tuple[str, ...] = ()


def block_name(step: int, member: int, epoch: int, attempt: int, generation: int) -> str:
    """The name of a block file within ``blocks/``."""
    return f"{step:010d}-w{member}-e{epoch}-a{attempt}-g{generation}.h5"


def written_at(name: str) -> tuple[int, int] | None:
    """(generation, step) in the name of a block file, finished or not; None if it is none."""
    match = _BLOCKS.match(name)
    return (int(match[2]), int(match[1])) if match else None


def step_of(folder: str) -> tuple[int, int | None] | None:
    """(step, generation if it is named) of a name in ``steps/``; None if it is none."""
    match = _STEP.fullmatch(folder)
    return (int(match[1]), int(match[2]) if match[2] else None) if match else None


class Directory:
    """The checkpoints below ``root``. All that it writes goes through ``disk``."""

    def __init__(
        self, root: Path, disk: Disk | None = None, decoded: Decoded | None = None
    ) -> None:
        self.root = root
        self.disk = disk or Disk()
        self._claims = Claims(root / "live", self.disk)
        self._readers = Readers(root / "readers", self.disk)
        self._files: dict[str, frozenset[str]] = {}  # by digest of the manifest
        self._decoded = decoded or Decoded()

    # -- what there is -----------------------------------------------------------------------------

    def committed(self) -> list[Committed]:
        """The checkpoints from oldest to newest, whole or not."""
        found = [item for item in self._listed() if isinstance(item, Committed)]
        return sorted(found, key=lambda committed: committed.order)

    def damaged(self) -> list[tuple[Path, str]]:
        """Folders whose COMMIT says nothing, and why: which checkpoint it was is not known."""
        return [item for item in self._listed() if not isinstance(item, Committed)]

    def find(self, step: int, generation: int | None = None) -> Committed:
        """The newest checkpoint of that step, or that of one generation.

        Raises ``CheckpointError`` if there is none.
        """
        everything = self.committed()
        for item in reversed(everything):
            if item.step == step and generation in (None, item.order[0]):
                return item
        steps = ", ".join(str(item.step) for item in everything[-10:]) or "none"
        of = "" if generation is None else f" of generation {generation}"
        raise CheckpointError(
            f"{self.root} has no checkpoint of step {step}{of}; the newest ones are: {steps}"
        )

    def _listed(self) -> Iterator[Committed | tuple[Path, str]]:
        steps = self.root / "steps"
        for name in names_in(steps):
            named = step_of(name)
            if named is None:
                continue
            try:
                yield _committed(steps / name, named[0])
            except (FileNotFoundError, NotADirectoryError):
                continue  # not committed, or removed a moment ago
            except CheckpointDamagedError as error:
                yield steps / name, str(error)

    def manifest(self, committed: Committed) -> Manifest:
        """What the checkpoint consists of.

        Raises ``CheckpointDamagedError`` if the manifest is not the one that was committed.
        """
        path = committed.folder / "manifest.json"
        try:
            data = _read(path)
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{path} is missing") from None
        found = manifest_digest(data)
        if found != committed.record.manifest:
            raise CheckpointDamagedError(
                f"{path} is not what was committed: its {len(data)} bytes have the SHA-256 digest"
                f" {found}, and COMMIT says {committed.record.manifest}"
            )
        manifest = self._decoded.take(data, found, str(path))
        for what, has, says in (
            ("step", manifest.step, committed.step),
            ("order", manifest.order, committed.order),
        ):
            if has != says:
                raise CheckpointDamagedError(f"{path} has {what} {has}, and COMMIT says {says}")
        return manifest

    def files(self, committed: Committed) -> frozenset[str]:
        """The names of the block files that the checkpoint needs; its manifest is read once.

        Raises ``CheckpointDamagedError`` if it can't be.
        """
        key = committed.record.manifest
        if key not in self._files:
            self._files[key] = frozenset(file.name for file in self.manifest(committed).files)
        return self._files[key]

    # -- whether it is whole -----------------------------------------------------------------------

    def check(self, committed: Committed, thorough: bool = False) -> Manifest:
        """The manifest, if every block file is there in its size; ``thorough``: if every byte is
        what its digests say. Raises ``CheckpointDamagedError`` with the first damage."""
        manifest = self.manifest(committed)
        for problem in file_damage(self.root, manifest, thorough):
            raise CheckpointDamagedError(f"checkpoint of step {committed.step}: {problem}")
        return manifest

    def damage(self, committed: Committed, advance: Advance | None = None) -> Iterator[str]:
        """Everything that is wrong with a checkpoint, one by one; all of it is read for that.

        ``advance`` is told of the bytes gone through, as ``damage.file_damage`` says.
        """
        try:
            manifest = self.manifest(committed)
        except CheckpointDamagedError as error:
            yield str(error)
            return
        yield from file_damage(self.root, manifest, True, advance)

    def newest_good(self) -> tuple[tuple[Committed, Manifest] | None, list[tuple[Path, str]]]:
        """The newest checkpoint with all its files in their sizes, None if there is none; and the
        folders of damaged ones met on the way, each with what is wrong.

        Storage that can't be reached is no damage: its ``OSError`` passes through.
        """
        problems = self.damaged()
        for committed in reversed(self.committed()):
            try:
                return (committed, self.check(committed)), problems
            except CheckpointDamagedError as error:
                problems.append((committed.folder, str(error)))
        return None, problems

    def quarantine(self, folder: Path, reason: str) -> Path:
        """Move a checkpoint's folder out of the way, with the reason in it; its new place.

        Block files stay, since other checkpoints may use them. Ranks may all do this: the first
        one moves it.
        """
        shelf = self.root / "quarantine"
        self.disk.make_folder(shelf)
        earlier = [shelf / folder.name]
        while earlier[-1].exists():
            earlier.append(shelf / f"{folder.name}-{len(earlier) + 1}")
        goal = earlier[-1]
        try:
            self.disk.rename(folder, goal)
        except FileNotFoundError:
            if len(earlier) > 1:
                return earlier[-2]
            if goal.exists():
                return goal
            raise
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another rank was faster
                return goal
            raise
        self.disk.create(goal / "REASON.txt", f"{reason}\n".encode())
        for changed in (goal, shelf, folder.parent):
            self.disk.sync_folder(changed)
        return goal

    def pin(self, step: int, name: str) -> None:
        """Keep the newest checkpoint of ``step`` for good, under a ``name`` that is taken from the
        one that had it.

        Raises ``CheckpointError`` if there is none, ``ValueError`` for a name that is no file's.
        """
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"a pin's name must be letters, digits, - and _, not {name!r}")
        wanted = self.find(step)
        publish(self.disk, wanted.folder / f"{_PIN}{name}", b"")
        for committed in self.committed():
            if name in committed.pins and committed.order != wanted.order:
                self.disk.unlink(committed.folder / f"{_PIN}{name}")
                self.disk.sync_folder(committed.folder)

    # -- writing -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the folders, and see that files can be made there; ``CheckpointError`` if not."""
        path = self.root
        try:
            for path in (self.root, self.root / "blocks", self.root / "steps"):
                self.disk.make_folder(path)
                probe = temporary(path / "writable")
                self.disk.create(probe, b"mpift")
                self.disk.unlink(probe)
            if not (self.root / IDENTITY).exists():
                with contextlib.suppress(FileExistsError):
                    publish_once(self.disk, self.root / IDENTITY, secrets.token_hex(8).encode())
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, f"{error.strerror}: choose another directory")
            raise CheckpointError(f"checkpoints can't be written to {path}: {remedy}") from None

    def free_name(self, step: int, generation: int) -> str:
        """The name of the folder for a new checkpoint; what an attempt that was never committed
        left there is removed. For the coordinator alone.

        Raises ``CheckpointError`` if this generation has committed the step already.
        """
        for name in (f"{step:010d}", f"{step:010d}.g{generation}"):
            folder = self.root / "steps" / name
            with contextlib.suppress(CheckpointDamagedError, FileNotFoundError):
                if _committed(folder, step).order[0] == generation:
                    break
            if not folder.exists() or self.discard(folder) is not None:
                return name
        raise CheckpointError(
            f"{folder} is committed already: step {step} can't be saved twice in generation"
            f" {generation}; save a later step, or go back to an older checkpoint first"
        )

    def discard(self, folder: Path) -> int | None:
        """Remove a folder of ``steps/`` that has no COMMIT; the bytes freed, None if it has one.

        It is renamed first: a COMMIT comes before that and is seen, or finds no folder any more.
        """
        if (folder / "COMMIT").exists():
            return None
        doomed = temporary(folder)
        self.disk.rename(folder, doomed)
        if (doomed / "COMMIT").exists():
            self.disk.rename(doomed, folder)
            return None
        return self.clear(doomed)

    def clear(self, folder: Path) -> int:
        """Remove a folder with its files, and give the bytes freed."""
        freed = 0
        for path in sorted(folder.iterdir()):
            freed += path.stat().st_size
            self.disk.unlink(path)
        folder.rmdir()
        self.disk.sync_folder(folder.parent)
        return freed

    # -- who is there ------------------------------------------------------------------------------

    def claim(self, job: str) -> int:
        """Become the job that writes here, in a new generation, which is returned.

        The job itself may take over from another of its processes, and may claim again. While
        somebody cleans up, this waits. Raises ``CheckpointError`` if another job is alive.
        """
        patient_until = time.monotonic() + LEASE_SECONDS
        while True:
            holder = self._claims.newest()
            other = holder is not None and (holder.job != job or job == MAINTENANCE)
            if holder is not None and other and self._claims.alive(holder):
                if holder.job != MAINTENANCE or time.monotonic() > patient_until:
                    raise CheckpointError(
                        f"{self.root} is written to by job {holder.job}: {holder.described()};"
                        " wait until it has ended, end it, or choose another checkpoint directory"
                    )
                time.sleep(_MAINTENANCE_POLL_SECONDS)
                continue
            generation = 1 + max(self.generation(), holder.generation if holder else 0)
            if not self._claims.take(job, generation):
                continue
            newest = self._claims.newest()
            # Jobs may have come, and even gone, since the generation was chosen.
            if newest and newest.generation == generation and self.generation() < generation:
                self._claims.drop_older(generation)
                return generation
            self._claims.drop(generation)

    def refresh(self, job: str, generation: int) -> None:
        """Say that the job lives; to be called more often than every ``LEASE_SECONDS``.

        Raises ``CheckpointError`` if it lost the directory to another one.
        """
        self._claims.refresh(job, generation)

    def release(self, job: str) -> None:
        """End the job's claim, if it has one."""
        newest = self._claims.newest()
        if newest is not None and newest.job == job:
            self._claims.drop(newest.generation)

    def live(self) -> Live | None:
        """The job that writes here and is alive."""
        newest = self._claims.newest()
        return newest if newest is not None and self._claims.alive(newest) else None

    def generation(self) -> int:
        """The highest generation that left anything here; 0 if none did."""
        found = [committed.order[0] for committed in self.committed()]
        for name in (*names_in(self.root / "steps"), *names_in(self.root / "quarantine")):
            named = step_of(name)
            found.append(named[1] or 0 if named else 0)
        for name in names_in(self.root / "blocks"):
            written = written_at(name)
            found.append(written[0] if written else 0)
        return max(found, default=0)

    def reading(self) -> AbstractContextManager[None]:
        """Keep everything from being removed by others meanwhile; where the directory can't be
        written to, nothing is promised."""
        return self._readers.entered()

    def readers(self) -> list[Live]:
        """The processes that read here and are alive."""
        return self._readers.live()

    def forget_readers(self) -> None:
        """Remove the files of readers that have ended."""
        self._readers.clear()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector, and not just something in the way
            raise CheckpointDamagedError(f"{path} can't be read: {error.strerror}") from None
        raise


def _committed(folder: Path, step: int) -> Committed:
    path = folder / "COMMIT"
    record = CommitRecord.decode(_read(path), str(path))
    if record.step != step:
        raise CheckpointDamagedError(f"{path} is that of step {record.step}, not of {step}")
    names = [path.name for path in folder.glob(f"{_PIN}*") if path.suffix != ".new"]
    pins = tuple(sorted(name[len(_PIN) :] for name in names))
    return Committed(record.step, record.order, folder, record, pins)
