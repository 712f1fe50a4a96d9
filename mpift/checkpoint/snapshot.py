"""Snapshots: a rank's share of the state, copied into its arena between two steps.

What all ranks hold alike is cut into shares, one a rank, so that each byte is copied and written
once; what is a rank's own it copies itself. Training is held for that copy alone: what follows is
done from the arena by the writer process.

What is on a device is only begun to be copied, beside what the device does next. Parameters and
optimizer state don't change before the next step, which waits for the copy on the device; a rank's
own tensors may, as BatchNorm's do in the next forward, so a second copy of those, on the device, is
what is read. Else no device memory is needed, and of pinned host memory as much as the share.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpift.checkpoint.arena import Arena, Contents, blocks_between
from mpift.checkpoint.blocks import TensorSpec, cut
from mpift.checkpoint.group import Seat
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.state import Flat, as_bytes, current, flatten
from mpift.core.saving import Origin
from mpift.devices import staging
from mpift.errors import DeviceError


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes ``start`` to ``stop`` of a tensor, which lie at ``offset`` of the arena."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot. ``finish`` is None where ``arena`` holds it whole; else it waits for a device, on
    any thread, and then the arena does."""

    arena: Arena
    origin: Origin
    finish: Callable[[], None] | None


class Snapshots:
    """Takes the snapshots of one manager into arenas that ``make_path(slot)`` names."""

    def __init__(self, make_path: Callable[[int], Path], slots: int) -> None:
        self._make_path = make_path
        self._arenas: list[Arena | None] = [None] * slots
        self._key: Any = None
        self._shared: list[_Piece] = []
        self._own: list[_Piece] = []
        self._ranges: tuple[tuple[int, int], ...] = ()
        self._layout = ""
        self._size = 0
        self._staging = staging.Staging()

    @property
    def size_bytes(self) -> int:
        """Of this rank's share, after the first snapshot."""
        return self._size

    def take(
        self,
        state: Mapping[str, Any],
        version: int,
        seat: Seat,
        slot: int,
        begin: Callable[[], None] = lambda: None,
    ) -> Taken:
        """Copy this rank's share of ``state`` into the arena of ``slot``; ``begin`` is called
        before anything in it is touched. Raises ``DeviceError`` where a device, its memory or
        pinned memory fails."""
        flat = flatten(current(state))
        shared = tuple(flat.specs[name] for name in flat.shared_tensors)
        own = tuple(flat.specs[name] for name in flat.own_tensors)
        key = (shared, own, seat.share, len(seat.owners), seat.neighbours, seat.whole)
        if key != self._key:
            self._plan(shared, own, seat)
            self._key = key
        origin = Origin(seat.history, self._layout, seat.owners)
        local = (seat.neighbours.index(seat.share), len(seat.neighbours))
        contents = Contents(
            version,
            order_of(version)[1],
            origin,
            seat.share,
            self._ranges,
            shared,
            own,
            flat.shared,
            flat.own,
            local if seat.whole else (0, 0),
        ).encode()
        begin()
        arena = self._arena(slot, len(contents))
        arena.begin()
        arrive = self._copy(flat, arena)
        if arrive is None:
            arena.finish(version, contents)
            return Taken(arena, origin, None)

        def finish() -> None:
            arrive()
            arena.finish(version, contents)

        return Taken(arena, origin, finish)

    def _plan(self, shared: Sequence[TensorSpec], own: Sequence[TensorSpec], seat: Seat) -> None:
        sizes = [stop - start for spec in shared for start, stop in spec.blocks()]
        self._ranges = _ranges(sizes, seat)
        text = json.dumps([[s.name, s.dtype, s.shape, s.block_bytes] for s in shared])
        self._layout = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._shared, offset = [], 0
        for first, last in self._ranges:
            for _, tensor, block in blocks_between(shared, first, last):
                start, stop = shared[tensor].block(block)
                before = self._shared[-1] if self._shared else None
                if before is not None and (before.tensor, before.stop) == (tensor, start):
                    self._shared[-1] = _Piece(tensor, before.start, stop, before.offset)
                else:
                    self._shared.append(_Piece(tensor, start, stop, offset))
                offset += stop - start
        self._own = []
        for tensor, spec in enumerate(own):
            self._own.append(_Piece(tensor, 0, spec.size_bytes, offset))
            offset += spec.size_bytes
        self._size = offset

    def _arena(self, slot: int, contents_bytes: int) -> Arena:
        arena = self._arenas[slot]
        if arena is not None and (
            arena.capacity < self._size or arena.contents_room < contents_bytes
        ):
            arena.unlink()
            arena.close()
            self._arenas[slot] = arena = None  # also if there is no room for the next
        if arena is None:
            # Twice: numbers in the trees get longer.
            arena = Arena.create(self._make_path(slot), self._size, 2 * contents_bytes)
            self._arenas[slot] = arena
        return arena

    def _copy(self, flat: Flat, arena: Arena) -> Callable[[], None] | None:
        """Copy; what comes from a device is only begun, and what is returned waits for it."""
        shared, own = tuple(flat.shared_tensors.values()), tuple(flat.own_tensors.values())
        on_device: list[staging.Piece] = []
        may_change: list[staging.Piece] = []
        for tensors, pieces, there in (
            (shared, self._shared, on_device),
            (own, self._own, may_change),
        ):
            last, data = -1, np.empty(0, np.uint8)
            for piece in pieces:
                tensor = tensors[piece.tensor]
                target = arena.data[piece.offset : piece.offset + piece.stop - piece.start]
                if tensor.device.type != "cpu":
                    there.append(staging.Piece(tensor, piece.start, piece.stop, target))
                    continue
                if piece.tensor != last:
                    last, data = piece.tensor, as_bytes(tensor)
                np.copyto(target, data[piece.start : piece.stop])
        if not on_device and not may_change:
            return None
        try:
            kept = [replace(piece, tensor=piece.tensor.detach().clone()) for piece in may_change]
            return self._staging.begin([*on_device, *kept])
        except RuntimeError as error:  # what torch makes of a device's fault, and of no memory
            raise DeviceError(f"a device could not be read: {error}") from error

    def fence(self) -> None:
        """Somebody is about to write to the tensors: let the copies be done before."""
        self._staging.fence()

    def close(self, keep: bool) -> None:
        """Give the arenas back; with ``keep`` their files stay."""
        self._staging.close()
        for slot, arena in enumerate(self._arenas):
            if arena is not None:
                if not keep:
                    arena.unlink()
                arena.close()
            self._arenas[slot] = None


def _ranges(sizes: Sequence[int], seat: Seat) -> tuple[tuple[int, int], ...]:
    """What this rank copies, as ranges of block numbers: its share and, if the node is to hold all
    of the state, its part of what belongs to ranks of other nodes."""
    shares = cut(sizes, len(seat.owners))
    mine = shares[seat.share]
    if not seat.whole:
        return (mine,)
    others = [shares[s] for s in range(len(seat.owners)) if s not in seat.neighbours]
    numbers = [number for first, last in others for number in range(first, last)]
    portions = cut([sizes[number] for number in numbers], len(seat.neighbours))
    first, last = portions[seat.neighbours.index(seat.share)]
    return (mine, *_runs(numbers[first:last]))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as half-open ranges."""
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield run[0], run[-1] + 1
