"""Verification: whether all replicas of a view hold the same bits, and who is right if they don't.

Every so many rounds each rank hashes its state to 64 bits and tells the coordinator of the view.
``Digests`` is the coordinator's memory: it says ``Mismatch`` as soon as two digests of one round
differ. That is a suspicion only, since a digest may have been taken while a script had other values
in its parameters for a while. What counts is the examination that follows, in which all ranks stand
still: ``judge`` looks at digests of each piece of every rank's state.

A majority is one of whole states, never piece by piece: what the others are to hold has then been
somebody's state, and is no mixture of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Checks of a lane that are kept for those who are late; older ones are forgotten, and what is late
# by so many is compared with the next.
KEPT_CHECKS = 8


# -- events and instructions -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Digest:
    """What ``member`` holds after ``round`` of ``lane``: 64 bits of a hash."""

    member: int
    lane: int
    round: int
    value: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two members hold different states after ``round`` of ``lane``."""

    lane: int
    round: int


# -- the coordinator's machine -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Check:
    lane: int
    round: int
    value: int  # the first that was heard
    heard: frozenset[int]
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Digests:
    """The coordinator's state in one view; a new view gets a new one. A frozen value."""

    members: frozenset[int]
    checks: tuple[_Check, ...] = ()  # ascending by round within a lane
    forgotten: Mapping[int, int] | None = None  # by lane: checks of rounds up to this are over

    def handle(self, digest: Digest) -> tuple[Digests, tuple[Mismatch, ...]]:
        """The state after ``digest``, and whether something is wrong: told once a round."""
        over = (self.forgotten or {}).get(digest.lane, -1)
        if digest.member not in self.members or digest.round <= over:
            return self, ()
        known = next((c for c in self.checks if _place(c) == _place(digest)), None)
        check = known or _Check(digest.lane, digest.round, digest.value, frozenset())
        differs = digest.value != check.value
        mismatch = (Mismatch(digest.lane, digest.round),) if differs and not check.differs else ()
        check = replace(
            check, heard=check.heard | {digest.member}, differs=check.differs or differs
        )
        others = [c for c in self.checks if c is not known]
        return replace(self, checks=(*others, check))._forget(digest.lane), mismatch

    def _forget(self, lane: int) -> Digests:
        """Without checks that all have answered, and those that too many newer ones follow."""
        mine = sorted((c for c in self.checks if c.lane == lane), key=lambda c: c.round)
        over = (self.forgotten or {}).get(lane, -1)
        kept = [c for c in mine if c.heard != self.members]
        for check in kept[:-KEPT_CHECKS]:
            over = max(over, check.round)
        kept = kept[-KEPT_CHECKS:]
        others = [c for c in self.checks if c.lane != lane]
        forgotten = {**(self.forgotten or {}), lane: over}
        return replace(self, checks=(*others, *kept), forgotten=forgotten)


def _place(item: _Check | Digest) -> tuple[int, int]:
    return item.lane, item.round


# -- the examination ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judgement:
    """``groups`` are the members that hold the same, the largest group first; ``pieces`` are the
    positions that differ anywhere. ``content`` is what a majority holds, None if there is none, and
    ``deviating`` has the positions in which each of the others differs from it."""

    groups: tuple[tuple[int, ...], ...]
    pieces: tuple[int, ...]
    content: tuple[bytes, ...] | None
    deviating: Mapping[int, tuple[int, ...]]


def judge(table: Mapping[int, Sequence[bytes]], damaged: frozenset[int] = frozenset()) -> Judgement:
    """``table`` has a row for each member that is still training: the digests of the pieces of its
    state, in the same order. A row of another length lacks pieces, which counts as a difference.
    Members that are ``damaged`` know of themselves that their state is of no use, and have no vote.
    A content is a majority's if more than half of those with a vote hold all of it."""
    holders: dict[tuple[bytes, ...], list[int]] = {}
    for member in sorted(table):
        holders.setdefault(tuple(table[member]), []).append(member)
    votes = {row: len(set(members) - damaged) for row, members in holders.items()}
    rows = sorted(holders, key=lambda row: (-votes[row], holders[row]))
    groups = tuple(tuple(holders[row]) for row in rows)
    pieces = sorted({piece for row in rows for piece in _differences(row, rows[0])})
    if not rows or 2 * votes[rows[0]] <= sum(votes.values()):
        return Judgement(groups, tuple(pieces), None, {})
    content = rows[0]
    deviating = {member: _differences(row, content) for row in rows[1:] for member in holders[row]}
    return Judgement(groups, tuple(pieces), content, deviating)


def _differences(row: Sequence[bytes], other: Sequence[bytes]) -> tuple[int, ...]:
    longer = max(len(row), len(other))
    return tuple(i for i in range(longer) if row[i : i + 1] != other[i : i + 1])
