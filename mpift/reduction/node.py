"""Sums of buckets that a node's ranks read in each other's memory, and exchange between nodes.

``core.sharing`` decides what comes after what and whose contributions count; this carries it out.
The words between ranks are messages, so a wait for one is a wait like any other of the service's
loop. Between nodes values may travel compressed; within one nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpift.core import sharing
from mpift.core.sharing import Act, Kind, Legacies, Part, Stamp
from mpift.errors import GradientError
from mpift.reduction.arena import Arena
from mpift.reduction.codecs import Compressor, Range
from mpift.reduction.compressed import CompressedSum, exchange, sum_of_slice
from mpift.reduction.sums import Claim
from mpift.transport.lane import Started
from mpift.transport.world import World

# Summed piece by piece, so that what is added to is still in the processor's cache.
_BLOCK_ELEMENTS = 1 << 15


class Node:
    """This rank's place among those who share ``arena``, in the present view."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.part: Part
        self.legacies = Legacies(arena.members)
        self.intact = True
        self._epoch = -1

    def enter(self, world: World, round_: int) -> None:
        """The open round of this view is ``round_``; to be called before anything is done in it.

        Whoever is missing and not known to have ended might still write into memory that it shares
        with others: ``intact`` is False from then on, on all ranks alike."""
        if world.view.epoch == self._epoch:
            return
        self._epoch = world.view.epoch
        node_of = {member: identity.node for member, identity in world.identities.items()}
        self.part = sharing.part_of(world.member, world.view, node_of)
        self.legacies = self.legacies.in_view(self.part, round_)
        missing = self.arena.everybody - set(world.view.members)
        self.intact = self.intact and missing <= world.gone


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Some ranks of a communicator as one of their own, for messages; ``rank`` is a place in
    ``ranks``."""

    comm: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def Isend(self, buffer: np.ndarray, dest: int, tag: int) -> Any:
        return self.comm.Isend(buffer, dest=self.ranks[dest], tag=tag)

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> Any:
        return self.comm.Irecv(buffer, source=self.ranks[source], tag=tag)


class NodeSum:
    """See ``sums.BucketSum``; bucket ``number`` of the layout of ``node.arena``."""

    lends = False

    def __init__(self, node: Node, number: int, compressor: Compressor) -> None:
        self._node = node
        self._number = number
        self._bucket = node.arena.layout.buckets[number]
        self._compressor = compressor
        self._act = Act.DONE
        self._claim: Claim
        self._heard: list[np.ndarray] = []  # words that this act waits for
        self._some = False  # whether anybody of this node contributes to this rank's slice
        self._across: CompressedSum | None = None
        self._summed = (0, 0)  # the slice that it sums
        self._exchanged = False  # whether it has begun to, in the sum under way

    def start(self, world: World, comm: Any, claim: Claim) -> Sequence[Started]:
        node = self._node
        self._claim, self._exchanged = claim, False
        home = node.arena.homes[self._number]
        if claim.kind is Kind.REAL and claim.contribution is not home:
            np.copyto(home, claim.contribution)
        node.arena.put(self._number, Stamp(claim.round, claim.kind))
        self._act = Act.MEET
        return self._go_on(world, self._carry_out(world))

    def proceed(self, world: World) -> Sequence[Started]:
        self._check_words()
        if self._act is Act.EXCHANGE:
            assert self._across is not None
            more = self._across.proceed(self._across_nodes(world))
            if more:
                return more
            self._across.result(self._mine())
        return self._go_on(world, [])

    def settle(self) -> None:
        if self._across is not None and self._exchanged:
            self._across.settle()

    def abandon(self) -> None:
        self._act = Act.DONE
        self._heard = []
        if self._across is not None:
            self._across.abandon()

    # -- act by act --------------------------------------------------------------------------------

    def _go_on(self, world: World, started: Sequence[Started]) -> Sequence[Started]:
        """Act after act, until one has to wait or the result is there."""
        while not started and self._act is not Act.DONE:
            self._act = sharing.next_act(self._act, self._node.part)
            started = self._carry_out(world)
        return started

    def _carry_out(self, world: World) -> Sequence[Started]:
        part = self._node.part
        match self._act:
            case Act.MEET:
                heard = () if part.slice is None else part.locals
                return self._words(world, 2 * self._claim.tag, part.owners, heard)
            case Act.SUM:
                self._sum()
            case Act.EXCHANGE:
                return self._exchange(world)
            case Act.SPREAD:
                told = () if part.slice is None else part.locals
                return self._words(world, 2 * self._claim.tag + 1, told, part.owners)
            case Act.DONE:
                result = self._node.arena.result(self._claim.round, self._number)
                if self._claim.receive is not result:
                    np.copyto(self._claim.receive, result)
        return []

    def _words(
        self, world: World, tag: int, told: Sequence[int], heard: Sequence[int]
    ) -> Sequence[Started]:
        """The round's number to these members, and from those."""
        ranks = {m: world.view.rank_of(m) for m in {*told, *heard} - {world.member}}
        word = np.array([self._claim.round], np.int64)
        receive = {ranks[m]: np.empty(1, np.int64) for m in heard if m in ranks}
        self._heard = list(receive.values())
        send = {ranks[m]: word for m in told if m in ranks}
        return exchange(world.control, tag, receive, send, bulk=False)

    def _check_words(self) -> None:
        for word in self._heard:
            if word[0] != self._claim.round:
                raise GradientError(
                    f"a rank of this node is at round {word[0]} of bucket {self._number}, this one"
                    f" at round {self._claim.round}"
                )
        self._heard = []

    @property
    def _slice(self) -> Range:
        """The elements that this rank owns, without the counts."""
        part = self._node.part
        assert part.slice is not None
        return sharing.cut(self._bucket.elements, len(part.owners))[part.slice]

    def _mine(self) -> np.ndarray:
        """This rank's slice of the result, with the counts if it is the last."""
        part, (start, stop) = self._node.part, self._slice
        last = part.slice == len(part.owners) - 1
        result = self._node.arena.result(self._claim.round, self._number)
        return result[start : self._bucket.length if last else stop]

    def _sum(self) -> None:
        """This rank's slice of all that the node contributes."""
        arena, number, node = self._node.arena, self._number, self._node
        members = sharing.contributors(self._claim.round, node.part, node.legacies)
        stamps = {member: arena.stamp(member, number) for member in members}
        found = sharing.counted(self._claim.round, node.part, node.legacies, stamps)
        out = self._mine()
        start = self._slice[0]
        inputs = [
            arena.contribution(member, number)[start : start + out.size]
            for member, kind in found
            if kind is Kind.REAL
        ]
        add_up(inputs, out)
        alarm = self._bucket.alarm - start
        if alarm < out.size:
            out[alarm] += sum(kind is Kind.ALARM for _, kind in found)
        self._some = bool(found)

    # -- between nodes -----------------------------------------------------------------------------

    def _exchange(self, world: World) -> Sequence[Started]:
        mine = self._mine()
        self._across, self._exchanged = self._sum_across(mine.size), True
        given = mine if self._some else None
        started = self._across.start(self._across_nodes(world), self._claim.tag, given)
        if not started:
            self._across.result(mine)
        return started

    def _across_nodes(self, world: World) -> _Ranks:
        part = self._node.part
        ranks = tuple(world.view.rank_of(member) for member in part.across)
        return _Ranks(world.control, ranks, part.across.index(part.member))

    def _sum_across(self, length: int) -> CompressedSum:
        """What sums this rank's slice over all nodes. If slices are cut anew, what is owed stays
        with its elements as far as they stay this rank's."""
        start, stop = self._slice
        known = self._across
        if known is not None and self._summed == self._slice:
            return known
        counts = length - (stop - start)
        across = sum_of_slice(self._bucket, start, stop, counts, self._compressor)
        if known is not None and known.residual is not None:
            owed = np.zeros(self._bucket.elements, np.float32)
            first, last = self._summed
            owed[first:last] = known.residual
            across.owe(owed[start:stop].copy())
        self._summed = self._slice
        return across


@np.errstate(all="ignore")  # gradients overflow now and then; who steps on them finds out
def add_up(inputs: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Let ``out`` be the sum of ``inputs``, all of one length and dtype, added in their order."""
    if not inputs:
        out[:] = 0
        return
    first, *rest = inputs
    for start in range(0, out.size, _BLOCK_ELEMENTS):
        here = slice(start, start + _BLOCK_ELEMENTS)
        if not rest:
            np.copyto(out[here], first[here])
            continue
        np.add(first[here], rest[0][here], out=out[here])
        for more in rest[1:]:
            np.add(out[here], more[here], out=out[here])
