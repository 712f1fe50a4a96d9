"""What there is of Huawei's software for NPUs (torch_npu, CANN, the driver), without loading torch.

torch_npu is a plugin that ``import torch`` loads by itself, and it needs the libraries of CANN.
Where it is installed and they are not to be found (the ``set_env.sh`` of CANN was not sourced, or
the machine has no NPU at all), ``import torch`` itself fails, though the CPU would do. torch loads
no plugin where ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0; so that is what mpift sets there, before
torch is loaded. Nothing is changed where CANN can be loaded, or torch is loaded already.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

TORCH_NPU = "torch_npu"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# torch_npu is linked to both, in all its versions.
LIBRARIES = ("libascendcl.so", "libhccl.so")

_ROOT = Path("/usr/local/Ascend")
_DRIVER = _ROOT / "driver"
_TOOLKITS = ("cann", "ascend-toolkit", "ascend-toolkit/latest", "nnrt", "nnae")
# Set by set_env.sh.
_TOOLKIT_VARIABLES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_TRY_SECONDS = 20.0
_TRY = "import ctypes, sys\nfor name in sys.argv[1:]: ctypes.CDLL(name)"


# -- can torch be loaded ---------------------------------------------------------------------------


def is_installed() -> bool:
    """Whether torch_npu is there to be loaded by ``import torch``."""
    return importlib.util.find_spec(TORCH_NPU) is not None


def version_installed() -> str | None:
    """The version of torch_npu; None where it is not installed."""
    try:
        return metadata.version(TORCH_NPU)
    except metadata.PackageNotFoundError:
        return None


def loading_error() -> str | None:
    """Why CANN's libraries can't be loaded into this process, in one line; None if they can.

    They stay loaded then: for a process that is about to load torch_npu anyway.
    """
    try:
        for name in LIBRARIES:
            ctypes.CDLL(name)
    except OSError as error:
        return _one_line(str(error))
    return None


def loading_error_apart(environment: Mapping[str, str] = os.environ) -> str | None:
    """As ``loading_error``, found out by a process of its own that has that environment."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRY, *LIBRARIES],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_TRY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"loading {' and '.join(LIBRARIES)} did not end within {_TRY_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return _one_line(said[-1].removeprefix("OSError: ")) if said else f"{done.returncode}"


def let_torch_load() -> None:
    """Keep torch from failing over torch_npu without CANN in this process, and say so in one line.

    To be called before torch is loaded; it does nothing once it is.
    """
    if "torch" in sys.modules or not _autoloads(os.environ):
        return
    missing = loading_error()
    if missing is not None:
        os.environ[AUTOLOAD_VARIABLE] = "0"
        print(f"mpift: warning: {without_cann(missing)}", file=sys.stderr, flush=True)


def missing_for_torch(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why ``import torch`` would fail for lack of CANN in such an environment; None if it won't.

    Where it would, set ``AUTOLOAD_VARIABLE`` to 0 for such a process.
    """
    return loading_error_apart(environment) if _autoloads(environment) else None


def _autoloads(environment: Mapping[str, str]) -> bool:
    """Whether ``import torch`` will load torch_npu (torch takes only 1 for yes)."""
    return environment.get(AUTOLOAD_VARIABLE, "1") == "1" and is_installed()


def without_cann(missing: str) -> str:
    """What it means that CANN's libraries can't be loaded, and what to do, in one line."""
    return (
        f"{TORCH_NPU} is installed, but CANN can't be loaded ({missing}): no NPU is used on this"
        f" node ({AUTOLOAD_VARIABLE}=0); for NPUs, {sourcing_advice()}"
    )


def sourcing_advice() -> str:
    """Which file of CANN to source, if one is there."""
    for name in _TOOLKITS:
        script = _ROOT / name / "set_env.sh"
        if script.is_file():
            return f"source {script} first"
    return f"install CANN and source its set_env.sh (by default {_ROOT}/cann/set_env.sh) first"


# -- versions --------------------------------------------------------------------------------------


def cann_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the CANN is that ``set_env.sh`` has put into the environment, else an installed one."""
    named = [Path(environment[name]) for name in _TOOLKIT_VARIABLES if environment.get(name)]
    found = (folder for folder in (*named, *(_ROOT / name for name in _TOOLKITS)))
    return next((folder for folder in found if folder.is_dir()), None)


def cann_version(folder: Path) -> str | None:
    """The version of the CANN in a folder, such as 8.5.0; None if no file there tells."""
    places = (
        folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info",
        folder / "ascend_toolkit_install.info",
        *sorted(folder.glob("*-linux/ascend_*_install.info")),
    )
    for place in places:
        version = _entry(place, r"version=(\S+)")
        if version is not None:
            return version
    # runtime_running_version=[7.0.0.5.242:8.0.RC1]
    return _entry(folder / "version.cfg", r"\w*running_version=\[[^:\]]*:([^\]]+)\]")


def driver_version(folder: Path = _DRIVER) -> str | None:
    """The version of the NPU driver; None where there is none (in a container: not passed in)."""
    return _entry(folder / "version.info", r"[Vv]ersion=(\S+)")


def _entry(file: Path, pattern: str) -> str | None:
    """The first group of the first line that matches; None if none does, or there is no file."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^\s*{pattern}", text, re.MULTILINE)
    return match[1] if match else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
