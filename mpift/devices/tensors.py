"""Where tensors live: the way of gradients between a device and the host memory that MPI sees."""

from __future__ import annotations

from typing import Protocol

import torch

from mpift.devices.cpu import CpuDevice
from mpift.errors import GradientError

__all__ = ["Device", "device_of"]


class Device(Protocol):
    """Moves one gradient at a time; ``host`` is a flat view of a bucket in host memory."""

    def copy_in(self, gradient: torch.Tensor, host: torch.Tensor, factor: float) -> None:
        """Begin ``host`` = ``gradient`` * ``factor``, in the host's dtype."""

    def fence(self) -> None:
        """Return once all copies begun so far are in host memory."""

    def copy_out(self, host: torch.Tensor, divisor: float, gradient: torch.Tensor) -> None:
        """``gradient`` = ``host`` / ``divisor``, in the gradient's dtype; ``host`` stays."""


_DEVICES: dict[str, Device] = {"cpu": CpuDevice()}


def device_of(tensor: torch.Tensor) -> Device:
    """The device layer for ``tensor``; ``GradientError`` for a kind that has none yet."""
    kind = tensor.device.type
    if kind not in _DEVICES:
        raise GradientError(
            f"gradients on device {tensor.device} cannot be reduced in this version;"
            f" supported: {', '.join(_DEVICES)}"
        )
    return _DEVICES[kind]
