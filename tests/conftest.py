"""What all tests share: hypothesis profiles, and the check that nothing is left running."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("long", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """No child of the test run outlives it: ranks, launchers and guards all end."""
    yield
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive, f"left running: {[(p.pid, p.cmdline()) for p in alive]}"
