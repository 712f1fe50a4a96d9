"""Going on after a fault of this rank's own device.

``retry_on_device_fault`` makes a function that does one whole training step do it again after a
fault that can be overcome. If nothing of this rank's state can have been touched, the same step is
made once more, and training is bit for bit what it would have been. Else the rank takes no part
with its gradient until all ranks have compared their states, as after a bit flip, and takes over
theirs. Whoever can't go on leaves at once and says why: the others don't wait for a time limit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from mpift import runtime
from mpift.checkpoint.state import random_states, set_random_states
from mpift.core import events
from mpift.devices import repair
from mpift.devices.faults import DeviceFault, Remedy, classify
from mpift.errors import DeviceError
from mpift.torch.optimizer import DistributedMixin
from mpift.torch.reducer import Reducer

P = ParamSpec("P")
T = TypeVar("T")

RETRIES = 3


def retry_on_device_fault(
    optimizer: Any, retries: int = RETRIES
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for a function that makes one whole step with ``optimizer``, a distributed one:
    from ``zero_grad`` or ``backward`` to ``step``. After a fault of the device the function is
    called again with the same arguments and the same random numbers, ``retries`` times at most.

    Faults of an NPU that a restart mends are repaired in place. A rank whose device is lost, or
    fails more often, leaves; the others go on. Everything else is raised as it is, running out of
    memory too. Buffers, such as the statistics of batch normalization, are as a step that failed
    has left them: no other rank has the same ones.

    Operations such as ``hvd.allreduce`` don't belong into it: the other ranks call them once.

    A step of several distributed optimizers can't be made again: such a rank leaves.

    Raises ``ValueError`` for another optimizer.
    """
    if not isinstance(optimizer, DistributedMixin):
        raise ValueError(f"retry_on_device_fault takes a distributed optimizer, not {optimizer!r}")
    reducer = optimizer._mpift_reducer

    seen: list[Any] = []  # what other optimizers had done when the steps began

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def step(*arguments: P.args, **keywords: P.kwargs) -> T:
            seen.append(_others(reducer))
            del seen[:-2]  # since the step before, too: one step may go with several optimizers
            reducer.begin_step()
            drawn = random_states()
            for attempt in itertools.count(1):
                try:
                    return function(*arguments, **keywords)
                except Exception as error:
                    fault = classify(error)
                    if fault is None:
                        raise
                    _overcome(
                        reducer,
                        fault,
                        attempt <= retries,
                        all(_others(reducer) == before for before in seen),
                    )
                set_random_states(drawn)
            raise AssertionError("the last attempt leaves")

        return step

    return decorate


def _overcome(reducer: Reducer, fault: DeviceFault, again: bool, alone: bool) -> None:
    """Returns when the step can be made again; leaves if it can't."""
    current = runtime.current()
    device = _failed(reducer, fault)
    code = "" if fault.code is None else f" {fault.code}"
    current.emit(
        events.DeviceFailed, current.host, f"{device}{code}", fault.remedy.value, fault.words
    )
    if not again:
        current.leave_evicted(f"has a device that fails again and again: {device}: {fault.words}")
    if fault.remedy in (Remedy.LEAVE, Remedy.NODE):
        current.leave_evicted(f"has lost its device {device}: {fault.words}")
    if not alone:
        current.leave_evicted(
            f"can't make a step of several optimizers again: {device}: {fault.words}"
        )
    try:
        sound = fault.remedy is not Remedy.REPAIR or repair.restart(device)
        if sound and reducer.intact:
            reducer.rewind()
        else:
            reducer.take_state_from_others()
    except RuntimeError as error:
        if not isinstance(error, DeviceError) and classify(error) is None:
            raise
        current.leave_evicted(f"has lost its device {device}, which can't be repaired: {error}")


def _others(reducer: Reducer) -> list[tuple[int, bool]]:
    """How far other distributed optimizers are."""
    followers: Any = runtime.current().gradients.followers
    return [(other.replica.applied, other.pending) for other in followers if other is not reducer]


def _failed(reducer: Reducer, fault: DeviceFault) -> torch.device:
    """The device that a fault tells of, if it has parameters; else the first that has."""
    devices = reducer.devices
    return next((device for device in devices if device.index == fault.device), devices[0])
