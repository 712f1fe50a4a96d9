"""Checkpoints of states, written to a folder without processes or a commit, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpift.checkpoint.adopt import Adopted, adopt
from mpift.checkpoint.blockfile import write_blocks
from mpift.checkpoint.blocks import Block, digest
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.manifest import BlockFile, Manifest, TensorEntry
from mpift.checkpoint.reading import Job, Reader
from mpift.checkpoint.state import as_bytes, flatten, own_prefix


class Unsynced(Disk):
    """Nothing crashes here, and the disk has better things to do."""

    def sync(self, path: Path) -> None:
        pass


def saved(root: Path, *states: Mapping[str, Any], rng: bool = False) -> Manifest:
    """The manifest of a checkpoint of these ranks' states; what is shared is the first one's."""
    (root / "blocks").mkdir(exist_ok=True)
    flats = [flatten(state, rng=rng) for state in states]
    tensors = {flats[0].specs[name]: tensor for name, tensor in flats[0].shared_tensors.items()}
    for rank, flat in enumerate(flats):
        for name, tensor in flat.own_tensors.items():
            own = dataclasses.replace(flat.specs[name], name=own_prefix(rank) + name)
            tensors[own] = tensor
    blocks = [
        Block(data, spec.dtype, spec.block_bytes, digest(data.data, spec.dtype))
        for spec, tensor in tensors.items()
        for start, stop in spec.blocks()
        for data in [as_bytes(tensor)[start:stop]]
    ]
    files: tuple[BlockFile, ...] = ()
    places: Iterable[Any] = iter(())
    if blocks:
        name = f"{len(list((root / 'blocks').iterdir()))}.h5"
        file, stored = write_blocks(Unsynced(), root, name, blocks, encode=False, threads=1)
        files, places = (file,), iter(stored)
    entries = tuple(
        TensorEntry(spec, tuple(next(places) for _ in range(spec.block_count)))  # type: ignore[call-overload]
        for spec in tensors
    )
    return Manifest(
        7,
        (1, 7),
        "history",
        "job",
        len(states),
        0.0,
        "1.0",
        files,
        entries,
        flats[0].shared,
        tuple(flat.own for flat in flats),
    )


class CountingReader(Reader):
    """Notes the tensors whose blocks are read, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.names: list[tuple[str, int]] = []

    def __enter__(self) -> CountingReader:
        return self

    def read_many(self, jobs: Iterable[Job], threads: int) -> None:
        listed = list(jobs)
        self.names += [(job[1].name, job[2]) for job in listed]
        super().read_many(listed, threads)


def put_back(
    root: Path, manifest: Manifest, state: Mapping[str, Any], rank: int = 0, **options: Any
) -> Adopted:
    with CountingReader(root) as reader:
        return adopt(state, manifest, reader, rank, **options)


def contents(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of all that a state holds."""
    return {
        name: copy.deepcopy(value.state_dict()) if hasattr(value, "state_dict") else value
        for name, value in state.items()
    }
