"""The coordinator's machine for digests, the judgement of an examination, and what is said then."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from mpift.core.verification import KEPT_CHECKS, Digest, Digests, Mismatch, judge
from mpift.torch.rows import Row, beyond_repair, no_majority

MEMBERS = frozenset({0, 2, 3})


def told(*digests: tuple[int, int, int], lane: int = 1) -> tuple[Digests, list[Mismatch]]:
    """After digests of (member, round, value)."""
    state, found = Digests(MEMBERS), []
    for member, round_, value in digests:
        state, mismatches = state.handle(Digest(member, lane, round_, value))
        found += mismatches
    return state, found


def test_equal_digests_are_no_news_and_are_forgotten_once_all_are_here() -> None:
    state, found = told((0, 9, 7), (2, 9, 7), (3, 9, 7))
    assert found == []
    assert state.checks == ()


def test_a_mismatch_is_told_with_the_second_digest_and_once() -> None:
    assert told((3, 9, 7), (0, 9, 8))[1] == [Mismatch(1, 9)]
    assert told((3, 9, 7), (0, 9, 8), (2, 9, 9))[1] == [Mismatch(1, 9)]


def test_rounds_and_lanes_are_compared_with_their_like_alone() -> None:
    state, found = told((0, 9, 7), (2, 19, 8))
    assert found == []
    assert state.handle(Digest(3, 2, 9, 5))[1] == ()


def test_a_late_digest_still_counts_and_one_from_outside_the_view_does_not() -> None:
    assert told((0, 9, 7), (0, 19, 8), (2, 19, 8), (3, 9, 6))[1] == [Mismatch(1, 9)]
    assert told((0, 9, 7), (1, 9, 6))[1] == []


def test_what_nobody_completes_is_forgotten_and_does_not_come_back() -> None:
    many = [(0, round_, 7) for round_ in range(KEPT_CHECKS + 3)]
    state, _ = told(*many)
    assert len(state.checks) == KEPT_CHECKS
    assert told(*many, (2, 0, 8))[1] == []
    assert told(*many, (2, 3, 8))[1] == [Mismatch(1, 3)]


A, B, C = (b"s", b"p", b"x"), (b"s", b"p", b"y"), (b"s", b"q", b"z")


def test_a_majority_wins_and_the_others_are_told_what_differs() -> None:
    judgement = judge({0: A, 1: C, 2: A, 4: A})
    assert judgement.content == A
    assert judgement.deviating == {1: (1, 2)}


def test_half_is_no_majority_whoever_the_others_are() -> None:
    for table, groups in (
        ({0: A, 1: B}, ((0,), (1,))),
        ({0: A, 1: A, 2: B, 3: B}, ((0, 1), (2, 3))),
        ({0: C, 1: A, 2: B, 3: A}, ((1, 3), (0,), (2,))),
    ):
        judgement = judge(table)
        assert judgement.content is None
        assert judgement.groups == groups


def test_who_knows_that_it_is_damaged_has_no_vote_and_gives_way() -> None:
    judgement = judge({0: A, 1: B}, damaged=frozenset({1}))
    assert judgement.content == A
    assert judgement.deviating == {1: (2,)}
    assert judge({0: A, 1: B, 2: B}, damaged=frozenset({1, 2})).content == A
    assert judge({0: A, 1: A}, damaged=frozenset({0, 1})).content is None
    assert judge({0: A, 1: B, 2: C}, damaged=frozenset({2})).content is None


def test_two_that_deviate_differently_from_three_both_give_way() -> None:
    judgement = judge({0: B, 1: A, 2: A, 3: A, 4: C})
    assert judgement.content == A
    assert judgement.deviating == {0: (2,), 4: (1, 2)}


def test_a_row_that_lacks_pieces_differs_in_them() -> None:
    judgement = judge({0: A, 1: A[:2], 2: A})
    assert judgement.deviating == {1: (2,)}


@given(st.dictionaries(st.integers(0, 9), st.sampled_from([A, B, C]), min_size=1))
def test_a_content_is_held_by_more_than_half_and_by_all_who_do_not_deviate(
    table: dict[int, tuple[bytes, ...]],
) -> None:
    judgement = judge(table)
    rows = list(table.values())
    best = max(rows.count(row) for row in rows)
    assert (judgement.content is not None) == (2 * best > len(rows))
    assert sorted(member for group in judgement.groups for member in group) == sorted(table)
    if judgement.content is not None:
        holders = {member for member, row in table.items() if row == judgement.content}
        assert holders == set(table) - set(judgement.deviating)


# -- settings --------------------------------------------------------------------------------------


def row(lr: float, weight: bytes = b"w" * 16, trail: bytes = b"t" * 8) -> Row:
    settings = json.dumps([[{"lr": lr}], []]).encode()
    return Row.decode(Row(b"s" * 16, trail, settings, [weight]).encode())


def said_of(*rows: Row) -> str:
    table = dict(enumerate(rows))
    judgement = judge({who: each.pieces for who, each in table.items()})
    return no_majority(7, judgement, ["weight"], table)


def test_without_a_majority_settings_are_named_if_they_may_be_the_reason() -> None:
    said = said_of(row(0.1), row(0.2))
    assert "differ in settings. " in said
    assert "Settings that differ: param_groups[0]['lr']; " in said
    assert "optimizer.register_scheduler" in said
    parted = said_of(row(0.1), row(0.1, b"v" * 16, trail=b"u" * 8))
    assert "differ in weight. " in parted
    assert "Settings have differed in a round before" in parted
    assert "ettings" not in said_of(row(0.1), row(0.1, b"v" * 16))


def test_beyond_repair_is_what_nothing_but_settings_differs_in_after_a_repair() -> None:
    def is_beyond(now: Row, before: Row | None) -> bool:
        rows = {0: row(0.1), 1: row(0.1), 2: now}
        judgement = judge({who: each.pieces for who, each in rows.items()})
        return beyond_repair(judgement, rows, {} if before is None else {2: before})

    assert is_beyond(row(0.2), row(0.2))
    assert is_beyond(row(0.2), row(0.2, b"v" * 16))  # its tensors were repaired
    assert not is_beyond(row(0.2), None)
    assert not is_beyond(row(0.2), row(0.3))
    assert not is_beyond(row(0.2, b"v" * 16), row(0.2, b"v" * 16))
