"""Blocks of floating point numbers made smaller: their exponents compressed, their mantissas not.

Trained numbers have a mantissa that looks random, and exponents of which a few are frequent. So
the bytes of a block are sorted into *planes* (all first bytes, all second bytes...), as the shuffle
filter of HDF5 does it; the planes that hold sign and exponent are Huffman-coded, and those of the
mantissa stand in the stream as they are. A plane of one value (zeros, or what was rounded to a
shorter type) becomes a few bytes.

The result is an ordinary zlib stream: stock HDF5 reads it through its own "gzip" and "shuffle"
filters. Most of the time is spent in zlib and in numpy's copies, which release the interpreter's
lock: threads help. Nothing here knows of files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpift.errors import CheckpointDamagedError

Bytes: TypeAlias = NDArray[np.uint8]

FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})

# RFC 1950: deflate with a window of 32 KiB, the fastest level.
ZLIB_HEADER = b"\x78\x01"
# RFC 1951, section 3.2.4: the length of a stored block has 16 bits.
STORED_BYTES_MAX = 0xFFFF


def pays(dtype: str) -> bool:
    """Whether blocks of torch's ``dtype`` are worth encoding: real floating point of 16 bits or
    more. All else is better stored as it is."""
    return dtype in FLOATING


def encode(block: Bytes, itemsize: int) -> bytes:
    """A zlib stream of the shuffled ``block`` (1-D, contiguous bytes, a multiple of ``itemsize``,
    little-endian). It may be longer than the block; then store the block itself."""
    planes = np.empty((itemsize, block.nbytes // itemsize), np.uint8)
    items = block.reshape(-1, itemsize)
    for number, plane in enumerate(planes):
        plane[...] = items[:, number]  # plane by plane: six times faster than one transposed copy
    # Four of the eleven exponent bits of a float64 are in its second byte.
    coded_from = itemsize - (2 if itemsize == 8 else 1)
    parts: list[bytes | memoryview] = [ZLIB_HEADER]
    for number, plane in enumerate(planes):
        last = number == itemsize - 1
        if plane.size and bool((plane == plane[0]).all()):
            parts += _coded(plane, zlib.Z_RLE, last)
        elif number >= coded_from:
            parts += _coded(plane, zlib.Z_HUFFMAN_ONLY, last)
        else:
            parts += _stored(plane)
    parts.append(struct.pack(">I", zlib.adler32(planes.data)))
    return b"".join(parts)


def _coded(plane: Bytes, strategy: int, last: bool) -> list[bytes]:
    """The last plane ends the stream; the others end at a full byte: the next can follow."""
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
    return [coder.compress(plane.data), coder.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)]


def _stored(plane: Bytes) -> Iterator[bytes | memoryview]:
    for start in range(0, plane.size, STORED_BYTES_MAX):
        piece = plane[start : start + STORED_BYTES_MAX].data
        yield struct.pack("<BHH", 0, piece.nbytes, piece.nbytes ^ 0xFFFF)
        yield piece


def decode(
    stored: bytes | memoryview, itemsize: int, size_bytes: int, out: Bytes | None = None
) -> Bytes:
    """The block of ``size_bytes`` that ``encode`` was given, in ``out`` if there is one (1-D,
    contiguous, of that length).

    Raises ``CheckpointDamagedError`` if ``stored`` is not the encoding of so many bytes.
    """
    # Bounded: damaged bytes may claim to unfold to a thousand times the block.
    unfolding = zlib.decompressobj()
    try:
        shuffled = unfolding.decompress(stored, size_bytes + 1)
    except zlib.error as error:
        raise CheckpointDamagedError(f"the encoding cannot be read ({error})") from None
    if len(shuffled) != size_bytes or not unfolding.eof or unfolding.unused_data:
        raise CheckpointDamagedError(
            f"the encoding is not that of {size_bytes} bytes:"
            f" {len(shuffled)} came out{'' if unfolding.eof else ', and no end of it'}"
        )
    block = np.empty(size_bytes, np.uint8) if out is None else out
    items = block.reshape(-1, itemsize)
    for number, plane in enumerate(np.frombuffer(shuffled, np.uint8).reshape(itemsize, -1)):
        items[:, number] = plane
    return block
