"""CUDA devices through NVIDIA's management library (``pynvml``, of the package nvidia-ml-py).

What a model, a driver or this user's rights do not allow to ask is unknown, and no fault. A fault
is what the library itself calls one (a device lost, a driver gone), a faulty memory row that could
not be replaced, and memory errors since the job began that could not be corrected.

It loads neither torch nor CUDA, and creates no context.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from mpift.devices.accelerators import AcceleratorState, ErrorsOfThisJob

SPACING_SECONDS = 2.0
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

_MILLIWATTS = 1000
# Names that the library may lack, since older versions do.
_OPTIONAL_ERRORS = ("NVML_ERROR_INVALID_ARGUMENT",)


class NvmlProbe:
    """One device; ``nvml`` is the library's module, initialized.

    ``device`` is what ``CUDA_VISIBLE_DEVICES`` holds: an index, or a UUID.
    """

    spacing_seconds = SPACING_SECONDS

    def __init__(self, nvml: Any, device: str) -> None:
        self._nvml = nvml
        if device.isdigit():
            self._handle = nvml.nvmlDeviceGetHandleByIndex(int(device))
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(device)
        self._name = f"CUDA device {device}"
        self._unanswered = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_DATA,
        }
        self._of_this_job = ErrorsOfThisJob()
        self._of_this_job.of(self._errors("UNCORRECTED"))
        self._limit = self._temperature_limit()

    def sample(self) -> AcceleratorState:
        """See ``AcceleratorProbe``."""
        nvml = self._nvml
        try:
            temperature = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
            utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates)
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
            power = self._ask_optional("nvmlDeviceGetPowerUsage")
            corrected, uncorrected = self._errors("CORRECTED"), self._errors("UNCORRECTED")
            fault = self._fault(uncorrected)
            link_up = self._links_up()
        except nvml.NVMLError as error:
            return AcceleratorState(
                healthy=False, words=f"{self._name}: {error}", device=self._name
            )
        return AcceleratorState(
            healthy=fault is None,
            words=self._name if fault is None else f"{self._name}: {fault}",
            use=None if utilization is None else utilization.gpu / 100,
            memory=None if memory is None else memory.used / memory.total,
            temperature_celsius=temperature,
            temperature_limit_celsius=self._limit,
            power_watts=None if power is None else power / _MILLIWATTS,
            corrected_errors=corrected,
            uncorrected_errors=uncorrected,
            link_up=link_up,
            device=self._name,
        )

    def _fault(self, uncorrected: int | None) -> str | None:
        """What the device itself reports, in words; None if it reports nothing."""
        remapped = self._ask(self._nvml.nvmlDeviceGetRemappedRows)
        if remapped is not None and remapped[3]:
            return "a faulty memory row could not be replaced; the device needs service"
        new = self._of_this_job.of(uncorrected)
        if new > 0:
            return f"{new} uncorrected memory errors since the job began; reset the device"
        return None

    def _errors(self, kind: str) -> int | None:
        """Memory errors since the driver was loaded; ``kind`` is CORRECTED or UNCORRECTED."""
        nvml = self._nvml
        found = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}", None)
        if found is None:
            return None
        count: int | None = self._ask(
            nvml.nvmlDeviceGetTotalEccErrors, found, nvml.NVML_VOLATILE_ECC
        )
        return count

    def _temperature_limit(self) -> float | None:
        """Where the device slows down. Newest models tell it elsewhere: then it is unknown."""
        kind = getattr(self._nvml, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", None)
        if kind is None:
            return None
        try:
            limit = self._ask_optional("nvmlDeviceGetTemperatureThreshold", kind)
        except self._nvml.NVMLError:  # it is no fault of the device, which sample() will tell
            return None
        return float(limit) if limit else None

    def _links_up(self) -> bool | None:
        """Whether all NVLinks that the device has are active; None where it has none."""
        states = []
        for link in range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 0)):
            state = self._ask_optional("nvmlDeviceGetNvLinkState", link)
            if state is None:  # links are numbered without gaps
                break
            states.append(bool(state))
        return all(states) if states else None

    def _ask_optional(self, name: str, *arguments: Any) -> Any:
        """As ``_ask``, of a function that versions or models may lack, in more ways."""
        query = getattr(self._nvml, name, None)
        if query is None:
            return None
        also = {getattr(self._nvml, error, None) for error in _OPTIONAL_ERRORS}
        try:
            return self._ask(query, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in also:
                return None
            raise

    def _ask(self, query: Any, *arguments: Any) -> Any:
        """The answer; None if the driver has none for this model or this user.

        What is left are faults: a device lost, an interrupt that never came, a driver gone.
        """
        try:
            return query(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in self._unanswered:
                return None
            raise


def probe(local_rank: int) -> NvmlProbe | None:
    """The probe of the node's ``local_rank``-th rank; None without the library, driver or device.

    CUDA numbers devices by speed and the management library by slot, which is the same on nodes
    with one model of device or ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        everything = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
        visible = os.environ.get(VISIBLE_VARIABLE, everything)
        devices = [name.strip() for name in visible.split(",") if name.strip() not in {"", "-1"}]
        return NvmlProbe(nvml, devices[local_rank % len(devices)]) if devices else None
    except nvml.NVMLError:  # no driver, or none of its devices
        return None
