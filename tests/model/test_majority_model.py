"""Every order of events around late gradients; broken variants must be caught.

Where all orders are too many, seeded walks go deep into them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpift.core.closing import Closing, Decline, Nudge
from mpift.core.lockstep import Lockstep, Start
from mpift.core.rounds import Rounds
from mpift.testing.explorer import explore, wander
from tests.model.majority_model import MajorityModel

# (batches a rank, deaths, and more): every order, and an end from everywhere.
WORLDS: list[dict[str, Any]] = [
    {"loops": (1, 1), "deaths": 1},
    {"loops": (2, 1)},
    {"loops": (2, 2), "deaths": 1, "buckets": 2, "prompt": True, "max_lag": 1},
    {"loops": (1, 1, 1), "prompt": True, "operation": False, "quorum": "all"},
    {"loops": (1, 1), "deaths": 1, "shares": True},
    {"loops": (2, 2), "deaths": 1, "buckets": 2, "prompt": True, "max_lag": 1, "shares": True},
]
LONG_WORLDS: list[dict[str, Any]] = [
    {"loops": (1, 1, 1), "prompt": True, "operation": False},
    {"loops": (1, 1, 1)},
    {"loops": (2, 1, 1)},
    {"loops": (3, 1, 1), "prompt": True},
    {"loops": (1, 1, 1), "deaths": 1, "prompt": True},
    {"loops": (1, 1, 1), "deaths": 1, "prompt": True, "operation": False, "carry": False},
    {"loops": (1, 1, 1), "buckets": 2, "prompt": True},
    {"loops": (2, 2, 2), "prompt": True, "operation": False, "max_lag": 1},
]


@pytest.mark.parametrize(
    "world", [*WORLDS, *(pytest.param(world, marks=pytest.mark.long) for world in LONG_WORLDS)]
)
def test_all_agree_and_every_gradient_counts_once(world: dict[str, Any]) -> None:
    report = explore(MajorityModel(**world), must_end=True)
    assert report.violation is None, str(report)
    assert report.states > 100


DEEP_WORLDS: list[dict[str, Any]] = [
    {"loops": (3, 3, 3), "deaths": 1, "buckets": 2},
    {"loops": (3, 3, 3), "deaths": 1, "buckets": 2, "shares": True},
    {"loops": (3, 3, 3, 3), "deaths": 2, "buckets": 2},
    {"loops": (4, 2, 3, 1), "deaths": 1, "buckets": 1, "max_lag": 1},
    {"loops": (3, 3, 3), "deaths": 1, "buckets": 2, "carry": False},
    {"loops": (2, 2, 2, 2), "deaths": 1, "quorum": 2, "operation": False},
    {"loops": (3, 3, 3), "quorum": 1, "max_lag": 1},
]


@pytest.mark.parametrize("world", DEEP_WORLDS)
@pytest.mark.parametrize(
    "walks", [50, pytest.param(5000, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_walks_through_larger_worlds_find_nothing(world: dict[str, Any], walks: int) -> None:
    report = wander(MajorityModel(**world), walks=walks, seed=1)
    assert report.violation is None, str(report)
    assert report.transitions > 20 * walks


# -- broken variants -------------------------------------------------------------------------------


class _CountedTwice(Rounds):
    """Broken: what was counted waits on."""

    def _next_round(self):  # type: ignore[no-untyped-def]
        return replace(super()._next_round(), waiting=self.waiting | self.held)


class _ClaimsTwice(Rounds):
    """Broken: the claim isn't atomic: data that comes after the zeros is sent after them."""

    def _contribute(self, bucket):  # type: ignore[no-untyped-def]
        state, instructions = super()._contribute(bucket)
        if bucket < len(self.claims) and not self.claims[bucket]:
            again = Start(self.epoch, self.completed, bucket, real=True)
            return state, (*instructions, again)
        return state, instructions


class _NothingHandedOver(Rounds):
    """Broken: after a fault everybody reduces its own open round, whoever has its result."""

    def _reconcile(self, epoch, completed):  # type: ignore[no-untyped-def]
        return Lockstep._reconcile(self, epoch, (self.completed,))


class _ClaimsStayAfterAFault(Rounds):
    """Broken: a rebuild doesn't re-open what was claimed."""

    def _reopened(self, epoch):  # type: ignore[no-untyped-def]
        return replace(super()._reopened(epoch), claims=self.claims)


class _LateIsForgotten(Rounds):
    """Broken: what was too late for its round is neither carried nor reported as dropped."""

    def _next_round(self):  # type: ignore[no-untyped-def]
        return replace(super()._next_round(), waiting=frozenset())


class _NudgesAreObeyedWithoutRoom(Rounds):
    """Broken: a rank falls behind without end."""

    def _has_room(self) -> bool:
        return True

    def _closed(self) -> bool:
        return super()._closed() or self.nudged >= self.completed


class _NobodyIsDeclined(Closing):
    """Broken: a round is waited for although most are away."""

    def _decide(self, over):  # type: ignore[no-untyped-def]
        state, instructions = super()._decide(over)
        return state, tuple(i for i in instructions if not isinstance(i, Decline))


class _NobodyIsNudged(Closing):
    """Broken: a round waits for ranks that are away."""

    def _decide(self, over):  # type: ignore[no-untyped-def]
        state, instructions = super()._decide(over)
        return state, tuple(i for i in instructions if not isinstance(i, Nudge))


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("twice", {"machine": _CountedTwice, "loops": (1, 1)}),
    ("twice", {"machine": _ClaimsTwice, "loops": (1, 1, 1), "prompt": True, "operation": False}),
    ("", {"machine": _NothingHandedOver, "loops": (1, 1, 1), "deaths": 1}),
    ("", {"machine": _ClaimsStayAfterAFault, "loops": (1, 1, 1), "deaths": 1}),
    ("lost", {"machine": _LateIsForgotten, "loops": (1, 1, 1), "prompt": True}),
    (
        "too far behind",
        {
            "machine": _NudgesAreObeyedWithoutRoom,
            "loops": (2, 2, 2),
            "prompt": True,
            "operation": False,
            "max_lag": 0,
        },
    ),
    ("deadlock", {"coordinator": _NobodyIsDeclined, "loops": (1, 1, 1), "prompt": True}),
    ("deadlock", {"coordinator": _NobodyIsNudged, "loops": (2, 1), "prompt": True}),
]


@pytest.mark.parametrize(
    ("expected", "world"),
    BROKEN,
    ids=[next(v for v in w.values() if isinstance(v, type)).__name__[1:] for _, w in BROKEN],
)
def test_a_broken_variant_is_caught_with_a_counter_example(
    expected: str, world: dict[str, Any]
) -> None:
    report = wander(MajorityModel(**world), walks=2_000, seed=3)
    assert report.violation is not None
    assert expected in report.violation, str(report)
    assert report.trace
