"""What the tests of the simulated NPU share: the device, a gate for streams, and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOREVER_SECONDS = 3600.0  # cut short by stopping the device, or by the end of the process
SHORT_SECONDS = 0.1


@pytest.fixture(name="npu")
def simulated_npu() -> Iterator[Any]:
    import mpift.testing.npu as simulated

    yield simulated
    for device in range(torch.npu.device_count()):
        torch.npu.stop_device(device)
    simulated.reset()
    torch.npu.set_stream(torch.npu.default_stream(0))
    torch.npu.synchronize(0)
    torch.npu.synchronize(1)


@pytest.fixture(name="gate")
def gate_of_streams(npu: Any) -> SimpleNamespace:
    """Holds up whatever waits for its event, until it is opened."""
    event = torch.npu.Event()
    waiting = torch.npu.Stream(1)
    npu.set_kernel_seconds(FOREVER_SECONDS)
    with torch.npu.stream(waiting):
        torch.zeros(1, device="npu:1")
        event.record()
    npu.set_kernel_seconds(0)

    def open_gate() -> None:
        torch.npu.stop_device(1)
        torch.npu.restart_device(1)

    return SimpleNamespace(event=event, open=open_gate)


def later(action: Callable[[], object]) -> threading.Timer:
    """Does it while the caller waits; what the caller sees does not depend on when."""
    timer = threading.Timer(SHORT_SECONDS, action)
    timer.start()
    return timer


def registration() -> Any:
    from mpift.testing.npu import registration as module

    return module


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    env = os.environ | environment
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
