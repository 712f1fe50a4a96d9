"""Reading a file of blocks again once it is written: what a disk did to it is found now, and not
when it is needed."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from mpift.checkpoint import reading
from mpift.checkpoint.blocks import Block, TensorSpec, digester
from mpift.checkpoint.encoding import Bytes
from mpift.checkpoint.manifest import Stored
from mpift.errors import CheckpointDamagedError, CheckpointError

T = TypeVar("T")


def in_order(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]], in_flight: int
) -> Iterator[T]:
    """The results of ``calls``, of which at most ``in_flight`` are begun and not yet taken."""
    waiting: deque[Future[T]] = deque()
    for call in calls:
        if len(waiting) == in_flight:
            yield waiting.popleft().result()
        waiting.append(pool.submit(call))
    while waiting:
        yield waiting.popleft().result()


def read_again(
    path: Path, stored: Sequence[Stored], blocks: Sequence[Block], threads: int
) -> tuple[int, str]:
    """Compare every block, and give the file's size and digest, in one pass over it."""
    with ThreadPoolExecutor(threads, "mpift-check") as pool, path.open("rb", buffering=0) as file:
        one_pass = _Pass(file)

        def calls() -> Iterator[Callable[[], None]]:
            for index in sorted(range(len(stored)), key=lambda index: stored[index].offset):
                place, block = stored[index], blocks[index]
                one_pass.go_to(place.offset)
                if place.stored_bytes < block.data.nbytes:
                    data = one_pass.take(place.stored_bytes)
                    yield functools.partial(_check, path, data, place, block, index, None)
                else:  # its digest takes no longer than another thread would to begin
                    found = one_pass.digest(block)
                    _check(path, block.data, place, block, index, found)

        for _ in in_order(pool, calls(), 2 * threads):
            pass
        size = os.fstat(file.fileno()).st_size
        one_pass.go_to(size)
    return size, one_pass.whole.hexdigest()


class _Pass:
    """Reads a file once, in pieces that are hashed while they are in the processor's cache;
    ``whole`` makes the digest of all that was read. Beyond the file's end nothing is read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._piece = np.empty(reading.RUN_BYTES, np.uint8)
        self.whole = xxhash.xxh3_128()

    def go_to(self, offset: int) -> None:
        self._read(offset - self._file.tell())

    def digest(self, block: Block) -> str:
        """Of the raw bytes that are stored next, as many as the block has."""
        found = digester(block.dtype, block.data.nbytes)
        self._read(block.data.nbytes, found)
        return str(found.hexdigest())

    def take(self, size_bytes: int) -> Bytes:
        """The next bytes, fewer where the file ends."""
        data = np.empty(size_bytes, np.uint8)
        done = 0
        while count := self._file.readinto(data[done:].data):
            done += count
        self.whole.update(data[:done].data)
        return data[:done]

    def _read(self, size_bytes: int, *more: Any) -> None:
        while size_bytes > 0 and (count := self._file.readinto(self._piece[:size_bytes].data)):
            for digest in (self.whole, *more):
                digest.update(self._piece[:count].data)
            size_bytes -= count


def _check(
    path: Path, data: Bytes, stored: Stored, block: Block, index: int, found: str | None
) -> None:
    """``data`` is what was stored of an encoded block; of a raw one, ``found`` is its digest."""
    size = block.data.nbytes
    spec = TensorSpec(f"written block {index}", block.dtype, (block.elements,), size)
    out = np.empty(size, np.uint8) if found is None else data
    try:
        reading.check(path, data, stored, spec, 0, out, found)
    except CheckpointDamagedError as error:
        raise CheckpointError(
            f"a file of blocks reads back other than it was written: {error}"
        ) from None
