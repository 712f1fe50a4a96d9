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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpift.checkpoint.arena import Arena, Contents
from mpift.checkpoint.blocks import DIGEST_BYTES, TensorSpec
from mpift.checkpoint.copying import Copying
from mpift.checkpoint.group import Seat
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.share import Share, share_of
from mpift.checkpoint.state import Flat, current, flatten
from mpift.core.saving import Origin
from mpift.devices import staging


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot. ``finish`` is None where ``arena`` holds it whole; else it waits for a device, on
    any thread, and then the arena does."""

    arena: Arena
    origin: Origin
    finish: Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class _Held:
    """What an arena holds: a snapshot of this version, with these digests if they are known."""

    version: int
    share: Share
    digests: bytes


class Snapshots:
    """Takes the snapshots of one manager into arenas that ``make_path(slot)`` names."""

    def __init__(self, make_path: Callable[[int], Path], slots: int) -> None:
        self._make_path = make_path
        self._arenas: list[Arena | None] = [None] * slots
        self._held: list[_Held | None] = [None] * slots
        self._key: Any = None
        self._share = Share((), (), (), "")
        self._staging = staging.Staging()

    @property
    def size_bytes(self) -> int:
        """Of this rank's share, after the first snapshot."""
        return self._share.size_bytes

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
            self._share, self._key = share_of(shared, own, seat), key
        share, contents = self._share, self._contents(flat, version, seat, shared, own)
        begin()
        arena = self._arena(slot, len(contents) + DIGEST_BYTES * len(share.blocks))
        known = self._known(slot, arena)
        arena.begin()
        copying = Copying(flat, share, arena.data)
        arrive, digests = None, b""
        if known and copying.would_find_most(known, seed=version):
            digests = copying.differing(known)
        else:
            arrive = copying.everything(self._staging)
        self._held[slot] = _Held(version, share, digests)
        origin = Origin(seat.history, share.layout, seat.owners)
        if arrive is None:
            arena.finish(version, contents, digests)
            return Taken(arena, origin, None)

        def finish() -> None:
            arrive()
            arena.finish(version, contents)

        return Taken(arena, origin, finish)

    def _contents(
        self,
        flat: Flat,
        version: int,
        seat: Seat,
        shared: tuple[TensorSpec, ...],
        own: tuple[TensorSpec, ...],
    ) -> bytes:
        local = (seat.neighbours.index(seat.share), len(seat.neighbours))
        return Contents(
            version,
            order_of(version)[1],
            Origin(seat.history, self._share.layout, seat.owners),
            seat.share,
            self._share.ranges,
            shared,
            own,
            flat.shared,
            flat.own,
            local if seat.whole else (0, 0),
        ).encode()

    def _arena(self, slot: int, told_bytes: int) -> Arena:
        arena = self._arenas[slot]
        if arena is not None and (
            arena.capacity < self.size_bytes
            or arena.contents_room < told_bytes
            or not arena.is_in_place()  # somebody has cleaned up, and no writer would find it
        ):
            arena.unlink()
            arena.close()
            self._arenas[slot] = arena = None  # also if there is no room for the next
        if arena is None:
            # Twice: numbers in the trees get longer.
            arena = Arena.create(self._make_path(slot), self.size_bytes, 2 * told_bytes)
            self._arenas[slot] = arena
        return arena

    # -- what arenas hold --------------------------------------------------------------------------

    def _known(self, slot: int, arena: Arena) -> bytes:
        """The digests of what the arena holds now, if it is what is to be overwritten; none from
        here on."""
        held, self._held[slot] = self._held[slot], None
        if held is None or held.share is not self._share or held.version != arena.version:
            return b""
        return held.digests

    def learn(self, version: int, digests: bytes) -> None:
        """The digests of all blocks of a snapshot have been made. From any thread."""
        for slot, held in enumerate(self._held):
            if held is not None and held.version == version:
                self._held[slot] = replace(held, digests=digests)

    def doubt(self) -> None:
        """Something did not come out as it was snapshot: copy everything next. From any thread."""
        self._held = [None] * len(self._held)

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
