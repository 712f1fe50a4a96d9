"""Views and who may go on: which members a job consists of, and when a rest of them is enough.

A *view* is an epoch number and the ordered member ids; a member id is the rank at launch, for
life, and a rank is a position in the view. Epochs only grow, and a view only follows the one that
it was made from. ``judge`` is the majority rule: of two halves that cannot see each other, at most
one goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from mpift.errors import MpiftError


@dataclass(frozen=True, slots=True)
class View:
    """An epoch and its live members, in rank order (ascending member id)."""

    epoch: int
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.members) != sorted(set(self.members)) or not self.members:
            raise MpiftError(f"a view needs distinct ascending members, not {self.members}")

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def coordinator(self) -> int:
        """Member id of the first of the view."""
        return self.members[0]

    def rank_of(self, member: int) -> int:
        """Position of ``member``; ValueError if it is not in the view."""
        return self.members.index(member)

    def successor(self, epoch: int, members: Iterable[int]) -> View:
        """The next view; it must be newer, and hold no member that this one lacks."""
        after = View(epoch, tuple(sorted(members)))
        if epoch <= self.epoch:
            raise MpiftError(f"epoch {epoch} does not follow epoch {self.epoch}")
        if not set(after.members) <= set(self.members):
            raise MpiftError(f"view {after} holds members that {self} lacks")
        return after


def by_node(members: Iterable[int], node_of: Callable[[int], str]) -> dict[str, tuple[int, ...]]:
    """Members by the node that they are on; nodes in the order of their first members."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(node_of(member), []).append(member)
    return {node: tuple(there) for node, there in nodes.items()}


def initial_view(size: int) -> View:
    """Epoch 0 of a world of ``size`` members."""
    return View(0, tuple(range(size)))


class Outcome(enum.Enum):
    """What the rest of a view does after a fault."""

    GO_ON = "go on"
    QUORUM_LOST = "quorum lost"
    TOO_SMALL = "too small"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, and why in words."""

    outcome: Outcome
    reason: str


def judge(
    view: View, survivors: Collection[int], confirmed_dead: Collection[int], min_size: int
) -> Verdict:
    """Whether ``survivors`` of ``view`` may go on without the others.

    Missing members whose death is confirmed cannot go on elsewhere, so they don't count. Of the
    rest, the survivors must be more than half: fewer, or exactly half, might face an equal or
    larger group that is alive behind a cut. ``min_size`` is the user's own floor.
    """
    left = set(survivors)
    unconfirmed = set(view.members) - left - set(confirmed_dead)
    voters = len(left) + len(unconfirmed)
    if 2 * len(left) <= voters:
        missing = ", ".join(map(str, sorted(unconfirmed)))
        return Verdict(
            Outcome.QUORUM_LOST,
            f"only {len(left)} of {voters} members of epoch {view.epoch} are left and the death of"
            f" {missing} is not confirmed: another part of the job may be alive; this part stops",
        )
    if len(left) < min_size:
        return Verdict(
            Outcome.TOO_SMALL,
            f"too few ranks are left: {len(left)}, fewer than min_size={min_size}"
            " (--min-np, MPIFT_MIN_SIZE)",
        )
    return Verdict(Outcome.GO_ON, f"{len(left)} of {view.size} members go on")
