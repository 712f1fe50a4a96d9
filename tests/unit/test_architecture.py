"""The house rules that a machine can check: who imports whom, and how large things get.

A *room* is a folder or a lone file of ``mpift/``. ``MAY_IMPORT`` says which rooms each may look
into; anything not in it is upwards or sideways, and refused. The imports are read from the syntax
tree, those inside functions included, so nothing is loaded and nothing can hide in a branch. Only
absolute imports that start with ``mpift`` and relative ones are ours: ``import torch`` within
``mpift/torch`` is PyTorch.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mpift"
TESTS = Path(__file__).resolve().parents[1]
FACE = "__init__"  # what ``import mpift`` gives
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

GROUND = frozenset({"_version", "errors", "settings", "config", "core"})
PARTS = GROUND | {"memory", "transport", "devices"}
SERVICES = PARTS | {"reduction", "checkpoint", "recovery", "parameter_server"}
FACES = SERVICES | {"runtime", "communicator", "torch"}
TOOLS = FACES | {"launch", "observe", "simulate"}

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "_version": frozenset(),
    "errors": frozenset(),
    "core": frozenset({"_version", "errors"}),
    "settings": frozenset({"errors"}),
    # core for the grammar of fault schedules
    "config": frozenset({"_version", "errors", "core", "settings"}),
    "memory": GROUND,
    "transport": GROUND | {"memory"},  # the file through which a node's ranks are watched
    "devices": GROUND,
    "reduction": PARTS,
    "checkpoint": PARTS,
    "recovery": PARTS,
    "parameter_server": PARTS,
    "introduction": SERVICES,
    "runtime": SERVICES | {"introduction", "observe"},  # events have to be heard from the first on
    "communicator": SERVICES | {"runtime"},
    "torch": SERVICES | {FACE, "runtime", "communicator"},
    "launch": FACES | {"observe"},  # events have the same words everywhere
    "observe": GROUND,  # gets events and values handed to it
    "simulate": FACES,
    "testing": TOOLS,
    "bench": TOOLS | {"testing"},
    FACE: GROUND | {"runtime", "communicator"},
    "cli": TOOLS | {FACE, "testing", "bench"},
    "__main__": frozenset({"cli"}),
}

# core/ is pure: time is an argument, and everything that happens comes in as an event.
# fmt: off
IMPURE = frozenset({
    "asyncio", "concurrent", "ctypes", "fcntl", "io", "mmap", "multiprocessing", "os", "pathlib",
    "queue", "select", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time",
})
# fmt: on


def room_of(path: Path, package: Path) -> str:
    """The room that a file of the package stands in."""
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imported_names(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file; ``from a import b`` gives ``a.b``."""
    inside = (package.name, *path.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) + 1 - node.level] if node.level else ()
            prefix = (*base, *([node.module] if node.module else []))
            yield from ((node.lineno, ".".join((*prefix, alias.name))) for alias in node.names)


def room_named(dotted: str, package: Path, rules: Mapping[str, frozenset[str]]) -> str | None:
    """The room that an absolute dotted name lies in; None if it is not of this package."""
    top, _, rest = dotted.partition(".")
    if top != package.name:
        return None
    room = rest.partition(".")[0]
    exists = (package / room).is_dir() or (package / f"{room}.py").is_file()
    return room if room and (exists or room in rules) else FACE


def room_imports(
    package: Path, rules: Mapping[str, frozenset[str]]
) -> Iterator[tuple[str, str, str]]:
    """(place, room, room that it imports), without what a room imports of itself."""
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        for line, name in imported_names(path, package):
            other = room_named(name, package, rules)
            if other is not None and other != room:
                yield f"{path.relative_to(package.parent)}:{line}", room, other


def forbidden_imports(package: Path, rules: Mapping[str, frozenset[str]]) -> list[str]:
    """Imports that the table does not allow, and files that stand in no room of it."""
    unknown = {room_of(path, package) for path in package.rglob("*.py")} - set(rules)
    found = [f"room {room!r} is not in the table" for room in sorted(unknown)]
    for place, room, other in room_imports(package, rules):
        if room in rules and other not in rules[room]:
            found.append(f"{place}: {room} may not import {other}")
    return found


def circle(imports: Mapping[str, set[str] | frozenset[str]]) -> list[str]:
    """Rooms that import each other in a circle, first and last the same; empty if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def circle_of(package: Path, rules: Mapping[str, frozenset[str]]) -> list[str]:
    """As ``circle``, of the imports that the files really have."""
    imports: dict[str, set[str]] = {}
    for _, room, other in room_imports(package, rules):
        imports.setdefault(room, set()).add(other)
    return circle(imports)


def impure_core_imports(package: Path) -> list[str]:
    """Imports of core/ that are neither ours nor of the standard library's pure part."""
    found = []
    for path in sorted((package / "core").rglob("*.py")):
        for line, name in imported_names(path, package):
            top = name.partition(".")[0]
            pure = top in sys.stdlib_module_names and top not in IMPURE
            if top != package.name and not pure:
                found.append(f"{path.relative_to(package.parent)}:{line}: core imports {name}")
    return found


def oversized_files(folder: Path) -> dict[str, str]:
    """What is wrong with each file past its limit of lines, by its path."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            place = path.relative_to(folder.parent).as_posix()
            found[place] = f"{place}: {lines} lines, more than {FILE_LINES_MAX}"
    return found


def oversized_functions(package: Path) -> list[str]:
    """Functions past their limit of lines."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package.parent)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found.append(
                        f"{place}:{node.lineno}: {node.name} has {lines} lines, "
                        f"more than {FUNCTION_LINES_MAX}"
                    )
    return found


def test_no_room_imports_what_lies_above_or_beside_it() -> None:
    assert forbidden_imports(PACKAGE, MAY_IMPORT) == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert circle_of(PACKAGE, MAY_IMPORT) == []


def test_the_table_itself_has_no_circle_and_names_only_rooms_that_it_holds() -> None:
    assert circle(MAY_IMPORT) == []
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)


def test_core_imports_neither_packages_nor_clocks_threads_and_files() -> None:
    assert impure_core_imports(PACKAGE) == []


def test_no_file_and_no_function_has_outgrown_its_limit() -> None:
    assert [*oversized_files(PACKAGE).values(), *oversized_functions(PACKAGE)] == []


def test_no_file_of_tests_has_outgrown_its_limit() -> None:
    assert list(oversized_files(TESTS).values()) == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("mpift", ("torch", "mpi4py.MPI", "numpy")),
        ("mpift.cli", ("torch", "mpi4py.MPI", "h5py")),
        ("mpift.torch", ("mpi4py.MPI", "h5py")),  # HDF5 is the writer process's
        ("mpift.checkpoint.writer", ("torch", "mpi4py.MPI")),
    ],
)
def test_importing_a_module_loads_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    heavy_loaded = f"import sys, {module}; print(*(set({heavy}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", heavy_loaded],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr


# What follows shows that the checks can fail: each works on a small made-up tree.


def made_up(folder: Path, files: Mapping[str, str]) -> Path:
    """A package ``mpift`` of these files, by path within it."""
    package = folder / "mpift"
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("core/a.py", "import mpift.transport.world", "core may not import transport"),
        ("core/a.py", "from mpift.torch import x", "core may not import torch"),
        ("core/a.py", "from mpift import rank", "core may not import __init__"),
        ("core/a.py", "from mpift import runtime", "core may not import runtime"),
        ("core/a.py", "from .. import launch", "core may not import launch"),
        ("core/deep/a.py", "from ...torch import x", "core may not import torch"),
        ("core/__init__.py", "from ..torch.x import y", "core may not import torch"),
        ("errors.py", "from . import config", "errors may not import config"),
        (
            "transport/a.py",
            "def f():\n    import mpift.runtime",
            "transport may not import runtime",
        ),
        ("reduction/a.py", "from mpift.recovery import x", "reduction may not import recovery"),
        ("runtime.py", "from mpift.communicator import x", "runtime may not import communicator"),
        ("torch/a.py", "import mpift.launch as x", "torch may not import launch"),
        ("cellar/a.py", "", "room 'cellar' is not in the table"),
    ],
)
def test_an_import_that_breaks_the_rule_is_found(
    tmp_path: Path, file: str, text: str, complaint: str
) -> None:
    package = made_up(tmp_path, {"runtime.py": "", "launch/a.py": "", file: text})
    found = forbidden_imports(package, MAY_IMPORT)
    assert len(found) == 1
    assert found[0].endswith(complaint)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("torch/a.py", "import torch\nfrom torch.optim import Optimizer"),
        ("torch/a.py", "from . import b\nfrom .b import c\nfrom mpift.torch import b"),
        ("torch/a.py", "from ..communicator import x\nfrom mpift.core.rounds import y"),
        ("core/a.py", "from mpift import errors\nfrom mpift.errors import MpiftError"),
        ("config.py", "from mpift.core import chaos"),
        ("cli/a.py", "import mpift\nfrom mpift import Communicator, __version__"),
        ("launch/a.py", "import mpiftools"),
    ],
)
def test_an_import_that_keeps_the_rule_is_left_alone(tmp_path: Path, file: str, text: str) -> None:
    assert forbidden_imports(made_up(tmp_path, {file: text}), MAY_IMPORT) == []


def test_a_circle_is_found_even_where_the_table_would_allow_each_import(tmp_path: Path) -> None:
    rules = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"}), FACE: frozenset()}
    package = made_up(
        tmp_path,
        {"a.py": "from . import b", "b.py": "import mpift.c", "c.py": "from mpift.a import x"},
    )
    assert forbidden_imports(package, rules) == []
    assert set(circle_of(package, rules)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "line", ["import numpy", "from torch import nn", "import time", "from os import environ"]
)
def test_a_core_that_reaches_outside_is_found(tmp_path: Path, line: str) -> None:
    package = made_up(tmp_path, {"core/a.py": f"import enum\nimport mpift.errors\n{line}\n"})
    assert len(impure_core_imports(package)) == 1


def test_a_file_and_a_function_one_line_too_long_are_found(tmp_path: Path) -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    pass\n" * (lines - 1)

    package = made_up(
        tmp_path,
        {
            "fits.py": function(FUNCTION_LINES_MAX) + "# line\n" * (400 - FUNCTION_LINES_MAX),
            "file.py": "# line\n" * (FILE_LINES_MAX + 1),
            "function.py": function(FUNCTION_LINES_MAX + 1),
        },
    )
    assert oversized_files(package) == {"mpift/file.py": "mpift/file.py: 401 lines, more than 400"}
    assert oversized_functions(package) == ["mpift/function.py:1: f has 61 lines, more than 60"]
