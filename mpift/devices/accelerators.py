"""Probing accelerators: how busy, how full, how hot, and whether the device is all right.

Every kind of device has one class that fits ``AcceleratorProbe``; ``accelerator_probe`` picks the
one for this machine. Nothing here loads torch or creates a context on a device: a probe must also
work in a process that never computes. Calls into a driver may block while a device is failing, so
whoever samples regularly does it on a thread apart (``probes.HostProbe`` does).

A probe tells faults; what is short of one (memory errors that were corrected, heat, a lost link)
it only reads, and ``core.health`` judges it over time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from mpift.devices import cann

# As ``backend`` has it, which loads torch.
NPU_BACKEND_VARIABLE = "MPIFT_NPU_BACKEND"


@dataclass(frozen=True, slots=True)
class AcceleratorState:
    """One reading of one device; shares from 0 to 1, None where nobody tells.

    ``healthy`` is False for a fault, None where the driver does not say. ``words`` name the device
    and say what is wrong or why it is unknown; ``warning`` says what is less than a fault, "" if
    there is nothing. ``device`` is the name alone.

    ``use`` is the share of time in which the device computed. Errors are of its memory, counted
    since a moment of the driver's choice. ``link_up`` is its network port (NPU) or all its links
    to other devices (CUDA). ``temperature_limit_celsius`` is where it slows down to cool.
    """

    healthy: bool | None
    words: str
    use: float | None = None
    memory: float | None = None
    temperature_celsius: float | None = None
    temperature_limit_celsius: float | None = None
    power_watts: float | None = None
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    link_up: bool | None = None
    error_codes: tuple[str, ...] = ()
    warning: str = ""
    device: str = ""


class AcceleratorProbe(Protocol):
    """Reads the state of one device."""

    @property
    def spacing_seconds(self) -> float:
        """A reading is worth its cost at most this often."""

    def sample(self) -> AcceleratorState:
        """The device's state now. It never raises for a fault of the device: it reports it."""


class ErrorsOfThisJob:
    """How many errors came since the first count that was seen.

    Drivers count since they were loaded, or for the life of the device. A count that falls was
    reset, and goes on from there.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def of(self, count: int | None) -> int:
        """Of ``count`` errors, those of this job; 0 where it is unknown."""
        if count is None:
            return 0
        self._before = count if self._before is None else min(self._before, count)
        return count - self._before


def accelerator_probe(local_rank: int = 0) -> AcceleratorProbe | None:
    """The probe for the device of the node's ``local_rank``-th rank; None where there is no device.

    The device is the entry of ``ASCEND_RT_VISIBLE_DEVICES`` or ``CUDA_VISIBLE_DEVICES`` at that
    position, counted round, or of all devices where that is not set. An NPU comes first, where
    npu-smi is found and ``MPIFT_NPU_BACKEND`` does not put another module in torch_npu's place.
    """
    # Not at the top: both need the classes above.
    from mpift.devices import npu_smi, nvml

    if (os.environ.get(NPU_BACKEND_VARIABLE) or cann.TORCH_NPU) == cann.TORCH_NPU:
        npu = npu_smi.probe(local_rank)
        if npu is not None:
            return npu
    return nvml.probe(local_rank)
