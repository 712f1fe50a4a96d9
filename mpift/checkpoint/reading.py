"""Reading blocks back by the manifest, each checked against its digest before anyone sees it.

Files are read at the offsets that the manifest gives, without HDF5: so no lock of it is in the way
of threads, and bytes go straight to where they belong. What is missing, cut short, changed or in
another's place is refused with the tensor, the block and the file, and never passes for good.
``out`` may hold anything after an error. Nothing here writes.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from mpift.checkpoint import blocks, encoding
from mpift.checkpoint.blocks import TensorSpec
from mpift.checkpoint.encoding import Bytes
from mpift.checkpoint.manifest import BlockFile, Stored
from mpift.errors import CheckpointDamagedError

OPEN_FILES_MAX = 64
# What is read at once: small blocks share a read, and larger ones are read in pieces. More would
# leave the processor's cache before it is hashed.
RUN_BYTES = 1 << 18
RUN_BLOCKS = 512  # Linux takes 1024 buffers at once
WINDOW_BYTES = 1 << 20

# (where it lies, its tensor, its number, where it goes, what to call when it is there)
Job: TypeAlias = tuple[Stored, TensorSpec, int, Bytes, Callable[[], None] | None]


def read_block(
    root: Path, stored: Stored, spec: TensorSpec, index: int, out: Bytes | None = None
) -> Bytes:
    """One block's raw bytes; see ``Reader.read``. For many, keep a ``Reader``."""
    with Reader(root) as reader:
        return reader.read(stored, spec, index, out)


def verify_file(root: Path, file: BlockFile) -> None:
    """Compare a whole file with what the manifest says of it: its size, and its digest if there is
    one. Raises ``CheckpointDamagedError`` naming what differs."""
    path = root / file.name
    try:
        found = path.stat().st_size
        if found != file.size_bytes:
            raise CheckpointDamagedError(
                f"{path} has {found} bytes, and the manifest says {file.size_bytes}:"
                " restore an older checkpoint, or the file from a copy"
            )
        digest = _file_digest(path) if file.digest else ""
    except OSError as error:
        raise _unreadable(error, path, str(path)) from None
    if digest != file.digest:
        raise CheckpointDamagedError(
            f"{path} is not what was written: its digest is {digest}, and the manifest says"
            f" {file.digest}: restore an older checkpoint, or the file from a copy"
        )


def _file_digest(path: Path) -> str:
    # Not mapped: a bad sector would then end the process instead of raising.
    whole = xxhash.xxh3_128()
    window = np.empty(WINDOW_BYTES, np.uint8)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(window.data):
            whole.update(window[:size].data)
    return whole.hexdigest()


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    users: int = 0


class Reader:
    """Reads blocks of the checkpoint directory ``root``, and keeps up to ``open_files_max`` of its
    files open. Any number of threads may use it; ``close`` when they are done."""

    def __init__(self, root: Path, open_files_max: int = OPEN_FILES_MAX) -> None:
        self._root = root
        self._open_files_max = open_files_max
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()  # the longest unused first
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                os.close(file.descriptor)
            self._open.clear()

    def read(self, stored: Stored, spec: TensorSpec, index: int, out: Bytes | None = None) -> Bytes:
        """Block ``index`` of a tensor as raw bytes, in ``out`` if given (1-D, contiguous, writable,
        uint8, of the block's length).

        Raises ``CheckpointDamagedError`` if the file is missing, cut short or not readable, or if
        the bytes are not those that the digest was made of.
        """
        start, stop = spec.block(index)
        block = np.empty(stop - start, np.uint8) if out is None else out
        self.read_many([(stored, spec, index, block, None)], 1)
        return block

    def read_many(self, jobs: Iterable[Job], threads: int) -> None:
        """Read blocks in about the order given, each into its ``out``; the last value of a job is
        called without arguments once its block is there and checked, by the thread that read it.
        Neighbours in a file that follow each other in ``jobs`` are read at once.

        Raises the first error in order; what was not begun by then is left undone.
        """
        runs = _runs(jobs)
        if threads == 1:
            for run in runs:
                self._read_run(run)
            return
        with ThreadPoolExecutor(threads, "mpift-read") as pool:
            for _ in pool.map(self._read_run, runs):
                pass

    def _read_run(self, run: Sequence[Job]) -> None:
        """Jobs of one file whose stored bytes follow each other: an encoded one is alone."""
        stored, spec, index, out, _ = run[0]
        path = f"{self._root}/{stored.file}"
        encoded = stored.stored_bytes != out.nbytes
        buffers = [np.empty(stored.stored_bytes, np.uint8)] if encoded else [job[3] for job in run]
        found = None
        try:
            file = self._use(stored.file, path)
            try:
                if not encoded and out.nbytes > RUN_BYTES:
                    got, found = _read_in_pieces(file.descriptor, stored, spec, out)
                else:
                    got = _fill(file.descriptor, buffers, stored.offset)
            finally:
                with self._lock:
                    file.users -= 1
        except OSError as error:
            raise _unreadable(error, path, f"{spec.name}, block {index}") from None
        for job, buffer in zip(run, buffers, strict=True):
            stored, spec, index, out, after = job
            if got < buffer.nbytes:
                raise damaged(
                    path,
                    spec,
                    index,
                    f"the file is cut short: {stored.stored_bytes} bytes were"
                    f" stored from {stored.offset} on, {got} are left",
                )
            got -= buffer.nbytes
            check(path, buffer, stored, spec, index, out, found)
            if after is not None:
                after()

    def _use(self, name: str, path: str) -> _OpenFile:
        """A file that is not closed before it has no ``users`` any more."""
        with self._lock:
            file = self._open.get(name)
            if file is None:
                file = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self._open[name] = file
            self._open.move_to_end(name)
            file.users += 1
            if len(self._open) > self._open_files_max:
                self._close_surplus()
        return file

    def _close_surplus(self) -> None:
        surplus = len(self._open) - self._open_files_max
        unused = [name for name, file in self._open.items() if not file.users]
        for name in unused[:surplus]:
            os.close(self._open.pop(name).descriptor)


def check(
    path: Path | str,
    data: Bytes,
    stored: Stored,
    spec: TensorSpec,
    index: int,
    out: Bytes,
    found: str | None = None,
) -> None:
    """Decode what was stored of a block, if it was encoded, and compare its digest, which is
    ``found`` if it is known. The block is in ``out`` then; ``data`` is ``out`` itself where it was
    read in place."""
    if data is not out:
        try:
            encoding.decode(data.data, spec.itemsize, out.nbytes, out)
        except CheckpointDamagedError as error:
            raise damaged(path, spec, index, str(error)) from None
    found = found or blocks.digest(out, spec.dtype)
    if found != stored.digest:
        raise damaged(
            path, spec, index, f"its digest is {found}, and the manifest says {stored.digest}"
        )


def damaged(path: Path | str, spec: TensorSpec, index: int, what: str) -> CheckpointDamagedError:
    """The error for one block, worded the same everywhere."""
    return CheckpointDamagedError(
        f"{spec.name}, block {index} of {spec.block_count}, is damaged in {path}: {what};"
        " restore an older checkpoint, or the file from a copy"
    )


def _unreadable(error: OSError, path: Path | str, what: str) -> Exception:
    """Missing files and bad sectors are damage; a lack of permission or of descriptors is not."""
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.EISDIR}:
        return CheckpointDamagedError(
            f"{what}: {path} cannot be read ({error.strerror}): restore an older checkpoint, or"
            " the file from a copy"
        )
    return error


def _fill(descriptor: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Read from ``offset`` on until ``buffers`` are full or the file ends; how many bytes came."""
    views = [buffer.data for buffer in buffers]
    total = 0
    while views:
        got = os.preadv(descriptor, views, offset + total)
        if not got:
            break
        total += got
        while views and got >= views[0].nbytes:
            got -= views.pop(0).nbytes
        if views:
            views[0] = views[0][got:]
    return total


def _read_in_pieces(
    descriptor: int, stored: Stored, spec: TensorSpec, out: Bytes
) -> tuple[int, str]:
    """Read a raw block; how many bytes came, and the digest of these."""
    whole, view = blocks.digester(spec.dtype, out.nbytes), out.data
    total = 0
    while total < out.nbytes:
        got = os.preadv(descriptor, [view[total : total + RUN_BYTES]], stored.offset + total)
        if not got:
            break
        whole.update(view[total : total + got])
        total += got
    return total, whole.hexdigest()


def _runs(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Runs of jobs to be read at once: raw ones that follow each other in one file."""
    run: list[Job] = []
    size = 0
    known, tensor_bytes = None, 0  # a spec counts its bytes anew each time
    for job in jobs:
        stored, spec, index, out, _ = job
        if spec is not known:
            known, tensor_bytes = spec, spec.size_bytes
        raw = min(spec.block_bytes, tensor_bytes - index * spec.block_bytes)
        if out.nbytes != raw:
            raise ValueError(
                f"{spec.name}, block {index}: {raw} bytes do not fit the {out.nbytes} of `out`"
            )
        if run and not (
            stored.stored_bytes == raw
            and _follows(run[-1], stored)
            and size + raw <= RUN_BYTES
            and len(run) < RUN_BLOCKS
        ):
            yield run
            run, size = [], 0
        run.append(job)
        size += raw
    if run:
        yield run


def _follows(job: Job, stored: Stored) -> bool:
    """Whether ``stored`` begins where the raw block of ``job`` ends."""
    before, _, _, out, _ = job
    return (
        before.stored_bytes == out.nbytes
        and before.offset + before.stored_bytes == stored.offset
        and before.file == stored.file
    )
