"""Every order of events of a few ranks around ``core.turns``; broken variants must be caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpift.core.turns import Turns
from mpift.testing.explorer import explore
from tests.model.turns_model import TurnsModel


@pytest.mark.parametrize(
    ("loops", "deaths", "buckets"),
    [
        ((2, 2), 1, 2),
        ((1, 2), 1, 2),
        ((2, 0), 0, 3),
        ((1, 1, 1), 2, 1),
        ((1, 1, 0), 1, 2),
        ((0, 1, 2), 1, 1),
        pytest.param((2, 2, 2), 2, 1, marks=pytest.mark.long),
        pytest.param((1, 1, 1), 2, 2, marks=pytest.mark.long),
        pytest.param((1, 1, 1, 1), 2, 1, marks=pytest.mark.long),
    ],
)
def test_survivors_agree_on_every_operation_and_lose_no_finished_work(
    loops: tuple[int, ...], deaths: int, buckets: int
) -> None:
    report = explore(TurnsModel(loops, deaths, buckets))
    assert report.violation is None, str(report)
    assert report.states > 20


class _NobodyHandsOver(Turns):
    """Broken: after a fault everybody simply redoes its own open operation."""

    def _reconcile(self, epoch, completed):  # type: ignore[no-untyped-def]
        return replace(self, epoch=epoch, started=0, done=frozenset(), suspended=False)._start()


class _OldEpochCounts(Turns):
    """Broken: what completed before the fault is kept, instead of done again."""

    def _reopened(self, epoch):  # type: ignore[no-untyped-def]
        return self

    def _reconcile(self, epoch, completed):  # type: ignore[no-untyped-def]
        state, instructions = super()._reconcile(epoch, completed)
        return replace(state, done=self.done), instructions


class _JoinedRankStaysAway(Turns):
    """Broken: a rank that left its loop no longer takes part."""

    def _start(self):  # type: ignore[no-untyped-def]
        return super()._start() if self.contributed else (self, ())


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (_NobodyHandsOver, "deadlock"),
        (_OldEpochCounts, ""),
        (_JoinedRankStaysAway, "deadlock"),
    ],
)
def test_a_broken_variant_is_caught_with_a_counter_example(
    machine: type[Turns], expected: str
) -> None:
    report = explore(TurnsModel((1, 1, 0), 1, 2, machine))
    assert report.violation is not None
    assert expected in report.violation
    assert report.trace
