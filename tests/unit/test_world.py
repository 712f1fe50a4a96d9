"""What ``MpiWorld`` makes of MPI's answers; the MPI here is a fake that needs no launcher."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.transport import startup
from mpift.transport.world import MpiWorld


class FaultError(Exception):
    """What the fake raises."""


class Request:
    """One that has ``completed`` is freed by the look that finds it, as in MPI: it is null then."""

    def __init__(self, state: str) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.state == other.state

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def Testsome(requests: list[Request]) -> list[int]:
        done = [i for i, request in enumerate(requests) if request.state == "completed"]
        for i in done:
            requests[i].state = "null"
        if any(request.state == "failed" for request in requests):
            raise FaultError  # and not a word of those that are done
        return done


class FakeMpi:
    Exception = FaultError
    Request = Request
    REQUEST_NULL = Request("null")


def world(monkeypatch: pytest.MonkeyPatch, ulfm: bool = True) -> Any:
    monkeypatch.setattr(startup, "ulfm_enabled", lambda _mpi: ulfm)
    made = MpiWorld.__new__(MpiWorld)
    made._mpi = FakeMpi  # type: ignore[assignment]
    return made


def test_what_completes_in_the_look_that_meets_a_fault_is_told_before_the_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world(monkeypatch)
    requests = [Request("pending"), Request("completed"), Request("failed")]
    assert made.test_some(requests) == [1]
    del requests[1]  # as whoever waits for it does
    with pytest.raises(FaultError):
        made.test_some(requests)


def test_an_mpi_that_may_free_failed_requests_too_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world(monkeypatch, ulfm=False)
    with pytest.raises(FaultError):
        made.test_some([Request("completed"), Request("failed")])
