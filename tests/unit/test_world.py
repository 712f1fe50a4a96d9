"""What ``MpiWorld`` makes of MPI's answers; the MPI here is a fake that needs no launcher."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.transport import startup
from mpift.transport.mpi_world import MpiWorld
from mpift.transport.world import LetterRequest


class FaultError(Exception):
    """What the fake raises."""


class Request:
    """One that has ``completed`` is freed by the look that finds it, as in MPI: it is null then. So
    is a receive that ``failed``; a collective that ``broke`` is not."""

    def __init__(self, state: str) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.state == other.state

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def Testsome(requests: list[Request]) -> list[int]:
        before = [request.state for request in requests]
        done = [i for i, state in enumerate(before) if state == "completed"]
        for request in requests:
            if request.state in ("completed", "failed"):
                request.state = "null"
        if {"failed", "broke"} & set(before):
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
    made._met = None
    return made


@pytest.mark.parametrize("fault", ["failed", "broke"])
def test_a_letter_that_is_found_with_a_fault_is_told_before_the_fault(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    made = world(monkeypatch)
    requests = [Request("pending"), LetterRequest(Request("completed")), Request(fault)]
    assert made.test_some(requests) == [1]
    del requests[1]  # as whoever waits for it does
    with pytest.raises(FaultError):
        made.test_some(requests)


def test_a_receive_that_failed_is_never_taken_for_one_that_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world(monkeypatch)
    requests = [LetterRequest(Request("pending")), Request("completed"), Request("failed")]
    with pytest.raises(FaultError):
        made.test_some(requests)


def test_an_mpi_that_may_free_failed_requests_too_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world(monkeypatch, ulfm=False)
    with pytest.raises(FaultError):
        made.test_some([LetterRequest(Request("completed")), Request("failed")])
