"""Writing files of blocks: plain HDF5 files, each written once, synced, named and then read again.

Full blocks of one kind make up one 1-D dataset ("float32_262144": dtype, elements of a block);
what is shorter (ends of tensors, small tensors) is packed into another ("float32_ends"). Each has
torch's name of its dtype as the attribute ``torch_dtype``. HDF5 makes the datasets and reserves
their space; raw bytes are then written at their places in the file, from the memory in which they
are: no copy, and no lock of HDF5's. Encoded blocks are chunks behind HDF5's own filters "shuffle"
and "gzip", so that any HDF5 reads them.

A file gets its name only when it is whole and synced, and never takes another's. It is read-only
from then on. Nothing here is tried twice: on an error the file is removed and the error goes up.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import h5py

from mpift.checkpoint import encoding
from mpift.checkpoint.blocks import Block, digest, storage_dtype
from mpift.checkpoint.durable import Disk, temporary
from mpift.checkpoint.encoding import Bytes
from mpift.checkpoint.manifest import BlockFile, Stored
from mpift.checkpoint.rereading import in_order, read_again
from mpift.errors import CheckpointError

# Not "latest": any HDF5 since 1.10 (2016) is to read these files, and refuse one not closed.
LIBVER = ("v110", "v110")
# For datasets, attributes and HDF5's index of the chunks.
OVERHEAD_BYTES = 1 << 20
# Longer writes make the kernel look for larger pages, and wait for them: 0.5 s in 250 MB.
WRITE_BYTES = 1 << 20
WRITE_BLOCKS = 512  # Linux takes 1024 buffers at once
# Storage begins after so much, while the rest is copied.
BEGIN_BYTES = 8 << 20
BOTH_FILTERS_SKIPPED = 0b11

Begin: TypeAlias = Callable[[int, int], object]  # (first byte, bytes): these were written
MakeDigest: TypeAlias = Callable[[int], object]  # (number of a block): it is about to be written


@dataclass(frozen=True, slots=True)
class _Part:
    """A dataset to be: its blocks by their numbers, one after the other."""

    name: str
    dtype: str
    members: tuple[int, ...]
    places: tuple[int, ...]  # each one's first element
    elements: int
    encoded: bool


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a block's bytes are in the file."""

    offset: int
    size_bytes: int


def write_blocks(
    disk: Disk, root: Path, name: str, blocks: Sequence[Block], encode: bool, threads: int
) -> tuple[BlockFile, list[Stored]]:
    """Write ``blocks`` (at least one) to ``root/blocks/name``, and read the file again; where each
    of them lies, in their order.

    With ``encode``, full blocks of floating point are encoded by ``threads`` threads, which hold at
    most two encodings each; blocks that would not get smaller are stored as they are. Digests that
    blocks have not are made on the way. The blocks' memory must not change meanwhile.

    Raises ``CheckpointError`` if space is short, if there is such a file already, or if it reads
    back other than written; ``OSError`` if the disk refuses. No file is left then.
    """
    path = root / "blocks" / name
    _check_space(path, blocks)
    parts = _parts(blocks, encode)
    unfinished = temporary(path)
    digests = [block.digest for block in blocks]

    def make_digest(index: int) -> None:
        digests[index] = digests[index] or digest(blocks[index].data, blocks[index].dtype)

    try:
        # The disk is at work meanwhile; and what is read again is in memory still.
        with ThreadPoolExecutor(1, "mpift-sync") as syncing:
            spans = _write(
                unfinished,
                parts,
                blocks,
                threads,
                lambda start, size: syncing.submit(disk.begin, unfinished, start, size),
                make_digest,
            )
            unfinished.chmod(0o444)
            stored = _stored(f"blocks/{name}", parts, spans, digests)
            synced = syncing.submit(disk.sync, unfinished)
            size, found = read_again(unfinished, stored, blocks, threads)
            synced.result()
        disk.reached("block_file_synced")
        disk.link(unfinished, path)
    except FileExistsError:
        raise CheckpointError(
            f"{path} was written already, and a file of blocks is never replaced: name this anew"
        ) from None
    finally:
        disk.unlink(unfinished)
    try:
        disk.sync_folder(path.parent)
        disk.reached("block_file_named")
        _check_datasets(path, parts)
    except BaseException:
        disk.unlink(path)
        raise
    return BlockFile(f"blocks/{name}", size, found), stored


def _check_space(path: Path, blocks: Sequence[Block]) -> None:
    """Before anything is written: encodings are never larger than what they encode."""
    needed = sum(block.data.nbytes for block in blocks) + OVERHEAD_BYTES
    found = os.statvfs(path.parent)
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise CheckpointError(
            f"{path} needs {needed} bytes, and {path.parent} has {free} free: make room there, keep"
            " fewer checkpoints, or save elsewhere"
        )


def _parts(blocks: Sequence[Block], encode: bool) -> list[_Part]:
    members: dict[tuple[str, str, bool], list[int]] = {}
    for index, block in enumerate(blocks):
        name = f"{block.dtype}_{block.elements if block.is_full else 'ends'}"
        encoded = encode and block.is_full and encoding.pays(block.dtype)
        members.setdefault((name, block.dtype, encoded), []).append(index)
    parts = []
    for (name, dtype, encoded), indices in members.items():
        *places, end = itertools.accumulate((blocks[i].elements for i in indices), initial=0)
        parts.append(_Part(name, dtype, tuple(indices), tuple(places), end, encoded))
    return parts


def _write(
    path: Path,
    parts: Sequence[_Part],
    blocks: Sequence[Block],
    threads: int,
    begin: Begin,
    make_digest: MakeDigest,
) -> dict[int, _Span]:
    """The whole file, not synced; the span of each block by its number."""
    spans: dict[int, _Span] = {}
    with ThreadPoolExecutor(threads, "mpift-write") as pool:
        with _new_file(path) as file:
            for part in parts:
                if part.encoded:
                    spans.update(_write_encoded(file, part, blocks, pool, threads, make_digest))
                else:
                    spans.update(_reserve(file, part, blocks))
        raw = [index for part in parts if not part.encoded for index in part.members]
        pieces = [(spans[index].offset, index, blocks[index].data) for index in raw]
        _write_raw(path, pieces, pool, begin, make_digest)
    return spans


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    # Nobody else knows of the file, and some file systems have no locks.
    file = h5py.File(path, "x", libver=LIBVER, locking=False)
    try:
        yield file
    except BaseException:
        # HDF5 writes once more when it closes: that this fails too is not the cause.
        with contextlib.suppress(OSError, RuntimeError):
            file.close()
        raise
    try:
        file.close()
    except RuntimeError as error:  # what h5py makes of all that happens then
        raise CheckpointError(f"{path} cannot be finished, the disk refuses: {error}") from None


def _dataset(file: Any, part: _Part, settings: Any) -> Any:
    made = h5py.h5d.create(
        file.id,
        part.name.encode(),
        h5py.h5t.py_create(storage_dtype(part.dtype), logical=True),
        h5py.h5s.create_simple((part.elements,)),
        settings,
    )
    h5py.Dataset(made).attrs["torch_dtype"] = part.dtype
    return made


def _reserve(file: Any, part: _Part, blocks: Sequence[Block]) -> Iterator[tuple[int, _Span]]:
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    start = _dataset(file, part, settings).get_offset()
    itemsize = storage_dtype(part.dtype).itemsize
    for index, place in zip(part.members, part.places, strict=True):
        yield index, _Span(start + place * itemsize, blocks[index].data.nbytes)


def _write_encoded(
    file: Any,
    part: _Part,
    blocks: Sequence[Block],
    pool: ThreadPoolExecutor,
    threads: int,
    make_digest: MakeDigest,
) -> Iterator[tuple[int, _Span]]:
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((blocks[part.members[0]].elements,))
    settings.set_shuffle()
    settings.set_deflate(1)
    dataset = _dataset(file, part, settings)
    itemsize = storage_dtype(part.dtype).itemsize

    def encode(index: int) -> bytes:
        make_digest(index)
        return encoding.encode(blocks[index].data, itemsize)

    calls = (functools.partial(encode, index) for index in part.members)
    encodings = in_order(pool, calls, 2 * threads)
    for index, place, encoded in zip(part.members, part.places, encodings, strict=True):
        # Only what is smaller counts as encoded: readers tell the two apart by the length.
        if len(encoded) < blocks[index].data.nbytes:
            dataset.write_direct_chunk((place,), encoded)
        else:
            dataset.write_direct_chunk((place,), blocks[index].data, BOTH_FILTERS_SKIPPED)
    spans = _chunks(dataset)
    for index, place in zip(part.members, part.places, strict=True):
        yield index, spans[place]


def _chunks(dataset: Any) -> dict[int, _Span]:
    """The chunks by their first element."""
    found: list[Any] = []
    if hasattr(dataset, "chunk_iter"):
        dataset.chunk_iter(found.append)
    else:  # HDF5 before 1.12.3; its time grows with the square of the number
        found += map(dataset.get_chunk_info, range(dataset.get_num_chunks()))
    return {chunk.chunk_offset[0]: _Span(chunk.byte_offset, chunk.size) for chunk in found}


def _write_raw(
    path: Path,
    pieces: Sequence[tuple[int, int, Bytes]],
    pool: ThreadPoolExecutor,
    begin: Begin,
    make_digest: MakeDigest,
) -> None:
    """Pieces are (offset in the file, number of the block, its bytes)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    begun = 0
    try:
        write_run = functools.partial(_write_run, descriptor, make_digest)
        for end in pool.map(write_run, _write_runs(pieces)):
            if end - begun >= BEGIN_BYTES:
                begin(begun, end - begun)
                begun = end
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def _write_runs(
    pieces: Iterable[tuple[int, int, Bytes]],
) -> Iterator[tuple[int, list[tuple[int, Bytes]]]]:
    """Pieces that follow each other in the file, to be written at once."""
    run: list[tuple[int, Bytes]] = []
    start = end = 0
    for offset, index, data in pieces:
        if run and (
            offset != end or end - start + data.nbytes > WRITE_BYTES or len(run) == WRITE_BLOCKS
        ):
            yield start, run
            run = []
        if not run:
            start = end = offset
        run.append((index, data))
        end += data.nbytes
    if run:
        yield start, run


def _write_run(
    descriptor: int, make_digest: MakeDigest, run: tuple[int, list[tuple[int, Bytes]]]
) -> int:
    """Returns where in the file it ends."""
    offset, pieces = run
    for index, _ in pieces:
        make_digest(index)  # so it is in the processor's cache when it is copied
    views = [data.data for _, data in pieces]
    while views:
        written = os.pwritev(descriptor, views, offset)
        offset += written
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if views:
            views[0] = views[0][written:]
    return offset


def _stored(
    name: str, parts: Sequence[_Part], spans: dict[int, _Span], digests: Sequence[str]
) -> list[Stored]:
    found = {
        index: Stored(
            name,
            part.name,
            place,
            spans[index].offset,
            spans[index].size_bytes,
            digests[index],
        )
        for part in parts
        for index, place in zip(part.members, part.places, strict=True)
    }
    return [found[index] for index in range(len(digests))]


def _check_datasets(path: Path, parts: Sequence[_Part]) -> None:
    """HDF5 finds what it was told to make: its own part of the file is not covered by digests."""
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise CheckpointError(f"{path} was written, but HDF5 cannot open it: {error}") from None
    with file:
        for part in parts:
            found = file.get(part.name)
            if found is None or (found.shape, found.dtype, found.attrs.get("torch_dtype")) != (
                (part.elements,),
                storage_dtype(part.dtype),
                part.dtype,
            ):
                raise CheckpointError(
                    f"{path} was written, but its dataset {part.name} reads back as {found}, not as"
                    f" {part.elements} of {part.dtype}: the disk or its file system is at fault"
                )
