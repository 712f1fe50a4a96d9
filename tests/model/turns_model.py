"""A small world of ranks around ``core.turns``: operations, deaths, rebuilds, departures.

The network is abstract but adversarial: a collective may complete on some ranks and fail on
others whenever all members of its view have started it; errors are noticed in any order; ranks
die at any moment; finished ranks leave while others still lack the last result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpift.core import lockstep
from mpift.core.turns import Turns
from tests.model.worlds import with_rank

Result = tuple[frozenset[int], ...]  # per bucket, the ranks whose real data is in it


@dataclass(frozen=True)
class Rank:
    machine: Turns
    loops: int  # rounds that its training loop will contribute to
    alive: bool = True
    faulted: bool = False  # noticed the fault of its epoch
    contributed: int = 0  # buckets contributed to the open round
    results: Result = ()  # of the open round, in this epoch
    last: tuple[int, int, Result] = (-1, -1, ())  # last completed round, its tag and result
    delivered: tuple[tuple[int, Result], ...] = ()


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    view: tuple[int, ...]
    epoch: int
    deaths_left: int
    # (epoch, round, bucket, rank, real); bucket -1 is the hand-over
    posted: frozenset[tuple[int, int, int, int, bool]] = frozenset()


class TurnsModel:
    """``loops[i]`` rounds on rank i, at most ``deaths`` deaths, ``buckets`` buckets a round."""

    def __init__(
        self,
        loops: tuple[int, ...],
        deaths: int,
        buckets: int = 2,
        machine: type[Turns] = Turns,
    ) -> None:
        self.loops, self.deaths = loops, deaths
        self.first = machine(buckets=buckets)

    def initial(self) -> World:
        ranks = tuple(Rank(self.first, loops) for loops in self.loops)
        return World(ranks, tuple(range(len(ranks))), 0, self.deaths)

    # -- what can happen ---------------------------------------------------------------------

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        for number in world.view:
            rank = world.ranks[number]
            if not rank.alive:
                continue
            yield from self._loop(world, number, rank)
            yield from self._completions(world, number, rank)
            if world.deaths_left and self._living(world) > 1:
                gone = replace(world, deaths_left=world.deaths_left - 1)
                yield f"rank {number} dies", with_rank(gone, number, replace(rank, alive=False))
            if rank.machine.finished and not rank.faulted:
                yield f"rank {number} departs", with_rank(world, number, replace(rank, alive=False))
            if not rank.faulted and self._broken(world):
                machine, _ = rank.machine.handle(lockstep.Faulted())
                noticed = replace(rank, machine=machine, faulted=True)
                yield f"rank {number} sees the fault", with_rank(world, number, noticed)
        if self._living(world) and all(
            world.ranks[n].faulted for n in world.view if world.ranks[n].alive
        ):
            yield "rebuild", self._rebuild(world)

    def _loop(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        machine = rank.machine
        if machine.joined or machine.finished:
            return
        if machine.completed >= rank.loops:
            yield f"rank {number} joins", self._feed(world, number, lockstep.Joined())
        elif rank.contributed < 1:
            bucket = rank.contributed
            busy = with_rank(world, number, replace(rank, contributed=bucket + 1))
            yield (
                f"rank {number} contributes bucket {bucket} of {machine.completed}",
                self._feed(busy, number, lockstep.Contributed(bucket)),
            )

    def _completions(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        if rank.faulted:
            return
        machine, epoch = rank.machine, world.epoch
        posts: dict[tuple[int, int], dict[int, bool]] = {}
        for post_epoch, round_, bucket, who, real in world.posted:
            if post_epoch == epoch:
                posts.setdefault((round_, bucket), {})[who] = real
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
                who = frozenset(n for n, real in by.items() if real)
                results = list(rank.results) + [frozenset()] * machine.buckets
                results[bucket] = who
                held = replace(rank, results=tuple(results[: machine.buckets]))
                event = lockstep.BucketCompleted(epoch, bucket, len(who))
                yield (
                    f"rank {number} completes bucket {bucket} of {round_} with {sorted(who)}",
                    self._feed(with_rank(world, number, held), number, event),
                )

    def _hand_over(self, world: World, number: int, round_: int) -> World:
        givers = [
            r.last for n, r in enumerate(world.ranks) if n in world.view and r.last[0] == round_
        ]
        _, tag, result = givers[0]
        rank = world.ranks[number]
        if rank.machine.completed == round_:
            world = with_rank(world, number, replace(rank, results=result))
        handed = lockstep.HandedOver(world.epoch, round_, tag, last=not result[0])
        return self._feed(world, number, handed)

    def _rebuild(self, world: World) -> World:
        view = tuple(n for n in world.view if world.ranks[n].alive)
        epoch = world.epoch + 1
        completed = tuple(world.ranks[n].machine.completed for n in view)
        world = replace(world, view=view, epoch=epoch, posted=frozenset())
        for number in view:
            world = with_rank(
                world, number, replace(world.ranks[number], faulted=False, results=())
            )
            world = self._feed(world, number, lockstep.Reconciled(epoch, completed))
        return world

    # -- carrying out instructions ------------------------------------------------------------

    def _feed(self, world: World, number: int, event: lockstep.Event) -> World:
        machine, instructions = world.ranks[number].machine.handle(event)
        rank = replace(world.ranks[number], machine=machine)
        posted = set(world.posted)
        for instruction in instructions:
            match instruction:
                case lockstep.Start(epoch, round_, bucket, real, _):
                    posted.add((epoch, round_, bucket, number, real))
                case lockstep.HandOver(epoch, round_, _):
                    posted.add((epoch, round_, -1, number, False))
                case lockstep.Deliver(round_, tag, _):
                    rank = replace(
                        rank,
                        delivered=(*rank.delivered, (round_, rank.results)),
                        last=(round_, tag, rank.results),
                        results=(),
                        contributed=0,
                    )
                case lockstep.Finish(tag):
                    rank = replace(rank, last=(machine.completed - 1, tag, rank.results))
        return with_rank(replace(world, posted=frozenset(posted)), number, rank)

    # -- what must hold ------------------------------------------------------------------------

    def violation(self, world: World) -> str | None:
        living = [(n, world.ranks[n]) for n in world.view if world.ranks[n].alive]
        agreed: dict[int, Result] = {}
        for number, rank in living:
            if [r for r, _ in rank.delivered] != list(range(len(rank.delivered))):
                return f"rank {number} got rounds out of order: {rank.delivered}"
            for round_, result in rank.delivered:
                if agreed.setdefault(round_, result) != result:
                    return f"round {round_}: rank {number} has {result}, others {agreed[round_]}"
                if round_ < rank.loops and any(number not in bucket for bucket in result):
                    return f"round {round_} lacks the finished work of living rank {number}"
        return None

    def final(self, world: World) -> bool:
        return all(rank.machine.finished or not rank.alive for rank in world.ranks)

    def _living(self, world: World) -> int:
        return sum(rank.alive for rank in world.ranks)

    def _broken(self, world: World) -> bool:
        return any(not world.ranks[n].alive or world.ranks[n].faulted for n in world.view)
