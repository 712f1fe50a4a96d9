"""Faults on purpose in a device: only one that is simulated can be made to fail."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from mpift.devices import backend
from mpift.devices.faults import Remedy, classify
from mpift.devices.repair import MemoryState

# Uncorrectable errors of memory, which are taken to be in parameters.
_LASTING = (507053, 507054)


def is_simulated(device: torch.device) -> bool:
    """Whether ``device`` is an NPU that a module simulates in place of torch_npu."""
    return device.type == "npu" and hasattr(_module(), "inject")


def strike(device: torch.device, code: int) -> None:
    """Let ``device`` fail with this error code, once or until it is restarted, as the code says."""
    if not is_simulated(device):
        warnings.warn(
            f"device:...:{code} found nothing to strike: {device} is real, and only a simulated NPU"
            f" can be made to fail ({backend.NPU_BACKEND_VARIABLE})",
            stacklevel=2,
        )
        return
    fault = classify(RuntimeError(f"NPU function error, error code is {code}"))
    remedy = fault.remedy if fault is not None else Remedy.LEAVE
    if code in _LASTING:
        _module().set_uce(device.index or 0, MemoryState.PERSISTENT)
    _module().inject(
        code,
        device=device.index or 0,
        sticky=remedy is not Remedy.RETRY,
        lost=remedy not in (Remedy.RETRY, Remedy.REPAIR),
    )


def _module() -> Any:
    return importlib.import_module(backend.npu_backend())
