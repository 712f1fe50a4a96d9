"""Every order of writes, words and deaths in a node's memory; broken variants must be caught."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.testing.explorer import explore, wander
from tests.model.sharing_model import SharingModel

LATE = frozenset({1})
WORLDS: list[dict[str, Any]] = [
    {"nodes": (0, 0), "rounds": 3},
    {"nodes": (0, 0), "rounds": 2, "deaths": 1},
    {"nodes": (0, 0), "rounds": 2, "deaths": 1, "late": LATE},
    {"nodes": (0, 1, 1), "rounds": 1, "deaths": 1},
    {"nodes": (0, 0, 0), "rounds": 1, "deaths": 1},
]
LONG_WORLDS: list[dict[str, Any]] = [
    {"nodes": (0, 0), "rounds": 3, "deaths": 1, "late": LATE},
    {"nodes": (0, 0, 0), "rounds": 1, "deaths": 2},
    {"nodes": (0, 0, 0), "rounds": 2, "deaths": 1},
    {"nodes": (0, 0, 1, 1), "rounds": 1, "deaths": 1},
]


@pytest.mark.parametrize(
    "world", [*WORLDS, *(pytest.param(world, marks=pytest.mark.long) for world in LONG_WORLDS)]
)
def test_all_ranks_read_the_same_sums_of_whole_contributions(world: dict[str, Any]) -> None:
    report = explore(SharingModel(**world), must_end=True)
    print(world, report)
    assert report.violation is None, str(report)
    assert report.states > 100


DEEP_WORLDS: list[dict[str, Any]] = [
    {"nodes": (0, 0, 0, 0), "rounds": 4, "deaths": 2, "late": LATE},
    {"nodes": (0, 0, 1, 1), "rounds": 3, "deaths": 2, "late": LATE},
    {"nodes": (0, 0, 0, 1, 1), "rounds": 3, "deaths": 2},
    {"nodes": (0, 1, 2, 2), "rounds": 3, "deaths": 1},
]


@pytest.mark.parametrize("world", DEEP_WORLDS)
@pytest.mark.parametrize(
    "walks", [150, pytest.param(5000, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_walks_through_larger_nodes_find_nothing(world: dict[str, Any], walks: int) -> None:
    report = wander(SharingModel(**world), walks=walks, seed=1)
    assert report.violation is None, str(report)
    assert report.transitions > 20 * walks


# -- broken variants -------------------------------------------------------------------------------


class _OnePlace(SharingModel):
    """Broken: a result is written where the last one is being read and handed over."""

    kept = 1


class _NothingIsVacated(SharingModel):
    """Broken: a rank that is behind reads what has been written over."""

    def vacate(self, world, member):  # type: ignore[no-untyped-def]
        return world.ranks[member]


class _StampsStay(SharingModel):
    """Broken: a stamp still stands while the next gradient is written over what it tells of."""

    def cleared(self, rank):  # type: ignore[no-untyped-def]
        return rank.stamp


class _TheDeadCountByTheirWords(SharingModel):
    """Broken: owners go by what they heard of the dead, and have not all heard the same."""

    def counted(self, world, part):  # type: ignore[no-untyped-def]
        found = super().counted(world, part)
        dead = {m for m in found if not world.ranks[m].alive}
        heard = {m for m in dead if part.slice in {None, 0} or m in world.ranks[part.member].said}
        return found - dead | heard


class _LegaciesAreForgotten(SharingModel):
    """Broken: what the dead had finished is lost with them."""

    def counted(self, world, part):  # type: ignore[no-untyped-def]
        return frozenset(m for m in super().counted(world, part) if m in part.locals)


BROKEN: list[tuple[str, type[SharingModel], dict[str, Any]]] = [
    ("as round", _OnePlace, {"nodes": (0, 1, 1), "rounds": 2, "deaths": 1}),
    ("as round", _NothingIsVacated, {"nodes": (0, 0), "rounds": 3, "late": LATE}),
    ("in place of", _StampsStay, {"nodes": (0, 0), "rounds": 2, "deaths": 1}),
    ("", _TheDeadCountByTheirWords, {"nodes": (0, 0, 0), "rounds": 1, "deaths": 1}),
    ("lacks what", _LegaciesAreForgotten, {"nodes": (0, 0), "rounds": 1, "deaths": 1}),
]


@pytest.mark.parametrize(("words", "variant", "world"), BROKEN)
def test_broken_variants_are_caught(
    words: str, variant: type[SharingModel], world: dict[str, Any]
) -> None:
    report = explore(variant(**world))
    assert report.violation is not None, f"{variant.__doc__} was not noticed: {report}"
    assert words in report.violation
    print(variant.__name__, report)
