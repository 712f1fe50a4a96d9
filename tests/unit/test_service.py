"""The service loop in a world of one, with faults that its collectives raise."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from mpift.config import Config
from mpift.reduction.buckets import ParameterSpec, lay_out
from mpift.reduction.gradients import GradientRounds
from mpift.reduction.operations import Operations
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
    workload = GradientRounds(lay_out([ParameterSpec("p", 3, "float32")], 1, 1))
    service.call(lambda: service.add_lane(Operations(0)) and None)
    service.call(lambda: service.add_lane(workload) and None)
    service.join_all()
    service.thread.join(5)
    assert not service.thread.is_alive()
    assert service.world.view.epoch == 1  # the fault was there, and was recovered from
