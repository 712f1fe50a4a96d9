"""Flat fusion buffers: how parameters are laid out in buckets, and the memory behind them.

A bucket holds parameters of one dtype and, at its end, one used-count a parameter, the number of
late gradients, the number of ranks that want an examination and the participation count, all as
elements of the sum:

    [ parameter 0 | parameter 1 | ... | used 0 | used 1 | ... | late | alarm | participation ]

So every rank reads from the result alone how many ranks took part, whether anybody used a
parameter, whether anybody's gradient was meant for an earlier round, and whether all have to
compare their states after this round. Half types are widened to float32, because MPI has no
half-precision sum.

Copies a gradient byte: one in (``p.grad`` to the contribution), one out (result to ``p.grad``, the
division included). ``p.grad`` never aliases either, since users clip and zero it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpift.errors import GradientError

# What is summed as what. Complex gradients are seen as pairs of reals by the caller.
SUM_DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float32),
    "bfloat16": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies: elements [start, stop) of its bucket, and its used-count."""

    parameter: int
    start: int
    stop: int
    used: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A slice of the flat gradient. ``length`` counts elements, counts included; ``device`` tells
    the devices of one process apart, by a number."""

    dtype: np.dtype
    slots: tuple[Slot, ...]
    length: int
    device: int = 0

    @property
    def elements(self) -> int:
        """Without the counts."""
        return self.slots[-1].stop

    @property
    def late(self) -> int:
        """Index of the number of late gradients."""
        return self.length - 3

    @property
    def alarm(self) -> int:
        """Index of the number of ranks that want all states to be examined after the round."""
        return self.length - 2

    @property
    def participation(self) -> int:
        """Index of the participation count."""
        return self.length - 1


def empty_bucket(bucket: Bucket) -> np.ndarray:
    """Zeroed memory for one bucket."""
    return np.zeros(bucket.length, bucket.dtype)


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets, in the one order in which every rank starts them. ``memory`` gives what
    contributions and results lie in, zeroed; those of the ``pinned`` devices lie in no other, since
    a device reaches no other."""

    buckets: tuple[Bucket, ...]
    memory: Callable[[Bucket], np.ndarray] = field(default=empty_bucket, compare=False)
    pinned: frozenset[int] = frozenset()

    def places(self, memory: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """By bucket, the array of ``memory`` that it may lie in; None where it needs its own."""
        if not memory:
            return [None] * len(self.buckets)
        pairs = zip(self.buckets, memory, strict=True)
        return [None if bucket.device in self.pinned else array for bucket, array in pairs]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout needs to know of a parameter: name, elements, dtype by its torch name, and a
    number for the device that it is on."""

    name: str
    elements: int
    dtype: str
    device: int = 0


def lay_out(
    parameters: Sequence[ParameterSpec],
    first_bytes: int,
    bucket_bytes: int,
    memory: Callable[[Bucket], np.ndarray] = empty_bucket,
    pinned: Iterable[int] = (),
) -> Layout:
    """Buckets for ``parameters``, last one first: backward produces gradients in about that order.

    The first bucket of the order closes at ``first_bytes``, the others at ``bucket_bytes``. Dtypes
    and devices are kept apart. Raises ``GradientError`` for a dtype that has no sum.
    """
    open_buckets: dict[tuple[str, int], list[int]] = {}
    closed: list[tuple[tuple[str, int], list[int]]] = []
    sizes: dict[tuple[str, int], int] = {}
    for number in reversed(range(len(parameters))):
        spec = parameters[number]
        if spec.dtype not in SUM_DTYPES:
            raise GradientError(
                f"parameter {spec.name!r} has dtype {spec.dtype}, whose gradients cannot be"
                f" reduced; known: {', '.join(SUM_DTYPES)}"
            )
        kind = (spec.dtype, spec.device)
        open_buckets.setdefault(kind, []).append(number)
        size = sizes.get(kind, 0) + spec.elements * SUM_DTYPES[spec.dtype].itemsize
        limit = bucket_bytes if closed else first_bytes
        if size >= limit:
            closed.append((kind, open_buckets.pop(kind)))
            size = 0
        sizes[kind] = size
    closed += open_buckets.items()
    buckets = (_bucket(parameters, *kind, numbers) for kind, numbers in closed)
    return Layout(tuple(buckets), memory, frozenset(pinned))


def _bucket(
    parameters: Sequence[ParameterSpec], dtype: str, device: int, numbers: Iterable[int]
) -> Bucket:
    numbers = list(numbers)
    total = sum(parameters[number].elements for number in numbers)
    slots, start = [], 0
    for position, number in enumerate(numbers):
        stop = start + parameters[number].elements
        slots.append(Slot(number, start, stop, total + position))
        start = stop
    return Bucket(SUM_DTYPES[dtype], tuple(slots), total + len(numbers) + 3, device)


class Contributions:
    """The memory of what this rank puts into the rounds of one layout: a buffer a bucket, and what
    is carried to a later round. ``homes`` is memory for the buffers, where they may lie in it.
    A buffer that MPI may still read is replaced, never reused.
    """

    def __init__(self, layout: Layout, homes: Sequence[np.ndarray] = ()) -> None:
        self.layout = layout
        self.buffers = [
            self._fresh(bucket) if home is None else home
            for bucket, home in enumerate(layout.places(homes))
        ]
        # What has found no round yet, and is added to the next gradient.
        self._carried: list[np.ndarray | None] = [None] * len(layout.buckets)

    def replace(self, bucket: int) -> None:
        """A fresh buffer in place of one that may still be read from."""
        self.buffers[bucket] = self._fresh(bucket)

    def _fresh(self, bucket: int) -> np.ndarray:
        return self.layout.memory(self.layout.buckets[bucket])

    def target(self, bucket: int, withheld: bool) -> tuple[np.ndarray, bool]:
        """Where a gradient is put, and whether it is added to what is there: into the buffer for
        the open round, with what was carried; or, ``withheld``, to what is carried."""
        carried = self._carried[bucket]
        if withheld:
            if carried is not None:
                return carried, True
            carried = self._carried[bucket] = self._fresh(bucket)
            return carried, False
        if carried is None:
            return self.buffers[bucket], False
        np.copyto(self.buffers[bucket], carried)
        self._carried[bucket] = None
        return self.buffers[bucket], True

    def carry(self, bucket: int) -> None:
        """What is in a buffer has found no round: keep it for the next gradient."""
        given, carried = self.buffers[bucket], self._carried[bucket]
        if carried is None:
            carried = self._carried[bucket] = self._fresh(bucket)
            np.copyto(carried, given)
            return
        carried += given
        counts = carried[self.layout.buckets[bucket].slots[0].used :]
        np.minimum(counts, 1, out=counts)

    @property
    def carries(self) -> tuple[int, ...]:
        """Buckets in which something is carried."""
        return tuple(b for b, carried in enumerate(self._carried) if carried is not None)

    def forget_carried(self) -> None:
        """Nothing is carried on."""
        self._carried = [None] * len(self.buffers)
