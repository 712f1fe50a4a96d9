"""Small real checkpoints for tests: block files, index, manifest, COMMIT, as a job leaves them.

And a disk that takes none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpift.checkpoint import blocks, manifest
from mpift.checkpoint.blockfile import write_blocks
from mpift.checkpoint.blocks import Block, TensorSpec
from mpift.checkpoint.directory import Committed, Directory, block_name
from mpift.checkpoint.durable import Disk, publish, publish_once
from mpift.checkpoint.index import write_index
from mpift.checkpoint.manifest import CommitRecord, Manifest, Stored, TensorEntry

BLOCK_BYTES = 1024
Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Saved:
    committed: Committed
    manifest: Manifest


def arrays(seed: int = 0, **sizes: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 vectors of these lengths by name."""
    random = np.random.default_rng(seed)
    return {name: random.random(size, np.float32) for name, size in sizes.items()}


def save(
    root: Path,
    step: int,
    tensors: Arrays,
    generation: int = 1,
    base: Saved | None = None,
    encode: bool = False,
) -> Saved:
    """Commit the tensors as a job would; blocks that ``base`` has are shared with it."""
    directory = Directory(root)
    directory.prepare()
    specs = [
        TensorSpec(name, str(a.dtype), tuple(a.shape), BLOCK_BYTES) for name, a in tensors.items()
    ]
    known: dict[str, Stored] = {}
    if base is not None:
        known = {s.digest: s for entry in base.manifest.tensors for s in entry.blocks}
    new: dict[str, Block] = {}
    digests: list[list[str]] = []
    for spec, array in zip(specs, tensors.values(), strict=True):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digests.append([])
        for start, stop in spec.blocks():
            found = blocks.digest(data[start:stop], spec.dtype)
            digests[-1].append(found)
            if found not in known:
                new[found] = Block(data[start:stop], spec.dtype, BLOCK_BYTES, found)
    files = {file.name: file for file in base.manifest.files} if base is not None else {}
    new_bytes = 0
    if new:
        name = block_name(step, 0, 0, 0, generation)
        file, places = write_blocks(Disk(), root, name, list(new.values()), encode, 1)
        files[file.name] = file
        known.update(zip(new, places, strict=True))
        new_bytes = sum(place.stored_bytes for place in places)
    entries = tuple(
        TensorEntry(spec, tuple(known[found] for found in row))
        for spec, row in zip(specs, digests, strict=True)
    )
    used = {stored.file for entry in entries for stored in entry.blocks}
    made = Manifest(
        step=step,
        order=(generation, step),
        history="history",
        job="job",
        world_size=2,
        unix_time=1.7e9 + step,
        version="0",
        files=tuple(file for name, file in sorted(files.items()) if name in used),
        tensors=entries,
        shared={name: {"#": "tensor", "name": name} for name in tensors},
        own=({}, {}),
        base=None if base is None else base.manifest.step,
        new_blocks=len(new),
        new_bytes=new_bytes,
        changed_bytes=sum(block.data.nbytes for block in new.values()),
    )
    return Saved(commit(directory, made), made)


def commit(directory: Directory, made: Manifest) -> Committed:
    """The folder of a checkpoint whose block files are there."""
    disk = directory.disk
    folder = directory.root / "steps" / directory.free_name(made.step, made.order[0])
    disk.make_folder(folder)
    write_index(disk, folder / "index.h5", made, "../..")
    data = manifest.encode(made)
    publish(disk, folder / "manifest.json", data)
    record = CommitRecord(made.step, made.order, manifest.manifest_digest(data))
    publish_once(disk, folder / "COMMIT", record.encode())
    return Committed(made.step, made.order, folder, record)


def flip(path: Path, offset: int) -> None:
    """Turn one bit of a file over, however it is protected."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class Refusing(Disk):
    """On which nothing can be made, for a reason with this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def create(self, path: Path, data: bytes) -> None:
        raise OSError(self.number, os.strerror(self.number), str(path))

    mark = create
