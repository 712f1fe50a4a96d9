"""A rank's share of a state: which blocks it copies, and where in its arena they go."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpift.checkpoint.arena import blocks_between
from mpift.checkpoint.blocks import TensorSpec, cut
from mpift.checkpoint.group import Seat


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor, which lie at ``offset`` of the arena. Tensors are
    counted through those that all ranks hold alike, and on through this rank's own."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Share:
    """``blocks`` in the order of their bytes in the arena, each with its end there in ``ends``: of
    the shared tensors those with numbers in ``ranges``, counted through all shared tensors, then
    all of this rank's own. ``layout`` stands for how the shared tensors are cut."""

    ranges: tuple[tuple[int, int], ...]
    blocks: tuple[Piece, ...]
    ends: tuple[int, ...]
    layout: str

    @property
    def size_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0


def share_of(shared: Sequence[TensorSpec], own: Sequence[TensorSpec], seat: Seat) -> Share:
    """What the rank in that seat copies."""
    sizes = [stop - start for spec in shared for start, stop in spec.blocks()]
    ranges = _ranges(sizes, seat)
    text = json.dumps([[s.name, s.dtype, s.shape, s.block_bytes] for s in shared])
    layout = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    of_shared = (
        (tensor, *shared[tensor].block(block))
        for first, last in ranges
        for _, tensor, block in blocks_between(shared, first, last)
    )
    of_own = (
        (tensor, *block) for tensor, spec in enumerate(own, len(shared)) for block in spec.blocks()
    )
    blocks = []
    offset = 0
    for tensor, start, stop in itertools.chain(of_shared, of_own):
        blocks.append(Piece(tensor, start, stop, offset))
        offset += stop - start
    ends = tuple(piece.offset + piece.stop - piece.start for piece in blocks)
    return Share(ranges, tuple(blocks), ends, layout)


def runs(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same bytes in as few pieces as there can be."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and (last.tensor, last.stop) == (piece.tensor, piece.start):
            last = last._replace(stop=piece.stop)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


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
    return (mine, *_as_ranges(numbers[first:last]))


def _as_ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as half-open ranges."""
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield run[0], run[-1] + 1
