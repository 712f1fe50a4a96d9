"""A part of a checkpoint: what one writer has stored of a snapshot, as it is sent to others.

Parts are made from an arena, put together to a manifest, and forgotten then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpift._version import __version__
from mpift.checkpoint.arena import Contents
from mpift.checkpoint.blocks import TensorSpec
from mpift.checkpoint.manifest import BlockFile, Manifest, Stored, TensorEntry, order_of
from mpift.core.saving import Origin
from mpift.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Part:
    """``shared`` are the blocks of the shared tensors in ``ranges``, ``own`` those of the share's
    own tensors, both in the arena's order. Specs and tree of the shared tensors are in every part,
    so that any will do. ``files`` are those that the blocks lie in. ``base`` is the step whose
    blocks were compared with."""

    version: int
    share: int
    origin: Origin
    ranges: tuple[tuple[int, int], ...]
    shared: tuple[Stored, ...]
    own: tuple[Stored, ...]
    shared_specs: tuple[TensorSpec, ...]
    own_specs: tuple[TensorSpec, ...]
    shared_tree: Any
    own_tree: Any
    files: tuple[BlockFile, ...]
    base: int | None = None
    new_blocks: int = 0
    new_bytes: int = 0
    changed_bytes: int = 0

    @classmethod
    def of(
        cls,
        contents: Contents,
        ranges: tuple[tuple[int, int], ...],
        shared: Sequence[Stored],
        own: Sequence[Stored],
        files: Sequence[BlockFile],
        base: int | None = None,
        new: tuple[int, int, int] = (0, 0, 0),
    ) -> Part:
        """The part of an arena's contents that was stored so; ``new`` are blocks, bytes as stored
        and raw bytes that were written for it."""
        return cls(
            contents.version,
            contents.share,
            contents.origin,
            ranges,
            tuple(shared),
            tuple(own),
            contents.shared_specs,
            contents.own_specs,
            contents.shared,
            contents.own,
            tuple(files),
            base,
            *new,
        )

    def encode(self) -> bytes:
        record = {name: getattr(self, name) for name in self.__slots__}
        names = {file.name: number for number, file in enumerate(self.files)}
        for name in ("shared", "own"):
            record[name] = [[names[block.file], *block[1:]] for block in record[name]]
        for name in ("shared_specs", "own_specs", "files"):
            record[name] = [[getattr(item, of) for of in item.__slots__] for item in record[name]]
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Part:
        record = json.loads(bytes(data))
        history, layout, owners = record["origin"]
        record["origin"] = Origin(history, layout, tuple(owners))
        record["ranges"] = tuple((first, last) for first, last in record["ranges"])
        record["files"] = tuple(BlockFile(*row) for row in record["files"])
        for name in ("shared_specs", "own_specs"):
            record[name] = tuple(
                TensorSpec(tensor, dtype, tuple(shape), block_bytes)
                for tensor, dtype, shape, block_bytes in record[name]
            )
        names = [file.name for file in record["files"]]
        for name in ("shared", "own"):
            record[name] = tuple(Stored(names[row[0]], *row[1:]) for row in record[name])
        return cls(**record)


def put_together(parts: Sequence[Part], job: str, unix_time: float) -> Manifest:
    """The manifest of a checkpoint that consists of ``parts``.

    Raises ``CheckpointError`` if they are not of one snapshot, or a block is missing or is there
    twice.
    """
    first = parts[0]
    if {(part.version, part.origin) for part in parts} != {(first.version, first.origin)}:
        raise CheckpointError("parts of different snapshots can't make one checkpoint")
    blocks: dict[int, Stored] = {}
    for part in parts:
        numbers = [number for start, stop in part.ranges for number in range(start, stop)]
        if len(numbers) != len(part.shared) or not blocks.keys().isdisjoint(numbers):
            raise CheckpointError(f"the part of share {part.share} does not fit in with the others")
        blocks.update(zip(numbers, part.shared, strict=True))
    total = sum(spec.block_count for spec in first.shared_specs)
    if len(blocks) != total:
        raise CheckpointError(f"{total - len(blocks)} of {total} blocks are in no part")
    ordered = [blocks[number] for number in range(total)]
    tensors = list(_entries(first.shared_specs, ordered))
    own: list[Any] = [None] * len(first.origin.owners)
    for part in parts:
        own[part.share] = part.own_tree
        named = [_of_rank(spec, part.share) for spec in part.own_specs]
        tensors += _entries(named, part.own)
    # Files that no block lies in any more are no part of it.
    used = {block.file for entry in tensors for block in entry.blocks}
    files = {file.name: file for part in parts for file in part.files if file.name in used}
    order = order_of(first.version)
    return Manifest(
        order[1],
        order,
        first.origin.history,
        job,
        len(first.origin.owners),
        unix_time,
        __version__,
        tuple(files[name] for name in sorted(files)),
        tuple(tensors),
        first.shared_tree,
        tuple(own),
        _base_of(parts),
        sum(part.new_blocks for part in parts),
        sum(part.new_bytes for part in parts),
        sum(part.changed_bytes for part in parts),
        extra={"layout": first.origin.layout, "owners": list(first.origin.owners)},
    )


def _base_of(parts: Sequence[Part]) -> int | None:
    """The oldest step that something was compared with."""
    return min((part.base for part in parts if part.base is not None), default=None)


def _of_rank(spec: TensorSpec, share: int) -> TensorSpec:
    return TensorSpec(f"ranks/{share}/{spec.name}", spec.dtype, spec.shape, spec.block_bytes)


def _entries(specs: Sequence[TensorSpec], blocks: Sequence[Stored]) -> list[TensorEntry]:
    entries, start = [], 0
    for spec in specs:
        stop = start + spec.block_count
        entries.append(TensorEntry(spec, tuple(blocks[start:stop])))
        start = stop
    if start != len(blocks):
        raise CheckpointError(f"{len(blocks)} blocks for tensors that have {start}")
    return entries
