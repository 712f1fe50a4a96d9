"""Sums of whole arrays over all ranks whose values travel compressed, as operations need them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpift.reduction.codecs import Codec
from mpift.reduction.compressed import OPERATION_TAG, CompressedSum
from mpift.transport.lane import Started

# An array is summed in parts: bounds memory, and the time between two looks at MPI.
PART_ELEMENTS = 1 << 24


class CompressedArray:
    """The sum of one array over all ranks, part by part; nothing is owed afterwards.

    ``array`` is float32 or float64, narrowed to float32 before it is encoded; None if this rank has
    left and adds nothing. The sum is in ``out``, of the shape and dtype that all agreed on, once
    ``start`` or ``proceed`` returns nothing.
    """

    def __init__(self, codec: Codec, array: np.ndarray | None, out: np.ndarray) -> None:
        self._codec = codec
        self._array = None if array is None else array.reshape(-1)
        self._out = out.reshape(-1)
        self._at = 0
        self._sum = CompressedSum(codec, 0)
        self._part = np.empty(0, np.float32)

    def start(self, comm: Any) -> list[Started]:
        """As ``CompressedSum.start``."""
        while self._at < self._out.size:
            length = min(PART_ELEMENTS, self._out.size - self._at)
            if length != self._part.size:
                self._sum = CompressedSum(self._codec, length, feedback=False)
                self._part = np.empty(length, np.float32)
            started = self._sum.start(comm, OPERATION_TAG, self._contribution(length))
            if started:
                return started
            self._take_part()
        return []

    def proceed(self, comm: Any) -> list[Started]:
        """As ``CompressedSum.proceed``."""
        more = self._sum.proceed(comm)
        if more:
            return more
        self._take_part()
        return self.start(comm)

    @np.errstate(over="ignore")  # what float32 cannot hold is infinite
    def _contribution(self, length: int) -> np.ndarray | None:
        if self._array is None:
            return None
        return self._array[self._at : self._at + length].astype(np.float32, copy=False)

    def _take_part(self) -> None:
        self._sum.result(self._part)
        self._out[self._at : self._at + self._part.size] = self._part
        self._at += self._part.size
