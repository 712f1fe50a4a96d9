"""Sharing: who owns which slice, and whose contributions count, in any layout of nodes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.membership import View
from mpift.core.sharing import (
    Act,
    Kind,
    Legacies,
    Part,
    Stamp,
    contributors,
    counted,
    cut,
    next_act,
    part_of,
)
from mpift.errors import MpiftError

# By member id, the node that it is on; any of them may have left the view.
layouts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@st.composite
def views(draw: st.DrawFn) -> tuple[View, dict[int, str]]:
    node_of = dict(enumerate(draw(layouts)))
    members = draw(st.sets(st.sampled_from(sorted(node_of)), min_size=1))
    return View(3, tuple(sorted(members))), node_of


def parts_of(view: View, node_of: Mapping[int, str]) -> dict[int, Part]:
    return {member: part_of(member, view, node_of) for member in view.members}


# -- places ----------------------------------------------------------------------------------------


@given(views())
def test_every_slice_has_one_owner_on_each_node_and_all_agree_who_it_is(
    given_: tuple[View, dict[int, str]],
) -> None:
    view, node_of = given_
    parts = parts_of(view, node_of)
    nodes: dict[str, list[int]] = {}
    for member in view.members:
        nodes.setdefault(node_of[member], []).append(member)
    slices = min(len(members) for members in nodes.values())
    for members in nodes.values():
        for member in members:
            assert parts[member].member == member
            assert parts[member].locals == tuple(members)
            assert parts[member].owners == tuple(members[:slices])
        owned = [parts[member].slice for member in members]
        assert owned == [*range(slices), *[None] * (len(members) - slices)]


@given(views())
def test_the_owners_of_a_slice_see_the_same_ranks_across_one_a_node(
    given_: tuple[View, dict[int, str]],
) -> None:
    view, node_of = given_
    parts = parts_of(view, node_of)
    first_ranks = [part.locals[0] for m, part in parts.items() if m == part.locals[0]]
    for member, part in parts.items():
        if part.slice is None:
            assert part.across == ()
            continue
        assert member in part.across
        assert [node_of[m] for m in part.across] == [node_of[m] for m in first_ranks]
        for other in part.across:
            assert parts[other].across == part.across
            assert parts[other].slice == part.slice


def test_a_view_tells_where_everybody_is() -> None:
    node_of = {0: "a", 1: "b", 2: "a", 3: "b", 5: "b", 6: "a"}
    view = View(1, (0, 1, 2, 3, 5))
    parts = parts_of(view, node_of)
    assert parts[0] == Part(0, locals=(0, 2), owners=(0, 2), across=(0, 1))
    assert parts[3] == Part(3, locals=(1, 3, 5), owners=(1, 3), across=(2, 3))
    assert parts[5] == Part(5, locals=(1, 3, 5), owners=(1, 3), across=())


# -- slices ----------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(1, 40))
def test_slices_are_all_elements_in_order_and_end_between_cache_lines(
    elements: int, slices: int
) -> None:
    ranges = cut(elements, slices)
    assert len(ranges) == slices
    at = 0
    for start, stop in ranges:
        assert start == at
        assert stop >= start
        assert stop % 16 == 0 or stop == elements
        at = stop
    assert at == elements
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) < 32, "slices are of about the same length"


def test_few_elements_are_one_owners() -> None:
    assert cut(3, 3) == [(0, 0), (0, 0), (0, 3)]
    assert cut(33, 2) == [(0, 16), (16, 33)]
    assert cut(0, 2) == [(0, 0), (0, 0)]


# -- acts ------------------------------------------------------------------------------------------


def acts(part: Part) -> list[Act]:
    found = [Act.MEET]
    while found[-1] is not Act.DONE:
        found.append(next_act(found[-1], part))
    return found


@given(views())
def test_only_owners_sum_and_only_where_there_are_other_nodes_they_exchange(
    given_: tuple[View, dict[int, str]],
) -> None:
    view, node_of = given_
    several = len({node_of[member] for member in view.members}) > 1
    for part in parts_of(view, node_of).values():
        expected = [Act.MEET]
        if part.slice is not None:
            expected.append(Act.SUM)
            if several:
                expected.append(Act.EXCHANGE)
        assert acts(part) == [*expected, Act.SPREAD, Act.DONE]


# -- legacies --------------------------------------------------------------------------------------

ALONE = Part(0, locals=(0,), owners=(0,), across=(0,))
PAIR = Part(0, locals=(0, 1), owners=(0, 1), across=(0,))


def test_the_dead_may_count_in_the_round_that_was_open_and_in_no_other() -> None:
    legacies = Legacies((0, 1, 2)).in_view(PAIR, 7)
    assert legacies.left_for(7) == (2,)
    assert legacies.left_for(6) == ()
    assert legacies.left_for(8) == ()
    assert contributors(7, PAIR, legacies) == [0, 1, 2]
    assert contributors(8, PAIR, legacies) == [0, 1]


def test_those_lost_one_after_the_other_in_one_round_all_count_in_it() -> None:
    legacies = Legacies((0, 1, 2)).in_view(PAIR, 7).in_view(ALONE, 7)
    assert legacies.left_for(7) == (1, 2)
    later = Legacies((0, 1, 2)).in_view(PAIR, 7).in_view(ALONE, 8)
    assert later.left_for(8) == (1,)
    assert later.left_for(7) == (), "that round is complete"


def test_a_view_that_lost_nobody_of_the_node_changes_nothing() -> None:
    legacies = Legacies((0, 1, 2)).in_view(PAIR, 7)
    assert legacies.in_view(PAIR, 7) == legacies


changes = st.tuples(st.integers(0, 2), st.sets(st.integers(1, 5), max_size=2))


@given(st.lists(changes, max_size=4))
def test_a_member_is_lost_once_whatever_views_follow(views: list[tuple[int, set[int]]]) -> None:
    round_, legacies = 0, Legacies(tuple(range(6)))
    lost: dict[int, int] = {}
    for rounds, gone in views:
        round_ += rounds
        lost = {**dict.fromkeys(gone, round_), **lost}
        locals_ = tuple(m for m in range(6) if m not in lost)
        legacies = legacies.in_view(Part(0, locals_, locals_, (0,)), round_)
        for each in range(round_, round_ + 3):
            assert legacies.left_for(each) == tuple(m for m in range(6) if lost.get(m) == each)


# -- who counts ------------------------------------------------------------------------------------

stamps = st.builds(Stamp, st.integers(-1, 3), st.sampled_from(Kind))


@given(st.lists(st.sampled_from(Kind), min_size=4, max_size=4))
def test_the_living_count_by_their_kind_in_order_of_member_id(kinds: list[Kind]) -> None:
    members = (1, 4, 5, 9)
    part = Part(4, members, members, (4,))
    said = {m: Stamp(3, kind) for m, kind in zip(members, kinds, strict=True)}
    found = counted(3, part, Legacies(members), said)
    expected = [(m, k) for m, k in zip(members, kinds, strict=True) if k is not Kind.NOTHING]
    assert found == expected


@given(st.dictionaries(st.integers(0, 5), stamps, min_size=6), st.integers(0, 3), st.integers(0, 3))
def test_the_dead_count_if_they_had_stamped_the_round_in_which_they_were_lost(
    said: dict[int, Stamp], lost_in: int, round_: int
) -> None:
    living = (1, 3)
    said |= {m: Stamp(round_, Kind.REAL) for m in living}
    parts = [Part(m, living, living, (m,)) for m in living]
    lists = [
        counted(round_, part, Legacies(tuple(range(6))).in_view(part, lost_in), said)
        for part in parts
    ]
    assert lists[0] == lists[1], "all owners of a node find the same"
    expected = [
        (m, stamp.kind)
        for m, stamp in sorted(said.items())
        if m in living
        or (lost_in == round_ and stamp.round == round_ and stamp.kind is not Kind.NOTHING)
    ]
    assert lists[0] == expected


@given(stamps)
def test_a_living_member_that_has_stamped_another_round_is_an_error(stamp: Stamp) -> None:
    said = {0: Stamp(2, Kind.REAL), 1: stamp}
    if stamp.round == 2:
        counted(2, PAIR, Legacies((0, 1)), said)
        return
    words = f"member 1 said that its part of round 2 is in place.* holds round {stamp.round}"
    with pytest.raises(MpiftError, match=words):
        counted(2, PAIR, Legacies((0, 1)), said)
