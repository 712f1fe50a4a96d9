"""``torch.npu`` as the simulated NPU has it: torch_npu's names and signatures, and no more of them
than a program that trains and recovers needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, TypeAlias

import torch

from mpift.testing.npu import control
from mpift.testing.npu.registration import NAME, library

Device: TypeAlias = int | str | torch.device | None

_STOPPED = 0  # torch_npu's word for success


def _index(which: Device) -> int:
    """Index of a device; the current one for None, and where the index is left open."""
    if isinstance(which, int):
        return which
    if which is None:
        return current_device()
    named = torch.device(which)
    if named.type != NAME:
        raise ValueError(f"Expected a npu device, but got: {which}")
    return current_device() if named.index is None else named.index


# ---- Devices -------------------------------------------------------------------------------------


def init() -> None:
    """Nothing is to be done."""


_lazy_init = init


def is_available() -> bool:
    """Whether there is a device: always."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether this process may use the devices: all but a forked child of one that did."""
    return not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(library().in_bad_fork())


def device_count() -> int:
    """``MPIFT_SIMULATED_NPUS``, or 2."""
    return int(library().device_count())


def current_device() -> int:
    """Index of this thread's device."""
    return int(library().current_device())


def set_device(device: Device) -> None:
    """Make a device this thread's current one. Raises ``RuntimeError`` where there is no such."""
    library().set_device(_index(device))


class device:  # noqa: N801  the name is torch's
    """Makes a device the current one for a block; a negative index changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        if self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        set_device(self.prev_idx)


def get_device_name(device: Device = None) -> str:
    """The same for all devices that there are. Raises ``ValueError`` for others."""
    control.check_index(_index(device))
    return "Simulated NPU"


def is_bf16_supported() -> bool:
    """Yes."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast("npu")`` may lower to."""
    return [torch.float16, torch.bfloat16]


# ---- Streams and events --------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of a device, one of a pool of 32; the priority is without effect."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:  # by its number
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == NAME


class Event(metaclass=_EventType):
    """An event of a stream: a ``torch.Event``, since ``torch.Stream`` takes none of a subclass."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> Any:
        """A new event that is not recorded yet; times are had only with ``enable_timing``."""
        return torch.Event(
            NAME,
            enable_timing=enable_timing,
            blocking=blocking,
            interprocess=interprocess,
        )


def _own(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def current_stream(device: Device = None) -> Stream:
    """The stream that this thread's work goes to."""
    return _own(torch.accelerator.current_stream(_index(device)))


def default_stream(device: Device = None) -> Stream:
    """The stream that is current where none was set."""
    here = current_stream(device)
    return Stream(stream_id=0, device_index=here.device_index, device_type=here.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make it the current stream of its device, and that the current device; None does nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class stream:  # noqa: N801  the name is torch's
    """Makes a stream, and its device, the current one for a block; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: tuple[int, Stream] | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = (current_device(), current_stream(self.stream.device_index))
            set_stream(self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            index, before = self._before
            set_stream(before)
            set_device(index)


def synchronize(device: Device = None) -> None:
    """Wait until all streams of a device are done. Raises the device's error."""
    torch.accelerator.synchronize(_index(device))


# ---- Memory --------------------------------------------------------------------------------------


def memory_allocated(device: Device = None) -> int:
    """Bytes of the living tensors of a device, each rounded up to 512."""
    return int(library().allocated_bytes(_index(device)))


def max_memory_allocated(device: Device = None) -> int:
    """The most that ``memory_allocated`` has been, since ``reset_peak_memory_stats``."""
    return int(library().most_allocated_bytes(_index(device)))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Count the most allocated memory from here on."""
    library().reset_most_allocated_bytes(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and all bytes of a device."""
    total = int(library().capacity_bytes(_index(device)))
    return total - memory_allocated(device), total


def empty_cache() -> None:
    """Nothing is cached: what is freed is free."""


# ---- Random numbers ------------------------------------------------------------------------------


def _generators() -> Iterable[torch.Generator]:
    return (library().default_generator(index) for index in range(device_count()))


def get_rng_state(device: Device = NAME) -> torch.Tensor:
    """State of a device's generator: uint8, on the host."""
    return library().default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = NAME) -> None:
    """Take a state that ``get_rng_state`` returned."""
    library().default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices' generators, in order."""
    return [generator.get_state() for generator in _generators()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Take the states that ``get_rng_state_all`` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    library().default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices' generators; ``torch.manual_seed`` does it too."""
    for generator in _generators():
        generator.manual_seed(seed)


def initial_seed() -> int:
    """What the current device's generator was seeded with."""
    return int(library().default_generator(current_device()).initial_seed())


# ---- Repair in place -----------------------------------------------------------------------------


def stop_device(device_id: int) -> int:
    """Drop all that a device has to do; every call fails until it is restarted. Returns 0."""
    library().stop(_index(device_id))
    return _STOPPED


def restart_device(device_id: int, rebuild_all_resources: bool = False) -> None:  # noqa: ARG001
    """End a stop, and a fault that a restart can mend; the resources are always rebuilt."""
    library().restart(_index(device_id))


def check_uce_in_memory(device_id: int) -> int:
    """Which uncorrectable errors the device's memory has: 0 none, 1, 2, 3 as ``set_uce`` says."""
    return control.uce(device_id)
