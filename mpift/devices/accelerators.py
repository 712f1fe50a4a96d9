"""Probing accelerators: how busy, how full, how hot, and whether the device is all right.

Every kind of device has one class that fits ``AcceleratorProbe``; ``accelerator_probe`` picks the
one for this machine. Nothing here loads torch or creates a context on a device: a probe must also
work in a process that never computes. Calls into a driver may block while a device is failing, so
whoever samples regularly does it on a thread apart (``probes.HostProbe`` does).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class AcceleratorState:
    """One reading of one device; shares from 0 to 1, None where the driver does not tell.

    ``use`` is the share of time in which the device computed. ``words`` names the device and, when
    ``healthy`` is false, says what is wrong.
    """

    healthy: bool
    words: str
    use: float | None = None
    memory: float | None = None
    temperature_celsius: float | None = None


class AcceleratorProbe(Protocol):
    """Reads the state of one device."""

    def sample(self) -> AcceleratorState:
        """The device's state now. It never raises for a fault of the device: it reports it."""


class NvmlProbe:
    """A CUDA device through NVIDIA's management library; ``nvml`` is its module, initialized.

    ``device`` is what ``CUDA_VISIBLE_DEVICES`` holds: an index, or a UUID.
    """

    def __init__(self, nvml: Any, device: str) -> None:
        self._nvml = nvml
        if device.isdigit():
            self._handle = nvml.nvmlDeviceGetHandleByIndex(int(device))
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(device)
        self._name = f"CUDA device {device}"
        # Counted since the driver was loaded: only what comes on top is this job's fault.
        self._errors_before = self._uncorrected_errors()

    def sample(self) -> AcceleratorState:
        """See ``AcceleratorProbe``."""
        nvml = self._nvml
        try:
            temperature = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
            utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates)
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
            fault = self._fault()
        except nvml.NVMLError as error:
            return AcceleratorState(healthy=False, words=f"{self._name}: {error}")
        return AcceleratorState(
            healthy=fault is None,
            words=self._name if fault is None else f"{self._name}: {fault}",
            use=None if utilization is None else utilization.gpu / 100,
            memory=None if memory is None else memory.used / memory.total,
            temperature_celsius=temperature,
        )

    def _fault(self) -> str | None:
        """What the device itself reports, in words; None if it reports nothing."""
        remapped = self._ask(self._nvml.nvmlDeviceGetRemappedRows)
        if remapped is not None and remapped[3]:
            return "a faulty memory row could not be replaced; the device needs service"
        new = self._uncorrected_errors() - self._errors_before
        if new > 0:
            return f"{new} uncorrected memory errors since the job began; reset the device"
        return None

    def _uncorrected_errors(self) -> int:
        nvml = self._nvml
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        return self._ask(nvml.nvmlDeviceGetTotalEccErrors, *kinds) or 0

    def _ask(self, query: Any, *arguments: Any) -> Any:
        """The answer; None if the driver has none for this model or this user.

        What is left are faults: a device lost, an interrupt that never came, a driver gone.
        """
        nvml = self._nvml
        unanswered = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_DATA,
        }
        try:
            return query(self._handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in unanswered:
                return None
            raise


def accelerator_probe(local_rank: int = 0) -> AcceleratorProbe | None:
    """The probe for the device of the node's ``local_rank``-th rank; None where there is no device.

    The device is the entry of ``CUDA_VISIBLE_DEVICES`` at that position, counted round, or of all
    devices where that is not set. CUDA numbers devices by speed and the management library by
    slot, which is the same on nodes with one model of device or ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")  # of the package nvidia-ml-py
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        everything = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", everything)
        devices = [name.strip() for name in visible.split(",") if name.strip() not in {"", "-1"}]
        return NvmlProbe(nvml, devices[local_rank % len(devices)]) if devices else None
    except nvml.NVMLError:  # no driver, or none of its devices
        return None
