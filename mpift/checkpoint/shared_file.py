"""One file of blocks for all ranks, which they write at once through parallel HDF5: an option.

It is for file systems that suffer from many files. There is one 1-D dataset a dtype ("float32"),
with torch's name of it as the attribute ``torch_dtype``: first the blocks of the shared tensors,
share by share, so that each tensor lies there in one piece; then every rank's own. All is written,
and nothing encoded: what is to be compared and compressed needs files of its own.

It is done on the thread that owns MPI, by all ranks at the same time. What may fail on one of them
is done between two exchanges, and none enters the next call that waits for others before all are
through with the last: either every rank has its part in the end, or every rank raises the same
error and the file is gone. If a rank dies, MPI's own error goes up on the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import xxhash

from mpift.checkpoint import reading
from mpift.checkpoint.arena import Arena, Contents
from mpift.checkpoint.blockfile import LIBVER, OVERHEAD_BYTES
from mpift.checkpoint.blocks import digest, storage_dtype
from mpift.checkpoint.durable import Disk, temporary
from mpift.checkpoint.encoding import Bytes
from mpift.checkpoint.manifest import BlockFile, Stored, order_of
from mpift.checkpoint.part import Part
from mpift.checkpoint.writing import Piece, pieces_of
from mpift.core.saving import Origin
from mpift.errors import CheckpointDamagedError, CheckpointError

# A rank writes so much at once, out of a copy. MPI counts in 32 bits.
SLICE_BYTES = 64 << 20
REASONS_MAX = 4

T = TypeVar("T")
# Of the blocks that follow each other in a dataset: dtype, and whether they are a rank's own.
_Kind = tuple[str, bool]


def require() -> None:
    """Raises ``CheckpointError`` unless h5py can write with MPI."""
    if not h5py.get_config().mpi:
        raise CheckpointError(
            f'layout="shared" needs an h5py that is built with MPI, and h5py {h5py.__version__} in'
            f" {Path(h5py.__file__).parent} is not: see docs/how-to/parallel-hdf5.md for how to"
            " build one (make test-mpio does it), or leave layout out"
        )


def write_shared(comm: Any, disk: Disk, root: Path, name: str, arena_path: Path) -> Part:
    """Write the snapshots that the ranks of ``comm``, an mpi4py communicator, hold in their arenas
    to ``root/blocks/name``, whose folder exists; returns the part of this rank's share. All ranks
    call it; the names given to rank 0 count.

    The file is synced by all, named, and read back: each rank compares the digests of its blocks.

    Raises ``CheckpointError`` on all ranks if one of them can't do it, naming rank and reason;
    mpi4py's ``MPI.Exception`` if a rank dies. No file is left then, but a temporary one if rank 0
    is dead.
    """
    mine: _Mine = _here(comm, "reading the snapshot", lambda: _Mine(arena_path))
    heads: list[_Head] = comm.allgather(mine.head)
    _require_same(heads)
    plan = _Plan(heads, comm.rank)
    if not plan.totals:
        return mine.part([], None)
    path, unfinished, offsets = _begin(comm, disk, root / "blocks" / name, plan)
    leads = comm.rank == 0
    try:
        _write(comm, unfinished, plan, mine)
        _here(comm, "protecting it", lambda: unfinished.chmod(0o444) if leads else None)
        # On every rank: what another node has in its memory, rank 0 can't sync.
        _here(comm, "syncing it", lambda: disk.sync(unfinished))
        _here(comm, "naming it", lambda: _name(disk, unfinished, path) if leads else None)
    finally:
        _remove(comm, disk, unfinished)
    try:
        _here(comm, "syncing its folder", lambda: disk.sync_folder(path.parent) if leads else None)
        stored = mine.stored(f"blocks/{path.name}", plan, offsets)
        _here(comm, "reading it back", lambda: _read_back(root, mine, stored))
        ends = _together(comm, "reading it back", lambda: _whole(path, plan) if leads else (0, ""))
    except BaseException:
        _remove(comm, disk, path)
        raise
    return mine.part(stored, BlockFile(f"blocks/{path.name}", *ends[0]))


# -- together --------------------------------------------------------------------------------------


def _together(comm: Any, what: str, do: Callable[[], T]) -> list[T]:
    """What ``do()`` gives on each rank, in their order; if it fails on any, all raise."""
    value, problem = None, ""
    try:
        value = do()
    except Exception as error:  # noqa: BLE001, the others wait: they must hear of it
        problem = str(error) or repr(error)
    everybody = comm.allgather((value, problem))
    ranks: dict[str, list[str]] = {}
    for rank, (_, text) in enumerate(everybody):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    if ranks:
        reasons = [f"on rank {', '.join(who)}: {text}" for text, who in ranks.items()]
        if len(reasons) > REASONS_MAX:
            reasons[REASONS_MAX:] = ["and on others"]
        raise CheckpointError(f"no file for all ranks: {what} failed {'; '.join(reasons)}")
    return [value for value, _ in everybody]


def _here(comm: Any, what: str, do: Callable[[], T]) -> T:
    """The same for what must not be sent around: this rank's alone."""
    results: list[T] = []
    _together(comm, what, lambda: results.append(do()))
    return results[0]


# -- what is to be written -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Head:
    """What all ranks know of one: its snapshot, how many elements of each kind it has, and in how
    many slices it writes those of a dtype."""

    version: int
    origin: Origin
    share: int
    elements: dict[_Kind, int]
    slices: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Blocks that are written at once, the first one at ``place`` of those of its kind."""

    kind: _Kind
    place: int
    blocks: list[Bytes]


class _Mine:
    """This rank's share of the snapshot. Raises ``CheckpointError`` if there is none."""

    def __init__(self, arena_path: Path) -> None:
        arena = Arena.open(arena_path)
        contents = arena.contents()
        if contents is None:
            raise CheckpointError(f"the snapshot in {arena_path} is not whole")
        self.contents: Contents = contents
        self.pieces: list[Piece] = list(pieces_of(contents, arena.data, contents.ranges[:1]))
        first, last = contents.ranges[0]
        self._shared = last - first
        self._kinds = [(p.spec.dtype, n >= self._shared) for n, p in enumerate(self.pieces)]
        self._places: list[int] = []  # each one's first element among those of its kind
        self.slices: dict[str, list[_Slice]] = {}
        elements: dict[_Kind, int] = {}
        for kind, piece in zip(self._kinds, self.pieces, strict=True):
            place = elements.setdefault(kind, 0)
            self._places.append(place)
            self._add(_Slice(kind, place, [piece.data]))
            elements[kind] += len(piece.data) // piece.spec.itemsize
        counts = {dtype: len(slices) for dtype, slices in self.slices.items()}
        self.head = _Head(contents.version, contents.origin, contents.share, elements, counts)

    def _add(self, more: _Slice) -> None:
        slices = self.slices.setdefault(more.kind[0], [])
        if slices and slices[-1].kind == more.kind:
            blocks = slices[-1].blocks
            if sum(map(len, blocks)) + len(more.blocks[0]) <= SLICE_BYTES:
                blocks += more.blocks
                return
        slices.append(more)

    def stored(self, file: str, plan: _Plan, offsets: dict[str, int]) -> list[Stored]:
        """Where each block lies, in the arena's order."""
        found = []
        for kind, piece, place in zip(self._kinds, self.pieces, self._places, strict=True):
            dtype, start = kind[0], plan.starts[kind] + place
            offset = offsets[dtype] + start * piece.spec.itemsize
            size = len(piece.data)
            found.append(Stored(file, dtype, start, offset, size, digest(piece.data, dtype)))
        return found

    def part(self, stored: Sequence[Stored], file: BlockFile | None) -> Part:
        size = sum(block.stored_bytes for block in stored)
        return Part.of(
            self.contents,
            self.contents.ranges[:1],
            stored[: self._shared],
            stored[self._shared :],
            [file] if file is not None else [],
            None,
            (len(stored), size, size),
        )


class _Plan:
    """How the file is laid out, the same on all ranks, and where the blocks of ``rank`` begin."""

    def __init__(self, heads: Sequence[_Head], rank: int) -> None:
        dtypes = sorted({dtype for head in heads for dtype, _ in head.elements})
        self.totals: dict[str, int] = dict.fromkeys(dtypes, 0)
        self.starts: dict[_Kind, int] = {}
        for own in (False, True):
            for head in sorted(heads, key=lambda head: head.share):
                for dtype in dtypes:
                    if head is heads[rank]:
                        self.starts[dtype, own] = self.totals[dtype]
                    self.totals[dtype] += head.elements.get((dtype, own), 0)
        self.rounds = {dtype: max(h.slices.get(dtype, 0) for h in heads) for dtype in dtypes}

    @property
    def size_bytes(self) -> int:
        return sum(n * storage_dtype(dtype).itemsize for dtype, n in self.totals.items())


def _require_same(heads: Sequence[_Head]) -> None:
    """Raises on all ranks alike: they have the same heads."""
    if len({(head.version, head.origin) for head in heads}) > 1:
        steps = ", ".join(str(order_of(head.version)[1]) for head in heads)
        raise CheckpointError(
            f"a file for all ranks holds one snapshot, and theirs are of steps {steps} or of"
            " different states: all ranks must save at the same step, and the same"
        )


# -- writing ---------------------------------------------------------------------------------------


def _begin(comm: Any, disk: Disk, path: Path, plan: _Plan) -> tuple[Path, Path, dict[str, int]]:
    """The file's name to be, its temporary one, and at which byte of it each dataset begins.

    Rank 0 makes them alone, with HDF5's ordinary driver: errors are plain ones then. Each rank has
    opened the file before MPI does: if one can't then, the others may wait for good.
    """

    def create() -> tuple[str, str, dict[str, int]]:
        if comm.rank != 0:
            return "", "", {}
        if path.exists():
            raise CheckpointError(f"{path} was written already, and is never replaced")
        _check_space(path, plan.size_bytes)
        unfinished = temporary(path)
        disk.create(unfinished, b"")
        try:
            # HDF5 before 1.12 crashes if it can't make a file longer.
            os.truncate(unfinished, plan.size_bytes + OVERHEAD_BYTES)
            return path.name, unfinished.name, _create(unfinished, plan)
        except BaseException:
            _remove(comm, disk, unfinished)
            raise

    name, unfinished_name, offsets = _together(comm, "creating it", create)[0]
    path, unfinished = path.with_name(name), path.with_name(unfinished_name)
    try:
        _here(comm, "opening it", lambda: _try_to_open(unfinished))
    except BaseException:
        _remove(comm, disk, unfinished)
        raise
    return path, unfinished, offsets


def _remove(comm: Any, disk: Disk, path: Path) -> None:
    """What can't be removed now is swept later; it must not keep rank 0 from the next exchange."""
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            disk.unlink(path)


def _check_space(path: Path, size_bytes: int) -> None:
    found = os.statvfs(path.parent)
    needed, free = size_bytes + OVERHEAD_BYTES, found.f_bavail * found.f_frsize
    if free < needed:
        raise CheckpointError(
            f"{path} needs {needed} bytes, and {path.parent} has {free} free: make room there, keep"
            " fewer checkpoints, or save elsewhere"
        )


def _try_to_open(path: Path) -> None:
    try:
        path.open("r+b").close()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} can't be seen from here: all nodes must share the checkpoint directory"
        ) from None


def _create(path: Path, plan: _Plan) -> dict[str, int]:
    """The datasets, with their space in the file; at which byte each begins."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    offsets = {}
    # Nobody else knows of the file, and some file systems have no locks.
    with h5py.File(path, "w", libver=LIBVER, locking=False) as file:
        for dtype, elements in plan.totals.items():
            kind = h5py.h5t.py_create(storage_dtype(dtype), logical=True)
            space = h5py.h5s.create_simple((elements,))
            made = h5py.h5d.create(file.id, dtype.encode(), kind, space, settings)
            h5py.Dataset(made).attrs["torch_dtype"] = dtype
            offsets[dtype] = made.get_offset()
    return offsets


def _write(comm: Any, path: Path, plan: _Plan, mine: _Mine) -> None:
    """All ranks fill the datasets; the file is not synced."""
    open_file = functools.partial(h5py.File, path, "r+", libver=LIBVER, driver="mpio", comm=comm)
    file = _here(comm, "opening it with MPI", open_file)
    datasets = {dtype: file[dtype].id for dtype in plan.totals}
    try:
        for dtype, dataset in datasets.items():
            slices = iter(mine.slices.get(dtype, ()))
            for _ in range(plan.rounds[dtype]):
                write = functools.partial(_write_slice, dataset, plan, next(slices, None))
                _here(comm, "writing it", write)
    except CheckpointError:
        # On all ranks. HDF5 writes once more when it closes: that this fails too is not the cause.
        with contextlib.suppress(OSError, RuntimeError):
            file.close()
        raise
    except BaseException:
        # A rank has died, and closing waits for it: the file stays open as long as this process.
        for identifier in (file.id, *datasets.values()):
            identifier.locked = True
        raise
    _here(comm, "closing it", file.close)


def _write_slice(dataset: Any, plan: _Plan, slice_: _Slice | None) -> None:
    """Called on all ranks, also by those that have nothing (left) to write."""
    target = dataset.get_space()
    if slice_ is None:
        data = np.empty(dataset.dtype.itemsize, np.uint8)
        source = h5py.h5s.create_simple((1,))
        source.select_none()
        target.select_none()
    else:
        data = np.concatenate(slice_.blocks)
        elements = data.nbytes // dataset.dtype.itemsize
        source = h5py.h5s.create_simple((elements,))
        target.select_hyperslab((plan.starts[slice_.kind] + slice_.place,), (elements,))
    transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    # As the bytes that they are: HDF5 does not write collectively what it has to convert.
    dataset.write(source, target, data, dataset.get_type(), transfer)


# -- finishing -------------------------------------------------------------------------------------


def _name(disk: Disk, unfinished: Path, path: Path) -> None:
    disk.reached("block_file_synced")
    try:
        disk.link(unfinished, path)
    except FileExistsError:
        raise CheckpointError(f"{path} was written already, and is never replaced") from None
    disk.reached("block_file_named")


def _read_back(root: Path, mine: _Mine, stored: Sequence[Stored]) -> None:
    """Compare this rank's blocks with their digests."""
    with reading.Reader(root) as reader:
        for piece, block in zip(mine.pieces, stored, strict=True):
            try:
                reader.read(block, piece.spec, piece.index)
            except CheckpointDamagedError as error:
                raise CheckpointError(
                    f"it reads back other than it was written: {error}. Open MPI keeps failed"
                    " writes to itself: is the disk full, or the size of files limited?"
                ) from None


def _whole(path: Path, plan: _Plan) -> tuple[int, str]:
    """Size and digest of the file, in which HDF5 finds what it was told to make: its own part of it
    is not covered by the blocks' digests."""
    with h5py.File(path, "r", locking=False) as file:
        for dtype, elements in plan.totals.items():
            found = file[dtype]
            what = (found.shape, found.dtype, found.attrs["torch_dtype"])
            if what != ((elements,), storage_dtype(dtype), dtype):
                raise CheckpointError(f"{path} has {found} in place of {elements} of {dtype}")
    whole = xxhash.xxh3_128()
    window = np.empty(reading.WINDOW_BYTES, np.uint8)
    with path.open("rb", buffering=0) as opened:
        while size := opened.readinto(window.data):
            whole.update(window[:size].data)
        return os.fstat(opened.fileno()).st_size, whole.hexdigest()
