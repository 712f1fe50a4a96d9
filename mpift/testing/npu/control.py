"""What tests do to the simulated NPU: let it take time, fail, hang, or run out of memory."""

from __future__ import annotations

from mpift.testing.npu.registration import library

DEFAULT_CAPACITY_BYTES = 1 << 30

_uce: dict[int, int] = {}


def set_kernel_seconds(seconds: float) -> None:
    """From now on every kernel keeps its stream busy for so long; 0 at first. For all devices."""
    library().set_kernel_seconds(_not_negative("seconds", seconds))


def set_copy_seconds(latency: float, per_byte: float = 0.0) -> None:
    """From now on a copy takes ``latency + per_byte * bytes`` seconds; 0 at first. All devices.

    It reads its source and writes its target at the end of that time.
    """
    library().set_copy_seconds(
        _not_negative("latency", latency), _not_negative("per_byte", per_byte)
    )


def set_capacity(size_bytes: int, device: int = 0) -> None:
    """What fits into the memory of a device; 1 GiB at first. What is allocated stays."""
    library().set_capacity_bytes(check_index(device), int(_not_negative("size_bytes", size_bytes)))


def inject(
    code: int,
    after: int = 0,
    device: int = 0,
    sticky: bool = True,
    *,
    lost: bool = False,
) -> None:
    """Let the call after the next ``after`` ones to the device fail with CANN's error ``code``.

    A call is a kernel, a copy or a synchronization (``Tensor.item()`` is one); queries, and what is
    done with events, are not counted. ``sticky``: so does all that is asked of the device from then
    on, until ``torch.npu.restart_device``; with ``lost``, even after that. Replaces what was
    injected before.
    """
    _not_negative("after", after)
    library().inject(check_index(device), code, after, sticky, lost)


def clear_faults(device: int = 0) -> None:
    """The device is whole again: nothing injected, not stopped, and no bad memory is reported."""
    library().clear_faults(check_index(device))
    _uce.pop(device, None)


def hang(device: int = 0) -> None:
    """Nothing on a device ends any more, nor does a call that launches a kernel or waits.

    Asynchronous copies are taken and never done, events never come by. There is no way back: the
    process has to be killed. Other Python threads go on.
    """
    library().hang(check_index(device))


def set_uce(device: int, value: int) -> None:
    """Let ``torch.npu.check_uce_in_memory`` find uncorrectable errors of memory (0 to 3).

    0 none; 1 not repairable; 2 in temporary memory: redo the step; 3 in memory that lives on:
    reload it from a healthy replica.
    """
    if value not in range(4):
        raise ValueError(f"value={value}: check_uce_in_memory returns 0, 1, 2 or 3")
    _uce[check_index(device)] = value


def uce(device: int) -> int:
    """What ``set_uce`` was told of the device; 0 where nothing."""
    return _uce.get(check_index(device), 0)


def reset() -> None:
    """All as it was at first, but for hung devices and for what is allocated."""
    set_kernel_seconds(0.0)
    set_copy_seconds(0.0, 0.0)
    for device in range(library().device_count()):
        clear_faults(device)
        set_capacity(DEFAULT_CAPACITY_BYTES, device)


def check_index(device: int) -> int:
    """The index of a device that there is. Raises ``ValueError``."""
    count = library().device_count()
    if not 0 <= device < count:
        raise ValueError(f"device={device}: there are {count} simulated NPUs, numbered from 0")
    return device


def _not_negative(name: str, value: float) -> float:
    if value < 0:
        raise ValueError(f"{name}={value} is negative")
    return value
