"""Views, and which part of a broken one goes on."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from mpift.core.membership import Outcome, View, initial_view, judge
from mpift.errors import MpiftError


def test_ranks_follow_member_ids() -> None:
    view = initial_view(4).successor(1, [3, 0, 1])
    assert view.members == (0, 1, 3)
    assert view.rank_of(3) == 2
    assert view.coordinator == 0


def test_a_view_follows_only_an_older_one_that_holds_its_members() -> None:
    view = View(3, (0, 2))
    with pytest.raises(MpiftError, match="does not follow"):
        view.successor(3, [0])
    with pytest.raises(MpiftError, match="lacks"):
        view.successor(4, [0, 1])


def test_confirmed_deaths_may_leave_a_single_member() -> None:
    verdict = judge(initial_view(4), {3}, {0, 1, 2}, min_size=1)
    assert verdict.outcome is Outcome.GO_ON


def test_exactly_half_does_not_go_on_when_the_rest_may_be_alive() -> None:
    verdict = judge(initial_view(4), {0, 1}, set(), min_size=1)
    assert verdict.outcome is Outcome.QUORUM_LOST
    assert "2, 3" in verdict.reason


def test_fewer_than_min_size_stops() -> None:
    verdict = judge(initial_view(4), {0, 1}, {2, 3}, min_size=3)
    assert verdict.outcome is Outcome.TOO_SMALL


def subsets(items: tuple[int, ...]) -> list[set[int]]:
    sizes = range(len(items) + 1)
    return [set(s) for s in chain.from_iterable(combinations(items, k) for k in sizes)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_of_two_groups_that_cannot_see_each_other_at_most_one_goes_on(size: int) -> None:
    # Every split of the living into two groups, with every set of truly dead members, and every
    # part of them that a side has confirmed.
    view = initial_view(size)
    for dead in subsets(view.members):
        living = tuple(m for m in view.members if m not in dead)
        for left in subsets(living):
            right = set(living) - left
            if not left or not right:
                continue
            for known in subsets(tuple(dead)):
                sides = [judge(view, side, known, 1).outcome for side in (left, right)]
                assert sides.count(Outcome.GO_ON) <= 1, (left, right, dead, known)
