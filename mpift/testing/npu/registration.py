"""Makes torch know the simulated NPU: its name, its library and ``torch.npu``, once a process."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from mpift.errors import DeviceError
from mpift.testing.npu import build

NAME = "npu"
COUNT_VARIABLE = "MPIFT_SIMULATED_NPUS"
MOST_DEVICES = 16

_UNNAMED = "privateuseone"

_library: Any = None


def library() -> Any:
    """The extension module, once it is registered."""
    assert _library is not None, "the simulated NPU is not registered yet"
    return _library


def register() -> None:
    """Register the backend. Raises ``DeviceError`` where another one is in its place."""
    global _library
    if _library is not None:
        return
    check_that_it_can_be()
    path = build.library()
    backend_registration.rename_privateuse1_backend(NAME)
    _library = _load(path)
    # Before the threads of the streams meet libraries that are being taken down.
    atexit.register(_library.close)

    from mpift.testing.npu import face

    torch._register_device_module(NAME, face)
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True, for_packed_sequence=True
    )


def check_that_it_can_be() -> None:
    """Raise ``DeviceError`` where the backend can't be registered: taken, or a wrong setting."""
    count = os.environ.get(COUNT_VARIABLE)
    if count is not None and not (count.isdecimal() and 1 <= int(count) <= MOST_DEVICES):
        raise DeviceError(
            f"{COUNT_VARIABLE}={count}: the number of simulated NPUs is from 1 to {MOST_DEVICES}"
        )
    if "torch_npu" in sys.modules:
        raise DeviceError(
            "torch_npu is loaded: the simulated NPU can't take its place in the same process (where"
            " torch_npu loads itself with torch, set TORCH_DEVICE_BACKEND_AUTOLOAD=0)"
        )
    taken = torch._C._get_privateuse1_backend_name()
    if hasattr(torch, NAME) or taken != _UNNAMED:
        raise DeviceError(
            f"the simulated NPU can't be registered: something else has registered torch.{taken}"
            " in this process; import mpift.testing.npu before it, or in another process"
        )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{__package__}.{build.LIBRARY}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
