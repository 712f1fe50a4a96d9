"""Builds the C++ of the simulated NPU, once a machine, into a cache that all processes share.

The library lies in a folder named by all that it depends on: its sources, torch, Python and the
compiler. It is built in a private folder and moved into place by one rename, under a lock that the
kernel takes from a builder that dies; so any number of ranks may start at once, and whoever is
killed in a build costs the next one nothing but the time. Nothing here touches torch's state.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mpift.errors import DeviceError

LIBRARY = "simulated_npu"
CACHE_VARIABLE = "MPIFT_CACHE"
SOURCES = Path(__file__).parent / "source"

_FLAGS = ("-O1", "-g0")
_PRIVATE_PREFIX = "building-"
_LOCK_SECONDS = 900.0  # several times a build on a slow machine
_LOCK_POLL_SECONDS = 0.1

# Runs in a process of its own: torch's builder loads what it has built, and that is to happen here
# only from the final place, and only after the backend has got its name.
_BUILD = """
import sys
from torch.utils.cpp_extension import load
name, folder, flags, *sources = sys.argv[1:]
load(name, sources, extra_cflags=flags.split(), build_directory=folder)
"""


def library() -> Path:
    """Path of the built library; builds it where there is none yet (about a minute).

    Raises ``DeviceError`` where that can't be done, which says what is missing.
    """
    path = place()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent.parent / "lock"):
            if not path.exists():
                _say("building the simulated NPU (about a minute, once)...")
                _build(path)
    return path


def place() -> Path:
    """Where the library of these sources, this torch, Python and compiler belongs."""
    return cache() / "simulated-npu" / _identity() / f"{LIBRARY}.so"


def cache() -> Path:
    """``MPIFT_CACHE``, else ``mpift`` in the user's folder of caches."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpift"


def _identity() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    about = (
        torch.__version__,
        sys.version,
        platform.machine(),
        _compiler_version(),
        *_FLAGS,
    )
    digest.update("\n".join(about).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    """Path of the compiler that torch's builder uses."""
    name = os.environ.get("CXX") or "c++"
    found = shutil.which(name)
    if found is None:
        raise DeviceError(
            f"the simulated NPU is built from C++, and there is no compiler {name!r}: install g++"
            " (Debian, Ubuntu: apt install g++), or set CXX"
        )
    return found


def _compiler_version() -> str:
    command = [_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _environment() -> dict[str, str]:
    """The environment of a build, in which ninja is found even if no environment is activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if shutil.which("ninja", path=path) is None:
        raise DeviceError(
            "the simulated NPU is built by ninja, which is not installed: pip install ninja"
        )
    # A backend that loads itself with torch has no business in a compilation.
    return os.environ | {"PATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeviceError(
                        f"another process has been building the simulated NPU for more than"
                        f" {_LOCK_SECONDS:.0f} s: look who holds {path} (lsof)"
                    ) from None
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _build(path: Path) -> None:
    """Under the lock: builds the library and puts it at ``path``."""
    root = path.parent.parent
    environment = _environment()
    for left in root.glob(f"{_PRIVATE_PREFIX}*"):  # of builders that were killed
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=root))
    try:
        sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
        command = [
            sys.executable,
            "-c",
            _BUILD,
            LIBRARY,
            str(folder),
            " ".join(_FLAGS),
            *sources,
        ]
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise DeviceError(f"the simulated NPU can't be built: {_why(done.stdout)}")
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _why(output: str) -> str:
    """The first error of a compiler, and else the end of what was printed."""
    lines = output.splitlines()
    errors = [line.strip() for line in lines if "error:" in line]
    return errors[0] if errors else "\n".join(lines[-20:])


def _say(text: str) -> None:
    print(f"mpift: {text}", file=sys.stderr, flush=True)
