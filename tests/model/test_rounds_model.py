"""Every order of events of a few ranks around ``core.rounds``; broken variants must be caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpift.core import rounds
from mpift.core.rounds import Rounds
from mpift.testing.explorer import explore
from tests.model.rounds_model import RoundsModel


@pytest.mark.parametrize(
    ("loops", "deaths", "buckets"),
    [
        ((2, 2), 1, 2),
        ((1, 2), 1, 2),
        ((2, 0), 0, 3),
        ((1, 1, 1), 2, 1),
        ((1, 1, 1), 1, 2),
        ((0, 1, 2), 1, 1),
        pytest.param((2, 2, 2), 2, 1, marks=pytest.mark.long),
        pytest.param((1, 1, 1), 2, 2, marks=pytest.mark.long),
        pytest.param((1, 1, 1, 1), 2, 1, marks=pytest.mark.long),
    ],
)
def test_survivors_agree_on_every_round_and_lose_no_finished_work(
    loops: tuple[int, ...], deaths: int, buckets: int
) -> None:
    report = explore(RoundsModel(loops, deaths, buckets))
    assert report.violation is None, str(report)
    assert report.states > 50


@pytest.mark.parametrize("loops", [(2, 2), (1, 2), (1, 1, 0)])
def test_operations_whose_buckets_follow_in_turn_agree_too(loops: tuple[int, ...]) -> None:
    report = explore(RoundsModel(loops, deaths=1, buckets=2, in_turn=True))
    assert report.violation is None, str(report)


class _NobodyHandsOver(Rounds):
    """Broken: after a fault everybody simply redoes its own open round."""

    def _reconcile(self, epoch, completed):  # type: ignore[no-untyped-def]
        return replace(self, epoch=epoch, started=0, done=frozenset(), suspended=False)._start()


class _OldEpochCounts(Rounds):
    """Broken: what completed before the fault is kept, instead of reduced again."""

    def _reconcile(self, epoch, completed):  # type: ignore[no-untyped-def]
        state, instructions = super()._reconcile(epoch, completed)
        kept = replace(state, done=self.done, started=max(state.started, len(self.done)))
        return kept, tuple(
            i for i in instructions if not isinstance(i, rounds.Start) or i.bucket not in self.done
        )


class _NextRoundStartsEarly(Rounds):
    """Broken: a round counts as complete when its last bucket is, whatever the others do."""

    def _complete_bucket(self, bucket, participants):  # type: ignore[no-untyped-def]
        if bucket == self.buckets - 1:
            return self._complete_round(self.epoch, last=False)
        return super()._complete_bucket(bucket, participants)


class _JoinedRankStaysAway(Rounds):
    """Broken: a rank that left its loop no longer takes part."""

    def _may_start(self, bucket: int) -> bool:
        return bucket in self.contributed


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (_NobodyHandsOver, "deadlock"),
        (_OldEpochCounts, ""),
        (_NextRoundStartsEarly, ""),
        (_JoinedRankStaysAway, "deadlock"),
    ],
)
def test_a_broken_variant_is_caught_with_a_counter_example(
    machine: type[Rounds], expected: str
) -> None:
    report = explore(RoundsModel((1, 1, 1), 1, 2, machine))
    assert report.violation is not None
    assert expected in report.violation
    assert report.trace
