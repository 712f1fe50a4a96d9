"""How the gradients of a bucket travel between where they live and the host memory that MPI sees.

A bucket has one carrier, of the kind of its device: ``cpu`` copies, ``accelerator`` goes by pinned
memory on a stream of its own. The face that drives them goes by the interface alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mpift.devices import backend
from mpift.devices.accelerator import AcceleratorCarrier
from mpift.devices.courier import Courier
from mpift.devices.cpu import CpuCarrier
from mpift.errors import GradientError

__all__ = ["Carrier", "Load", "carrier_for", "memory_for"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a bucket's carrier carries: ``slots`` are the parameters' elements [start, stop), one
    after the other from 0 on. On the way in, values are multiplied by ``factor``. ``travels`` is
    for each parameter the dtype that it may be narrowed to on its way, or None."""

    device: torch.device
    dtype: torch.dtype
    slots: Sequence[tuple[int, int]]
    factor: float
    travels: Sequence[torch.dtype | None]


class Carrier(Protocol):
    """Carries one bucket; ``host`` is a flat tensor over its elements in host memory.

    In: ``place`` for every parameter, in any order, then ``send``; no other ``place`` until that is
    done. Out: ``fetch``, and ``settle`` before the memory it was given is written to again.
    """

    def place(
        self, position: int, gradient: torch.Tensor | None, host: torch.Tensor, add: bool
    ) -> None:
        """``gradient`` is there for the parameter at ``position``, None for zeros; ``host`` is to
        hold it, or it is to be added to what ``host`` holds. It may be read until it is sent."""

    def send(self, done: Callable[[], None]) -> None:
        """All are placed: see that they get to ``host`` and call ``done`` then, here or on another
        thread."""

    def rewind(self) -> Sequence[int]:
        """Forget what was placed and has not reached the host; returns those positions."""

    def forget(self) -> None:
        """What the device was still owed by earlier gradients is of no use any more."""

    def fetch(
        self, host: torch.Tensor, divisor: float, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Each of ``gradients``, by position, becomes its part of ``host`` / ``divisor``; of those
        that are None nothing comes. What uses them next on their device finds them so."""

    def settle(self) -> None:
        """Return once no ``fetch`` reads ``host`` any more."""


def carrier_for(load: Load, courier: Courier) -> Carrier:
    """The carrier for a bucket on ``load.device``; ``courier`` waits for devices.

    Raises ``GradientError`` for a kind of device that has none."""
    kind = load.device.type
    if kind == "cpu":
        return CpuCarrier(load.slots, load.factor)
    if kind in backend.KINDS:
        return AcceleratorCarrier(
            load.device, load.dtype, load.slots, load.factor, load.travels, courier
        )
    raise GradientError(
        f"gradients on device {load.device} cannot be reduced: known are {', '.join(backend.KINDS)}"
    )


def memory_for(device: torch.device, length: int, dtype: np.dtype) -> np.ndarray:
    """dtype[length], zeroed: host memory that ``device`` can copy from and to beside the host."""
    if device.type == "cpu":
        return np.zeros(length, dtype)
    return backend.pinned(length, torch.from_numpy(np.empty(0, dtype)).dtype).numpy()
