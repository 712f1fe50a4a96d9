"""What all ranks know of a parameter server: its keys, and how updates are applied."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpift.parameter_server.optimizers import ServerOptimizer


class Verb(enum.IntEnum):
    """What a letter is about, and what is in it."""

    # Client to primary. Numbers: serial, then (key, base) each. Arrays: settings of all keys
    # (float64[keys, settings]), then an update each.
    PUSH = 1
    # The answer: serial, then (key, outcome, version) each.
    PUSHED = 2
    # Client to primary: number of the call, then (key, least version) each.
    PULL = 3
    # The answer: number of the call, then (key, found, version) each. Arrays: the values found.
    PULLED = 4
    # Primary to backup: (key, version, steps, clients) and (client, serial, version) of each
    # client. Arrays: the states.
    COPY = 5
    # The answer: (key, version) each.
    COPIED = 6


class Found(enum.IntEnum):
    """What a pull came to."""

    HERE = 0
    NOT_YET = 1  # the least version that was asked for isn't committed
    LOST = 2


@dataclass(frozen=True, slots=True)
class Key:
    """One key's name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Table:
    """The same on all ranks. A key's position in ``keys`` is its number in letters."""

    number: int  # of the server in this job
    keys: tuple[Key, ...]
    optimizer: ServerOptimizer
    staleness: int | None

    def settings_of(self, array: np.ndarray, keys: int) -> np.ndarray:
        """float64[keys, settings] in a letter's array."""
        return array.view(np.float64).reshape(keys, len(self.optimizer.settings))


def grouped(numbers: Sequence[int], width: int) -> list[Sequence[int]]:
    """``numbers`` in tuples of ``width``."""
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]
