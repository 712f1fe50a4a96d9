"""How a state is cut: tensors, and the fixed slices of their bytes that are the unit of change.

A block is ``block_bytes`` of a tensor's bytes in C order, its last one what is left over. It has a
digest that depends on its dtype and length too, so that equal bytes of another kind are another
block. Nothing here loads torch or h5py.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

BLOCK_BYTES = 1 << 20
# Rows of embeddings change sparsely: at 1 MiB, half of all blocks would look changed.
SPARSE_BLOCK_BYTES = 1 << 16

DIGEST_BYTES = 16

# What HDF5 and numpy know under another name, or not at all: torch's dtype, and what its bytes are
# stored as.
STORED_AS: dict[str, str] = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds the bytes of torch's ``dtype`` ("float32", "bfloat16"...).

    Raises ``TypeError`` for a dtype that has none.
    """
    return np.dtype(STORED_AS.get(dtype, dtype))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One dense tensor. ``name`` is its path in the state ("model/fc.weight"), ``dtype`` torch's
    name of it, ``block_bytes`` a multiple of its item size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES

    @property
    def itemsize(self) -> int:
        return storage_dtype(self.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def block_count(self) -> int:
        """An empty tensor has none."""
        return -(-self.size_bytes // self.block_bytes)

    def block(self, index: int) -> tuple[int, int]:
        """First byte of a block, and the byte after its last, within the tensor."""
        start = index * self.block_bytes
        return start, min(start + self.block_bytes, self.size_bytes)

    def blocks(self) -> Iterator[tuple[int, int]]:
        return (self.block(index) for index in range(self.block_count))


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be written: its raw bytes (1-D, contiguous; whole items), torch's name of its
    dtype, the block size of its tensor in bytes, and ``blocks.digest`` of it if that is made."""

    data: np.ndarray
    dtype: str
    block_bytes: int
    digest: str = ""

    @property
    def elements(self) -> int:
        return self.data.nbytes // storage_dtype(self.dtype).itemsize

    @property
    def is_full(self) -> bool:
        return self.data.nbytes == self.block_bytes


def digest(data: Any, dtype: str) -> str:
    """The digest of a block's raw bytes (any contiguous buffer): 32 hexadecimal digits, XXH3-128
    seeded with dtype and length."""
    return digest_bytes(data, dtype).hex()


def digest_bytes(data: Any, dtype: str) -> bytes:
    """The same as bytes."""
    size = memoryview(data).nbytes
    return xxhash.xxh3_128_digest(data, seed=_seed(dtype, size))


def digester(dtype: str, size_bytes: int) -> Any:
    """Makes the same digest of a block that comes in pieces: ``update`` it, then ``hexdigest``."""
    return xxhash.xxh3_128(seed=_seed(dtype, size_bytes))


@functools.lru_cache(4096)
def _seed(dtype: str, size: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{dtype} {size}".encode())


def cut(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Ranges of indices of ``sizes``, one a part, in order and without gaps, whose sums are as even
    as whole entries allow. Some are empty where there are fewer entries than parts."""
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    borders = [0]
    index = 0
    for part in range(1, parts):
        goal = total * part / parts
        # An entry belongs to the part in which its middle lies.
        while index < len(sizes) and ends[index] - sizes[index] / 2 < goal:
            index += 1
        borders.append(index)
    borders.append(len(sizes))
    return list(itertools.pairwise(borders))


def sample(ends: Sequence[int], count: int, seed: int) -> list[int]:
    """Indices of what lies at ``count`` random places of a whole of which each entry ends at one of
    ``ends``, ascending: large entries are found more often, and no pattern of small and large ones
    hides any for good."""
    if not ends or not ends[-1]:
        return []
    draw = random.Random(seed)
    return sorted({bisect.bisect_right(ends, draw.randrange(ends[-1])) for _ in range(count)})


def hyperslabs(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """The elements ``start`` to ``stop`` of a tensor in C order, as boxes of its index space.

    Gives (one slice a dimension, first element, element after the last) in order; at most
    2 * len(shape) - 1 of them. A scalar's only box is ``()``.
    """
    if start >= stop:
        return
    if not shape:
        yield (), start, stop
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        rest = tuple(slice(0, size) for size in shape[1:])
        yield (slice(first, last), *rest), first * row, last * row
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    base = row * math.prod(shape[1:])
    for box, low, high in hyperslabs(shape[1:], start - base, stop - base):
        yield (slice(row, row + 1), *box), low + base, high + base
