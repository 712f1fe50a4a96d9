"""Letters: what servers and clients write to each other: numbers, and any number of arrays.

A letter is one parcel with the numbers and all small arrays, and one more for each large array,
which is sent from where it lies: no thread of the loop copies much. Parcels from one rank come in
order, so the parts of a letter follow each other. What is not here in full when the view ends is
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpift.transport.messages import Kind
from mpift.transport.parcels import Parcel, Parcels

_PACKED_BYTES = 64 << 10  # an array up to this size travels with the numbers
_LETTER_BYTES = 4 << 20  # packed arrays of one letter, all together
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """``server`` is the number of the parameter server, ``verb`` says what it is about. Arrays are
    uint8[n] and read-only when they have come from elsewhere."""

    sender: int
    server: int
    verb: int
    numbers: Sequence[int]
    arrays: Sequence[np.ndarray] = ()


@dataclass(slots=True, eq=False)
class _Opened:
    """A letter whose first parcel is here; arrays that are still to come are None."""

    letter: Letter
    arrays: list[np.ndarray | None] = field(default_factory=list)


class Letters:
    """Used on the service thread only; ``deliver`` is called with each letter that is complete."""

    def __init__(self, parcels: Parcels, deliver: Callable[[Letter], None]) -> None:
        self._parcels = parcels
        self._deliver = deliver
        self._opened: dict[int, _Opened] = {}  # by sender
        parcels.register(Kind.PARAMETERS, self._arrived)

    def send(self, member: int, letter: Letter) -> None:
        """Nobody may write to the letter's arrays any more."""
        flat = [bytes_of(array) for array in letter.arrays]
        packed, total = [], 0
        for array in flat:
            small = array.nbytes <= _PACKED_BYTES and total + array.nbytes <= _LETTER_BYTES
            packed.append(small or not array.nbytes)
            total += array.nbytes * small
        sizes = [array.nbytes if here else -array.nbytes for array, here in _both(flat, packed)]
        head = np.array([len(letter.numbers), len(sizes), *letter.numbers, *sizes], np.int64)
        parts = [head.view(np.uint8)]
        for array, here in _both(flat, packed):
            if here:
                parts += [_padding(parts[-1]), array]
        first = np.concatenate(parts)
        self._parcels.send(Kind.PARAMETERS, member, f"{letter.server} {letter.verb}", first)
        for array, here in _both(flat, packed):
            if not here:
                self._parcels.send(Kind.PARAMETERS, member, "more", array)

    def forget(self) -> None:
        """The view has ended: what isn't complete never will be."""
        self._opened = {}

    def _arrived(self, parcel: Parcel) -> None:
        if parcel.text != "more":
            self._opened[parcel.sender] = _open(parcel)
        elif parcel.sender in self._opened:
            missing = self._opened[parcel.sender].arrays
            missing[[array is None for array in missing].index(True)] = parcel.data
        else:
            return
        opened = self._opened[parcel.sender]
        arrays = [array for array in opened.arrays if array is not None]
        if len(arrays) < len(opened.arrays):
            return
        del self._opened[parcel.sender]
        for array in arrays:
            array.flags.writeable = False
        first = opened.letter
        self._deliver(Letter(first.sender, first.server, first.verb, first.numbers, arrays))


def _open(parcel: Parcel) -> _Opened:
    numbers, sizes = (int(count) for count in parcel.data[:16].view(np.int64))
    stop = 8 * (2 + numbers + sizes)
    head = parcel.data[16:stop].view(np.int64).tolist()
    arrays: list[np.ndarray | None] = []
    for size in head[numbers:]:
        if size < 0:
            arrays.append(None)
            continue
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + size
        arrays.append(parcel.data[start:stop])
    server, verb = map(int, parcel.text.split())
    return _Opened(Letter(parcel.sender, server, verb, head[:numbers]), arrays)


def _both(arrays: Sequence[np.ndarray], packed: Sequence[bool]) -> zip[tuple[np.ndarray, bool]]:
    return zip(arrays, packed, strict=True)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """uint8[n] over the memory of ``array``, which is contiguous."""
    return array.reshape(-1).view(np.uint8)


def _padding(part: np.ndarray) -> np.ndarray:
    """What lets the next part of a parcel begin where any dtype may lie."""
    return np.zeros(-part.nbytes % _ALIGNMENT, np.uint8)
