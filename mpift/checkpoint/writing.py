"""What the writer process does: blocks out of arenas into files, parts into checkpoints.

``Workshop`` has one method a job. Each leaves either a whole result behind or nothing that counts,
whatever happens in the middle: files have temporary names until they are synced and read back, and
a checkpoint exists once its COMMIT file does. Change detection compares digests with those of a
committed checkpoint, never with anything in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpift.checkpoint import encoding, index, manifest, retention
from mpift.checkpoint.arena import Arena, Contents
from mpift.checkpoint.blockfile import write_blocks
from mpift.checkpoint.blocks import DIGEST_BYTES, Block, TensorSpec, digest, sample
from mpift.checkpoint.comparing import Committed, is_there
from mpift.checkpoint.directory import Directory
from mpift.checkpoint.durable import Disk, MemoryDisk, publish, publish_once
from mpift.checkpoint.manifest import BlockFile, CommitRecord, Manifest, Stored
from mpift.checkpoint.orders import Order, Summary, Written
from mpift.checkpoint.part import Part, put_together
from mpift.checkpoint.ram import part_path
from mpift.errors import CheckpointDamagedError, CheckpointError

_TRIED = 16  # blocks, before all are compared
_MEASURED_BYTES_MIN = 4 << 20  # less says nothing about how fast storage is
MANIFEST, COMMIT = "manifest.json", "COMMIT"


@dataclass(frozen=True, slots=True)
class Piece:
    """One block in an arena."""

    spec: TensorSpec
    index: int
    name: str  # of its tensor, in the manifest
    data: np.ndarray


class Workshop:
    """See the module's docstring. ``threads`` may encode at a time."""

    def __init__(self, disk: Disk, threads: int) -> None:
        self._disk = disk
        self._threads = threads
        self._arenas: dict[Path, Arena] = {}
        self._decoded = manifest.Decoded()
        self._directory: Directory | None = None
        # Of the arena that was sealed last: which, its version, and the digests of its blocks.
        self._sealed: tuple[Path, int, list[str]] = (Path(), 0, [])
        self._storage_rate = 0.0  # bytes a second, 0 as long as nothing was measured

    def remove_arenas(self) -> None:
        """Their rank is gone, and nobody else may use them."""
        for arena in tuple(self._arenas.values()):
            arena.unlink()

    # -- writing a part ----------------------------------------------------------------------------

    def write(self, order: Order) -> Written:
        """Store the changed blocks; returns the part, durable and read back.

        Raises ``CheckpointError`` if the arena does not hold that version (any more), ``OSError``
        for what the storage says.
        """
        arena, contents = self._find(order)
        pieces = list(pieces_of(contents, arena.data, contents.ranges[:1]))
        base = self._load_base(order)
        old = Committed(base, order.root, order.compact_below) if base is not None else None
        known = self._known_digests(arena, contents)
        digests = known or _to_compare(pieces, old, order.version)
        stored = [
            old.same(p.name, p.spec, p.index, d) if old else None
            for p, d in zip(pieces, digests, strict=True)
        ]
        changed = [number for number, block in enumerate(stored) if block is None]
        files = old.used(stored) if old else []
        blocks = [
            Block(pieces[n].data, pieces[n].spec.dtype, pieces[n].spec.block_bytes, digests[n])
            for n in changed
        ]
        places: Sequence[Stored] = ()
        if blocks:
            file, places = self._store(order, blocks)
            files.append(file)
        if arena.version != order.version:
            raise CheckpointError("the snapshot was overwritten while it was written")
        fresh = dict(zip(changed, places, strict=True))
        complete = [block or fresh[number] for number, block in enumerate(stored)]
        first, last = contents.ranges[0]
        raw = sum(len(block.data) for block in blocks)
        part = Part.of(
            contents,
            contents.ranges[:1],
            complete[: last - first],
            complete[last - first :],
            files,
            None if base is None else base.step,
            (len(blocks), sum(place.stored_bytes for place in places), raw),
        )
        # Of an arena that also holds what is others' to write, only these.
        everything = not known and len(contents.ranges) == 1
        made = _joined([block.digest for block in complete]) if everything else b""
        return Written(part.origin, part.encode(), made)

    def _find(self, order: Order) -> tuple[Arena, Contents]:
        for path in order.arenas:
            with contextlib.suppress(FileNotFoundError):
                arena = self._map(path)
                contents = arena.contents()
                if contents is not None and contents.version == order.version:
                    return arena, contents
        raise CheckpointError(
            f"the snapshot of step {manifest.order_of(order.version)[1]} is not in the memory of"
            " this node, or not whole"
        )

    def _map(self, path: Path) -> Arena:
        """An arena stays mapped: page faults cost more than the copying."""
        gone = [known for known, arena in self._arenas.items() if not arena.is_in_place()]
        for known in gone:
            del self._arenas[known]  # unmapped with the last view of it
        if path not in self._arenas:
            self._arenas[path] = Arena.open(path)
        return self._arenas[path]

    def _store(self, order: Order, blocks: Sequence[Block]) -> tuple[BlockFile, list[Stored]]:
        size = sum(len(block.data) for block in blocks)
        encode = self._pays(blocks) if order.encode == "auto" else bool(order.encode)
        start = time.perf_counter()
        result = write_blocks(self._disk, order.root, order.name, blocks, encode, self._threads)
        if not encode and size >= _MEASURED_BYTES_MIN:
            self._storage_rate = size / (time.perf_counter() - start)
        return result

    def _pays(self, blocks: Sequence[Block]) -> bool:
        """Whether storage is slower than encoding in all threads, as far as is known."""
        sample = next((b for b in blocks if encoding.pays(b.dtype) and len(b.data) > 1 << 16), None)
        if not self._storage_rate or sample is None:
            return False
        start = time.perf_counter()
        encoding.encode(sample.data, TensorSpec("", sample.dtype, ()).itemsize)
        rate = len(sample.data) / (time.perf_counter() - start)
        return rate * self._threads > self._storage_rate

    def _known_digests(self, arena: Arena, contents: Contents) -> list[str]:
        """Of the blocks to be written, if they came with the snapshot or were made to seal it."""
        *sealed, digests = self._sealed
        if sealed != [arena.path, contents.version]:
            digests = _hexadecimal(arena.digests())
        own = sum(spec.block_count for spec in contents.own_specs)
        first, last = contents.ranges[0]
        return [*digests[: last - first], *digests[len(digests) - own :]]

    def _load_base(self, order: Order) -> Manifest | None:
        """The checkpoint to compare with, if it is still there and can be read: on what is damaged
        nothing is built, and without one everything is written."""
        if order.base is None:
            return None
        directory = self._open(order.root)
        generation, step = manifest.order_of(order.base)
        try:
            return directory.manifest(directory.find(step, generation))
        except (CheckpointError, OSError):
            return None

    def _open(self, root: Path) -> Directory:
        """It remembers what it has read."""
        if self._directory is None or self._directory.root != root:
            self._directory = Directory(root, self._disk, self._decoded)
        return self._directory

    def _manifest(self, path: Path, announced: str) -> Manifest:
        """What is there now, if it has the digest that was ``announced``."""
        data = _read(path)
        found = manifest.manifest_digest(data)
        if found != announced:
            raise CheckpointDamagedError(f"{path} is not the manifest that was announced")
        return self._decoded.take(data, found, str(path))

    # -- making a checkpoint of parts --------------------------------------------------------------

    def assemble(
        self, root: Path, parts: Sequence[bytes], job_name: str, unix_time: float
    ) -> tuple[str, str]:
        """Write the manifest; returns the name of its folder, and its digest.
        Nothing of it counts before ``publish``."""
        made = put_together([Part.decode(part) for part in parts], job_name, unix_time)
        _require_files(root, made)
        generation, step = made.order
        folder = Directory(root, self._disk).free_name(step, generation)
        place = root / "steps" / folder
        self._disk.make_folder(place)
        data = manifest.encode(made)
        publish(self._disk, place / MANIFEST, data)
        self._disk.sync_folder(place.parent)
        self._disk.reached("manifest_written")
        found = manifest.manifest_digest(data)
        self._decoded.put(found, made)
        return folder, found

    def check(self, root: Path, folder: str, found: str, version: int, part: bytes | None) -> None:
        """Raises ``CheckpointError`` unless the manifest of ``version`` in ``folder`` has the
        digest ``found``, and what this rank has stored is in it as it was."""
        path = root / "steps" / folder / MANIFEST
        made = self._manifest(path, found)
        if manifest.version_of(made.order) != version:
            raise CheckpointError(f"{path} is of step {made.step}, not of the one announced")
        if part is not None:
            _require_part(made, Part.decode(part), path)
        _require_files(root, made)

    def publish(self, root: Path, folder: str, found: str, version: int) -> Summary:
        """Let the checkpoint exist: the decision is the COMMIT file that this makes, unless another
        rank has made the same. ``folder`` may be empty where its name has not come through."""
        place = root / "steps" / (folder or _folder_of(root, found))
        made = self._manifest(place / MANIFEST, found)
        _require_files(root, made)
        order = manifest.order_of(version)
        record = CommitRecord(order[1], order, found).encode()
        self._disk.reached("before_commit")
        try:
            publish_once(self._disk, place / COMMIT, record)
        except FileExistsError:
            if _read(place / COMMIT) != record:
                raise CheckpointError(f"{place / COMMIT} says something else already") from None
        self._disk.reached("committed")
        return Summary(
            made.base,
            made.block_count,
            made.new_blocks,
            made.state_bytes,
            made.changed_bytes,
            made.new_bytes,
        )

    def index(self, root: Path) -> None:
        """Write the index for readers without mpift: that of the checkpoint just published, and one
        of those that a job did not come to when it ended. Writing blocks waits for no more."""
        _, problems = index.write_missing(self._open(root), at_most=2)
        if problems:
            raise CheckpointDamagedError(problems[0])

    def sweep(self, root: Path, **rules: Any) -> retention.Swept:
        """Remove what nobody needs any more (``retention.sweep``)."""
        return retention.sweep(self._open(root), **rules)

    # -- the RAM tier ------------------------------------------------------------------------------

    def seal(self, slot: Path, path: Path, job_name: str, unix_time: float) -> bytes:
        """Let this rank's arena count as part of a checkpoint in memory; the digests of its blocks,
        as in ``Written``, or none if it holds nothing whole. Its files need no syncing: they don't
        outlast the memory.

        Raises ``CheckpointError`` if it is not what the snapshot's digests were made of: blocks
        that did not change lie there for long.
        """
        arena = self._map(path)
        contents = arena.contents()
        if contents is None:
            return b""
        pieces = list(pieces_of(contents, arena.data, contents.ranges))
        digests = [digest(piece.data, piece.spec.dtype) for piece in pieces]
        joined = _joined(digests)
        if arena.digests() not in (b"", joined) and arena.version == contents.version:
            raise CheckpointError(f"the memory of {path} is damaged")
        offset = arena.path.stat().st_size - arena.capacity
        file = BlockFile(arena.path.name, offset + arena.capacity)
        stored = []
        for piece, found in zip(pieces, digests, strict=True):
            stored.append(Stored(file.name, "", 0, offset, len(piece.data), found))
            offset += len(piece.data)
        if arena.version != contents.version:
            return b""
        self._sealed = (arena.path, contents.version, digests)
        own = sum(spec.block_count for spec in contents.own_specs)
        shared = len(stored) - own
        part = Part.of(contents, contents.ranges, stored[:shared], stored[shared:], [file])
        memory = MemoryDisk()
        member = contents.origin.owners[contents.share]
        publish(memory, part_path(slot, member), part.encode())
        _seal_whole(memory, slot, contents, job_name, unix_time)
        return joined


def _seal_whole(
    memory: MemoryDisk, slot: Path, contents: Contents, job_name: str, unix_time: float
) -> None:
    """If this was the last part that a checkpoint in memory was waiting for."""
    parts = [Part.decode(path.read_bytes()) for path in sorted(slot.glob("part-*.json"))]
    same = [p for p in parts if (p.version, p.origin) == (contents.version, contents.origin)]
    if len(same) < contents.local[1]:
        return
    made = put_together(same, job_name, unix_time)
    data = manifest.encode(made)
    publish(memory, slot / MANIFEST, data)
    record = CommitRecord(made.step, made.order, manifest.manifest_digest(data))
    publish(memory, slot / COMMIT, record.encode())


def _to_compare(pieces: Sequence[Piece], old: Committed | None, seed: int) -> list[str]:
    """The digests of the blocks; or empty ones, which are made while they are written, if there is
    nothing to compare with, or all seem to be new: some that are not are stored again then."""
    ends = list(itertools.accumulate(len(piece.data) for piece in pieces))
    tried = [pieces[number] for number in sample(ends, _TRIED, seed)]
    if old is None or not any(
        old.same(p.name, p.spec, p.index, digest(p.data, p.spec.dtype)) for p in tried
    ):
        return [""] * len(pieces)
    return [digest(piece.data, piece.spec.dtype) for piece in pieces]


def _hexadecimal(digests: bytes) -> list[str]:
    text, size = digests.hex(), 2 * DIGEST_BYTES
    return [text[start : start + size] for start in range(0, len(text), size)]


def _joined(digests: Sequence[str]) -> bytes:
    return bytes.fromhex("".join(digests))


def pieces_of(
    contents: Contents, data: np.ndarray, ranges: Sequence[tuple[int, int]]
) -> Iterator[Piece]:
    """The blocks of the shared tensors in ``ranges``, then those of the own tensors."""
    offset = 0
    wanted = {number for first, last in ranges for number in range(first, last)}
    for number, tensor, block in contents.shared_blocks():
        spec = contents.shared_specs[tensor]
        start, stop = spec.block(block)
        if number in wanted:
            yield Piece(spec, block, spec.name, data[offset : offset + stop - start])
        offset += stop - start
    for spec in contents.own_specs:
        for block in range(spec.block_count):
            start, stop = spec.block(block)
            name = f"ranks/{contents.share}/{spec.name}"
            yield Piece(spec, block, name, data[offset : offset + stop - start])
            offset += stop - start


def _require_files(root: Path, made: Manifest) -> None:
    """What a checkpoint refers to may have been removed since."""
    for file in made.files:
        if not is_there(root, file):
            raise CheckpointError(f"{root / file.name} is gone, or has another size than before")


def _require_part(made: Manifest, part: Part, path: Path) -> None:
    if made.extra["layout"] != part.origin.layout or made.history != part.origin.history:
        raise CheckpointError(f"{path} is of another history than this rank's snapshot")
    named = made.named()
    shared = [block for spec in part.shared_specs for block in named[spec.name].blocks]
    numbers = (number for first, last in part.ranges for number in range(first, last))
    there = [shared[number] for number in numbers]
    there += [b for s in part.own_specs for b in named[f"ranks/{part.share}/{s.name}"].blocks]
    # Not where they lie: a neighbour may have written the same blocks, when this rank was slow.
    if [b.digest for b in there] != [b.digest for b in (*part.shared, *part.own)]:
        raise CheckpointError(f"{path} says something else of this rank's blocks than it wrote")


def _folder_of(root: Path, found: str) -> str:
    """The folder of the manifest with that digest."""
    for path in (root / "steps").glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError):
            if manifest.manifest_digest(path.read_bytes()) == found:
                return path.parent.name
    raise CheckpointError(f"no manifest in {root / 'steps'} has the digest that was agreed on")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} can't be seen from here: all nodes must share the checkpoint directory"
        ) from None
