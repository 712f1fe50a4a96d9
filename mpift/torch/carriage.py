"""The gradients of one layout on their way: from ``p.grad`` into contributions, and from results
back into ``p.grad``.

Which buffer a bucket's gradients go to is decided when the first of them comes; a bucket is sent
when the last one has come, and is contributed once it is in host memory. If a device fails on the
way, ``rewind`` tells what has arrived from what has to come again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import torch

from mpift.devices.carriers import Carrier, Load, carrier_for, memory_for
from mpift.devices.courier import Courier
from mpift.errors import GradientError
from mpift.reduction.buckets import Bucket, Layout, ParameterSpec, lay_out
from mpift.reduction.codecs import Compressor
from mpift.reduction.gradients import GradientRounds
from mpift.reduction.results import Summed

# What a compressor's type means for torch.
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that have gradients, in the order of the groups."""
    every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return [parameter for parameter in every if parameter.requires_grad]


def dense_gradient(
    parameter: torch.Tensor, name_of: Callable[[torch.Tensor], str], sparse_as_dense: bool
) -> torch.Tensor | None:
    """``p.grad``, made dense if that is allowed. Raises ``GradientError`` if it is not."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return gradient
    if not sparse_as_dense:
        raise GradientError(
            f"the gradient of {name_of(parameter)!r} is sparse, which cannot be reduced:"
            " use sparse_as_dense=True, or build the layer with sparse=False"
        )
    parameter.grad = gradient.to_dense()
    return parameter.grad


def layout_of(
    parameters: Sequence[torch.Tensor], names: Sequence[str], first_bytes: int, bucket_bytes: int
) -> Layout:
    """The buckets of ``parameters``; their memory is what their devices copy from and to."""
    devices = list(dict.fromkeys(p.device for p in parameters))
    specs = [
        ParameterSpec(name, p.numel(), str(p.dtype).removeprefix("torch."), devices.index(p.device))
        for name, p in zip(names, parameters, strict=True)
    ]

    def memory(bucket: Bucket) -> np.ndarray:
        return memory_for(devices[bucket.device], bucket.length, bucket.dtype)

    pinned = [number for number, device in enumerate(devices) if device.type != "cpu"]
    return lay_out(specs, first_bytes, bucket_bytes, memory, pinned)


class Carriage:
    """See the module's docstring. ``predivide`` divides gradients on their way in, and multiplies
    results, which are divided by the ranks that took part for the ``average``; ``compressor`` says
    what may be narrowed on the way."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        workload: GradientRounds,
        average: bool,
        predivide: float,
        compressor: Compressor,
        courier: Courier,
    ) -> None:
        self.parameters = parameters
        self.layout = layout
        self._workload = workload
        self._average = average
        self._predivide = predivide
        self._compressor = compressor
        self._courier = courier
        self._places = [(0, 0)] * len(parameters)  # (bucket, position in it)
        for number, bucket in enumerate(layout.buckets):
            for position, slot in enumerate(bucket.slots):
                self._places[slot.parameter] = (number, position)
        self._carriers = [self._carrier(bucket) for bucket in layout.buckets]
        self._flats: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        self.begin()

    def _carrier(self, bucket: Bucket) -> Carrier:
        first = self.parameters[bucket.slots[0].parameter]
        slots = [(slot.start, slot.stop) for slot in bucket.slots]
        narrow = _NARROW.get(self._compressor.type) if first.dtype == torch.float32 else None
        travels = [narrow if self._compressor.compresses(b - a) else None for a, b in slots]
        return carrier_for(
            Load(first.device, first.dtype, slots, 1.0 / self._predivide, travels), self._courier
        )

    def begin(self) -> None:
        """A new gradient: nothing of it is placed."""
        self.placed: set[int] = set()  # parameters
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._unsent = len(self.layout.buckets)
        self._arrived: set[int] = set()  # buckets
        self._withheld = False
        self._early: dict[int, Summed] = {}  # by bucket, what is in ``p.grad``
        self._targets: dict[int, tuple[np.ndarray, bool]] = {}  # (buffer, whether to add to it)

    # -- in ----------------------------------------------------------------------------------------

    def place(self, index: int, gradient: torch.Tensor | None) -> None:
        """One gradient is there; the last one of a bucket sends it off."""
        number, position = self._places[index]
        bucket = self.layout.buckets[number]
        array, add = self._target(number)
        slot, carrier = bucket.slots[position], self._carriers[number]
        with torch.no_grad():
            carrier.place(position, gradient, self._flat(number, array), add)
        array[slot.used] = gradient is not None or (add and array[slot.used] > 0)
        self.placed.add(index)
        self._missing[number] -= 1
        if self._missing[number] == 0:
            array[bucket.participation] = 1
            self._unsent -= 1
            carrier.send(self._arrival(number))

    def _arrival(self, number: int) -> Callable[[], None]:
        """What is to be called when a bucket is in host memory."""
        whole, withheld, arrived = self._unsent == 0, self._withheld, self._arrived

        def arrive() -> None:
            arrived.add(number)
            if not withheld:
                self._workload.contribute(number, whole)

        return arrive

    def _target(self, number: int) -> tuple[np.ndarray, bool]:
        """The buffer that this gradient's part of a bucket goes to.

        While an earlier gradient is under way none is sent after it: it is added to the next."""
        if not self._targets:
            self._withheld = self._workload.busy
        if number not in self._targets:
            self._targets[number] = self._workload.contributions.target(number, self._withheld)
        return self._targets[number]

    def _flat(self, number: int, array: np.ndarray) -> torch.Tensor:
        """A tensor over the memory of a contribution, made anew when that changes."""
        known = self._flats.get(number)
        if known is None or known[0] is not array:
            known = self._flats[number] = (array, _tensor_over(array))
        return known[1]

    def drain(self) -> None:
        """Return once all that was sent is contributed. Raises what a device has raised."""
        self._courier.drain()

    @property
    def proven(self) -> bool:
        """Whether each accelerator has brought something of this gradient to the host: then all
        that it was asked before has been done without a fault."""
        arrived = {self.layout.buckets[number].device for number in self._arrived}
        kinds = {
            bucket.device: self.parameters[bucket.slots[0].parameter].device.type
            for bucket in self.layout.buckets
        }
        return all(device in arrived for device, kind in kinds.items() if kind != "cpu")

    def rewind(self) -> None:
        """A device has failed: what has not reached the host is to be placed again."""
        with contextlib.suppress(Exception):  # more of the same fault
            self._courier.drain()
        for number, bucket in enumerate(self.layout.buckets):
            lost: Iterable[int] = self._carriers[number].rewind()
            if not self._missing[number] and number not in self._arrived:
                lost = range(len(bucket.slots))
                self._unsent += 1
                self._carriers[number].forget()
            for position in lost:
                self.placed.discard(bucket.slots[position].parameter)
                self._missing[number] += 1

    def forget(self) -> None:
        """Whatever devices keep for the next gradients is of no use."""
        for carrier in self._carriers:
            carrier.forget()

    def place_nothing(self) -> None:
        """In place of the rest of this gradient: what is missing of it takes no part in the round.
        Returns once that is contributed, or is carried to the next one."""
        for number, bucket in enumerate(self.layout.buckets):
            if not self._missing[number]:
                continue
            array, add = self._target(number)
            if not add:  # what was carried from an earlier gradient is as good as before
                array[:] = 0
            self.placed.update(slot.parameter for slot in bucket.slots)
            self._missing[number] = 0
            self._unsent -= 1
            self._arrival(number)()

    # -- out ---------------------------------------------------------------------------------------

    def take(self, round_: int, sums: Container[Summed] = ()) -> None:
        """Let ``p.grad`` be the result of a completed round; None for a parameter that no rank
        used. It is already, where what ``take_early`` took is one of ``sums``."""
        with torch.no_grad(), self._workload.results.reading(round_) as results:
            for number, result in enumerate(results):
                if self._early.get(number) not in sums:
                    self._copy_out(number, result)

    def take_early(self, summed: Summed) -> None:
        """A bucket of the round that is waited for has been summed: copy it while others are. If a
        fault makes it be summed again, that is taken as if this had not been."""
        bucket = self.layout.buckets[summed.bucket]
        parameters = [self.parameters[slot.parameter] for slot in bucket.slots]
        used = summed.result[bucket.slots[0].used : bucket.late]
        if parameters[0].device.type != "cpu" or any(p.grad is None for p in parameters):
            return
        with torch.no_grad(), self._workload.holding(summed) as is_open:
            if is_open and used.all():
                self._copy_out(summed.bucket, summed.result)
                self._early[summed.bucket] = summed

    def forget_early(self) -> None:
        """What was taken early may have been changed since."""
        self._early = {}

    def _copy_out(self, number: int, result: np.ndarray) -> None:
        bucket = self.layout.buckets[number]
        divisor = 1.0 / self._predivide
        if self._average:
            divisor *= float(result[bucket.participation])
        used = result[bucket.slots[0].used : bucket.late].tolist()
        gradients: list[torch.Tensor | None] = []
        for slot, count in zip(bucket.slots, used, strict=True):
            parameter = self.parameters[slot.parameter]
            if not count:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradients.append(parameter.grad)
        self._carriers[number].fetch(_tensor_over(result), divisor, gradients)

    def settle(self) -> None:
        """Return once no device reads a result any more."""
        for carrier in self._carriers:
            carrier.settle()


def _tensor_over(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same memory: the one that the memory came with, if it did, since a device
    knows its pinned memory by that."""
    return array.base if isinstance(array.base, torch.Tensor) else torch.from_numpy(array)
