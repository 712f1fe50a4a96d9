"""Checks of ``contract`` about faults: what torch_npu says of each, how a device is repaired."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mpift.devices import backend, repair
from mpift.errors import DeviceError
from tests.npu.contract_kit import CHECKS, Cann, check, error_of, told

CODES = (
    *(507053, 507054, 507055, 507056, 507057, 107022, 507904),
    *(507010, 507014, 507046, 107020),
)


def fault_where_the_host_waits(code: int) -> dict[str, Any]:
    """Errors of an event's ``synchronize``, of one for the device, and of a blocking copy."""
    cann, module = Cann(), backend.module("npu")
    backend.select("npu", 1)
    tensor, event = torch.arange(6.0).to("npu"), module.Event()
    event.record()
    cann.damage(tensor.data_ptr(), 8)
    cann.fail_waits(code)
    calls = {"event": event.synchronize, "device": module.synchronize, "copy": tensor.cpu}
    return {name: told(error_of(call)) for name, call in calls.items()}


def fault_where_work_is_launched(code: int) -> dict[str, Any]:
    """The error that torch_npu's own thread has, which hands the work to the device."""
    cann = Cann()
    backend.select("npu", 1)
    tensor, host = torch.arange(6.0).to("npu"), backend.pinned(6, torch.float32)
    cann.damage(tensor.data_ptr(), 8)
    cann.fail_work(code)

    def work() -> None:
        for _ in range(1000):  # the first ones may be taken before that thread has the error
            host.copy_(tensor, non_blocking=True)

    return {"work": told(error_of(work))}


for _place in (fault_where_the_host_waits, fault_where_work_is_launched):
    for _code in CODES:
        name = _place.__name__.replace("fault", f"fault_{_code}")
        CHECKS[name] = functools.partial(_place, _code)


@check
def full_memory() -> dict[str, Any]:
    backend.select("npu", 0)
    return told(error_of(lambda: torch.empty(100 << 30, dtype=torch.uint8, device="npu")))


@check
def a_stopped_device_refuses_until_it_is_restarted() -> dict[str, Any]:
    cann, module = Cann(), backend.module("npu")
    device = backend.select("npu", 0)
    tensor = torch.arange(6.0).to(device)
    module.stop_device(0)
    assert cann.calls("DeviceTaskAbort") == 1
    refused = told(error_of(tensor.cpu))
    module.restart_device(0)
    assert torch.equal(tensor.cpu(), torch.arange(6.0))
    return refused


def damaged(where: str) -> tuple[torch.device, torch.Tensor, torch.Tensor | None]:
    """A device whose memory has an error: (it, a tensor on it, one that the error is in)."""
    cann = Cann()
    device = backend.select("npu", 0)
    # Larger than what the allocator makes of small ones, so that each has memory of its own.
    sound = torch.arange(1 << 22).to(device)
    kept: torch.Tensor | None = torch.arange(1 << 22).to(device)
    assert kept is not None
    event = backend.of(device).Event()
    event.record()
    address = {"none": 0, "elsewhere": 4096}.get(where, kept.data_ptr())
    if where == "freed":
        kept = None
    cann.damage(address, 8 if address else 0)
    cann.fail_waits(507055 if where == "none" else 507053)
    error_of(event.synchronize)
    cann.fail_waits(0)
    return device, sound, kept


@check
def memory_without_an_error_is_sound() -> None:
    device, sound, _ = damaged("none")
    assert repair.restart(device)
    assert int(sound.cpu()[-1]) == (1 << 22) - 1


@check
def an_error_outside_of_allocated_memory_is_beyond_repair() -> str:
    device, _, _ = damaged("elsewhere")
    error = error_of(lambda: repair.restart(device))
    assert isinstance(error, DeviceError), repr(error)
    return str(error)


@check
def an_error_in_freed_memory_is_temporary() -> None:
    device, sound, _ = damaged("freed")
    assert repair.restart(device)
    assert int(sound.cpu()[-1]) == (1 << 22) - 1


@check
def an_error_in_a_tensor_is_persistent() -> dict[str, Any]:
    device, sound, hit = damaged("kept")
    assert hit is not None
    assert not repair.restart(device)
    assert Cann().calls("MemUceRepair") == 1
    assert int(sound.cpu()[-1]) == (1 << 22) - 1
    refused = told(error_of(hit.cpu))
    hit.copy_(torch.ones(1 << 22, dtype=torch.int64))
    assert hit.cpu().all(), "what was written over it is not there"
    return refused


@check
def what_the_check_of_memory_says() -> list[int]:
    """Said once: asked again, it has forgotten what it did not find in allocated memory."""
    answers = []
    for where in ("none", "elsewhere", "freed", "kept"):
        device, *_ = damaged(where)
        answers += [backend.of(device).check_uce_in_memory(0) for _ in range(2)]
        backend.of(device).restart_device(0)
    return answers
