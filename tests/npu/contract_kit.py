"""What the checks of ``contract`` are made with: their registry, the fake CANN, forks, errors."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any

from mpift.devices import faults

LIMIT_SECONDS = 20.0
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add it to the checks. It fails by raising; what it returns is printed."""
    CHECKS[function.__name__] = function
    return function


class Cann:
    """The fake CANN's functions for tests, see ``ascendcl.c``."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libascendcl.so")
        self._library.fake_cann_calls.restype = ctypes.c_long

    def fail_waits(self, code: int) -> None:
        self._library.fake_cann_fail_waits(code)

    def fail_work(self, code: int) -> None:
        self._library.fake_cann_fail_work(code)

    def keep_events_pending(self, pending: bool = True) -> None:
        self._library.fake_cann_keep_events_pending(int(pending))

    def damage(self, address: int, size: int) -> None:
        self._library.fake_cann_fault_in_memory(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def calls(self, name: str) -> int:
        count = int(self._library.fake_cann_calls(f"aclrt{name}".encode()))
        assert count >= 0, f"calls of aclrt{name} are not counted"
        return count

    def waits(self) -> int:
        """How often the host has waited for the device."""
        return sum(map(self.calls, ("SynchronizeStream", "SynchronizeEvent", "SynchronizeDevice")))


def error_of(call: Callable[[], Any]) -> Exception:
    """The error that it raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001, whatever torch_npu raises
        return error
    raise AssertionError("it raised nothing")


def told(error: Exception) -> dict[str, Any]:
    """An error as it is printed, with what mpift makes of it."""
    fault = faults.classify(error)
    return {
        "type": f"{type(error).__module__}.{type(error).__name__}",
        "text": str(error),
        "code": fault and fault.code,
        "remedy": fault and fault.remedy.name,
        "device": fault and fault.device,
        "out_of_memory": faults.is_out_of_memory(error),
    }


def in_a_fork(function: Callable[[], Any]) -> dict[str, Any]:
    """What it returns or raises in a copy of this process."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = {"ok": True, "value": function()}
        except BaseException as error:  # noqa: BLE001, it is told
            told = "".join(traceback.format_exception(error))  # which of its asserts it was
            answer = {"ok": False, "error": told}
        with os.fdopen(sending, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        if not select.select([pipe], [], [], LIMIT_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    return {"ok": False, "error": f"it ended with wait status {status} and said nothing"}
