"""A small world around ``core.versions``: one key, clients that push, deaths and lost messages.

Each member runs a ``Shard``; some of them are clients too, with one update at a time under way.
Messages come in order from each sender and take as long as they like; whoever applies updates does
so too. A new view is installed by all at once (a rebuild ends for nobody before it has begun for
all), and loses what is under way. A value is the tuple of the updates that made it, so it tells its
own history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mpift.core import versions
from mpift.core.versions import Outcome, Shard, Update, Version

Link = tuple[int, int]  # sender, receiver


@dataclass(frozen=True)
class Client:
    """On the member of the same position; ``left`` updates are still to be made."""

    left: int
    serial: int = 0
    base: int = 0
    asks: bool = False
    answers: tuple[tuple[int, Outcome, int], ...] = ()  # (serial, outcome, version)


@dataclass(frozen=True)
class World:
    shards: tuple[Shard, ...]
    clients: tuple[Client, ...]
    view: tuple[int, ...]
    dead: frozenset[int]
    deaths_left: int
    rebuilds_left: int  # views that nobody's death calls for
    under_way: tuple[tuple[Link, tuple[Any, ...]], ...] = ()
    jobs: tuple[versions.Apply | None, ...] = ()
    seen: tuple[Any, ...] = ()  # the newest value that anybody may have read
    lost: bool = False
    fault: str = ""


class VersionsModel:
    """``pushes[i]`` updates by member i; the members' order in line for the key is 0, 1, 2..."""

    def __init__(
        self,
        pushes: tuple[int, ...],
        deaths: int = 0,
        rebuilds: int = 0,
        staleness: int | None = None,
        machine: type[Shard] = Shard,
    ) -> None:
        self.pushes, self.deaths, self.rebuilds = pushes, deaths, rebuilds
        self.staleness, self.machine = staleness, machine

    def initial(self) -> World:
        members = tuple(range(len(self.pushes)))
        primary, backup = _holders(members)
        first = Version(0, ())
        return World(
            tuple(
                self.machine.founded(member, primary, backup, first, self.staleness)
                for member in members
            ),
            tuple(Client(left) for left in self.pushes),
            members,
            frozenset(),
            self.deaths,
            self.rebuilds,
            jobs=(None,) * len(members),
        )

    # -- what can happen -----------------------------------------------------------------------

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        for label, after in self._actions(world):
            yield label, _observed(world, after)

    def _actions(self, world: World) -> Iterator[tuple[str, World]]:
        living = [member for member in world.view if member not in world.dead]
        for member in living:
            client = world.clients[member]
            if client.left and not client.asks:
                base = max(client.base, 0)
                asks = replace(
                    client, left=client.left - 1, serial=client.serial + 1, base=base, asks=True
                )
                yield f"client {member} pushes", self._ask(_client(world, member, asks), member)
            if world.jobs[member] is not None:
                yield f"member {member} has applied", self._apply(world, member)
            if world.deaths_left and len(living) > 1:
                gone = replace(world, dead=world.dead | {member}, deaths_left=world.deaths_left - 1)
                yield f"member {member} dies", gone
        for link, (message, *rest) in world.under_way:
            if link[1] not in world.dead:
                after = _put(world, link, tuple(rest))
                yield f"{link[0]} to {link[1]}: {message}", self._arrive(after, link[1], message)
        if len(living) < len(world.view):
            yield "a new view", self._rebuild(world, tuple(living))
        elif world.rebuilds_left:
            again = replace(world, rebuilds_left=world.rebuilds_left - 1)
            yield "a new view of the same members", self._rebuild(again, world.view)

    def _ask(self, world: World, member: int) -> World:
        client = world.clients[member]
        update = Update(member, client.serial, client.base, (member, client.serial))
        return _send(world, (member, _holders(world.view)[0]), versions.Pushed(update))

    def _apply(self, world: World, member: int) -> World:
        job = world.jobs[member]
        assert job is not None
        world = replace(world, jobs=_set(world.jobs, member, None))
        value = (*job.version.value, job.update.payload)
        return self._feed(world, member, versions.Applied(value))

    def _arrive(self, world: World, member: int, message: Any) -> World:
        if isinstance(message, versions.Answer):
            return self._answered(world, member, message)
        return self._feed(world, member, message)

    def _answered(self, world: World, member: int, answer: versions.Answer) -> World:
        client = world.clients[member]
        if not client.asks or answer.serial != client.serial:
            return world
        told = (answer.serial, answer.outcome, answer.number)
        after = replace(client, asks=False, base=answer.number, answers=(*client.answers, told))
        return _client(world, member, after)

    def _rebuild(self, world: World, members: tuple[int, ...]) -> World:
        world = replace(world, view=members, under_way=())
        primary, backup = _holders(members)
        for member in members:
            world = self._feed(world, member, versions.ViewChanged(primary, backup))
        for member in members:
            if world.clients[member].asks:
                world = self._ask(world, member)
        return world

    def _feed(self, world: World, member: int, event: versions.Event) -> World:
        shard, instructions = world.shards[member].handle(event)
        world = replace(world, shards=_set(world.shards, member, shard))
        for instruction in instructions:
            match instruction:
                case versions.Apply():
                    if world.jobs[member] is not None:
                        return replace(world, fault="two updates are applied at once")
                    world = replace(world, jobs=_set(world.jobs, member, instruction))
                case versions.Replicate(backup, version):
                    world = _send(world, (member, backup), versions.Received(version))
                case versions.Acknowledge(primary, number):
                    world = _send(world, (member, primary), versions.Acknowledged(number))
                case versions.Answer():
                    world = _send(world, (member, instruction.client), instruction)
                case versions.Lost():
                    world = replace(world, lost=True)
        return world

    # -- what must hold ------------------------------------------------------------------------

    def violation(self, world: World) -> str | None:
        if world.fault:
            return world.fault
        if world.lost and self.deaths < 2:
            return "the key is lost although only one of its holders died"
        for member in world.view:
            held = world.shards[member].held
            if held is None:
                continue
            if len(set(held.value)) < len(held.value):
                return f"member {member} has an update twice: {held.value}"
            if held.number != len(held.value):
                return f"member {member} has version {held.number} of {held.value}"
        return self._copied(world) or self._acknowledged(world)

    def _copied(self, world: World) -> str | None:
        """Once nothing is under way, the backup has what the primary has."""
        primary, backup = _holders(world.view)
        busy = world.under_way or any(world.jobs) or world.dead & set(world.view)
        if busy or backup is None or world.lost:
            return None
        newest, copy = world.shards[primary].held, world.shards[backup].held
        if newest is not None and (copy is None or copy.value != newest.value):
            return f"backup {backup} has {copy}, and nobody sends it {newest}"
        return None

    def _acknowledged(self, world: World) -> str | None:
        for member, client in enumerate(world.clients):
            for serial, outcome, number in client.answers:
                mine = (member, serial)
                if world.lost or outcome is Outcome.LOST:
                    continue
                if outcome is Outcome.STALE and mine in world.seen:
                    return f"{mine} was refused, and counts"
                committed = outcome is Outcome.COMMITTED
                if committed and world.seen[number - 1 : number] != (mine,):
                    return f"{mine} was acknowledged as version {number}, not in {world.seen}"
        return None

    def final(self, world: World) -> bool:
        return not any(
            client.asks or client.left
            for member, client in enumerate(world.clients)
            if member not in world.dead
        )


def _observed(before: World, after: World) -> World:
    """What a reader may see now must continue what was seen before."""
    primary = _holders(after.view)[0]
    committed = after.shards[primary].committed
    if primary in after.dead or committed is None:
        return after
    if after.lost:
        return replace(after, fault="a lost key is read")
    shorter = min(len(before.seen), len(committed.value))
    if committed.value[:shorter] != before.seen[:shorter]:
        return replace(after, fault=f"two orders: {before.seen} and {committed.value}")
    if len(committed.value) < len(before.seen):
        return replace(after, fault=f"back from {before.seen} to {committed.value}")
    return replace(after, seen=committed.value)


def _holders(members: tuple[int, ...]) -> tuple[int, int | None]:
    return members[0], members[1] if len(members) > 1 else None


def _set(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def _client(world: World, member: int, client: Client) -> World:
    return replace(world, clients=_set(world.clients, member, client))


def _send(world: World, link: Link, message: Any) -> World:
    if link[1] in world.dead:
        return world
    return _put(world, link, (*dict(world.under_way).get(link, ()), message))


def _put(world: World, link: Link, messages: tuple[Any, ...]) -> World:
    links = dict(world.under_way)
    links.pop(link, None)
    if messages:
        links[link] = messages
    return replace(world, under_way=tuple(sorted(links.items(), key=lambda item: item[0])))
