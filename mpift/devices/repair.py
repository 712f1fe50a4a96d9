"""Repairing an NPU inside a running process: stop it, look at its memory, restart it.

The order and the meaning of what the check finds are torch_npu's. What the device's memory held is
as before, but for what the check calls damaged; who needs that has to get it from elsewhere. Other
devices can't be repaired in place: a CUDA context that failed stays lost until its process ends.
"""

from __future__ import annotations

import enum

import torch

from mpift.devices import backend
from mpift.errors import DeviceError


class MemoryState(enum.IntEnum):
    """What ``check_uce_in_memory`` finds."""

    SOUND = 0
    BEYOND_REPAIR = 1  # the damage lies outside of what torch has allocated
    TEMPORARY = 2  # in memory of this step, which is made anew
    PERSISTENT = 3  # in memory that stays, such as parameters


_CALLS = ("stop_device", "check_uce_in_memory", "restart_device")


def restart(device: torch.device) -> bool:
    """Restart a failed NPU; returns whether what is allocated on it still holds what it did.

    Raises ``DeviceError`` if it can't be repaired here.
    """
    module = backend.of(device)
    missing = [name for name in _CALLS if not hasattr(module, name)]
    if missing:
        raise DeviceError(
            f"{device} can't be repaired in place: {backend.npu_backend()} has no"
            f" {', '.join(missing)}; newer versions of torch_npu do"
        )
    index = device.index or 0
    module.stop_device(index)
    found = module.check_uce_in_memory(index)
    if found == MemoryState.BEYOND_REPAIR:
        raise DeviceError(f"{device}: damaged memory outside of torch's, which no restart mends")
    module.restart_device(index)
    return bool(found != MemoryState.PERSISTENT)
