"""The shared memory of a node in which the gradients of one layout are summed.

Each rank of the node has a region for its contributions, which it alone writes, and there is one
region for results, each slice of which its owner writes (``core.sharing``). Both are laid out so,
where that of results has the buckets once a place and no use for stamps:

    [ identity | stamp of bucket 0 | stamp of bucket 1 | ... | bucket 0 | bucket 1 | ... ]

Sizes are known beforehand. The files have a name only until all have mapped them; the memory is
the kernel's to free when the last of them ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mpift import memory
from mpift.core.sharing import RESULTS_KEPT, Kind, Stamp
from mpift.errors import GradientError
from mpift.memory import Region
from mpift.reduction.buckets import Layout

_IDENTITY_BYTES = 64
_STAMP_BYTES = 64  # a cache line, since others read it while the next one is written
_PAGE_BYTES = 4096


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _bucket_bytes(layout: Layout) -> list[int]:
    return [_aligned(bucket.length * bucket.dtype.itemsize) for bucket in layout.buckets]


def contributions_bytes(layout: Layout) -> int:
    """Size of one rank's region."""
    return _heading_bytes(layout) + sum(_bucket_bytes(layout))


def results_bytes(layout: Layout) -> int:
    """Size of a node's region of results."""
    return _heading_bytes(layout) + RESULTS_KEPT * sum(_bucket_bytes(layout))


def arena_bytes(layout: Layout, ranks: int) -> int:
    """What a node with this many ranks needs."""
    return ranks * contributions_bytes(layout) + results_bytes(layout)


def _heading_bytes(layout: Layout) -> int:
    return _aligned(_IDENTITY_BYTES + _STAMP_BYTES * len(layout.buckets))


def identity(layout: Layout, name: str) -> bytes:
    """What a region begins with: a digest of its own name and of how it is laid out."""
    shape = [(str(b.dtype), b.length, b.slots, b.device) for b in layout.buckets]
    return hashlib.blake2b(repr((name, shape)).encode(), digest_size=_IDENTITY_BYTES).digest()


def create(path: Path, layout: Layout, size_bytes: int) -> Region:
    """A new region for ``layout``. Raises ``MpiftError`` if there is no space, ``FileExistsError``
    if the name is taken."""
    region = memory.create(path, size_bytes, identity(layout, path.name))
    _stamps(region, layout)[:, 0] = -1
    return region


def attach(path: Path, layout: Layout, size_bytes: int) -> Region:
    """The region that another rank has made. Raises ``GradientError`` if it is another one, and
    what ``memory.open_existing`` raises."""
    region = memory.open_existing(path)
    if region.view.nbytes != size_bytes or region.view[:_IDENTITY_BYTES] != identity(
        layout, path.name
    ):
        raise GradientError(f"{path} was made for other gradients: ranks have different parameters")
    return region


def _stamps(region: Region, layout: Layout) -> np.ndarray:
    """int64[buckets, 8], of which a stamp is the first two."""
    count = len(layout.buckets) * _STAMP_BYTES // 8
    flat = np.frombuffer(region.view, np.int64, count, _IDENTITY_BYTES)
    return flat.reshape(len(layout.buckets), -1)


def _arrays(region: Region, layout: Layout, start: int) -> list[np.ndarray]:
    """The memory of each bucket, one after the other from byte ``start`` on."""
    arrays = []
    for bucket, size_bytes in zip(layout.buckets, _bucket_bytes(layout), strict=True):
        arrays.append(np.frombuffer(region.view, bucket.dtype, bucket.length, start))
        start += size_bytes
    return arrays


class Arena:
    """``own`` is the region of ``member``, ``others`` are those of the other ranks of its node by
    member id, ``results`` is the node's. ``everybody`` are all members of the job that have one."""

    def __init__(
        self,
        layout: Layout,
        member: int,
        everybody: Sequence[int],
        own: Region,
        others: Mapping[int, Region],
        results: Region,
    ) -> None:
        self.layout = layout
        self.member = member
        self.everybody = frozenset(everybody)
        regions = {**others, member: own}
        self.members = tuple(sorted(regions))  # of this node
        start = _heading_bytes(layout)
        self._contributions = {m: _arrays(r, layout, start) for m, r in regions.items()}
        self._stamps = {m: _stamps(r, layout) for m, r in regions.items()}
        size_bytes = sum(_bucket_bytes(layout))
        self.results: list[list[np.ndarray]] = [
            _arrays(results, layout, start + place * size_bytes) for place in range(RESULTS_KEPT)
        ]

    @property
    def homes(self) -> list[np.ndarray]:
        """Where this rank's contributions lie, by bucket."""
        return self._contributions[self.member]

    def contribution(self, member: int, bucket: int) -> np.ndarray:
        """What ``member`` has put into a bucket. Not to be written to but by that rank."""
        return self._contributions[member][bucket]

    def result(self, round_: int, bucket: int) -> np.ndarray:
        """Where the result of a round lies, until that of the round ``RESULTS_KEPT`` later does."""
        return self.results[round_ % RESULTS_KEPT][bucket]

    def put(self, bucket: int, stamp: Stamp) -> None:
        """Let this rank's stamp of a bucket be that."""
        row = self._stamps[self.member][bucket]
        # Whoever finds the round there has to find what belongs to it.
        row[0] = -1
        row[1] = stamp.kind
        row[0] = stamp.round

    def stamp(self, member: int, bucket: int) -> Stamp:
        """What ``member`` says of a bucket."""
        round_, kind = self._stamps[member][bucket][:2].tolist()
        return Stamp(round_, Kind(kind))

    def clear(self) -> None:
        """This rank's contributions are no longer needed, and may be written over."""
        self._stamps[self.member][:, 0] = -1
