"""The wheels of torch_npu: which there are, how to get them, and what they offer without loading.

They are kept in the user's folder of caches, never in the project's own environment: where
torch_npu is installed and CANN is not, ``import torch`` fails.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

# The oldest that mpift supports, then the newest for each version of torch. The table in
# docs/reference/npu-versions.md has a row for each.
RELEASES = (
    "2.4.0",
    "2.4.0.post4",
    "2.5.1.post1",
    "2.6.0.post5",
    "2.7.1.post11",
    "2.8.0.post5",
    "2.9.0.post9",
    "2.9.1",
    "2.10.0.post7",
    "2.11.0.post3",
    "2.12.0.post3",
    "2.13.0",
    "2.14.0",
)

_PIP_SECONDS = 240


class Root(Protocol):
    """Where packages lie: a ``pathlib.Path``, or a ``zipfile.Path``."""

    def joinpath(self, *parts: str) -> Root: ...
    def exists(self) -> bool: ...
    def iterdir(self) -> Iterator[Root]: ...
    def read_text(self, encoding: str) -> str: ...
    @property
    def name(self) -> str: ...


class UnavailableError(Exception):
    """A wheel can't be fetched."""


def torch_of(release: str) -> str:
    """The version of torch that a release of torch_npu is for."""
    return re.sub(r"\.post[0-9]+$", "", release)


def release_for(torch_version: str) -> str | None:
    """The release for a version of torch, None if none is known; ``+cpu`` and the like is ignored.

    Where none is for that very version it is the newest for its minor version."""
    exact = torch_version.partition("+")[0]
    minor = exact.rpartition(".")[0]
    fitting = [r for r in RELEASES if torch_of(r) == exact]
    fitting = fitting or [r for r in RELEASES if torch_of(r).rpartition(".")[0] == minor]
    return fitting[-1] if fitting else None


# -- getting them ----------------------------------------------------------------------------------


def cache() -> Path:
    """``MPIFT_CACHE``, else ``mpift`` in the user's folder of caches; it exists."""
    named = os.environ.get("MPIFT_CACHE")
    general = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named) if named else Path(general) / "mpift"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time does what is done under that name."""
    with (cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def installed(release: str) -> Path:
    """A folder for ``PYTHONPATH`` that holds that release and what it needs beside torch and numpy.

    Raises ``UnavailableError``."""
    folder = cache() / f"torch_npu-{release}-{sys.implementation.cache_tag}"
    with locked(folder.name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                place = Path(temporary) / "site"
                _pip("install", "--target", str(place), "pyyaml", f"torch_npu=={release}")
                place.rename(folder)
    return folder


def downloaded(release: str, folder: Path) -> Path:
    """The wheel of that release, as a file in ``folder``. Raises ``UnavailableError``."""
    _pip("download", "--dest", str(folder), f"torch_npu=={release}")
    (wheel,) = folder.glob(f"torch_npu-{release}-*.whl")
    return wheel


def _pip(command: str, *arguments: str) -> None:
    options = [
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "1",
        "--timeout",
        "20",
    ]
    line = [sys.executable, "-m", "pip", command, *options, *arguments]
    try:
        subprocess.run(line, check=True, capture_output=True, text=True, timeout=_PIP_SECONDS)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"pip {command} {arguments[-1]}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip {command} took more than {_PIP_SECONDS} s") from error


# -- what they say of themselves -------------------------------------------------------------------


def contents(wheel: Path) -> Root:
    """What lies in a wheel's file."""
    return zipfile.Path(wheel)


def required_torch(root: Root) -> str:
    """The version of torch that its metadata demand, without ``+cpu`` and ``.*``."""
    match = re.search(r"^Requires-Dist: torch ?\(?==([0-9.]+[0-9])", _metadata(root), re.MULTILINE)
    assert match is not None, "its metadata demand no torch"
    return match[1]


def stated_cann(root: Root) -> dict[str, str]:
    """CANN's version for releases of torch_npu, as far as a table in its description has them."""
    stated = {}
    cann = ""
    for line in _metadata(root).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 6 or not re.match(r"[0-9]+\.[0-9]", cells[2]):
            continue
        cann = cells[1].removeprefix("CANN ") or cann
        stated[cells[3]] = cann
    return stated


def _metadata(root: Root) -> str:
    (folder,) = (
        entry for entry in root.iterdir() if re.match(r"torch_npu-.*\.dist-info$", entry.name)
    )
    return folder.joinpath("METADATA").read_text(encoding="utf-8")


# -- the names that they offer ---------------------------------------------------------------------


def names_of_npu(root: Root) -> frozenset[str]:
    """All names that ``torch_npu.npu``, which is ``torch.npu``, has once it is imported."""
    return _names(root, ("torch_npu", "npu"))


def _names(root: Root, package: tuple[str, ...]) -> frozenset[str]:
    names: set[str] = set()
    for statement in _parsed(root, package).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.Delete):
            names -= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.ImportFrom):
            named = {alias.asname or alias.name for alias in statement.names}
            if named != {"*"}:
                names |= named
            elif statement.level == 1 and statement.module is not None:
                names |= _exported(root, (*package, *statement.module.split(".")))
    return frozenset(names)


def _exported(root: Root, module: tuple[str, ...]) -> frozenset[str]:
    """What ``from module import *`` brings."""
    for statement in _parsed(root, module).body:
        if isinstance(statement, ast.Assign):
            targets = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            if targets == ["__all__"]:
                return frozenset(ast.literal_eval(statement.value))
    return frozenset(name for name in _names(root, module) if not name.startswith("_"))


def _parsed(root: Root, module: tuple[str, ...]) -> ast.Module:
    *folders, last = module
    candidates = (
        root.joinpath(*folders, f"{last}.py"),
        root.joinpath(*module, "__init__.py"),
    )
    for file in candidates:
        if file.exists():
            return ast.parse(file.read_text(encoding="utf-8"))
    raise AssertionError(f"no module {'.'.join(module)} in {root}")
