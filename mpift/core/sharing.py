"""Sharing: how the ranks of a node sum a bucket that lies in memory which all of them can read.

Each rank has memory for its contributions, which it alone writes and the others of its node read,
and the node has memory for results. A bucket is cut into *slices*. Each slice has an *owner* on
every node, who sums that slice of all contributions of its node, exchanges the sum with the owners
of the same slice on other nodes, and writes it where its whole node reads results. Two words keep
them in step:

* "in place", from every rank to the owners: what I contribute lies in my memory and stays there
  until the round is complete; and I need no older result that lies where this one will.
* "summed", from each owner to all: this slice of the result is written.

Before the first word a rank writes a *stamp* into its memory, which says for which round it
contributes what, and when the round is complete it removes it again, before anything is written
over its contribution. So if a rank dies, the others find by its stamp what it had finished: nobody
writes it any more, so all of them find the same, and it still counts in the round that they reduce
again.

Results of two rounds lie side by side: while one is being written, the last complete one stays
readable, for those who apply it and for a hand-over.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpift.core.membership import View, by_node
from mpift.errors import MpiftError

RESULTS_KEPT = 2
# Slices end at these many elements, so that no two owners write to one cache line (64 bytes).
_GRAIN_ELEMENTS = 16


class Kind(enum.IntEnum):
    """What a rank contributes to a bucket."""

    NOTHING = 0
    ALARM = 1  # nothing, but it wants all states to be examined
    REAL = 2


@dataclass(frozen=True, slots=True)
class Stamp:
    """A rank contributes ``kind`` to a bucket of ``round``; without a round it says nothing."""

    round: int = -1
    kind: Kind = Kind.NOTHING


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's place in a view. ``locals`` are the members on its node in rank order, ``owners``
    those of them that own a slice, in the order of the slices; ``across`` are the owners of this
    rank's slice, one a node, in the order of the nodes' first ranks; empty if it owns none."""

    member: int
    locals: tuple[int, ...]
    owners: tuple[int, ...]
    across: tuple[int, ...]

    @property
    def slice(self) -> int | None:
        """The number of the slice that this rank owns."""
        return self.owners.index(self.member) if self.member in self.owners else None


def part_of(member: int, view: View, node_of: Mapping[int, str]) -> Part:
    """The place of ``member``. There are as many slices as ranks on the node that has the fewest,
    so that each slice has an owner everywhere."""
    nodes = by_node(view.members, node_of.__getitem__)
    slices = min(map(len, nodes.values()))
    mine = nodes[node_of[member]]
    seat = mine.index(member)
    across = tuple(there[seat] for there in nodes.values()) if seat < slices else ()
    return Part(member, mine, mine[:slices], across)


def cut(elements: int, slices: int) -> list[tuple[int, int]]:
    """Elements [start, stop) of each slice: all of them, in order, some perhaps empty."""
    grains = -(-elements // _GRAIN_ELEMENTS)
    ends = [min(elements, grains * s // slices * _GRAIN_ELEMENTS) for s in range(slices + 1)]
    return list(itertools.pairwise(ends))


class Act(enum.Enum):
    """What a rank does next for a bucket."""

    MEET = enum.auto()  # tell the owners, and as one of them hear from all of this node
    SUM = enum.auto()  # this rank's slice of all contributions of the node
    EXCHANGE = enum.auto()  # that sum with the other nodes
    SPREAD = enum.auto()  # as an owner tell all of this node; hear from all owners
    DONE = enum.auto()  # the result is there


def next_act(act: Act, part: Part) -> Act:
    """What follows once all of ``act`` has been carried out."""
    if act is Act.MEET:
        return Act.SUM if part.slice is not None else Act.SPREAD
    if act is Act.SUM:
        return Act.EXCHANGE if len(part.across) > 1 else Act.SPREAD
    return {Act.EXCHANGE: Act.SPREAD, Act.SPREAD: Act.DONE}[act]


@dataclass(frozen=True, slots=True)
class Legacies:
    """What members that this rank's node has lost may have left behind. ``known`` are the members
    of the node in the last view, ``rounds`` the round in which each lost one may still count: the
    one that was open when the others went on without it. What it had begun of a later round came
    after another result than theirs."""

    known: tuple[int, ...]
    rounds: tuple[tuple[int, int], ...] = ()  # (member, round)

    def in_view(self, part: Part, round_: int) -> Legacies:
        """In a new view, whose open round is ``round_``."""
        lost = [m for m in self.known if m not in part.locals]
        still = tuple(pair for pair in self.rounds if pair[1] >= round_)
        return replace(self, known=part.locals, rounds=(*still, *((m, round_) for m in lost)))

    def left_for(self, round_: int) -> tuple[int, ...]:
        """Lost members whose stamps count in ``round_``."""
        return tuple(sorted(member for member, last in self.rounds if last == round_))


def contributors(round_: int, part: Part, legacies: Legacies) -> list[int]:
    """Whose stamps are looked at for ``round_``, in order of member id."""
    return sorted((*part.locals, *legacies.left_for(round_)))


def counted(
    round_: int, part: Part, legacies: Legacies, stamps: Mapping[int, Stamp]
) -> Sequence[tuple[int, Kind]]:
    """Who of this node contributes what to a bucket of ``round_``, in order of member id, without
    those who contribute nothing. The same for all owners of the node.

    Raises ``MpiftError`` if a living member has stamped another round: memory is not what its
    words said."""
    found = []
    for member in contributors(round_, part, legacies):
        stamp = stamps[member]
        if stamp.round != round_:
            if member in part.locals:
                raise MpiftError(
                    f"member {member} said that its part of round {round_} is in place, but its"
                    f" shared memory holds round {stamp.round}"
                )
            continue
        if stamp.kind is not Kind.NOTHING:
            found.append((member, stamp.kind))
    return found
