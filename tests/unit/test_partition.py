"""Dealing an epoch's samples, also when members are lost in the middle of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from mpift.core.partition import Deal, first_deal


def test_without_a_fault_everybody_gets_an_equal_share() -> None:
    deal = first_deal(range(10), (0, 1, 2))
    shares = [[deal.sample(turn, member) for turn in range(deal.turns)] for member in (0, 1, 2)]
    # Ten samples for three members: two are repeated to fill the last turn.
    assert shares == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    assert deal.sample(4, 0) is None


def test_what_a_lost_member_had_not_finished_is_dealt_again() -> None:
    deal = first_deal(range(12), (0, 1, 2)).change((0, 2), finished=2, finished_by_lost=1)
    rest = [deal.sample(turn, member) for turn in (2, 3, 4, 5) for member in (0, 2)]
    assert sorted(rest[:7]) == [4, 6, 7, 8, 9, 10, 11]  # 4 was member 1's second sample


@example(samples=13, size=3, batch=2, lookahead=2, losses=[(0, 0), (1, 0)])
@example(samples=40, size=4, batch=2, lookahead=0, losses=[(1, 3), (2, 0)])
@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 5),
    batch=st.integers(1, 4),
    lookahead=st.integers(0, 3),
    losses=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), max_size=4),
)
def test_no_sample_is_lost_or_doubled_whatever_is_lost(
    samples: int, size: int, batch: int, lookahead: int, losses: list[tuple[int, int]]
) -> None:
    deal = first_deal(range(samples), tuple(range(size)), lookahead * batch)
    trained: Counter[int] = Counter()
    finished = step = 0
    while finished < deal.turns:
        end = min(finished + batch, deal.turns)
        members = deal.members
        lost = {members[index % len(members)] for when, index in losses if when == step}
        survivors = tuple(m for m in members if m not in lost) or members[:1]
        for turn in range(finished, end):
            trained.update(_samples(deal, turn, survivors))
        if survivors != members:
            # Loaders have drawn ahead of the batch in training: that must not change any more.
            ahead = range(end, min(end + lookahead * batch, deal.turns))
            drawn = [_samples(deal, turn, survivors) for turn in ahead]
            deal = deal.change(survivors, end, finished)
            assert drawn == [_samples(deal, turn, survivors) for turn in ahead]
        finished, step = end, step + 1
    # At the end of each partition a last turn that doesn't go up may repeat up to size - 1 samples.
    assert set(trained) == set(range(samples))
    assert sum(trained.values()) - samples <= sum(len(p.members) - 1 for p in deal.partitions)


def _samples(deal: Deal, turn: int, members: tuple[int, ...]) -> list[int]:
    found = [deal.sample(turn, member) for member in members]
    return [sample for sample in found if sample is not None]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 12))
def test_what_is_unfinished_and_what_is_finished_make_the_epoch(
    samples: int, size: int, finished: int
) -> None:
    deal = first_deal(range(samples), tuple(range(size)))
    finished = min(finished, deal.turns)
    done = {s for t in range(finished) for s in _samples(deal, t, deal.members)}
    assert done | set(deal.unfinished(finished)) == set(range(samples))
