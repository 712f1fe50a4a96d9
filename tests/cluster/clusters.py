"""A virtual cluster for a test, if there can be one here, and what is waited for on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from mpift.testing.cluster import VirtualCluster, availability

LIMIT_SECONDS = 30.0


@pytest.fixture
def cluster() -> Iterator[VirtualCluster]:
    require_clusters()
    with VirtualCluster(3) as made:
        yield made


def require_clusters() -> None:
    reason = availability()
    if reason is not None:
        pytest.skip(f"no virtual cluster here: {reason}")


def wait_until(true: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.01)
