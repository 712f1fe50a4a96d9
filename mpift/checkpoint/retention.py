"""Which checkpoints are kept, and the removal of what none of them needs.

Mark and sweep of whole files, since HDF5 gives no space back within one. The order makes a crash
harmless at any point: the COMMIT of what goes is removed first and its removal synced, so that
whatever still has a COMMIT still has all its blocks. A reader enters itself before it looks for a
COMMIT, and readers are looked for again once the COMMITs are gone: it is seen, or finds none.

Nothing is guessed: while the manifest of one checkpoint can't be read, no block file is removed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpift.checkpoint.directory import (
    IDENTITY,
    MAINTENANCE,
    Committed,
    Directory,
    step_of,
    written_at,
)
from mpift.checkpoint.manifest import Manifest, decode
from mpift.errors import CheckpointDamagedError, CheckpointError

Order = tuple[int, int]  # (generation, step)

# Headers and dead blocks of less than this are not worth writing the live ones anew.
COMPACT_BYTES = 1 << 20


def retained(
    found: Sequence[tuple[Order, int, bool]], keep: int, keep_every: int | None
) -> set[Order]:
    """The orders, of (order, step, pinned), that are kept: the newest ``keep`` and at least one,
    those whose step is a multiple of ``keep_every``, and what is pinned."""
    if keep < 1:
        raise ValueError(f"at least 1 checkpoint has to be kept, not {keep}")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every is a number of steps, at least 1, not {keep_every}")
    newest = sorted(order for order, _, _ in found)[-keep:]
    kept = {
        order
        for order, step, pinned in found
        if pinned or (keep_every is not None and step % keep_every == 0)
    }
    return kept | set(newest)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep would remove. ``held`` says why something stays that might have gone."""

    steps: tuple[Committed, ...] = ()
    leftovers: tuple[Path, ...] = ()  # folders and files of writes that never ended
    files: tuple[Path, ...] = ()  # block files
    held: str = ""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed: steps, the number of files, and their bytes; ``held`` as in a plan."""

    steps: tuple[int, ...]
    files: int
    bytes: int
    held: str = ""


def plan(
    directory: Directory,
    generation: int,
    last: Order | None,
    keep: int,
    keep_every: int | None,
    verified: Order | None = None,
) -> Plan:
    """What may be removed; nothing is changed.

    ``generation`` is the caller's, ``last`` the newest checkpoint of which it knows that nothing
    up to it is still being written. ``verified`` is the checkpoint that was last found good by
    reading it back, and stays. One whose manifest can't be read, or that misses a block file, stays
    too and does not count as one of those to keep.
    """
    readers = directory.readers()
    if readers:
        return Plan(held=f"nothing is removed while {readers[0].described()} reads")
    everything = directory.committed()
    needed, unreadable = _needed(directory, everything)
    present = {f"blocks/{path.name}" for path in (directory.root / "blocks").glob("*.h5")}
    whole = [c for c in everything if c.order in needed and needed[c.order] <= present]
    facts = [(c.order, c.step, bool(c.pins)) for c in whole]
    stay = retained(facts, keep, keep_every) | {verified}
    going = tuple(c for c in whole if c.order not in stay)
    ended = _Ended(generation, _finished(everything, last))
    # What is in the folders that go goes with them.
    staying = [c for c in everything if c not in going]
    leftovers = _leftovers(directory, staying, ended)
    if unreadable:
        return Plan(going, leftovers, held=f"no block file is removed, since {unreadable}")
    used: set[str] = set()
    used.update(*(needed[c.order] for c in everything if c not in going))
    unused = [directory.root / name for name in sorted(present - used)]
    files = tuple(path for path in unused if ended.has(written_at(path.name)))
    return Plan(going, leftovers, files)


def carry_out(directory: Directory, what: Plan) -> Swept:
    """Remove what was planned, in the order that the module's docstring tells."""
    disk = directory.disk
    bytes_freed = files = 0
    for item in what.steps:
        # The oldest first: after a crash the newer ones are there.
        bytes_freed += (item.folder / "COMMIT").stat().st_size
        disk.unlink(item.folder / "COMMIT")
        disk.sync_folder(item.folder)
    steps = tuple(item.step for item in what.steps)
    readers = directory.readers()
    if readers:
        return Swept(
            steps, len(steps), bytes_freed, f"files stay while {readers[0].described()} reads"
        )
    directory.forget_readers()
    folders = [path for path in what.leftovers if path.is_dir()]
    for folder in (*(item.folder for item in what.steps), *folders):
        count = len(list(folder.iterdir()))
        freed = directory.discard(folder)
        if freed is not None:
            bytes_freed += freed
            files += count
    singles = [path for path in what.leftovers if path not in folders]
    for path in (*singles, *what.files):
        bytes_freed += path.stat().st_size
        disk.unlink(path)
        files += 1
    if what.files:
        disk.sync_folder(directory.root / "blocks")
    return Swept(steps, files + len(steps), bytes_freed, what.held)


def sweep(
    directory: Directory,
    generation: int,
    last: Order | None,
    keep: int,
    keep_every: int | None,
    verified: Order | None = None,
) -> Swept:
    """``plan`` and carry it out. For the one that coordinates the writing job, or holds a claim."""
    return carry_out(directory, plan(directory, generation, last, keep, keep_every, verified))


def collect(
    directory: Directory, keep: int | None, keep_every: int | None, dry_run: bool = False
) -> Swept:
    """A sweep from outside, while no job writes; with ``keep`` None all checkpoints stay. The
    newest one that has all its files stays anyhow. ``dry_run`` only says what would go.

    Raises ``CheckpointError`` if a job is alive, or if there have never been checkpoints.
    """
    if not (directory.root / IDENTITY).exists():
        raise CheckpointError(f"{directory.root} is no directory of checkpoints")
    generation = directory.claim(MAINTENANCE)
    try:
        good, _ = directory.newest_good()
        if good is not None:
            # Its job may have been killed before this sync: a crash must not take it, and this the
            # older ones.
            directory.disk.sync_folder(good[0].folder)
        count = keep or max(1, len(directory.committed()))
        # Nobody else writes, so nothing is in the making.
        last = (generation, sys.maxsize)
        verified = good[0].order if good is not None else None
        found = plan(directory, generation, last, count, keep_every, verified)
        return _foretold(found) if dry_run else carry_out(directory, found)
    finally:
        directory.release(MAINTENANCE)


@dataclass(frozen=True, slots=True)
class _Ended:
    """Which writes can't be going on any more: those of older generations, and the caller's own up
    to what it has finished."""

    generation: int
    finished: Order

    def has(self, written: Order | None) -> bool:
        """Whether what was written as ``written`` is over; None: that is not known."""
        return written is not None and (written[0] < self.generation or written <= self.finished)


def _finished(everything: Sequence[Committed], last: Order | None) -> Order:
    """(generation, step) up to which nothing is in the making, as names of files have it."""
    if last is None:
        return (0, 0)
    step = next((item.step for item in everything if item.order == last), last[1])
    return (last[0], step)


def _needed(
    directory: Directory, everything: Iterable[Committed]
) -> tuple[dict[Order, frozenset[str]], str]:
    """The block files of each checkpoint whose manifest can be read, and why of one it can't."""
    needed = {}
    unreadable = ""
    for item in everything:
        try:
            needed[item.order] = directory.files(item)
        except (CheckpointDamagedError, OSError) as error:
            unreadable = str(error)
    for _, reason in directory.damaged():
        unreadable = reason
    return needed, unreadable


def _leftovers(
    directory: Directory, everything: Sequence[Committed], ended: _Ended
) -> tuple[Path, ...]:
    """Unfinished files, and folders of steps that were never committed."""
    blocks = (directory.root / "blocks").glob("*.new")
    found = [path for path in blocks if ended.has(written_at(path.name))]
    for folder in sorted((directory.root / "steps").glob("*")):
        if (folder / "COMMIT").exists():
            continue
        named = step_of(folder.name)
        if named is None:
            # A folder has this ending once its removal has begun.
            found += [folder] if folder.suffix == ".new" else []
        elif ended.has((_begun_by(folder, named[1], ended.generation), named[0])):
            found.append(folder)
    for item in everything:
        if item.order[0] < ended.generation:
            found += item.folder.glob("*.new")
    return tuple(found)


def _begun_by(folder: Path, named: int | None, own: int) -> int:
    """The generation of a folder that was not committed; where nothing says it, it may be the
    caller's own."""
    if named is not None:
        return named
    path = folder / "manifest.json"
    try:
        return decode(path.read_bytes(), str(path)).order[0]
    except (CheckpointDamagedError, OSError):
        return own


def _foretold(what: Plan) -> Swept:
    """What carrying it out would give."""
    paths = [*(item.folder for item in what.steps), *what.leftovers, *what.files]
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    freed = sum(file.stat().st_size for file in files)
    return Swept(tuple(item.step for item in what.steps), len(files), freed, what.held)


def live_share(manifests: Iterable[Manifest], file: str) -> float:
    """The share of a block file's bytes that the manifests still use; 0 if none does."""
    return live_shares(manifests).get(file, 0.0)


def live_shares(manifests: Iterable[Manifest]) -> dict[str, float]:
    """The same for every file that they name."""
    return {file: used / size for file, (used, size) in _live_bytes(manifests).items()}


def files_to_compact(manifests: Iterable[Manifest], below: float = 0.5) -> set[str]:
    """Block files of which less than this share is used, ``COMPACT_BYTES`` or more of them dead:
    the next save should write their live blocks anew, so that they can go."""
    return {
        file
        for file, (used, size) in _live_bytes(manifests).items()
        if used < below * size and size - used >= COMPACT_BYTES
    }


def _live_bytes(manifests: Iterable[Manifest]) -> dict[str, tuple[int, int]]:
    """For each file: bytes of blocks that are used by any of the manifests, and its size."""
    blocks: defaultdict[str, dict[int, int]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for manifest in manifests:
        sizes.update((file.name, file.size_bytes) for file in manifest.files)
        for entry in manifest.tensors:
            for stored in entry.blocks:
                blocks[stored.file][stored.offset] = stored.stored_bytes
    return {name: (sum(blocks[name].values()), size) for name, size in sizes.items()}
