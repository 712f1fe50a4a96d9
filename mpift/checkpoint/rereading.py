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
from mpift.checkpoint.blocks import Block, TensorSpec
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
    whole = xxhash.xxh3_128()
    with ThreadPoolExecutor(threads, "mpift-check") as pool, path.open("rb", buffering=0) as file:
        reused = np.empty(max(block.data.nbytes for block in blocks), np.uint8)

        def calls() -> Iterator[Callable[[], None]]:
            for index in sorted(range(len(stored)), key=lambda index: stored[index].offset):
                _take(file, stored[index].offset - file.tell(), whole)
                size, block = stored[index].stored_bytes, blocks[index]
                # A digest takes no longer than fresh memory for another thread would.
                encoded = size < block.data.nbytes
                data = _take(file, size, whole, None if encoded else reused)
                check = functools.partial(_check_block, path, data, stored[index], block, index)
                if encoded:
                    yield check
                else:
                    check()

        for _ in in_order(pool, calls(), 2 * threads):
            pass
        size = os.fstat(file.fileno()).st_size
        _take(file, size - file.tell(), whole)
    return size, whole.hexdigest()


def _take(file: Any, size_bytes: int, whole: Any, into: Bytes | None = None) -> Bytes:
    """The next bytes of a file, fewer where it ends; in new memory, or in ``into``."""
    data = np.empty(size_bytes, np.uint8) if into is None else into[:size_bytes]
    got = 0
    while count := file.readinto(data[got:].data):
        got += count
    whole.update(data[:got].data)
    return data[:got]


def _check_block(path: Path, data: Bytes, stored: Stored, block: Block, index: int) -> None:
    size = block.data.nbytes
    spec = TensorSpec(f"written block {index}", block.dtype, (block.elements,), size)
    out = data if data.nbytes == size else np.empty(size, np.uint8)
    try:
        reading.check(path, data, stored, spec, 0, out)
    except CheckpointDamagedError as error:
        raise CheckpointError(
            f"a file of blocks reads back other than it was written: {error}"
        ) from None
