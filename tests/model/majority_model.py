"""A small world around ``core.rounds`` and ``core.closing``: gradients late, declined and carried.

Main threads place buckets one by one, wait for their round, apply what is complete, and at the end
wait for each other in an operation before they leave. The network is abstract but adversarial: a
collective may complete on some ranks and fail on others whenever all members of its view have
started it; control messages take as long as they like, in order from each sender; patience may be
over whenever a quorum has arrived; ranks die at any moment, the coordinator included.

A gradient is known by its batch, so a result says exactly what was counted in it. Where all ranks
share memory, what the dead had claimed of the open round counts in it too (``core.sharing``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mpift.core import closing, lockstep, rounds
from mpift.core.closing import Closing
from mpift.core.rounds import Rounds, Standing
from tests.model.worlds import put, with_rank

Batches = frozenset[int]
Counted = tuple[tuple[int, Batches], ...]  # (rank, its batches in this bucket)
Result = tuple[Counted, ...]  # one a bucket
NOTHING: Batches = frozenset()


@dataclass(frozen=True)
class Rank:
    machine: Rounds
    loops: int  # batches that its training loop has
    batch: int = 0
    placed: int = 0  # buckets of the present batch that the main thread has dealt with
    waits: bool = False  # in step()
    withheld: bool = False  # this batch goes to what is carried: an earlier one is under way
    whole: bool = False  # all buckets of a batch were contributed
    own: int = -1  # the round in which the last of it was counted
    in_operation: bool = False
    left: bool = False
    alive: bool = True
    faulted: bool = False  # noticed the fault of its epoch
    buffers: tuple[Batches, ...] = ()  # in place, the main thread's or waiting
    flying: tuple[Batches, ...] = ()  # claimed for the open round
    carried: tuple[Batches, ...] = ()  # to be added to the next that is put in place
    results: Result = ()  # of the open round, in this epoch
    last: tuple[int, int, Result] = (-1, -1, ())  # last completed round, its tag and result
    delivered: tuple[Result, ...] = ()
    lost: tuple[Batches, ...] = ()  # dropped by rule
    inbox: tuple[Any, ...] = ()  # from the coordinator
    outbox: tuple[closing.Told, ...] = ()  # to it


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    view: tuple[int, ...]
    epoch: int
    deaths_left: int
    closing: Closing
    operations: int = 0
    posted: frozenset[tuple[int, int, int, Counted]] = frozenset()  # (round, bucket, rank, data)
    stamped: frozenset[tuple[int, int, int, Counted]] = frozenset()  # likewise, in memory
    left: frozenset[tuple[int, int, int, Counted]] = frozenset()  # likewise, by the dead
    fault: str = field(default="")


class MajorityModel:
    """``loops[i]`` batches on rank i, at most ``deaths`` deaths, ``buckets`` buckets a round. With
    ``prompt`` the coordinator hears at once what ranks tell it."""

    def __init__(
        self,
        loops: tuple[int, ...],
        deaths: int = 0,
        buckets: int = 1,
        quorum: closing.Quorum = "majority",
        carry: bool = True,
        max_lag: int = 2,
        machine: type[Rounds] = Rounds,
        coordinator: type[Closing] = Closing,
        operation: bool = True,
        prompt: bool = False,
        shares: bool = False,
    ) -> None:
        self.loops, self.deaths, self.buckets = loops, deaths, buckets
        self.quorum, self.coordinator = quorum, coordinator
        self.operation, self.prompt, self.shares = operation, prompt, shares
        self.first = machine(buckets=buckets, max_lag=max_lag, carry=carry)

    def initial(self) -> World:
        none = (NOTHING,) * self.buckets
        ranks = tuple(
            Rank(self.first, n, buffers=none, flying=none, carried=none, lost=none)
            for n in self.loops
        )
        view = tuple(range(len(ranks)))
        return World(ranks, view, 0, self.deaths, self.coordinator.of(view, self.quorum))

    # -- what can happen -------------------------------------------------------------------------

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        for number in world.view:
            rank = world.ranks[number]
            if not rank.alive:
                continue
            yield from self._main(world, number, rank)
            yield from self._completions(world, number, rank)
            yield from self._messages(world, number, rank)
            if world.deaths_left and sum(r.alive for r in world.ranks) > 1:
                gone = replace(world, deaths_left=world.deaths_left - 1)
                yield f"rank {number} dies", with_rank(gone, number, replace(rank, alive=False))
            if rank.machine.finished and not rank.faulted:
                yield f"rank {number} departs", with_rank(world, number, replace(rank, alive=False))
            if not rank.faulted and self._broken(world):
                noticed = replace(rank, faulted=True, inbox=(), outbox=())
                after = self._feed(with_rank(world, number, noticed), number, lockstep.Faulted())
                yield f"rank {number} sees the fault", after
        state = world.closing
        coordinator = world.ranks[world.view[0]]
        if state.missing and coordinator.alive and not coordinator.faulted:
            yield "patience is over", self._closing(world, closing.PatienceOver(state.round))
        living = [n for n in world.view if world.ranks[n].alive]
        if living and all(world.ranks[n].faulted for n in living):
            yield "rebuild", self._rebuild(world)

    def _main(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        """The main thread's next move."""
        machine = rank.machine
        if rank.waits:
            if machine.settled:  # its own round, or its gradient was dropped
                yield f"rank {number} ends its step", self._stepped(world, number)
        elif rank.batch < rank.loops:
            if rank.placed < self.buckets:
                yield (
                    f"rank {number} places bucket {rank.placed} of batch {rank.batch}",
                    self._place(world, number, rank.placed),
                )
            else:
                yield f"rank {number} waits in step", self._wait(world, number)
        elif self.operation and not rank.in_operation and world.operations == 0:
            calls = with_rank(world, number, replace(rank, in_operation=True))
            calls = self._feed(calls, number, rounds.WentAway())
            yield f"rank {number} waits in an operation", self._operate(calls)
        elif not rank.left and (world.operations or not self.operation):
            gone = with_rank(world, number, replace(rank, left=True))
            yield f"rank {number} leaves", self._feed(gone, number, lockstep.Joined())
        behind = machine.applied < machine.completed
        full = machine.completed - machine.applied >= machine.max_lag
        waits = rank.waits and not machine.settled and rank.own < 0
        if behind and (rank.left or waits or (rank.in_operation and full)):
            yield f"rank {number} catches up", self._applied(world, number)

    def _operate(self, world: World) -> World:
        """The operation completes once all the living have called it."""
        living = [n for n in world.view if world.ranks[n].alive]
        if any(not world.ranks[n].in_operation or world.ranks[n].faulted for n in living):
            return world
        world = replace(world, operations=world.operations + 1)
        for number in living:
            world = with_rank(world, number, replace(world.ranks[number], in_operation=False))
            world = self._feed(world, number, rounds.CameBack())
        return world

    def _place(self, world: World, number: int, bucket: int) -> World:
        rank = world.ranks[number]
        if bucket == 0:
            rank = replace(rank, withheld=not rank.machine.settled or rank.own >= 0)
        rank = replace(rank, placed=bucket + 1)
        mine = rank.carried[bucket] | {rank.batch}
        if rank.withheld:
            carried = put(rank.carried, bucket, mine)
            return with_rank(world, number, replace(rank, carried=carried))
        rank = replace(
            rank,
            buffers=put(rank.buffers, bucket, mine),
            carried=put(rank.carried, bucket, NOTHING),
            whole=bucket + 1 == self.buckets,
        )
        return self._feed(with_rank(world, number, rank), number, lockstep.Contributed(bucket))

    def _wait(self, world: World, number: int) -> World:
        world = with_rank(world, number, replace(world.ranks[number], waits=True))
        return self._feed(world, number, rounds.Awaited())

    def _stepped(self, world: World, number: int) -> World:
        rank = world.ranks[number]
        rank = replace(rank, waits=False, placed=0, batch=rank.batch + 1, own=-1)
        return self._applied(with_rank(world, number, rank), number)

    def _applied(self, world: World, number: int) -> World:
        rank = world.ranks[number]
        if rank.own >= 0 and not rank.waits:  # counted while nobody waited: applied as any other
            world = with_rank(world, number, replace(rank, own=-1))
        completed = world.ranks[number].machine.completed
        return self._feed(world, number, rounds.Applied(completed))

    def _messages(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        if rank.inbox and not rank.faulted:
            word, *rest = rank.inbox
            read = with_rank(world, number, replace(rank, inbox=tuple(rest)))
            yield f"rank {number} reads {word}", self._feed(read, number, word)
        coordinator = world.ranks[world.view[0]]
        if rank.outbox and coordinator.alive and not coordinator.faulted:
            told, *others = rank.outbox
            sent = with_rank(world, number, replace(rank, outbox=tuple(others)))
            yield f"the coordinator hears {told}", self._closing(sent, told)

    def _closing(self, world: World, event: closing.Told | closing.PatienceOver) -> World:
        state, instructions = world.closing.handle(event)
        world = replace(world, closing=state)
        for instruction in instructions:
            match instruction:
                case closing.Nudge(round_, members, _):
                    word: Any = rounds.Nudged(world.epoch, round_)
                case closing.Decline(round_, members):
                    word = rounds.Declined(world.epoch, round_)
                case closing.End(last):
                    word, members = rounds.Ended(world.epoch, last), world.view
            for member in members:
                rank = world.ranks[member]
                if rank.alive and not rank.faulted:
                    world = with_rank(world, member, replace(rank, inbox=(*rank.inbox, word)))
        return world

    def _completions(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        if rank.faulted:
            return
        machine = rank.machine
        posts: dict[tuple[int, int], dict[int, Counted]] = {}
        for round_, bucket, who, data in world.posted:
            posts.setdefault((round_, bucket), {})[who] = data
        for (round_, bucket), by in sorted(posts.items()):
            if number not in by or set(by) != set(world.view):
                continue
            if bucket == -1:
                if machine.suspended:
                    yield (
                        f"rank {number} ends the hand-over of {round_}",
                        self._hand_over(world, number, round_),
                    )
            elif round_ == machine.completed and bucket not in machine.done:
                legacies = [data for r, b, _, data in world.left if (r, b) == (round_, bucket)]
                counted = tuple(sorted(sum([*by.values(), *legacies], ())))
                results = list(rank.results) or [()] * self.buckets
                results[bucket] = counted
                held = replace(rank, results=tuple(results))
                event = lockstep.BucketCompleted(world.epoch, bucket, len(counted))
                yield (
                    f"rank {number} completes bucket {bucket} of {round_} with {counted}",
                    self._feed(with_rank(world, number, held), number, event),
                )

    def _hand_over(self, world: World, number: int, round_: int) -> World:
        givers = [r for n, r in enumerate(world.ranks) if n in world.view and r.last[0] == round_]
        _, tag, result = givers[0].last
        rank = world.ranks[number]
        if rank.machine.completed == round_:
            world = with_rank(world, number, replace(rank, results=result))
        last = givers[0].machine.finished
        handed = lockstep.HandedOver(world.epoch, round_, tag, last)
        return self._feed(world, number, handed)

    def _rebuild(self, world: World) -> World:
        view = tuple(n for n in world.view if world.ranks[n].alive)
        epoch = world.epoch + 1
        completed = tuple(world.ranks[n].machine.completed for n in view)
        state = self.coordinator.of(view, self.quorum)
        dead = set(world.view) - set(view)
        left = {p for p in world.stamped if p[2] in dead and p[0] == max(completed)}
        world = replace(world, view=view, epoch=epoch, posted=frozenset(), closing=state)
        if self.shares:
            world = replace(world, left=world.left | left)
        for number in view:
            rank = replace(world.ranks[number], faulted=False, results=())
            world = with_rank(world, number, rank)
            world = self._feed(world, number, lockstep.Reconciled(epoch, completed))
        return self._operate(world)

    # -- carrying out instructions ---------------------------------------------------------------

    def _feed(self, world: World, number: int, event: Any) -> World:
        machine, instructions = world.ranks[number].machine.handle(event)
        world = with_rank(world, number, replace(world.ranks[number], machine=machine))
        for instruction in instructions:
            world = self._carry_out(world, number, instruction)
        return world

    def _carry_out(  # noqa: C901, one match
        self, world: World, number: int, instruction: Any
    ) -> World:
        rank = world.ranks[number]
        match instruction:
            case lockstep.Start(_, round_, bucket, real, _):
                if real and not rank.flying[bucket]:
                    rank = replace(rank, flying=put(rank.flying, bucket, rank.buffers[bucket]))
                data: Counted = ((number, rank.flying[bucket]),) if real else ()
                if any(p[:3] == (round_, bucket, number) for p in world.posted):
                    return replace(world, fault=f"rank {number} claims {bucket} of {round_} twice")
                world = replace(world, posted=world.posted | {(round_, bucket, number, data)})
                if self.shares:
                    others = {p for p in world.stamped if p[1:3] != (bucket, number)}
                    stamped = frozenset(others | {(round_, bucket, number, data)})
                    world = replace(world, stamped=stamped)
            case lockstep.HandOver(_, round_, _):
                world = replace(world, posted=world.posted | {(round_, -1, number, ())})
            case lockstep.Deliver(round_, tag, counted):
                mine = [dict(c).get(number, NOTHING) for c in rank.results]
                claimed = [rank.flying[b] if b in counted else NOTHING for b in range(len(mine))]
                if mine != claimed:
                    fault = f"rank {number}: {mine} counted in {round_}, it believes {claimed}"
                    return replace(world, fault=fault)
                if rank.whole and counted and rank.machine.settled:
                    rank = replace(rank, own=round_, whole=False)
                stamped = frozenset(p for p in world.stamped if p[2] != number)
                world = replace(world, stamped=stamped)
                rank = replace(
                    rank,
                    delivered=(*rank.delivered, rank.results),
                    last=(round_, tag, rank.results),
                    results=(),
                    flying=(NOTHING,) * self.buckets,
                )
            case lockstep.Finish(tag):
                rank = replace(rank, last=(rank.machine.completed - 1, tag, rank.results))
            case rounds.GiveBack(buckets):
                carried = _added(rank.carried, rank.buffers, buckets)
                rank = replace(rank, carried=carried)
                if rank.own < 0:
                    rank = replace(
                        rank,
                        waits=False,
                        placed=0,
                        batch=rank.batch + 1,
                        whole=rank.machine.held != NOTHING,
                    )
            case rounds.Drop(buckets):
                rank = replace(rank, lost=_added(rank.lost, rank.buffers, buckets))
            case rounds.Announce(_, standing, round_):
                turn = world.operations
                told = closing.Told(number, Standing(standing), round_, turn)
                if self.prompt and not rank.faulted:
                    return self._closing(world, told)
                rank = replace(rank, outbox=(*rank.outbox, told))
        return with_rank(world, number, rank)

    # -- what must hold --------------------------------------------------------------------------

    def violation(self, world: World) -> str | None:
        if world.fault:
            return world.fault
        agreed: dict[int, Result] = {}
        for number in world.view:
            rank = world.ranks[number]
            if not rank.alive:
                continue
            for round_, result in enumerate(rank.delivered):
                if agreed.setdefault(round_, result) != result:
                    return f"round {round_}: rank {number} has {result}, not {agreed[round_]}"
            lag = rank.machine.completed - rank.machine.applied
            if lag > rank.machine.max_lag + 1 and not rank.machine.finished:
                return f"rank {number} is too far behind"
        return self._counting(world, agreed)

    def _counting(self, world: World, agreed: dict[int, Result]) -> str | None:
        for bucket in range(self.buckets):
            seen: set[tuple[int, int]] = set()
            for result in agreed.values():
                for who, batches in result[bucket]:
                    for batch in batches:
                        if (who, batch) in seen:
                            return f"batch {batch} of rank {who} is counted twice"
                        seen.add((who, batch))
            for number in world.view:
                rank = world.ranks[number]
                if not (rank.alive and rank.machine.settled):
                    continue
                if world.epoch == 0 and not rank.waits and rank.placed == 0:
                    missing = {(number, b) for b in range(rank.batch)} - seen
                    missing -= {(number, b) for b in rank.carried[bucket] | rank.lost[bucket]}
                    if missing and not rank.machine.finished:
                        return f"rank {number} lost {missing} of bucket {bucket}"
        return None

    def final(self, world: World) -> bool:
        return all(rank.machine.finished or not rank.alive for rank in world.ranks)

    def _broken(self, world: World) -> bool:
        return any(not world.ranks[n].alive or world.ranks[n].faulted for n in world.view)


def _added(
    items: tuple[Batches, ...], buffers: tuple[Batches, ...], buckets: frozenset[int]
) -> tuple[Batches, ...]:
    """``items`` with what is in the buffers of ``buckets``."""
    return tuple(
        item | (buffers[bucket] if bucket in buckets else NOTHING)
        for bucket, item in enumerate(items)
    )
