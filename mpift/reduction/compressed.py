"""Sums over all ranks whose values travel compressed, since MPI has no sum of what a codec makes.

The values are cut in one piece a rank. Stage 1: each rank sends every other one its part of that
rank's piece, encoded, with all its counts. Stage 2: each adds up its own piece, in float32 and in
rank order, encodes the sum and sends it to all others. Everybody decodes the same bytes, the owner
too, so every rank has the same bits. These are plain messages, so sums of several buckets may be
under way at once and no order binds them.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what encoding loses is kept as this
rank's residual, and added to its next contribution. That holds for the loss in a sum as well: its
owner keeps it, in the same residual, since for later results it is equal who adds it. So nothing
refers to how the values are cut, and a view that changes loses no more than the dead ranks'
residuals.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpift.reduction.buckets import Bucket
from mpift.reduction.codecs import FLOAT32, Codec, Compressor, Plain, Range
from mpift.transport.lane import Started

# Values are worked on in blocks that stay in the processor's cache, with what is made of them. Not
# longer, or torch's casts (``codecs.use_casts``) would start threads of their own.
BLOCK_ELEMENTS = 32768

# What ``tag`` of a sum may be; those below are taken by other messages. They run on a communicator
# that is not revoked, where messages on their way do no harm when a rebuild begins.
OPERATION_TAG = 8
GRADIENT_TAG = 16
GRADIENT_TAGS_A_LANE = 1 << 14

_HEAD_BYTES = 8  # of a contribution: whether anything follows

# Requests of a stage that failed while it was being started: nobody waits for them any more, but
# MPI may still carry them out. Kept for life, like a lane's quarantine.
_QUARANTINE: list[Started] = []


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements [start, stop), all of them encoded or all of them plain."""

    start: int
    stop: int
    plain: bool


class _Stage(enum.Enum):
    IDLE = enum.auto()  # before the first, or all that was started has completed
    CONTRIBUTIONS = enum.auto()  # under way
    SUMS = enum.auto()  # under way


class _Buffers:
    """Messages for one size and rank. ``contributions[r]`` is rank r's part of this rank's piece;
    ``pieces[r]`` is this rank's part of rank r's piece, and later the sum of it."""

    def __init__(self, size: int, rank: int, length: int) -> None:
        self.size, self.rank = size, rank
        self.contributions = [np.empty(length, np.uint8) for _ in range(size)]
        self.pieces = [np.empty(length, np.uint8) for _ in range(size)]


class CompressedSum:
    """The sum of one bucket: ``dtype``[elements] of values through ``codec``, and after them
    ``dtype``[counts] of exact small whole numbers. It is float32, unless all values travel plain.

    ``plain`` are ranges [start, stop) of values that travel as they are, ascending. ``feedback``:
    whether a residual is kept. Used on the service thread only. A round is ``start``, then
    ``proceed`` each time that all it was given has completed, until that is nothing; then
    ``result``, and ``settle`` once the whole round is over. After a fault ``abandon``; then
    ``start`` again for a redo, or ``settle`` where the round's result came from another rank: that
    holds what this rank sent.
    """

    def __init__(
        self,
        codec: Codec,
        elements: int,
        counts: int = 0,
        plain: Sequence[Range] = (),
        feedback: bool = True,
        dtype: np.dtype = FLOAT32,
    ) -> None:
        self._codec = codec
        self._dtype = dtype
        self._plain = Plain(dtype)
        self._elements = elements
        self._blocks = tuple(_blocks(elements, plain))
        self._feedback = feedback and codec.lossy
        self._residual: np.ndarray | None = None
        # The residual that is in force once the round is over; elements of plain ranges stay 0.
        self._next_residual: np.ndarray | None = None
        self._unsettled = False
        self._stage = _Stage.IDLE
        self._tag = 0
        self._buffers: _Buffers | None = None
        self._pieces: list[list[_Block]] = []
        self._present: list[int] = []  # ranks that contributed
        self._counts = np.zeros(counts, dtype)

    @property
    def counts(self) -> np.ndarray:
        """dtype[counts]: their sum over all ranks. Complete as the values are."""
        return self._counts

    @property
    def residual(self) -> np.ndarray | None:
        """float32[elements]: what is still owed to later results; None before the first loss."""
        return self._residual

    def owe(self, residual: np.ndarray) -> None:
        """Before the first start: dtype[elements] that is owed to its results from before."""
        self._residual = residual

    def start(self, comm: Any, tag: int, contribution: np.ndarray | None) -> list[Started]:
        """Begin the sum of a round; what is returned has to complete, nothing means it is done.

        ``contribution`` is dtype[elements + counts], read before this returns; None is zeros and
        leaves the residual as it is. Messages take the tags 2 ``tag`` and 2 ``tag`` + 1 of
        ``comm``, whose other ranks start theirs with the same one.
        """
        buffers = self._fresh_or_done(comm.size, comm.rank)
        self._tag = 2 * tag
        lengths = self._write_contributions(buffers, contribution)
        self._stage = _Stage.CONTRIBUTIONS
        others = _others(comm)
        started = exchange(
            comm,
            self._tag,
            receive={peer: buffers.contributions[peer] for peer in others},
            send={peer: buffers.pieces[peer][: lengths[peer]] for peer in others},
        )
        return started or self.proceed(comm)

    def proceed(self, comm: Any) -> list[Started]:
        """All that was started has completed: what has to complete next; nothing if it is done."""
        buffers = self._buffers
        if self._stage is not _Stage.CONTRIBUTIONS or buffers is None:
            self._stage = _Stage.IDLE
            return []
        self._add_counts(buffers)
        if not self._present:  # which everybody sees, so nobody sends the zeros that they sum to
            self._stage = _Stage.IDLE
            return []
        length = self._add_values(buffers)
        self._stage = _Stage.SUMS
        others = _others(comm)
        started = exchange(
            comm,
            self._tag + 1,
            receive={peer: buffers.pieces[peer] for peer in others},
            send=dict.fromkeys(others, buffers.pieces[buffers.rank][:length]),
        )
        return started or self.proceed(comm)

    def result(self, out: np.ndarray) -> None:
        """Write the sums, values and counts, into dtype[elements + counts]."""
        assert self._stage is _Stage.IDLE, "the sum is not complete"
        out[self._elements :] = self._counts
        if not self._present:
            out[: self._elements] = 0
            return
        assert self._buffers is not None
        for piece, data in zip(self._pieces, self._buffers.pieces, strict=True):
            at = 0
            for block in piece:
                codec = self._codec_of(block).of_sums
                at += codec.decode(data[at:], out[block.start : block.stop])

    def settle(self) -> None:
        """The round is over, and its result holds what this rank sent: what that lost counts."""
        if self._unsettled:
            self._residual, self._next_residual = self._next_residual, self._residual
            self._unsettled = False

    def abandon(self) -> None:
        """What is under way will never complete: its buffers are not used again."""
        self._buffers = None
        self._stage = _Stage.IDLE

    # -- stage 1 -----------------------------------------------------------------------------------

    def _fresh_or_done(self, size: int, rank: int) -> _Buffers:
        """Buffers for this size and rank that MPI has nothing to do with."""
        kept = self._buffers
        if (
            kept is not None
            and self._stage is _Stage.IDLE
            and (kept.size, kept.rank) == (size, rank)
        ):
            return kept
        self._pieces = [
            list(_cut(self._blocks, *_piece(self._elements, size, r))) for r in range(size)
        ]
        longest = max(self._max_bytes(piece) for piece in self._pieces)
        head = _HEAD_BYTES + self._counts.nbytes
        self._buffers = _Buffers(size, rank, head + longest)
        return self._buffers

    def _max_bytes(self, piece: Sequence[_Block]) -> int:
        total = 0
        for block in piece:
            codec, length = self._codec_of(block), block.stop - block.start
            total += max(codec.max_bytes(length), codec.of_sums.max_bytes(length))
        return total

    def _codec_of(self, block: _Block) -> Codec:
        return self._plain if block.plain else self._codec

    @np.errstate(all="ignore")  # gradients overflow now and then; who steps on them finds out
    def _write_contributions(self, buffers: _Buffers, contribution: np.ndarray | None) -> list[int]:
        """Fill the messages to all ranks; returns their lengths."""
        messages = list(buffers.pieces)
        messages[buffers.rank] = buffers.contributions[buffers.rank]
        loss = self._begin_residual(contribution is None)
        lengths = []
        for message, piece in zip(messages, self._pieces, strict=True):
            message[:_HEAD_BYTES].view(np.uint64)[0] = contribution is not None
            at = _HEAD_BYTES
            if contribution is not None:
                counts = message[at : at + self._counts.nbytes].view(self._dtype)
                counts[:] = contribution[self._elements :]
                at += counts.nbytes
                for block in piece:
                    at += self._encode(block, contribution, message[at:], loss)
            lengths.append(at)
        return lengths

    def _begin_residual(self, zeros: bool) -> np.ndarray | None:
        """The residual to come: the present one if this rank contributes nothing."""
        if not self._feedback:
            return None
        if self._next_residual is None:
            self._next_residual = np.zeros(self._elements, np.float32)
        if zeros:
            self._next_residual[:] = 0 if self._residual is None else self._residual
        self._unsettled = True
        return self._next_residual

    def _encode(
        self, block: _Block, contribution: np.ndarray, message: np.ndarray, loss: np.ndarray | None
    ) -> int:
        """One block of the contribution, and what is owed of it; returns the bytes used."""
        here = slice(block.start, block.stop)
        codec, values = self._codec_of(block), contribution[here]
        if loss is None or not codec.lossy:
            return codec.encode(values, message)
        if self._residual is not None:
            values = values + self._residual[here]
        length = codec.encode(values, message)
        codec.decode(message, loss[here])
        _subtract_from(values, loss[here])
        return length

    # -- stage 2 -----------------------------------------------------------------------------------

    def _add_counts(self, buffers: _Buffers) -> None:
        self._counts[:] = 0
        self._present = []
        for rank, message in enumerate(buffers.contributions):
            if message[:_HEAD_BYTES].view(np.uint64)[0]:
                counts = message[_HEAD_BYTES : _HEAD_BYTES + self._counts.nbytes]
                self._counts += counts.view(self._dtype)
                self._present.append(rank)

    @np.errstate(all="ignore")  # as above: infinities of two signs make a NaN
    def _add_values(self, buffers: _Buffers) -> int:
        """Sum this rank's piece into its own message; returns that one's length."""
        out = buffers.pieces[buffers.rank]
        piece = self._pieces[buffers.rank]
        longest = max((block.stop - block.start for block in piece), default=0)
        totals, addends = np.empty((2, longest), self._dtype)
        positions = dict.fromkeys(self._present, _HEAD_BYTES + self._counts.nbytes)
        length = 0
        for block in piece:
            here = slice(block.start, block.stop)
            total, addend = totals[: block.stop - block.start], addends[: block.stop - block.start]
            codec = self._codec_of(block)
            for number, rank in enumerate(self._present):
                message = buffers.contributions[rank][positions[rank] :]
                positions[rank] += codec.decode(message, addend if number else total)
                if number:
                    total += addend
            used = codec.of_sums.encode(total, out[length:])
            if self._feedback and self._next_residual is not None and codec.of_sums.lossy:
                codec.of_sums.decode(out[length:], addend)
                _subtract_from(total, addend)
                self._next_residual[here] += addend
            length += used
        return length


def is_compressed(bucket: Bucket, compressor: Compressor) -> bool:
    """Whether anything in ``bucket`` is."""
    some = any(compressor.compresses(slot.stop - slot.start) for slot in bucket.slots)
    return bucket.dtype == np.float32 and some


def sum_of_slice(
    bucket: Bucket, start: int, stop: int, counts: int, compressor: Compressor
) -> CompressedSum:
    """What sums elements [start, stop) of ``bucket``, and so many counts after them, by messages,
    compressed as far as they are to be."""
    if not is_compressed(bucket, compressor):
        return CompressedSum(Plain(bucket.dtype), stop - start, counts, dtype=bucket.dtype)
    tensors = [(slot.start, slot.stop) for slot in bucket.slots]
    within = [
        (max(first, start) - start, min(last, stop) - start)
        for first, last in compressor.plain_ranges(tensors)
        if first < stop and last > start
    ]
    return CompressedSum(compressor.codec, stop - start, counts, within)


def _others(comm: Any) -> list[int]:
    """All other ranks, the next one first, so that not all send to the same one at once."""
    return [(comm.rank + distance) % comm.size for distance in range(1, comm.size)]


def exchange(
    comm: Any,
    tag: int,
    receive: Mapping[int, np.ndarray],
    send: Mapping[int, np.ndarray],
    bulk: bool = True,
) -> list[Started]:
    """Begin one message from and one to each of these ranks of ``comm``; ``bulk`` as in
    ``Started``. If some of that fails, what was begun is kept for life, like a lane's quarantine.
    """
    started: list[Started] = []
    try:
        for peer, buffer in receive.items():
            request = comm.Irecv(buffer, source=peer, tag=tag)
            started.append(Started(request, (buffer,), bulk=bulk))
        for peer, buffer in send.items():
            request = comm.Isend(buffer, dest=peer, tag=tag)
            started.append(Started(request, (buffer,), sends=True, bulk=bulk))
    except BaseException:
        _QUARANTINE.extend(started)
        raise
    return started


def _subtract_from(values: np.ndarray, decoded: np.ndarray) -> None:
    """Turn what was decoded into what was lost; nothing where that is not finite, since it would
    never go away again."""
    np.subtract(values, decoded, out=decoded)
    finite = np.isfinite(decoded)
    if not finite.all():
        decoded[~finite] = 0


def _piece(elements: int, size: int, rank: int) -> Range:
    return elements * rank // size, elements * (rank + 1) // size


def _blocks(elements: int, plain: Sequence[Range]) -> Iterator[_Block]:
    """All elements in order, by whether they travel plain."""
    at = 0
    for start, stop in plain:
        if not at <= start <= stop <= elements:
            raise ValueError(f"plain ranges {plain} are not ascending within {elements} elements")
        yield _Block(at, start, plain=False)
        yield _Block(start, stop, plain=True)
        at = stop
    yield _Block(at, elements, plain=False)


def _cut(blocks: Sequence[_Block], start: int, stop: int) -> Iterator[_Block]:
    """What of ``blocks`` lies in [start, stop), none longer than ``BLOCK_ELEMENTS``."""
    for block in blocks:
        first, last = max(block.start, start), min(block.stop, stop)
        for at in range(first, last, BLOCK_ELEMENTS):
            yield _Block(at, min(at + BLOCK_ELEMENTS, last), block.plain)
