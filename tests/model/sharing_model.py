"""A small world around ``core.sharing``: ranks of one or two nodes, their memory, words and deaths.

Main threads write a gradient into their memory at any time between two rounds, in two moves, so
that half of one can be seen; some are late, and their round is begun without them. Results are
written in two moves as well, and read by main threads whenever they like. Words reach their
receivers one by one; a rank dies at any moment, half-way through its words or its slice. What a
rank holds is known by the round that it was written for, so a sum says exactly what was in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mpift.core.membership import View
from mpift.core.sharing import (
    RESULTS_KEPT,
    Act,
    Kind,
    Legacies,
    Part,
    Stamp,
    counted,
    next_act,
    part_of,
)
from tests.model.worlds import put, with_rank

TORN = -2
NOTHING = -1
UNSTAMPED = Stamp()
Slice = tuple[int, frozenset[int]]  # (round, members that are in the sum); (TORN, ...) half-way
Result = tuple[Slice, ...]


@dataclass(frozen=True)
class Rank:
    legacies: Legacies
    completed: int = 0
    alive: bool = True
    faulted: bool = False
    memory: int = NOTHING  # the round whose gradient lies there
    filled: bool = False  # the main thread has put a gradient in place for the open round
    stamp: Stamp = UNSTAMPED
    act: Act | None = None  # None before the open round is begun
    said: frozenset[int] = frozenset()  # who was told in this act
    partial: frozenset[int] | None = None  # the node's sum of this rank's slice
    # Complete rounds that the main thread has not read, and of how many slices they are.
    unread: tuple[tuple[int, int], ...] = ()
    private: tuple[tuple[int, Result], ...] = ()  # of those, what is no longer in shared memory
    delivered: tuple[Result, ...] = ()
    last: tuple[int, int] = (-1, 0)  # the last complete round, and of how many slices it is


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    view: View
    deaths_left: int
    results: tuple[tuple[Result, ...], ...]  # by node and place
    words: frozenset[tuple[Act, int, int, int]] = frozenset()  # (act, round, sender, receiver)
    sums: frozenset[tuple[int, int, int, frozenset[int]]] = frozenset()  # (round, slice, who, sum)
    fault: str = field(default="")


class SharingModel:
    """``nodes[m]`` is the node of member m; each goes through ``rounds`` rounds. Members in
    ``late`` may have nothing in place when a round is begun. Broken variants override methods."""

    kept = RESULTS_KEPT

    def __init__(
        self,
        nodes: tuple[int, ...],
        rounds: int,
        deaths: int = 0,
        late: frozenset[int] = frozenset(),
    ) -> None:
        self.node_of = {member: str(node) for member, node in enumerate(nodes)}
        self.rounds, self.deaths, self.late = rounds, deaths, late

    def initial(self) -> World:
        view = View(0, tuple(self.node_of))
        parts = [part_of(m, view, self.node_of) for m in view.members]
        ranks = tuple(Rank(Legacies(part.locals)) for part in parts)
        empty: Result = ((TORN, frozenset()),) * len(view.members)
        places = (empty,) * self.kept
        nodes = len(set(self.node_of.values()))
        return World(ranks, view, self.deaths, (places,) * nodes)

    # -- what variants change ----------------------------------------------------------------------

    def vacate(self, world: World, member: int) -> Rank:
        """``member`` keeps for itself what it has not read and will be written over."""
        rank = world.ranks[member]
        place = self.place(rank.completed)
        doomed = [
            (n, slices)
            for n, slices in rank.unread
            if self.place(n) == place and n not in dict(rank.private)
        ]
        saved = tuple((n, self._read(world, member, n, slices)) for n, slices in doomed)
        return replace(rank, private=rank.private + saved)

    def cleared(self, rank: Rank) -> Stamp:
        return UNSTAMPED

    def counted(self, world: World, part: Part) -> frozenset[int]:
        rank = world.ranks[part.member]
        stamps = {m: world.ranks[m].stamp for m in self.node_of}
        found = counted(rank.completed, part, rank.legacies, stamps)
        return frozenset(member for member, kind in found if kind is Kind.REAL)

    def in_view(self, rank: Rank, part: Part) -> Legacies:
        return rank.legacies.in_view(part, rank.completed)

    # -- what can happen ---------------------------------------------------------------------------

    def place(self, round_: int) -> int:
        return round_ % self.kept

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        for member in world.view.members:
            rank = world.ranks[member]
            if not rank.alive:
                continue
            yield from self._main(world, member, rank)
            if not rank.faulted:
                yield from self._service(world, member, rank)
            living = sum(r.alive for r in world.ranks)
            if world.deaths_left and living > 1 and rank.completed < self.rounds:
                gone = replace(world, deaths_left=world.deaths_left - 1)
                yield f"rank {member} dies", with_rank(gone, member, replace(rank, alive=False))
            broken = any(
                not world.ranks[m].alive or world.ranks[m].faulted for m in world.view.members
            )
            if broken and not rank.faulted:
                seen = replace(rank, faulted=True, act=None, said=frozenset(), partial=None)
                yield f"rank {member} sees the fault", with_rank(world, member, seen)
        living_members = [m for m in world.view.members if world.ranks[m].alive]
        if all(world.ranks[m].faulted for m in living_members):
            yield "rebuild", self._rebuild(world, tuple(living_members))

    def _main(self, world: World, member: int, rank: Rank) -> Iterator[tuple[str, World]]:
        """The main thread: its gradient goes in place in two moves, results come out in one."""
        if rank.completed < self.rounds and not rank.filled and rank.act is None:
            if rank.memory != TORN:
                torn = replace(rank, memory=TORN)
                yield f"rank {member} begins to write", with_rank(world, member, torn)
            else:
                whole = replace(rank, memory=rank.completed, filled=True)
                yield f"rank {member} has written", with_rank(world, member, whole)
        for number, slices in rank.unread[:1]:
            result = self._kept(world, member, number, slices)
            read = replace(
                rank,
                unread=rank.unread[1:],
                private=tuple(p for p in rank.private if p[0] != number),
                delivered=(*rank.delivered, result),
            )
            yield f"rank {member} reads round {number}", with_rank(world, member, read)

    def _read(self, world: World, member: int, number: int, slices: int) -> Result:
        return world.results[int(self.node_of[member])][self.place(number)][:slices]

    def _kept(self, world: World, member: int, number: int, slices: int) -> Result:
        private = dict(world.ranks[member].private).get(number)
        return private or self._read(world, member, number, slices)

    def _service(self, world: World, member: int, rank: Rank) -> Iterator[tuple[str, World]]:
        part = part_of(member, world.view, self.node_of)
        if rank.completed == self.rounds:
            return
        match rank.act:
            case None:
                if rank.filled or member in self.late:
                    begun = replace(
                        self.vacate(world, member),
                        act=Act.MEET,
                        stamp=Stamp(rank.completed, Kind.REAL if rank.filled else Kind.NOTHING),
                    )
                    yield f"rank {member} begins {rank.completed}", with_rank(world, member, begun)
            case Act.MEET:
                others = () if part.slice is None else part.locals
                yield from self._words(world, rank, part, part.owners, others)
            case Act.SUM:
                yield from self._sum(world, rank, part)
            case Act.EXCHANGE:
                yield from self._exchange(world, rank, part)
            case Act.SPREAD if self._unwritten(world, rank, part):
                assert rank.partial is not None
                written = self._write(world, rank, part, (rank.completed, rank.partial))
                yield f"rank {member} has its slice of {rank.completed}", written
            case Act.SPREAD:
                told = () if part.slice is None else part.locals
                yield from self._words(world, rank, part, told, part.owners)
            case Act.DONE:
                yield f"rank {member} completes {rank.completed}", self._complete(world, member)

    def _words(
        self,
        world: World,
        rank: Rank,
        part: Part,
        receivers: tuple[int, ...],
        senders: tuple[int, ...],
    ) -> Iterator[tuple[str, World]]:
        """One more receiver is told; or all of the act is through."""
        member, act = part.member, rank.act
        assert act is not None
        for receiver in receivers:
            if receiver != member and receiver not in rank.said:
                word = (act, rank.completed, member, receiver)
                told = replace(rank, said=rank.said | {receiver})
                after = replace(with_rank(world, member, told), words=world.words | {word})
                yield f"rank {member} tells {receiver} {act.name}", after
                return  # in a fixed order: which one is first makes no difference
        heard = {s for a, n, s, r in world.words if (a, n, r) == (act, rank.completed, member)}
        if set(senders) - {member} <= heard:
            through = replace(rank, act=next_act(act, part), said=frozenset())
            yield f"rank {member} is through with {act.name}", with_rank(world, member, through)

    def _sum(self, world: World, rank: Rank, part: Part) -> Iterator[tuple[str, World]]:
        found = self.counted(world, part)
        half = [m for m in found if world.ranks[m].memory != rank.completed]
        if half:
            fault = f"rank {part.member} sums what rank {half[0]} has in place of {rank.completed}"
            yield f"rank {part.member} sums", replace(world, fault=fault)
            return
        summed = replace(rank, partial=found, act=next_act(Act.SUM, part))
        after = self._write(world, rank, part, (TORN, found))
        yield f"rank {part.member} sums {set(found)}", with_rank(after, part.member, summed)

    def _exchange(self, world: World, rank: Rank, part: Part) -> Iterator[tuple[str, World]]:
        assert part.slice is not None
        assert rank.partial is not None
        mine = (rank.completed, part.slice, part.member, rank.partial)
        if mine not in world.sums:
            yield f"rank {part.member} sends", replace(world, sums=world.sums | {mine})
            return
        there = {m: s for n, c, m, s in world.sums if (n, c) == (rank.completed, part.slice)}
        if set(part.across) <= set(there):
            total = frozenset().union(*(there[m] for m in part.across))
            through = replace(rank, partial=total, act=Act.SPREAD)
            yield f"rank {part.member} has all", with_rank(world, part.member, through)

    def _unwritten(self, world: World, rank: Rank, part: Part) -> bool:
        if part.slice is None:
            return False
        result = self._read(world, part.member, rank.completed, len(part.owners))
        return result[part.slice] != (rank.completed, rank.partial)

    def _write(self, world: World, rank: Rank, part: Part, slice_: Slice) -> World:
        node, place = int(self.node_of[part.member]), self.place(rank.completed)
        assert part.slice is not None
        result = put(world.results[node][place], part.slice, slice_)
        places = put(world.results[node], place, result)
        return replace(world, results=put(world.results, node, places))

    def _complete(self, world: World, member: int) -> World:
        rank = world.ranks[member]
        slices = len(part_of(member, world.view, self.node_of).owners)
        lost = self._due(world, member) - self._read(world, member, rank.completed, slices)[0][1]
        if lost:
            fault = f"round {rank.completed} lacks what {set(lost)} had in place"
            world = replace(world, fault=fault)
        return with_rank(world, member, self._completed(rank, slices))

    def _due(self, world: World, member: int) -> frozenset[int]:
        """Whose gradients are in place for the open round as ``member`` knows: those of the living,
        and of the dead of its node what they had finished of the round that was open then."""
        number, node = world.ranks[member].completed, self.node_of[member]
        stamped = {m for m, r in enumerate(world.ranks) if r.stamp == Stamp(number, Kind.REAL)}
        heirs = {m for m, n in world.ranks[member].legacies.rounds if n == number}
        here = {m for m in stamped if self.node_of[m] == node}
        return frozenset(here & (heirs | set(world.view.members)))

    def _completed(self, rank: Rank, slices: int) -> Rank:
        return replace(
            rank,
            unread=(*rank.unread, (rank.completed, slices)),
            last=(rank.completed, slices),
            completed=rank.completed + 1,
            stamp=self.cleared(rank),
            filled=False,
            act=None,
            partial=None,
        )

    def _rebuild(self, world: World, members: tuple[int, ...]) -> World:
        view = world.view.successor(world.view.epoch + 1, members)
        ahead = max(world.ranks[m].completed for m in members)
        giver = next(m for m in members if world.ranks[m].completed == ahead)
        number, slices = world.ranks[giver].last
        given = self._kept(world, giver, number, slices)
        world = replace(world, view=view, words=frozenset(), sums=frozenset())
        for member in members:
            rank = replace(world.ranks[member], faulted=False)
            if rank.completed < ahead:
                private = (*rank.private, (rank.completed, given))
                rank = self._completed(replace(rank, private=private), slices)
            part = part_of(member, view, self.node_of)
            rank = replace(rank, legacies=self.in_view(rank, part))
            world = with_rank(world, member, rank)
        return world

    # -- what must hold ----------------------------------------------------------------------------

    def violation(self, world: World) -> str | None:
        if world.fault:
            return world.fault
        agreed: dict[int, frozenset[int]] = {}
        for member in world.view.members:
            for number, result in enumerate(world.ranks[member].delivered):
                if any(slice_[0] != number for slice_ in result):
                    return f"rank {member} reads {result} as round {number}"
                for _, who in result:
                    if agreed.setdefault(number, who) != who:
                        return f"round {number} is {set(agreed[number])} and {set(who)}"
        return None

    def final(self, world: World) -> bool:
        return all(
            rank.completed == self.rounds and not rank.unread for rank in world.ranks if rank.alive
        )
