"""One checkpoint as a full one, alone in a new directory that needs no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpift.checkpoint.blockfile import write_blocks
from mpift.checkpoint.blocks import Block
from mpift.checkpoint.damage import Advance
from mpift.checkpoint.directory import INDEX, Committed, Directory, block_name
from mpift.checkpoint.durable import publish, publish_once
from mpift.checkpoint.index import write_index
from mpift.checkpoint.manifest import (
    BlockFile,
    CommitRecord,
    Manifest,
    Stored,
    TensorEntry,
    encode,
    manifest_digest,
)
from mpift.checkpoint.reading import Job, Reader
from mpift.errors import CheckpointError

# What is held in memory at a time, and the size of the new block files.
BATCH_BYTES = 256 << 20

_Place = tuple[TensorEntry, int]


def flat_copy(
    directory: Directory,
    committed: Committed,
    out: Directory,
    threads: int = 2,
    advance: Advance | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Committed:
    """Copy a checkpoint into ``out``, which has to be empty or new; every block is checked on the
    way, and encoded if it was. ``advance`` is told of the raw bytes that were copied.

    Raises ``CheckpointDamagedError`` for what is damaged and ``CheckpointError`` if ``out`` can't
    be written, or is not empty.
    """
    if out.root.is_dir() and any(out.root.iterdir()):
        raise CheckpointError(f"{out.root} is not empty: name a new directory")
    manifest = directory.check(committed)
    out.prepare()
    return copy_whole(directory.root, manifest, out, 0, threads, advance, batch_bytes)


def copy_whole(
    root: Path,
    manifest: Manifest,
    out: Directory,
    attempt: int,
    threads: int = 2,
    advance: Advance | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Committed:
    """Commit in ``out`` what ``manifest`` tells of and whose blocks lie below ``root``, without
    anybody's vote: all of it is read and checked here. ``attempt`` tells the new files from others
    of the same step.

    Raises ``CheckpointDamagedError`` for what is damaged.
    """
    encoded = any(
        stored.stored_bytes < stop - start
        for entry in manifest.tensors
        for stored, (start, stop) in zip(entry.blocks, entry.spec.blocks(), strict=True)
    )
    files: list[BlockFile] = []
    places: list[Stored] = []
    with Reader(root) as reader:
        for number, batch in enumerate(_batches(manifest, batch_bytes)):
            blocks = _read(reader, batch, threads)
            name = block_name(manifest.step, number, 0, attempt, manifest.order[0])
            file, stored_blocks = write_blocks(out.disk, out.root, name, blocks, encoded, threads)
            files.append(file)
            places += stored_blocks
            if advance is not None:
                advance(sum(block.data.nbytes for block in blocks))
    return _commit(out, _moved(manifest, files, places))


def _batches(manifest: Manifest, batch_bytes: int) -> Iterator[list[_Place]]:
    batch: list[_Place] = []
    size = 0
    for entry in manifest.tensors:
        for index, (start, stop) in enumerate(entry.spec.blocks()):
            if batch and size + stop - start > batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append((entry, index))
            size += stop - start
    if batch:
        yield batch


def _read(reader: Reader, batch: list[_Place], threads: int) -> list[Block]:
    ranges = [entry.spec.block(index) for entry, index in batch]
    memory = np.empty(sum(stop - start for start, stop in ranges), np.uint8)
    jobs: list[Job] = []
    blocks = []
    end = 0
    for (entry, index), (start, stop) in zip(batch, ranges, strict=True):
        data = memory[end : end + stop - start]
        end += stop - start
        stored = entry.blocks[index]
        jobs.append((stored, entry.spec, index, data, None))
        blocks.append(Block(data, entry.spec.dtype, entry.spec.block_bytes, stored.digest))
    reader.read_many(jobs, threads)
    return blocks


def _moved(manifest: Manifest, files: list[BlockFile], places: list[Stored]) -> Manifest:
    """The manifest with all blocks where they are now, in the same order."""
    left = iter(places)
    tensors = tuple(
        TensorEntry(entry.spec, tuple(next(left) for _ in entry.blocks))
        for entry in manifest.tensors
    )
    return dataclasses.replace(
        manifest,
        files=tuple(files),
        tensors=tensors,
        base=None,
        new_blocks=len(places),
        new_bytes=sum(stored.stored_bytes for stored in places),
        changed_bytes=manifest.state_bytes,
    )


def _commit(out: Directory, manifest: Manifest) -> Committed:
    folder = out.root / "steps" / out.free_name(manifest.step, manifest.order[0])
    out.disk.make_folder(folder)
    write_index(out.disk, folder / INDEX, manifest, "../..")
    data = encode(manifest)
    publish(out.disk, folder / "manifest.json", data)
    record = CommitRecord(manifest.step, manifest.order, manifest_digest(data))
    publish_once(out.disk, folder / "COMMIT", record.encode())
    return Committed(manifest.step, manifest.order, folder, record)
