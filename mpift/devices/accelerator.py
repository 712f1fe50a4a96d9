"""Gradients on an accelerator: by pinned host memory, on a stream beside the one that computes.

In: when the last gradient of a bucket is there, the side stream packs the bucket on the device and
copies it to the host, while backward goes on. Nothing on the host waits but the courier's thread,
which sends the bucket off when its event comes. Out: results are copied on the side stream, and the
computing stream waits for that on the device.

Runs of parameters that travel in the same dtype are packed and copied as one. Half types travel as
they are and are widened by the host. What a compressor narrows to sixteen bits is narrowed on the
device, so half the bytes travel both ways; what rounding loses is kept on the device and added to
the next gradient (error feedback, as in ``reduction.compressed``). For that the device gives 4
bytes an element beside the bucket's own 4.

Device memory that two streams use is kept for good and handed over by events, never by the
allocator, which would think that a stream is through with it too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpift.devices import backend
from mpift.devices.courier import Courier


class Run:
    """Parameters [first, last) of a bucket, its elements [start, stop), which travel in one dtype.

    On the device: ``own`` in the gradients' dtype, ``wire`` as they travel, ``sum`` in the host's
    dtype; all of length stop - start, one tensor where dtypes are the same. ``pinned`` is host
    memory for what can't go from and to the bucket itself; ``owed`` what narrowing has lost.
    """

    def __init__(self, slots: Sequence[tuple[int, int]], first: int, last: int) -> None:
        self.first, self.last = first, last
        self.start, self.stop = slots[first][0], slots[last - 1][1]
        self.cuts = [(b - self.start, e - self.start) for b, e in slots[first:last]]
        self.own: torch.Tensor
        self.wire: torch.Tensor
        self.sum: torch.Tensor
        self.owed: torch.Tensor | None = None
        self._pinned: torch.Tensor | None = None

    def make(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype, torch.dtype],
        narrow: torch.dtype | None,
    ) -> None:
        """Memory on ``device``; ``dtypes`` are the gradients' and the host's."""
        length = self.stop - self.start
        own, host = dtypes
        self.own = torch.empty(length, dtype=own, device=device)
        self.sum = self.own if own == host else self.own.new_empty(length, dtype=host)
        self.wire = self.own
        if narrow is not None:
            self.wire = self.own.new_empty(length, dtype=narrow)
            self.owed = torch.zeros_like(self.own)

    @property
    def pinned(self) -> torch.Tensor:
        """Host memory for it, as it travels."""
        if self._pinned is None:
            self._pinned = backend.pinned(self.wire.numel(), self.wire.dtype)
        return self._pinned


class AcceleratorCarrier:
    """See ``mpift.devices.carriers.Carrier``, and ``Load`` for the arguments."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        slots: Sequence[tuple[int, int]],
        factor: float,
        travels: Sequence[torch.dtype | None],
        courier: Courier,
    ) -> None:
        self._device = device
        self._module = backend.of(device)
        self._factor = factor
        self._courier = courier
        self._gradients: list[torch.Tensor | None] = [None] * len(slots)
        self._placed: set[int] = set()
        self._host: torch.Tensor
        self._add = False
        self._computing: list[Any] = []  # streams that have made gradients of this bucket
        with self._module.device(device):
            # The bucket's sum is in a dtype of its own where gradients have sixteen bits.
            sums = torch.float32 if dtype.itemsize == 2 else dtype
            self._runs = list(_runs(slots, travels))
            for run in self._runs:
                run.make(device, (dtype, sums), travels[run.first])
            self._side = self._module.Stream()
            # The side stream may not begin before the memory above is what it is said to be.
            self._side.wait_stream(self._module.current_stream())
            self._sent, self._returned, self._used = (self._module.Event() for _ in range(3))
        self._fetching = False

    # -- in ----------------------------------------------------------------------------------------

    def place(
        self, position: int, gradient: torch.Tensor | None, host: torch.Tensor, add: bool
    ) -> None:
        self._gradients[position] = gradient
        self._placed.add(position)
        self._host, self._add = host, add
        with self._module.device(self._device):
            stream = self._module.current_stream()
        if stream not in self._computing:
            self._computing.append(stream)

    def send(self, done: Callable[[], None]) -> None:
        host, add = self._host, self._add
        arrivals: list[tuple[Run, torch.Tensor]] = []
        with self._module.device(self._device), torch.no_grad():
            for stream in self._computing:
                self._side.wait_stream(stream)
            with self._module.stream(self._side):
                if self._fetching:  # a result that is taken from the same memory
                    self._side.wait_event(self._used)
                for run in self._runs:
                    packed = self._pack(run)
                    direct = packed.dtype == host.dtype and not add
                    target = host[run.start : run.stop] if direct else run.pinned
                    target.copy_(packed, non_blocking=True)
                    if not direct:
                        arrivals.append((run, target))
                self._sent.record(self._side)
        # Who is referred to keeps its memory until it was read.
        held = self._take_placed()

        def deliver() -> None:
            backend.wait_for(self._sent, self._device)
            for run, arrived in arrivals:
                part = host[run.start : run.stop]
                if add:
                    part.add_(arrived)
                else:
                    part.copy_(arrived)
            held.clear()
            done()

        self._courier.take(deliver)

    def _take_placed(self) -> list[torch.Tensor | None]:
        held, self._gradients = self._gradients, [None] * len(self._gradients)
        self._placed.clear()
        self._computing.clear()
        return held

    def _pack(self, run: Run) -> torch.Tensor:
        """The gradients of a run in one piece, as they travel."""
        gradients = self._gradients[run.first : run.last]
        parts = [
            run.own.new_zeros(stop - start) if gradient is None else gradient.reshape(-1)
            for gradient, (start, stop) in zip(gradients, run.cuts, strict=True)
        ]
        if len(parts) == 1 and self._factor == 1.0 and run.owed is None:
            return parts[0]
        torch.cat(parts, out=run.own)
        if self._factor != 1.0:
            run.own.mul_(self._factor)
        if run.owed is not None:
            run.own.add_(run.owed)
            run.wire.copy_(run.own)
            torch.sub(run.own, run.wire, out=run.owed)
            # What overflowed is lost, and must not stay: who steps on it finds out now.
            run.owed.nan_to_num_(0.0, 0.0, 0.0)
        return run.wire

    def rewind(self) -> Sequence[int]:
        positions = sorted(self._placed)
        self._take_placed()
        return positions

    def forget(self) -> None:
        for run in self._runs:
            if run.owed is not None:  # written over, since it may not be readable any more
                run.owed.copy_(torch.zeros(run.owed.shape, dtype=run.owed.dtype))

    # -- out ---------------------------------------------------------------------------------------

    def fetch(
        self, host: torch.Tensor, divisor: float, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self.settle()  # of the pinned memory, too
        with self._module.device(self._device), torch.no_grad():
            computing = self._module.current_stream()
            with self._module.stream(self._side):
                if self._fetching:
                    self._side.wait_event(self._used)
                for run in self._runs:
                    part = host[run.start : run.stop]
                    if run.owed is None:
                        run.sum.copy_(part, non_blocking=True)
                    else:  # exact: sums travel between ranks in the same sixteen bits
                        run.pinned.copy_(part)
                        run.wire.copy_(run.pinned, non_blocking=True)
                        run.sum.copy_(run.wire)
                self._returned.record(self._side)
            self._fetching = True
            computing.wait_event(self._returned)
            for run in self._runs:
                self._unpack(run, divisor, gradients[run.first : run.last])
            self._used.record(computing)

    def _unpack(self, run: Run, divisor: float, gradients: Sequence[torch.Tensor | None]) -> None:
        if divisor != 1.0:
            run.sum.div_(divisor)
        for gradient, (start, stop) in zip(gradients, run.cuts, strict=True):
            if gradient is not None:
                gradient.copy_(run.sum[start:stop].view(gradient.shape))

    def settle(self) -> None:
        if self._fetching:
            backend.wait_for(self._returned, self._device)


def _runs(slots: Sequence[tuple[int, int]], travels: Sequence[torch.dtype | None]) -> Iterator[Run]:
    first = 0
    for last in range(1, len(slots) + 1):
        if last == len(slots) or travels[last] != travels[first]:
            yield Run(slots, first, last)
            first = last
