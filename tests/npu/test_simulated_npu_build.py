"""The simulated NPU is built once, whoever starts at once, is killed, or lacks what it takes."""

from __future__ import annotations

import fcntl
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mpift.errors import DeviceError

# The first test on a machine builds the real one.
pytestmark = pytest.mark.timeout(900)

SMALL = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "simulated_npu"};
PyMODINIT_FUNC PyInit_simulated_npu() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The builder, with sources that take a moment to compile, and an empty cache."""
    from mpift.testing.npu import build as module

    sources = tmp_path / "source"
    sources.mkdir()
    (sources / "module.cpp").write_text(SMALL)
    monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setenv("MPIFT_CACHE", str(tmp_path / "cache"))
    return module


def test_many_that_start_at_once_build_once_over_what_a_killed_builder_left(
    build: Any, capfd: pytest.CaptureFixture
) -> None:
    root = build.place().parent.parent
    left = root / "building-of-a-dead-process"
    left.mkdir(parents=True)
    (root / "lock").touch()
    with ThreadPoolExecutor(3) as starters:
        paths = {future.result() for future in [starters.submit(build.library) for _ in range(3)]}
    assert paths == {build.place()}
    assert build.place().read_bytes()[:4] == b"\x7fELF"
    assert capfd.readouterr().err.count("building the simulated NPU") == 1
    assert {path.name for path in root.iterdir()} == {"lock", build.place().parent.name}


def test_sources_that_do_not_compile_are_told_of_and_block_nobody(build: Any) -> None:
    broken = build.place()
    (build.SOURCES / "module.cpp").write_text("#error this is broken")
    assert build.place() != broken
    with pytest.raises(DeviceError, match=r"can't be built: .*error: #error this is broken"):
        build.library()
    assert not list(build.place().parent.parent.glob("building-*"))
    assert not build.place().exists()


def test_who_holds_the_lock_for_ever_is_named_by_its_file(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_LOCK_SECONDS", 0.0)
    lock = build.place().parent.parent / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeviceError, match=f"look who holds {lock}"):
            build.library()


def test_what_is_missing_for_a_build_is_named(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match=r"no compiler 'no-such-compiler': install g\+\+"):
        build.library()
    compiler = build.SOURCES / "compiler"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DeviceError, match="pip install ninja"):
        build.library()


def test_the_cache_is_where_the_environment_says(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert build.cache() == tmp_path / "cache"
    monkeypatch.delenv("MPIFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache() == Path("/x/mpift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache() == Path.home() / ".cache" / "mpift"
