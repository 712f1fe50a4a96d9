"""What a fault schedule does on the rank that it names."""

from __future__ import annotations

import threading
import time

import pytest

from mpift.core import chaos
from mpift.transport import injection
from mpift.transport.heartbeat import Impairment
from mpift.transport.injection import Injector, hold_interpreter_lock


def injector(text: str, member: int = 1) -> tuple[Injector, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []
    made = Injector(
        chaos.parse(text, 4),
        member,
        lambda fault, step: told.append((str(fault), step)),
        list,
        lambda text: told.append((text, -1)),
    )
    return made, told


def test_a_fault_that_lasts_strikes_in_each_of_its_steps_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(injection.time, "sleep", slept.append)
    made, told = injector("slow:1@3-5:0.25,slow:2@0-9:7")
    for step in range(8):
        made.strike(step, "step")
    assert slept == [0.25] * 3
    assert told == [("slow:1@3-5:0.25", 3)]


def test_a_fault_that_does_not_last_strikes_once_even_if_its_place_is_passed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[float] = []
    monkeypatch.setattr(injection, "hold_interpreter_lock", held.append)
    made, told = injector("gil:1@3:2")
    for _ in range(3):
        made.strike(3, "step")
    assert held == [2.0]
    assert len(told) == 1


def test_heartbeats_are_impaired_in_the_steps_of_the_fault_alone() -> None:
    made, told = injector("drop:1@3-5:0.25,corrupt:1@5-9:1")
    found = [made.impairment(step) for step in (2, 3, 5, 9, 10)]
    assert found == [
        Impairment(),
        Impairment(drop=0.25),
        Impairment(drop=0.25, corrupt=1.0),
        Impairment(corrupt=1.0),
        Impairment(),
    ]
    made.strike(3, "step")
    assert told == [("drop:1@3-5:0.25", 3)]


def test_no_python_runs_while_the_lock_is_held() -> None:
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.005):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    hold_interpreter_lock(0.3)
    end = time.monotonic()
    over.set()
    thread.join()
    # At the edges the other thread may have its turn just before or after the call.
    assert not [t for t in ticks if begin + 0.05 < t < end - 0.05]
    assert end - begin >= 0.3


def test_a_fault_of_what_is_trained_is_left_to_the_caller_once() -> None:
    made, told = injector("flip:1@3,flip:2@3")
    assert [[str(fault) for fault in made.strike(step, "step")] for step in (2, 3, 3, 4)] == [
        [],
        ["flip:1@3"],
        [],
        [],
    ]
    assert told == [("flip:1@3", 3)]
