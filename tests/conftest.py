"""What all tests share: hypothesis profiles, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("long", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

SESSION_VARIABLE = "PYTEST_MPIFT_SESSION"
SHARED_MEMORY = Path("/dev/shm")
OURS = ("mpift-", "sm_segment.")  # of mpift, and of Open MPI's transport between neighbours
LIMIT_SECONDS = 10.0
WALKED = "walked"


@pytest.fixture
def walked(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Lets a test of a model have its report printed at the end of the run."""
    return lambda report: record_property(WALKED, str(report))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = terminalreporter.stats.get("passed", [])
    reports = [(r, text) for r in passed for name, text in r.user_properties if name == WALKED]
    if reports:
        terminalreporter.section("state spaces walked")
    for report, text in reports:
        terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {text}")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No process of the test run outlives it, watchdogs included, and no file in shared memory."""
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    before = set(shared_files())
    yield
    processes = once_none(processes_of_session)
    assert not processes, f"left running: {[describe(process) for process in processes]}"
    files = once_none(lambda: sorted(set(shared_files()) - before - set(mapped_files())))
    assert not files, f"left in {SHARED_MEMORY}: {files}"


def once_none(look: Callable[[], list]) -> list:
    """What is left of what ``look`` finds once there is nothing, or after the limit."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def processes_of_session() -> list[psutil.Process]:
    session = os.environ[SESSION_VARIABLE]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            inherited = process.environ().get(SESSION_VARIABLE) == session
            if inherited and process.pid != os.getpid():
                found.append(process)
    children = psutil.Process().children(recursive=True)
    return list({*found, *(c for c in children if c.is_running())})


def describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())}"
    return str(process.pid)


def shared_files() -> list[str]:
    if not SHARED_MEMORY.is_dir():
        return []
    return [file.name for file in SHARED_MEMORY.iterdir() if file.name.startswith(OURS)]


def mapped_files() -> list[str]:
    """Those that some process uses: another job's on this machine."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {
                line.rpartition("/")[2]
                for line in maps.read_text().splitlines()
                if "/dev/shm/" in line
            }
    return sorted(found)
