"""The arena: a mapped file of fixed size that holds one rank's share of one snapshot.

It says itself what it holds (``Contents``), so whoever maps it can write a checkpoint from it: this
rank's writer process, or another rank of the node after this one has died. It is whole or it is
not: the mark is taken away before the first byte of a new snapshot is copied and set after the
last. If the blocks' digests were made for the snapshot, they are in it too. No process writes to it
but the rank that made it.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpift import memory
from mpift.checkpoint.blocks import TensorSpec
from mpift.core.saving import Origin
from mpift.errors import CheckpointError

# magic, version of the snapshot or 0 while there is none, length of the contents' text and of the
# digests that follow it, start of the tensors' bytes
_HEADER = struct.Struct("<8sQQQQ")
_MAGIC = b"MPIFTARN"
_PAGE = 4096
_CONTENTS_BYTES_MIN = 1 << 16


@dataclass(frozen=True, slots=True)
class Contents:
    """What an arena holds: the bytes of the shared tensors' blocks in ``ranges`` (half-open ranges
    of block numbers, counted through all shared tensors in order), one after the other, then those
    of this rank's own tensors.

    ``version`` is the number of the checkpoint (``manifest.version_of``), above 0. The first range
    is this rank's share of the persistent checkpoint. ``local`` says which of how many arenas hold
    the whole state together, (0, 0) if those of this node don't.
    """

    version: int
    step: int
    origin: Origin
    share: int
    ranges: tuple[tuple[int, int], ...]
    shared_specs: tuple[TensorSpec, ...]
    own_specs: tuple[TensorSpec, ...]
    shared: Any  # the tree of what all ranks hold alike
    own: Any  # the tree of what this rank holds alone
    local: tuple[int, int] = (0, 0)

    def encode(self) -> bytes:
        record = {name: getattr(self, name) for name in self.__slots__}
        record["origin"] = list(self.origin)
        for name in ("shared_specs", "own_specs"):
            record[name] = [[getattr(spec, of) for of in spec.__slots__] for spec in record[name]]
        return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Contents:
        record = json.loads(data)
        history, layout, owners = record["origin"]
        record["origin"] = Origin(history, layout, tuple(owners))
        for name in ("shared_specs", "own_specs"):
            record[name] = tuple(
                TensorSpec(tensor, dtype, tuple(shape), block_bytes)
                for tensor, dtype, shape, block_bytes in record[name]
            )
        record["local"] = tuple(record["local"])
        record["ranges"] = tuple(tuple(pair) for pair in record["ranges"])
        return cls(**record)

    def shared_blocks(self) -> Iterator[tuple[int, int, int]]:
        """(number through all shared tensors, tensor, block in it) of the arena's blocks, in the
        order of their bytes."""
        for first, last in self.ranges:
            yield from blocks_between(self.shared_specs, first, last)


def blocks_between(
    specs: Sequence[TensorSpec], first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """(number, tensor, block in it) of the blocks with numbers from ``first`` to below ``last``."""
    start = 0
    for tensor, spec in enumerate(specs):
        count = spec.block_count
        for block in range(max(first - start, 0), min(last - start, count)):
            yield start + block, tensor, block
        start += count
        if start >= last:
            return


class Arena:
    """A mapped arena; ``capacity`` bytes of tensors fit into it."""

    def __init__(self, region: memory.Region) -> None:
        self._region = region
        magic, *_, start = _HEADER.unpack_from(region.view)
        if magic != _MAGIC:
            raise CheckpointError(f"{region.path} is no arena of checkpoints: remove it")
        self._start = start
        self.data = np.frombuffer(region.view, np.uint8)[start:]

    @classmethod
    def create(cls, path: Path, capacity: int, contents_bytes: int) -> Arena:
        """A new one, its memory touched, for ``capacity`` bytes of tensors and at least
        ``contents_bytes`` of contents and digests. An older one of that name is replaced; who maps
        it keeps it.

        Raises ``MpiftError`` where there is no space.
        """
        room = max(contents_bytes, _CONTENTS_BYTES_MIN)
        start = -(-(_PAGE + room) // _PAGE) * _PAGE
        path.unlink(missing_ok=True)
        header = _HEADER.pack(_MAGIC, 0, 0, 0, start)
        arena = cls(memory.create(path, start + capacity, header))
        arena.data[::_PAGE] = 0  # page faults now, not in the first snapshot
        return arena

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Raises ``FileNotFoundError`` if there is none, ``MpiftError`` if it is none of ours."""
        return cls(memory.open_existing(path))

    @property
    def path(self) -> Path:
        return self._region.path

    @property
    def capacity(self) -> int:
        return len(self.data)

    @property
    def contents_room(self) -> int:
        """How many bytes of contents and digests fit in."""
        return self._start - _PAGE

    @property
    def version(self) -> int:
        """Of the snapshot that it holds whole; 0 if there is none."""
        return int(_HEADER.unpack_from(self._region.view)[1])

    def begin(self) -> None:
        """What it holds is not whole from now on."""
        self._set(0, 0, 0)

    def finish(self, version: int, contents: bytes, digests: bytes = b"") -> None:
        """All is copied; ``digests`` of all blocks in order (``blocks.digest_bytes``), or none."""
        told = contents + digests
        self._region.view[_PAGE : _PAGE + len(told)] = told
        self._set(0, len(contents), len(digests))
        self._set(version, len(contents), len(digests))

    def contents(self) -> Contents | None:
        """What it holds; None if that is not whole."""
        _, version, length, _, _ = _HEADER.unpack_from(self._region.view)
        if version == 0:
            return None
        return Contents.decode(bytes(self._region.view[_PAGE : _PAGE + length]))

    def digests(self) -> bytes:
        """Those of its blocks, in order; empty if it has none."""
        _, version, length, more, _ = _HEADER.unpack_from(self._region.view)
        start = _PAGE + length
        return bytes(self._region.view[start : start + more]) if version else b""

    def _set(self, version: int, contents: int, digests: int) -> None:
        _HEADER.pack_into(self._region.view, 0, _MAGIC, version, contents, digests, self._start)

    def is_in_place(self) -> bool:
        """Whether its path still leads to it."""
        return self._region.is_in_place()

    def unlink(self) -> None:
        """Remove its name; who maps it keeps it."""
        self._region.unlink()

    def close(self) -> None:
        """Unmap it; where arrays made of ``data`` are still in use, with the last of them."""
        del self.data
        with contextlib.suppress(BufferError):
            self._region.close()
