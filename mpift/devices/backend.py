"""Which kinds of device there are, and what torch offers for them: the only place that loads them.

Three kinds are known: ``npu`` (Huawei Ascend, by the package torch_npu), ``cuda`` and ``cpu``.
``torch.npu`` and ``torch.cuda`` have the same functions for what mpift needs, so what follows here
goes by the kind alone. The names of ``torch.npu`` that mpift calls are listed in ``NPU_NAMES``;
tests hold them against torch_npu itself.

``MPIFT_NPU_BACKEND`` names another module to import in place of torch_npu, which has to register
``torch.npu``; ``mpift.testing.npu`` is one that simulates a device on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from typing import Any

import torch

from mpift.errors import DeviceError

KINDS = ("npu", "cuda", "cpu")
NPU_BACKEND_VARIABLE = "MPIFT_NPU_BACKEND"
TORCH_NPU = "torch_npu"

# Of ``torch.npu``; the last three are optional, for repairs in place.
NPU_NAMES = (
    "is_available",
    "is_initialized",
    "device_count",
    "set_device",
    "current_device",
    "device",
    "get_device_name",
    "Stream",
    "Event",
    "stream",
    "current_stream",
    "synchronize",
    "empty_cache",
    "get_rng_state",
    "get_rng_state_all",
    "set_rng_state",
    "stop_device",
    "restart_device",
    "check_uce_in_memory",
)

# With it torch_npu turns an error of the device into a warning, and training goes on with garbage.
_RESUME_VARIABLE = "RESUME_MODE_ENABLE"
# Between two looks at an event, and between two at whether the device still takes work.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 2e-5, 5e-4
_LOOK_SECONDS = 1.0
_OFF = ("", "0", "false", "off", "no")


def npu_backend() -> str:
    """Name of the module that brings ``torch.npu``."""
    return os.environ.get(NPU_BACKEND_VARIABLE) or TORCH_NPU


def module(kind: str) -> Any:
    """``torch.npu`` or ``torch.cuda``, ready to be used.

    Raises ``DeviceError`` that says what is missing and how to get it.
    """
    if kind == "npu":
        _load_npu()
    elif kind != "cuda":
        raise DeviceError(f"{kind!r} is no accelerator: known are npu and cuda")
    found = getattr(torch, kind)
    if not found.is_available() or found.device_count() == 0:
        raise DeviceError(_none_of(kind))
    return found


def _load_npu() -> None:
    if os.environ.get(_RESUME_VARIABLE, "").lower() not in _OFF:
        raise DeviceError(
            f"{_RESUME_VARIABLE}={os.environ[_RESUME_VARIABLE]} is set: with it torch_npu turns"
            " faults of the device into warnings, and training goes on with wrong numbers: unset it"
        )
    name = npu_backend()
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise DeviceError(_not_loadable(name, error)) from error


def _not_loadable(name: str, error: ImportError) -> str:
    """Why no NPU can be used, and what to do."""
    minor = ".".join(torch.__version__.split(".")[:2])
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        if name == TORCH_NPU:
            return (
                "NPUs need the package torch_npu, which is not installed: pip install"
                f" 'torch_npu=={minor}.*', of the same minor version as torch; releases of it may"
                " ask for another patch version of torch"
            )
        return f"{NPU_BACKEND_VARIABLE} names the module {name!r}, which is not installed"
    if ".so" in str(error):
        return (
            f"torch_npu is installed, but the libraries of CANN are not found ({error}): source the"
            " set_env.sh of the CANN toolkit (by default"
            " /usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts the job, on"
            " every node"
        )
    return f"{name} can't be imported: {error}"


def _none_of(kind: str) -> str:
    names = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
    tools = {"npu": "npu-smi info", "cuda": "nvidia-smi"}
    visible = os.environ.get(names[kind])
    limits = f" ({names[kind]}={visible})" if visible is not None else ""
    return (
        f"this process sees no {kind} device{limits}: look at `{tools[kind]}`; in a container, pass"
        " the devices into it"
    )


def available() -> str:
    """The kind of device that this process should compute on: an accelerator where there is one.

    Where torch_npu is installed and can't be used, that is no error: "cpu", or "cuda".
    """
    with contextlib.suppress(DeviceError):
        if npu_backend() != TORCH_NPU or importlib.util.find_spec(TORCH_NPU) is not None:
            module("npu")
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def select(kind: str | None, local_rank: int) -> torch.device:
    """Make the device of the node's ``local_rank``-th process the current one, and return it.

    ``kind`` is one of ``KINDS``, None for the best there is. Devices are counted among those that
    ``ASCEND_RT_VISIBLE_DEVICES`` or ``CUDA_VISIBLE_DEVICES`` leave visible, round and round where
    there are fewer than processes. Raises ``DeviceError``.
    """
    kind = available() if kind is None else kind
    if kind not in KINDS:
        raise DeviceError(f"device {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "cpu":
        return torch.device("cpu")
    accelerator = module(kind)
    index = local_rank % accelerator.device_count()
    accelerator.set_device(index)
    return torch.device(kind, index)


def of(device: torch.device) -> Any:
    """The module of the kind of an accelerator that a tensor is on, so one that is loaded."""
    return getattr(torch, device.type)


def wait_for(event: Any, device: torch.device) -> None:
    """Return once ``event``, recorded on a stream of ``device``, has come. Errors of the device are
    raised, as torch's ``RuntimeError``.

    It is asked for again and again: with torch_npu a wait for an event may never return once a
    kernel before it has failed. A failed device refuses new work, and that tells.
    """
    accelerator = of(device)
    pause, look_at = _PAUSE_SECONDS, time.monotonic() + _LOOK_SECONDS
    with accelerator.device(device):  # a thread's first call to a device has to say which
        while not event.query():
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)
            if time.monotonic() > look_at:
                accelerator.Event().record()
                look_at = time.monotonic() + _LOOK_SECONDS
        event.synchronize()  # at once; raises what it has come to


def pinned(length: int, dtype: torch.dtype) -> torch.Tensor:
    """dtype[length], zeroed, in host memory that accelerators copy from and to asynchronously."""
    return torch.zeros(length, dtype=dtype, pin_memory=True)
