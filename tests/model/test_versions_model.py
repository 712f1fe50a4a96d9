"""Every order of pushes, copies and deaths around one key; broken variants must be caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpift.core import versions
from mpift.core.versions import Shard, Version
from mpift.testing.explorer import explore, wander
from tests.model.versions_model import VersionsModel

# (updates a member, and more): every order, and an end from everywhere.
WORLDS: list[dict[str, Any]] = [
    {"pushes": (2,)},
    {"pushes": (1, 1), "deaths": 1, "rebuilds": 1},
    {"pushes": (1, 1, 0), "deaths": 1},
    {"pushes": (0, 1, 1), "deaths": 1, "rebuilds": 1},
    {"pushes": (0, 1, 1), "deaths": 2},
    {"pushes": (1, 1, 1), "deaths": 1, "staleness": 0},
]
LONG_WORLDS: list[dict[str, Any]] = [
    {"pushes": (0, 2, 1), "deaths": 1, "rebuilds": 1},
    {"pushes": (0, 0, 1, 1), "deaths": 2},
    {"pushes": (0, 2, 2), "deaths": 1, "staleness": 1},
]


@pytest.mark.parametrize(
    "world", [*WORLDS, *(pytest.param(world, marks=pytest.mark.long) for world in LONG_WORLDS)]
)
def test_no_acknowledged_version_is_lost_and_each_update_counts_once_in_one_order(
    world: dict[str, Any],
) -> None:
    report = explore(VersionsModel(**world), must_end=True)
    assert report.violation is None, str(report)
    assert report.states > (100 if len(world["pushes"]) > 1 else 4)


@pytest.mark.parametrize(
    "walks", [200, pytest.param(5000, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_walks_through_larger_worlds_find_nothing(walks: int) -> None:
    world = VersionsModel((3, 3, 3, 3), deaths=2, rebuilds=2, staleness=3)
    report = wander(world, walks=walks, seed=1)
    assert report.violation is None, str(report)
    assert report.transitions > 20 * walks


# -- broken variants -------------------------------------------------------------------------------


class _AcknowledgesBeforeTheCopy(Shard):
    """Broken: an update is committed as soon as the primary has applied it."""

    def _spread(self):  # type: ignore[no-untyped-def]
        state, copies = super()._spread()
        committed, answers = state._commit(state.held)
        return replace(committed, flying=state.flying), (*copies, *answers)


class _ForgetsSerials(Shard):
    """Broken: the copy does not say whose updates are in it."""

    def _received(self, version):  # type: ignore[no-untyped-def]
        return super()._received(Version(version.number, version.value))


class _TrustsTheNewBackup(Shard):
    """Broken: what the old backup had is taken for what the new one has."""

    def _changed(self, primary, backup):  # type: ignore[no-untyped-def]
        return super(_TrustsTheNewBackup, replace(self, backup=backup))._changed(primary, backup)


class _TakesResentUpdatesForNew(Shard):
    """Broken: a primary that goes on in a new view applies what is sent again once more."""

    def _pushed(self, update):  # type: ignore[no-untyped-def]
        return self._next((*self.queue, update))


class _BeginsAnew(Shard):
    """Broken: a primary without a version makes a fresh one instead of telling that it's lost."""

    def _changed(self, primary, backup):  # type: ignore[no-untyped-def]
        fresh = self.held or (Version(0, ()) if primary == self.member else None)
        return super(_BeginsAnew, replace(self, held=fresh))._changed(primary, backup)


class _AcknowledgesWithoutKeeping(Shard):
    """Broken: a backup says that it has what it doesn't keep."""

    def _received(self, version):  # type: ignore[no-untyped-def]
        state, told = super()._received(version)
        return replace(state, held=self.held), told


class _ForgetsToCopyAgain(Shard):
    """Broken: what was on its way to the backup when the view ended is not sent again."""

    def _changed(self, primary, backup):  # type: ignore[no-untyped-def]
        same = (primary, backup) == (self.primary, self.backup)
        state, instructions = super()._changed(primary, backup)
        if not same:
            return state, instructions
        return state, tuple(i for i in instructions if not isinstance(i, versions.Replicate))


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("back from", {"machine": _AcknowledgesBeforeTheCopy, "pushes": (0, 1, 0), "deaths": 1}),
    ("twice", {"machine": _ForgetsSerials, "pushes": (0, 1, 0), "deaths": 1}),
    ("nobody sends", {"machine": _TrustsTheNewBackup, "pushes": (0, 0, 1), "deaths": 1}),
    ("twice", {"machine": _TakesResentUpdatesForNew, "pushes": (0, 1), "rebuilds": 1}),
    ("back from", {"machine": _BeginsAnew, "pushes": (0, 0, 1), "deaths": 2}),
    ("nobody sends", {"machine": _AcknowledgesWithoutKeeping, "pushes": (0, 1, 0), "deaths": 1}),
    ("nobody sends", {"machine": _ForgetsToCopyAgain, "pushes": (0, 1), "rebuilds": 1}),
]


@pytest.mark.parametrize(
    ("expected", "world"), BROKEN, ids=[world["machine"].__name__[1:] for _, world in BROKEN]
)
def test_a_broken_variant_is_caught_with_a_counter_example(
    expected: str, world: dict[str, Any]
) -> None:
    report = explore(VersionsModel(**world))
    assert report.violation is not None
    assert expected in report.violation, str(report)
    assert report.trace
