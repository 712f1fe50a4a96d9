"""The service loop in a world of one, with faults that its collectives raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from mpift.config import Config
from mpift.core.hangs import Phase
from mpift.reduction.buckets import ParameterSpec, lay_out
from mpift.reduction.gradients import GradientRounds, RoundRules
from mpift.reduction.operations import Operations
from mpift.transport.liveness import Liveness, Slot
from mpift.transport.service import Hooks, Service
from mpift.transport.solo import SoloComm, SoloWorld


class LinkBrokenError(Exception):
    """What this world's calls raise at a fault."""


class BreakingComm(SoloComm):
    """Its first collectives fail, as on a communicator that another rank has revoked."""

    def __init__(self, failures: int) -> None:
        self._failures = failures

    def _maybe_fail(self) -> None:
        if self._failures:
            self._failures -= 1
            raise LinkBrokenError

    def Iallgather(self, send: np.ndarray, receive: np.ndarray) -> Any:
        self._maybe_fail()
        return super().Iallgather(send, receive)

    def Iallreduce(self, send: np.ndarray, receive: np.ndarray, operator: Any) -> Any:
        self._maybe_fail()
        return super().Iallreduce(send, receive, operator)


class BreakingWorld(SoloWorld):
    """Two lanes, of which one fails when it is used first."""

    def __init__(self, breaking: int) -> None:
        super().__init__(2)
        self.lane_comms[breaking] = BreakingComm(1)

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        return (LinkBrokenError,)


def give_up(code: int, reason: str, seen: bool) -> NoReturn:
    raise AssertionError(f"gave up with {code}: {reason}")


@pytest.mark.parametrize("breaking", [0, 1])
def test_a_fault_while_a_rank_leaves_keeps_no_lane_from_ending(breaking: int) -> None:
    hooks = Hooks(lambda *_: None, give_up, lambda _step, _point: None)
    service = Service(lambda: BreakingWorld(breaking), Config(), hooks)
    service.start()
    workload = GradientRounds(
        lay_out([ParameterSpec("p", 3, "float32")], 1, 1), RoundRules("majority", 10.0, True, 4)
    )
    service.call(lambda: service.add_lane(Operations(0, lambda: None)) and None)
    service.call(lambda: service.add_lane(workload) and None)
    service.join_all()
    service.release()
    service.thread.join(5)
    assert not service.thread.is_alive()
    assert service.world.view.epoch == 1  # the fault was there, and was recovered from


class WatchingWorld(BreakingWorld):
    """Notes whether the slot tells of a blocking call while the world is rebuilt."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(0)
        self._slot = slot
        self.limits: list[tuple[bool, float]] = []

    def rebuild(self, *arguments: Any) -> Any:
        self.limits.append((self._slot.blocked_since_seconds > 0, self._slot.blocked_limit_seconds))
        return super().rebuild(*arguments)


def test_the_watchdog_is_told_of_every_turn_and_of_a_call_that_may_block(tmp_path: Path) -> None:
    liveness = Liveness.create("token", "node", (0,), tmp_path)
    slot = liveness.slots[0]
    world = WatchingWorld(slot)
    hooks = Hooks(lambda *_: None, give_up, lambda _step, _point: None)
    service = Service(lambda: world, Config(rebuild_timeout=77.0), hooks)
    service.start()
    service.call(lambda: service.show_life(slot))
    service.call(lambda: service.add_lane(Operations(0, lambda: None)) and None)
    beats = slot.beats
    service.join_all()
    service.release()
    service.thread.join(5)
    assert world.limits == [(True, 77.0)]
    assert slot.blocked_since_seconds == 0
    assert slot.beats > beats
    assert slot.phase is Phase.LEFT
    liveness.close()


class Lane:
    """A lane with one request, which notes what of its requests has completed."""

    def __init__(self) -> None:
        self.requests = [object()]
        self.completed: list[int] = []

    def complete(self, world: Any, positions: list[int]) -> None:
        self.completed += positions


class Messages:
    """A part whose message lets the first lane start something."""

    def __init__(self, lane: Lane) -> None:
        self.requests = [object()]
        self._lane = lane

    def complete(self, positions: list[int]) -> None:
        self._lane.requests.append(object())


def test_what_a_message_starts_in_one_lane_takes_no_completion_from_another() -> None:
    service = Service(SoloWorld, Config(), Hooks(lambda *_: None, give_up, lambda *_: None))
    first, second = Lane(), Lane()
    service.lanes = [first, second]  # type: ignore[list-item]
    service._parts = [Messages(first)]  # type: ignore[list-item]
    service.world = SoloWorld()
    service.world.test_some = lambda requests: [0, 2]  # type: ignore[method-assign]
    assert service._poll()
    assert (first.completed, second.completed) == ([], [0])
