"""Who observes whom, and what a rank makes of the heartbeats that reach it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.config import Config
from mpift.core.membership import View
from mpift.core.packet import Defect, Packet, Status
from mpift.transport import heartbeat
from mpift.transport.heartbeat import Heartbeat, Hooks, Impairment, predecessors, successors
from mpift.transport.processes import ProcessIdentity

INTERVAL, TIMEOUT = 1.0, 5.0
CONFIG = Config(heartbeat_interval=INTERVAL, heartbeat_timeout=TIMEOUT, observers=1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5))
def test_a_member_observes_exactly_those_that_it_is_a_successor_of(
    places: list[int], count: int
) -> None:
    members = tuple(range(0, 2 * len(places), 2))
    nodes = {m: f"node{place}" for m, place in zip(members, places, strict=True)}
    observed = {m: set(predecessors(m, members, nodes, count)) for m in members}
    for member in members:
        observers = successors(member, members, nodes, count)
        # The coordinator, the first, hears everybody anyway.
        others = len(members) - 1 - (member != members[0] and len(members) > 2)
        assert len(observers) == min(count, others)
        assert {m for m in members if member in observed[m]} == set(observers)


def test_observers_are_on_other_nodes_where_there_are_enough() -> None:
    nodes = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}
    assert successors(0, tuple(nodes), nodes, 3) == (3, 4, 5)
    assert successors(3, tuple(nodes), nodes, 3) == (5, 1, 2)
    assert successors(0, tuple(nodes), nodes, 4) == (3, 4, 5, 1)


# -- a few ranks on a clock of our own -----------------------------------------------------------


@dataclass
class Clock:
    now: float = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: made.now)
    return made


@dataclass
class Mail:
    """A message on its way, or a receive that waits for one."""

    to: int
    data: bytes = b""
    delivered: bool = False


@dataclass
class Comm:
    net: Net

    def Isend(self, buffer: bytearray, dest: int, tag: int) -> Mail:
        mail = Mail(dest, bytes(buffer))
        self.net.mail.append(mail)
        return mail


@dataclass
class World:
    member: int
    view: View
    identities: dict[int, ProcessIdentity]
    heartbeat: Comm

    def receive(self, comm: Comm, buffer: bytearray, tag: int) -> bytearray:
        return buffer


@dataclass
class Net:
    """Ranks 0 to n-1 of one node, with a clock; ``silent`` ones take no turn."""

    clock: Clock
    size: int
    epoch: int = 0
    mail: list[Mail] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    deaf: set[int] = field(default_factory=set)
    missed: list[tuple[int, int, bool]] = field(default_factory=list)
    heard: list[tuple[int, int]] = field(default_factory=list)
    parts: list[Heartbeat] = field(default_factory=list)
    impairments: dict[int, Impairment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identities = {m: ProcessIdentity(m, m, "h", "n", 10 + m, m) for m in range(self.size)}
        for member in range(self.size):
            part = Heartbeat(CONFIG, dict.fromkeys(identities, 7), self.hooks(member))
            view = View(self.epoch, tuple(range(self.size)))
            part.install(World(member, view, identities, Comm(self)))  # type: ignore[arg-type]
            self.parts.append(part)

    def hooks(self, member: int) -> Hooks:
        return Hooks(
            packet=lambda sequence: self.packet(member, sequence),
            missed=lambda who, good: self.missed.append((member, who, good)),
            heard=lambda who: self.heard.append((member, who)),
            heads=lambda: (0,),
            may_coordinate=lambda: member == 0,
            impairment=lambda step: self.impairments.get(member, Impairment()),
        )

    def packet(self, member: int, sequence: int, epoch: int = 0) -> Packet:
        return Packet(
            member=member,
            incarnation=7,
            epoch=epoch,
            sequence=sequence,
            step=3,
            timestamp=1.0,
            status=Status.TRAINING,
        )

    def pass_time(self, seconds: float, tick: float = 0.05) -> None:
        for _ in range(round(seconds / tick)):
            self.clock.now += tick
            for member, part in enumerate(self.parts):
                if member not in self.silent:
                    part.turn(self.clock.now)
            self.deliver()

    def deliver(self) -> None:
        for mail in self.mail:
            if mail.to not in self.silent | self.deaf:
                mail.delivered = True
                part = self.parts[mail.to]
                part._inbox.buffers[0][: len(mail.data)] = mail.data
                part.complete([0])
        self.mail = [mail for mail in self.mail if not mail.delivered]
        for part in self.parts:
            sent = [i for i, r in enumerate(part.requests) if i and r.request.delivered]
            if sent:
                part.complete(sent)


def test_the_coordinator_hears_everybody_and_everybody_hears_it(clock: Clock) -> None:
    net = Net(clock, 5)
    net.pass_time(10)
    assert set(net.parts[0].last) == {1, 2, 3, 4}
    for member in range(1, 5):
        assert 0 in net.parts[member].last
    assert net.missed == []
    # Each sends to its successor and to the coordinator, the coordinator to all, once an interval.
    assert net.parts[2].counts.sent == pytest.approx(2 * 10 / INTERVAL, abs=2)


def test_a_silent_rank_is_missed_by_its_observer_and_the_coordinator_alone(clock: Clock) -> None:
    net = Net(clock, 5)
    net.pass_time(10)
    net.silent.add(2)
    net.pass_time(TIMEOUT + 2 * INTERVAL)
    assert {(by, about) for by, about, _ in net.missed} == {(0, 2), (3, 2)}
    assert not any(good for _, _, good in net.missed)
    net.pass_time(4 * TIMEOUT)
    assert any(good for _, _, good in net.missed)
    net.silent.clear()
    net.pass_time(INTERVAL)
    assert (0, 2) in net.heard


def test_an_observer_that_slept_itself_misses_nobody(clock: Clock) -> None:
    net = Net(clock, 3)
    net.pass_time(5)
    net.silent = {0, 1, 2}  # the whole job is frozen
    net.pass_time(60)
    net.silent = set()
    net.pass_time(5)
    assert net.missed == []


def test_to_a_rank_that_takes_nothing_only_one_packet_is_under_way(clock: Clock) -> None:
    net = Net(clock, 3)
    net.deaf.add(2)
    net.pass_time(20)
    for part in net.parts[:2]:
        assert len([1 for request in part.requests[1:] if request.request.to == 2]) == 1
        assert part.counts.skipped > 10


def test_a_damaged_packet_is_counted_and_changes_nothing(clock: Clock) -> None:
    net = Net(clock, 2)
    net.impairments[1] = Impairment(corrupt=1.0)
    net.pass_time(TIMEOUT + 2 * INTERVAL)
    assert net.parts[0].counts.received == 0
    assert set(net.parts[0].counts.defects) <= {Defect.CORRUPT, Defect.FOREIGN}
    assert sum(net.parts[0].counts.defects.values()) >= TIMEOUT / INTERVAL
    assert (0, 1) in {(by, about) for by, about, _ in net.missed}


def test_a_packet_of_another_view_or_process_is_no_sign_of_life(clock: Clock) -> None:
    net = Net(clock, 2)
    part = net.parts[0]
    for strange in (net.packet(1, 0, epoch=4), net.packet(0, 0)):
        part._take(heartbeat_bytes(strange))
    assert part.counts.stale == 2
    assert part.last == {}


def heartbeat_bytes(packet: Packet) -> bytes:
    from mpift.core.packet import encode

    return encode(packet)


def test_packets_that_are_dropped_show_as_losses(clock: Clock) -> None:
    net = Net(clock, 2)
    net.impairments[1] = Impairment(drop=0.4)
    net.pass_time(60)
    assert net.parts[0].losses > 5


def test_buffers_of_what_was_under_way_are_kept_after_a_fault(clock: Clock) -> None:
    net: Any = Net(clock, 3)
    net.deaf.add(2)
    net.pass_time(3)
    part = net.parts[0]
    kept = [*part._outbox]
    part.fault()
    assert part.requests == []
    assert [started for _, started in kept] == part._quarantine[1:]
