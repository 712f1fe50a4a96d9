"""The simulated NPU fails as an NPU fails, and ends, forks and is refused as one is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from mpift.errors import DeviceError
from tests.npu.simulated import (
    FOREVER_SECONDS,
    later,
    registration,
    run,
    simulated_npu,  # noqa: F401  a fixture
)

# The first test on a machine builds it.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("code", "kernel_says", "wait_says"),
    [
        (507053, "UCE ERROR, error code is 507053", "UCE ERROR, error code is 507053"),
        (507054, "HBM MULTI BIT ECC ERROR, error code is", "HBM MULTI BIT ECC ERROR"),
        (507056, "HCCS LINK ERROR, error code is 507056", "HCCS LINK ERROR"),
        (507010, "error code is 507010", "ACL stream synchronize failed, error code:507010"),
    ],
)
def test_an_injected_fault_fails_calls_in_the_words_of_the_device(
    npu: Any, code: int, kernel_says: str, wait_says: str
) -> None:
    numbers = torch.zeros(4, device="npu")
    npu.inject(code, after=1)
    numbers.add_(1)
    with pytest.raises(RuntimeError, match=kernel_says):
        numbers.add_(1)
    for wait in (torch.npu.synchronize, numbers.cpu, numbers[0].item):
        with pytest.raises(RuntimeError, match=wait_says):
            wait()
    torch.ones(1, device="npu:1").add_(1)
    torch.npu.restart_device(0)
    assert numbers.tolist() == [1, 1, 1, 1]


def test_a_fault_fails_one_call_or_outlives_a_restart(npu: Any) -> None:
    npu.inject(507053, sticky=False)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        torch.npu.synchronize()
    torch.npu.synchronize()
    npu.inject(507054, lost=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ECC ERROR"):
            torch.npu.synchronize()
        torch.npu.restart_device(0)
    with pytest.raises(ValueError, match="after=-1"):
        npu.inject(507053, after=-1)


def test_a_stopped_device_fails_who_waits_for_it_until_it_is_restarted(npu: Any) -> None:
    numbers, copied = torch.ones(4, device="npu"), torch.zeros(4, pin_memory=True)
    npu.set_copy_seconds(FOREVER_SECONDS)
    copied.copy_(numbers, non_blocking=True)
    stopped = later(lambda: torch.npu.stop_device(0))
    with pytest.raises(RuntimeError, match="FORCE STOP, error code is 107022"):
        torch.npu.synchronize()
    stopped.join()
    npu.set_copy_seconds(0)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        numbers.add_(1)
    torch.npu.restart_device(0, rebuild_all_resources=True)
    assert numbers.add_(1).tolist() == [2, 2, 2, 2]
    assert copied.tolist() == [0, 0, 0, 0]


def test_bad_memory_is_reported_as_it_was_set(npu: Any) -> None:
    assert torch.npu.check_uce_in_memory(0) == 0
    npu.set_uce(0, 3)
    assert [torch.npu.check_uce_in_memory(device) for device in (0, 1)] == [3, 0]
    with pytest.raises(ValueError, match="returns 0, 1, 2 or 3"):
        npu.set_uce(0, 4)


def test_a_call_to_a_hung_device_never_returns(npu: Any) -> None:
    done = run(
        "import os, threading, torch, mpift.testing.npu as npu\n"
        "held = torch.ones(4, pin_memory=True).to('npu', non_blocking=True)\n"
        "npu.hang()\n"
        "event = torch.npu.Event(); event.record()\n"
        "threading.Timer(0.3, lambda: os._exit(10 + event.query())).start()\n"
        "torch.npu.synchronize()\n"
        "os._exit(1)"
    )
    assert done.returncode == 10, done.stderr


# ---- Processes -----------------------------------------------------------------------------------


def test_a_forked_child_cannot_use_the_device(npu: Any) -> None:
    done = run(
        "import os, torch, mpift.testing.npu\n"
        "held = torch.ones(1, device='npu')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del held\n"
        "    torch.ones(1, device='npu')\n"
        "os.waitpid(child, 0)"
    )
    assert "Cannot re-initialize NPU in forked subprocess" in done.stderr
    assert done.returncode == 0


def test_a_process_ends_with_its_work_done(npu: Any) -> None:
    done = run(
        "import atexit, torch\n"
        "atexit.register(lambda: print(copied.tolist(), (numbers + 1).tolist()))\n"
        "import mpift.testing.npu as npu\n"
        "numbers, copied = torch.ones(2, device='npu:2'), torch.zeros(2, pin_memory=True)\n"
        f"npu.set_copy_seconds({FOREVER_SECONDS})\n"
        "copied.copy_(numbers, non_blocking=True)",
        MPIFT_SIMULATED_NPUS="3",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 1.0] [2.0, 2.0]\n", "")


@pytest.mark.parametrize("count", ["0", "17", "two"])
def test_the_number_of_devices_is_checked(
    npu: Any, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    monkeypatch.setenv("MPIFT_SIMULATED_NPUS", count)
    with pytest.raises(DeviceError, match="number of simulated NPUs is from 1 to 16"):
        registration().check_that_it_can_be()
    with pytest.raises(RuntimeError, match="invalid NPU device id 2: there are 2"):
        torch.npu.set_device(2)


def test_it_does_not_take_the_place_of_another_backend(
    npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=r"something else has registered torch\.npu"):
        registration().check_that_it_can_be()
    monkeypatch.setitem(sys.modules, "torch_npu", sys)
    with pytest.raises(DeviceError, match="torch_npu is loaded"):
        registration().check_that_it_can_be()
    other = (
        "import torch; torch.utils.rename_privateuse1_backend('other'); import mpift.testing.npu"
    )
    assert "something else has registered torch.other" in run(other).stderr


def test_what_runs_on_the_cpu_beside_it_is_not_disturbed(npu: Any) -> None:
    data = torch.arange(6.0)
    batches = list(torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True))
    assert torch.cat(batches).tolist() == data.tolist()
    assert all(batch.is_pinned() for batch in batches)
    workers = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=1)
    assert torch.cat(list(workers)).tolist() == data.tolist()
