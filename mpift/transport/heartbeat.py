"""Signs of life between ranks, on a communicator of their own.

A part of the service's loop: it never blocks, and goes on while the script computes, writes
checkpoints or holds a lock. In each interval a rank sends a packet to its observers, which are the
next ranks in the ring of the view (on other nodes where there are several), to the rank that it
takes for the coordinator, and to whoever takes it for that. So the coordinator hears everybody and
everybody hears it, and the cost is constant for all other ranks.

No packet is sent to a rank while the one before it is still on its way, so a peer that hangs costs
one buffer. What arrives damaged or from elsewhere is counted, and not believed. This part tells
silence; what follows from it is decided elsewhere.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpift.config import Config
from mpift.core.detector import CAP_TIMEOUTS, Detector, make_detector
from mpift.core.packet import PACKET_BYTES, RECEIVE_BYTES, Defect, Packet, decode, encode_into
from mpift.transport.lane import Started
from mpift.transport.world import World

HEARTBEAT_TAG = 2
_LOOKS_AN_INTERVAL = 10
# Shorter pauses of the loop are its usual pace.
_SLEPT_SECONDS = 0.1


@dataclass(slots=True)
class Counts:
    """What this rank has seen since its start."""

    sent: int = 0
    skipped: int = 0  # the one before was still on its way
    received: int = 0
    stale: int = 0  # of another process or view
    defects: dict[Defect, int] = field(default_factory=dict)


@dataclass(slots=True)
class Impairment:
    """What a fault schedule does to the packets sent at present, as probabilities."""

    drop: float = 0.0
    corrupt: float = 0.0


@dataclass(slots=True)
class Hooks:
    """What the heartbeat asks and tells. All are called on the service thread."""

    # (sequence): the packet to send now; its sequence is that
    packet: Callable[[int], Packet]
    # (member, silent for good): a peer is overdue; told at every look
    missed: Callable[[int, bool], None]
    # (member): a peer that was overdue is heard again
    heard: Callable[[int], None]
    # the member that this rank takes for the coordinator, after those that it stands in for
    heads: Callable[[], tuple[int, ...]]
    # whether others may take this rank for the coordinator
    may_coordinate: Callable[[], bool]
    # (step): what the fault schedule does at this step
    impairment: Callable[[int], Impairment]


class Heartbeat:
    """See the module's docstring; a ``Part`` of the service."""

    def __init__(self, config: Config, incarnations: dict[int, int], hooks: Hooks) -> None:
        self._config = config
        self._incarnations = incarnations
        self._hooks = hooks
        self.counts = Counts()
        self.requests: list[Any] = []  # the receive, then the sends
        self.last: dict[int, Packet] = {}  # the newest packet of each peer
        self._world: World
        self._inbox: Started
        self._outbox: list[tuple[int, Started]] = []
        self._newest = bytearray(PACKET_BYTES)
        self._buffers: dict[int, bytearray] = {}
        self._quarantine: list[Started] = []
        self._observers: tuple[int, ...] = ()
        self._observed: tuple[int, ...] = ()
        self._detectors: dict[int, Detector] = {}
        self._overdue: set[int] = set()
        self._subscribers: dict[int, float] = {}  # who sends to this rank, and until when it gets
        self._sequence = 0
        self._beat_due = 0.0
        self._look_due = 0.0
        self._last_turn: float | None = None
        self._random = random.Random()

    # -- a part of the loop ------------------------------------------------------------------------

    def install(self, world: World) -> None:
        """Observe the peers of the new view, whose silence counts from now."""
        now = time.monotonic()
        self._world = world
        view = world.view
        nodes = {m: world.identities[m].node for m in view.members}
        self._observers = successors(world.member, view.members, nodes, self._config.observers)
        self._observed = predecessors(world.member, view.members, nodes, self._config.observers)
        self._overdue.clear()
        self._subscribers.clear()
        self._watch_whom_it_has_to(now)
        for detector in self._detectors.values():
            detector.watch(now)
        self._last_turn = None
        self._beat_due = now
        self._receive()

    def turn(self, now: float) -> None:
        self._forgive_own_sleep(now)
        if now >= self._beat_due:
            self._beat_due = now + self._config.heartbeat_interval
            self._beat(now)
        if now >= self._look_due:
            self._look_due = now + self._config.heartbeat_interval / _LOOKS_AN_INTERVAL
            self._look(now)

    def _forgive_own_sleep(self, now: float) -> None:
        """Silence while this loop itself stood still says nothing about the others."""
        slept = 0.0 if self._last_turn is None else now - self._last_turn
        self._last_turn = now
        if slept > _SLEPT_SECONDS:
            for detector in self._detectors.values():
                detector.slept(slept)

    def complete(self, positions: Sequence[int]) -> None:
        for position in sorted(positions, reverse=True):
            if position:
                del self._outbox[position - 1]
        arrived = bytes(self._inbox.buffers[0]) if 0 in positions else None
        if arrived is not None:
            self._receive()
        self.requests[1:] = [started.watched for _, started in self._outbox]
        if arrived is not None:
            self._take(arrived)

    def fault(self) -> None:
        self._quarantine += [self._inbox, *(started for _, started in self._outbox)]
        self._outbox, self.requests, self._buffers = [], [], {}

    # -- out ---------------------------------------------------------------------------------------

    def _beat(self, now: float) -> None:
        world = self._world
        packet = self._hooks.packet(self._sequence)
        encode_into(packet, self._newest)
        self._sequence += 1
        subscribers = {m for m, until in self._subscribers.items() if until > now}
        # Those that are stood in for too: one that comes back has to hear of it.
        targets = {*self._observers, *self._hooks.heads(), *subscribers} - {world.member}
        impairment = self._hooks.impairment(packet.step)
        pending = {member for member, _ in self._outbox}
        for member in targets & set(world.view.members):
            if member in pending:
                self.counts.skipped += 1
            elif self._random.random() >= impairment.drop:
                self._send(member, impairment.corrupt)

    def _send(self, member: int, corrupt: float) -> None:
        buffer = self._buffers.setdefault(member, bytearray(PACKET_BYTES))
        buffer[:] = self._newest
        if corrupt and self._random.random() < corrupt:
            buffer[self._random.randrange(PACKET_BYTES)] ^= 1 << self._random.randrange(8)
        world = self._world
        request = world.heartbeat.Isend(buffer, world.view.rank_of(member), HEARTBEAT_TAG)
        started = Started(request, (buffer,), sends=True)
        self._outbox.append((member, started))
        self.requests.append(started.watched)
        self.counts.sent += 1

    # -- in ----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        buffer = bytearray(RECEIVE_BYTES)
        request = self._world.receive(self._world.heartbeat, buffer, HEARTBEAT_TAG)
        self._inbox = Started(request, (buffer,))
        self.requests[:1] = [request]

    def _take(self, data: bytes) -> None:
        # Versions of other lengths cannot meet here: ranks compare their versions at the start.
        packet = decode(data[:PACKET_BYTES])
        if isinstance(packet, Defect):
            self.counts.defects[packet] = self.counts.defects.get(packet, 0) + 1
            return
        member, view = packet.member, self._world.view
        known = self._incarnations.get(member) == packet.incarnation
        if member == self._world.member or packet.epoch != view.epoch or not known:
            self.counts.stale += 1
            return
        self.counts.received += 1
        self.last[member] = packet
        now = time.monotonic()
        if member not in self._observed or self._hooks.may_coordinate():
            self._subscribers[member] = now + self._config.heartbeat_timeout
        if member in self._detectors:
            self._detectors[member].heard(now, packet.sequence)
        if member in self._overdue:
            self._overdue.discard(member)
            self._hooks.heard(member)

    # -- silence -----------------------------------------------------------------------------------

    def _watch_whom_it_has_to(self, now: float) -> None:
        """Its predecessors in the ring and the coordinator; everybody, if that is this rank."""
        heads = self._hooks.heads()
        world, config = self._world, self._config
        wanted = {*self._observed, *heads}
        if heads[-1] == world.member:
            wanted |= set(world.view.members)
        wanted -= {world.member}
        for member in set(self._detectors) - wanted:
            del self._detectors[member]
            if member in self._overdue:  # not for this rank to say any more
                self._overdue.discard(member)
                self._hooks.heard(member)
        for member in wanted - set(self._detectors):
            self._detectors[member] = make_detector(
                config.detector, config.heartbeat_interval, config.heartbeat_timeout
            )
            self._detectors[member].watch(now)

    def _look(self, now: float) -> None:
        """Tell of everybody who is overdue."""
        self._watch_whom_it_has_to(now)
        # Past what even the adaptive detector bears a silence is excused by nothing.
        limit = CAP_TIMEOUTS * self._config.heartbeat_timeout
        for member, detector in list(self._detectors.items()):
            if detector.overdue(now):
                self._overdue.add(member)
                self._hooks.missed(member, detector.silence(now) > limit)

    def silence(self, member: int) -> float:
        """Seconds since a peer was heard; 0 for one that this rank does not observe."""
        detector = self._detectors.get(member)
        return detector.silence(time.monotonic()) if detector is not None else 0.0

    @property
    def losses(self) -> int:
        """Packets that the sequence numbers of the observed peers show as lost."""
        return sum(detector.losses for detector in self._detectors.values())


def successors(
    member: int, members: Sequence[int], nodes: dict[int, str], count: int
) -> tuple[int, ...]:
    """The ``count`` members that observe ``member``: the next ones in the ring on other nodes, and
    the next ones on its own where those are too few. The coordinator hears everybody anyway, so it
    is one only where nobody else is left."""
    start = members.index(member)
    ring = [*members[start + 1 :], *members[:start]]
    ring = [m for m in ring if m != members[0]] or ring
    elsewhere = [m for m in ring if nodes[m] != nodes[member]]
    here = [m for m in ring if nodes[m] == nodes[member]]
    return tuple([*elsewhere, *here][:count])


def predecessors(
    member: int, members: Sequence[int], nodes: dict[int, str], count: int
) -> tuple[int, ...]:
    """The members that ``member`` observes: those that have it among their ``successors``."""
    first = members[0]
    if member == first and len(members) > 2:
        return ()
    start = members.index(member)
    ring = [*members[start + 1 :], *members[:start]]
    sizes = Counter(nodes[m] for m in members if m != first or len(members) == 2)
    others = sum(sizes.values())
    found = []
    passed = 0
    between = Counter[str]()  # observers between the one looked at and this one, by node
    for other in reversed(ring):
        node = nodes[other]
        if node == nodes[member]:
            place = others - sizes[node] + between[node]
        else:
            place = passed - between[node]
        if place < count:
            found.append(other)
        if other != first:
            between[node] += 1
            passed += 1
    return tuple(found)
