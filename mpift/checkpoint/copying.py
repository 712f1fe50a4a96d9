"""From a rank's tensors into its arena: everything, or what differs from what lies there already.

Making a block's digest reads it once, copying it reads and writes: where most blocks are as they
were at the snapshot before (frozen layers, rows of embeddings that no batch had), digests first
hold training for less, and the writer needs to make none. Where most have changed, as in dense
training, it would hold training twice as long: so a few blocks are tried first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpift.checkpoint.blocks import DIGEST_BYTES, digest_bytes, sample
from mpift.checkpoint.share import Piece, Share, runs
from mpift.checkpoint.state import Flat, as_bytes
from mpift.devices import staging
from mpift.errors import DeviceError

_TRIED = 8  # blocks at most
_CHANGED_PART_MAX = 0.4  # of these


class Copying:
    """One copy of a rank's ``share`` of ``flat`` to ``data``, uint8[share.size_bytes]."""

    def __init__(self, flat: Flat, share: Share, data: np.ndarray) -> None:
        self._tensors = (*flat.shared_tensors.values(), *flat.own_tensors.values())
        names = (*flat.shared_tensors, *flat.own_tensors)
        self._dtypes = [flat.specs[name].dtype for name in names]
        self._own_from = len(flat.shared_tensors)
        self._share = share
        self._data = data

    def would_find_most(self, held: bytes, seed: int) -> bool:
        """Whether most bytes are in blocks that have the digests ``held`` (all blocks', in order),
        as far as a few random ones tell. On a device they are not looked at, nor where a tensor
        would have to be copied for it."""
        if any(tensor.device.type != "cpu" for tensor in self._tensors):
            return False
        blocks = self._share.blocks
        tried = [
            number
            for number in sample(self._share.ends, _TRIED, seed)
            if self._tensors[blocks[number].tensor].is_contiguous()
        ]
        changed = 0
        for number in tried:
            data = as_bytes(self._tensors[blocks[number].tensor])
            changed += self._digest(blocks[number], data) != _entry(held, number)
            if changed > _CHANGED_PART_MAX * len(tried):
                return False
        return bool(tried)

    def differing(self, held: bytes) -> bytes:
        """Copy the blocks that have other digests than those ``held``; the digests of all."""
        found: list[bytes] = []
        last, data = -1, np.empty(0, np.uint8)
        for number, piece in enumerate(self._share.blocks):
            if piece.tensor != last:
                last, data = piece.tensor, as_bytes(self._tensors[piece.tensor])
            found.append(self._digest(piece, data))
            if found[-1] != _entry(held, number):
                np.copyto(self._target(piece), data[piece.start : piece.stop])
        return b"".join(found)

    def everything(self, devices: staging.Staging) -> Callable[[], None] | None:
        """Copy all; what comes from a device is only begun, and what is returned waits for it."""
        on_device: list[staging.Piece] = []
        may_change: list[staging.Piece] = []
        last, data = -1, np.empty(0, np.uint8)
        for piece in runs(self._share.blocks):
            tensor, target = self._tensors[piece.tensor], self._target(piece)
            if tensor.device.type != "cpu":
                there = on_device if piece.tensor < self._own_from else may_change
                there.append(staging.Piece(tensor, piece.start, piece.stop, target))
                continue
            if piece.tensor != last:
                last, data = piece.tensor, as_bytes(tensor)
            np.copyto(target, data[piece.start : piece.stop])
        if not on_device and not may_change:
            return None
        try:
            kept = [replace(piece, tensor=piece.tensor.detach().clone()) for piece in may_change]
            return devices.begin([*on_device, *kept])
        except RuntimeError as error:  # what torch makes of a device's fault, and of no memory
            raise DeviceError(f"a device could not be read: {error}") from error

    def _digest(self, piece: Piece, data: np.ndarray) -> bytes:
        return digest_bytes(data[piece.start : piece.stop], self._dtypes[piece.tensor])

    def _target(self, piece: Piece) -> np.ndarray:
        return self._data[piece.offset : piece.offset + piece.stop - piece.start]


def _entry(digests: bytes, number: int) -> bytes:
    return digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
