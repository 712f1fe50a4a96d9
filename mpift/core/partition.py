"""Who trains on which sample of an epoch, also when the world shrinks in the middle of it.

An epoch is a sequence of *partitions*. In each, a list of samples is dealt to the members of one
view in turn: the k-th turn of the member at position i is entry k * size + i (a short last turn is
filled up from the list's beginning, so that all members have equally many). All members take one
turn after the other in step, counted by one number over the whole epoch. When a view changes, what
nobody has finished is dealt anew to those who are left. A loader may draw some samples ahead of
training, so a new partition begins that many turns later. Everything is a function of the shuffled
order and of the changes, so every member computes the same without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpift.errors import MpiftError


@dataclass(frozen=True, slots=True)
class Partition:
    """One deal: ``samples`` to ``members``, from turn ``start`` on."""

    start: int
    samples: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def turns(self) -> int:
        """How often each member gets a sample."""
        return -(-len(self.samples) // len(self.members))

    def entry(self, turn: int, member: int) -> int:
        """Index into the dealt list, beyond its end where a short last turn is filled up."""
        return (turn - self.start) * len(self.members) + self.members.index(member)


@dataclass(frozen=True, slots=True)
class Deal:
    """All partitions of an epoch, in order; ``lookahead`` turns may be drawn ahead of training."""

    partitions: tuple[Partition, ...]
    lookahead: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        return self.partitions[-1].members

    def sample(self, turn: int, member: int) -> int | None:
        """What ``member`` trains on at ``turn`` of the epoch; None at its end."""
        partition = next(p for p in reversed(self.partitions) if p.start <= turn)
        if turn >= partition.start + partition.turns:
            return None
        return partition.samples[partition.entry(turn, member) % len(partition.samples)]

    @property
    def turns(self) -> int:
        """Turns of the whole epoch, as things stand."""
        return self.partitions[-1].start + self.partitions[-1].turns

    def change(self, members: Sequence[int], finished: int, finished_by_lost: int) -> Deal:
        """The deal after a view change.

        ``members`` is the new view; they have finished ``finished`` turns, and those that are lost
        only the first ``finished_by_lost``: what they drew after that is dealt again.
        """
        if not set(members) <= set(self.members):
            raise MpiftError(f"members {tuple(members)} can't follow {self.members} in an epoch")
        begin = min(finished + self.lookahead, self.turns)
        kept = [p for p in self.partitions if p.start < begin] or list(self.partitions[:1])
        again: list[int] = []
        lost = set(self.members) - set(members)
        for index, partition in enumerate(kept):
            stop = kept[index + 1].start if index + 1 < len(kept) else begin
            turns = range(max(partition.start, finished_by_lost), stop)
            for turn in turns:
                for member in sorted(lost & set(partition.members)):
                    entry = partition.entry(turn, member)
                    if entry < len(partition.samples):
                        again.append(partition.samples[entry])
        last = self.partitions[-1]
        dealt = max(0, begin - last.start) * len(last.members)
        rest = (*last.samples[dealt:], *again)
        return Deal((*kept, Partition(begin, rest, tuple(members))), self.lookahead)

    def unfinished(self, finished: int) -> tuple[int, ...]:
        """Samples that nobody has trained on after ``finished`` turns, in the order of the deal."""
        again = [
            partition.samples[entry]
            for index, partition in enumerate(self.partitions)
            for turn in range(max(partition.start, finished), self._stop(index))
            for entry in range(
                (turn - partition.start) * len(partition.members),
                (turn - partition.start + 1) * len(partition.members),
            )
            if entry < len(partition.samples)
        ]
        return tuple(again)

    def _stop(self, index: int) -> int:
        if index + 1 < len(self.partitions):
            return self.partitions[index + 1].start
        return self.turns


def first_deal(samples: Sequence[int], members: Sequence[int], lookahead: int = 0) -> Deal:
    """The deal at the beginning of an epoch."""
    return Deal((Partition(0, tuple(samples), tuple(members)),), lookahead)
