"""What checkpoints hold and how they differ, as plain rows for tables and JSON.

By the manifests alone: no block is read. Sizes are in bytes, times in seconds since 1970.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpift.checkpoint.directory import Committed, Directory, written_at
from mpift.checkpoint.manifest import Manifest, TensorEntry
from mpift.checkpoint.retention import live_shares
from mpift.errors import CheckpointDamagedError

# A checkpoint with a base that writes this share of its blocks anew saves nothing to speak of.
DENSE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Summary:
    """One checkpoint. ``new_bytes`` were written for it; ``changed_share`` is that of its blocks
    which differ from ``base``, 1 for a full write."""

    step: int
    generation: int
    unix_time: float
    state_bytes: int
    new_bytes: int
    blocks: int
    new_blocks: int
    changed_share: float
    base: int | None
    pins: tuple[str, ...]
    ranks: int
    job: str
    version: str
    folder: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """``new_blocks`` lie in files that were written for this checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stored_bytes: int
    blocks: int
    new_blocks: int


@dataclass(frozen=True, slots=True)
class FileRow:
    """A block file that the checkpoint uses, and the share of its bytes that it uses."""

    name: str
    size_bytes: int
    live_share: float


@dataclass(frozen=True, slots=True)
class Details:
    """All about one checkpoint. ``encoding_ratio``: bytes of its blocks for one byte stored."""

    summary: Summary
    about_change: str
    stored_bytes: int
    encoding_ratio: float
    tensors: tuple[TensorRow, ...]
    files: tuple[FileRow, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that differs: ``what`` says how, ``blocks_changed`` of its ``blocks`` do."""

    name: str
    what: str
    blocks: int
    blocks_changed: int


@dataclass(frozen=True, slots=True)
class Difference:
    """From an older checkpoint to a newer one; ``blocks`` are those of the newer one."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    unchanged: int
    blocks: int
    blocks_changed: int


def listing(directory: Directory) -> tuple[list[Summary], list[tuple[Path, str]]]:
    """The checkpoints from oldest to newest; and folders of those that can't be read, and why."""
    rows, problems = [], directory.damaged()
    for committed in directory.committed():
        try:
            rows.append(summary(committed, directory.manifest(committed)))
        except CheckpointDamagedError as error:
            problems.append((committed.folder, str(error)))
    return rows, problems


def summary(committed: Committed, manifest: Manifest) -> Summary:
    """The facts of one checkpoint."""
    blocks = manifest.block_count
    full = manifest.base is None
    return Summary(
        step=committed.step,
        generation=committed.order[0],
        unix_time=manifest.unix_time,
        state_bytes=manifest.state_bytes,
        new_bytes=manifest.new_bytes,
        blocks=blocks,
        new_blocks=manifest.new_blocks,
        changed_share=1.0 if full else manifest.new_blocks / max(1, blocks),
        base=manifest.base,
        pins=committed.pins,
        ranks=manifest.world_size,
        job=manifest.job,
        version=manifest.version,
        folder=str(committed.folder),
    )


def details(committed: Committed, manifest: Manifest) -> Details:
    """All about one checkpoint, its tensors by size, the largest first."""
    shares = live_shares([manifest])
    tensors = sorted(_tensors(manifest), key=lambda row: (-row.size_bytes, row.name))
    stored = sum(row.stored_bytes for row in tensors)
    facts = summary(committed, manifest)
    return Details(
        summary=facts,
        about_change=_about_change(facts),
        stored_bytes=stored,
        encoding_ratio=manifest.state_bytes / stored if stored else 1.0,
        tensors=tuple(tensors),
        files=tuple(FileRow(f.name, f.size_bytes, shares[f.name]) for f in manifest.files),
    )


def _tensors(manifest: Manifest) -> Iterator[TensorRow]:
    new = {f.name for f in manifest.files if written_at(Path(f.name).name) == manifest.order}
    for entry in manifest.tensors:
        yield TensorRow(
            entry.spec.name,
            entry.spec.dtype,
            entry.spec.shape,
            entry.spec.size_bytes,
            sum(stored.stored_bytes for stored in entry.blocks),
            len(entry.blocks),
            sum(stored.file in new for stored in entry.blocks),
        )


def _about_change(facts: Summary) -> str:
    if facts.base is None:
        return "A full write: it was compared with no older checkpoint, so every block is new."
    told = (
        f"{facts.new_blocks} of {facts.blocks} blocks ({percent(facts.changed_share)}) differ from"
        f" step {facts.base}."
    )
    if facts.changed_share < DENSE_SHARE:
        return f"{told} The others are shared with older checkpoints."
    return (
        f"{told} Dense optimizers change every block at every step: what is saved by comparing"
        " comes from frozen parameters, adapters, buffers and rows of embeddings."
    )


def percent(share: float) -> str:
    """Whole percents, but never 0 % or 100 % of what is some, or not all."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{100 * share:.0f} %"


def difference(older: Manifest, newer: Manifest) -> Difference:
    """What changed in between; a block counts as changed if its digest differs."""
    before, after = older.named(), newer.named()
    both = [(before[name], entry) for name, entry in after.items() if name in before]
    changed = [change for old, new in both if (change := _change(old, new)) is not None]
    added = tuple(name for name in after if name not in before)
    return Difference(
        added=added,
        removed=tuple(name for name in before if name not in after),
        changed=tuple(changed),
        unchanged=len(both) - len(changed),
        blocks=newer.block_count,
        blocks_changed=sum(change.blocks_changed for change in changed)
        + sum(len(after[name].blocks) for name in added),
    )


def _change(old: TensorEntry, new: TensorEntry) -> Change | None:
    what = []
    for fact in ("dtype", "shape", "block_bytes"):
        was, now = getattr(old.spec, fact), getattr(new.spec, fact)
        if was != now:
            what.append(f"{fact} {was} is {now}")
    if what:
        return Change(new.spec.name, ", ".join(what), len(new.blocks), len(new.blocks))
    same = Counter(a.digest == b.digest for a, b in zip(old.blocks, new.blocks, strict=True))
    if not same[False]:
        return None
    return Change(new.spec.name, "values", len(new.blocks), same[False])
