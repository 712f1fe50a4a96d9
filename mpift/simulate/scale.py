"""What heartbeats cost, and how long a hang lasts, on clusters of up to 100,000 nodes.

Three kinds of figures, told apart in the report:

* *computed*: messages and bytes that the topology implies (every rank beats to its ring observers
  and to the coordinator, which beats to every rank; only the coordinator's part grows);
* *measured* here and now: the time to read a packet and feed its detector, and to look at a peer's
  silence, hence the share of a core that the coordinator spends; and *simulated* with it: the time
  from a hang to the decision (``decision``), in which a message waits at the coordinator as in an
  M/D/1 queue;
* *modelled*: the MPI library's rebuild. ``REBUILD_POINTS`` are ranges that were measured on one
  machine; the curve through them, logarithmic as agreement along a tree is, is a guess beyond them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpift.config import PRESETS, SMALL_NODES_MAX
from mpift.core.detector import make_detector
from mpift.core.packet import PACKET_BYTES, Packet, Status, decode, encode
from mpift.errors import ConfigError
from mpift.simulate.decision import KILL_SECONDS, LOOK_SECONDS, Setting, decide
from mpift.simulate.detectors import quantile
from mpift.simulate.network import described
from mpift.simulate.traces import CALM

NODES = (10, 100, 1_000, 10_000, 100_000)
# Under this much load a queue still answers soon.
CORE_SHARE_MAX = 0.9


@dataclass(frozen=True, slots=True)
class RebuildPoint:
    """Rebuilds measured on virtual nodes of one machine of 2 cores: fastest and slowest seen."""

    nodes: int
    ranks: int
    fastest_seconds: float
    slowest_seconds: float

    @property
    def middle_seconds(self) -> float:
        """Geometric mean of both ends."""
        return math.sqrt(self.fastest_seconds * self.slowest_seconds)


REBUILD_POINTS = (RebuildPoint(1, 4, 0.0005, 0.07), RebuildPoint(3, 6, 0.08, 0.7))
REBUILD_NOTE = (
    "a cost model and not a measurement: A log2(ranks) + B log2(nodes) through two ranges that were"
    " measured on one machine with 4 and 6 ranks; beyond them it is a guess"
)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What the cost model says, in seconds, for the fastest, middle and slowest of the points."""

    fastest_seconds: float
    middle_seconds: float
    slowest_seconds: float


@dataclass(frozen=True, slots=True)
class Coordinator:
    """What the coordinator receives and sends, and the share of one core that listening takes.

    Sending costs a copy of one packet and what MPI takes, which is not in it.
    ``per_node_core_share``: if one rank a node told it of all its node in one packet. Nothing does
    so yet; it shows how far that would reach.
    """

    messages_per_second: float
    bytes_per_second: float
    core_share: float
    per_node_core_share: float


@dataclass(frozen=True, slots=True)
class Point:
    """One size of cluster.

    ``told_per_node``: heard by every rank itself, the coordinator would take more than
    ``CORE_SHARE_MAX`` of a core; so the decision is simulated with one packet a node. Its quantiles
    are None where even that is too much.
    """

    nodes: int
    ranks: int
    preset: str
    interval_seconds: float
    messages_per_rank_second: float
    bytes_per_rank_second: float
    coordinator: Coordinator
    told_per_node: bool
    suspected_seconds_p50: float | None
    decision_seconds_p50: float | None
    decision_seconds_p99: float | None
    rebuild_model: Rebuild


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds: to read a packet and feed its detector, and to look at one peer."""

    packet_seconds: float
    look_seconds: float

    def core_share(self, peers: int, interval_seconds: float) -> float:
        """The share of a core that listening to so many peers takes."""
        return peers * (self.packet_seconds / interval_seconds + self.look_seconds / LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class Report:
    """All sizes, and what they rest on."""

    ranks_per_node: int
    observers: int
    seed: int
    trials: int
    costs: Costs
    points: tuple[Point, ...]

    def as_json(self) -> dict[str, Any]:
        """The report, with its assumptions in words."""
        return {
            **dataclasses.asdict(self),
            "packet_bytes": PACKET_BYTES,
            "seconds_between_looks": LOOK_SECONDS,
            "kill_seconds": KILL_SECONDS,
            "link": described(CALM.link),
            "node": described(CALM.node),
            "rebuild_points": [dataclasses.asdict(point) for point in REBUILD_POINTS],
            "notes": {
                "messages": "computed; bytes are those of the packets, without MPI's and TCP's own",
                "core_share": "from the costs, which were measured in this run on this machine",
                "decision": "simulated: the ranks around the hung one and the coordinator, calm"
                " network, no watchdog; the other ranks only load the coordinator",
                "rebuild_model": REBUILD_NOTE,
            },
        }


def measure_costs(packets: int = 20_000) -> Costs:
    """What listening costs on this machine; the best of five runs."""
    data = [encode(_packet(sequence)) for sequence in range(100)]
    reading = looking = math.inf
    for _ in range(5):
        detector = make_detector("adaptive", 3.0, 15.0)
        detector.watch(0.0)
        began = time.perf_counter()
        for sequence in range(packets):
            packet = decode(data[sequence % len(data)])
            if isinstance(packet, Packet):
                detector.heard(3.0 * sequence, sequence)
        read = time.perf_counter()
        for _ in range(packets):
            detector.overdue(3.0 * packets)
        looked = time.perf_counter()
        reading = min(reading, (read - began) / packets)
        looking = min(looking, (looked - read) / packets)
    return Costs(reading, looking)


def _packet(sequence: int) -> Packet:
    return Packet(
        member=7,
        incarnation=1,
        epoch=0,
        sequence=sequence,
        step=sequence,
        timestamp=1.7e9 + sequence,
        status=Status.TRAINING,
        cpu=0.9,
        memory=0.5,
        disk=0.3,
        network=0.2,
        accelerator=1.0,
        health_score=0.6,
    )


def measure(nodes: int, ranks_per_node: int, observers: int, seed: int, trials: int) -> Report:
    """The report for ``NODES`` and ``nodes``, with so many simulated hangs each."""
    if nodes < 2:
        raise ConfigError(f"{nodes} nodes: from 2 on there is somebody on another one to watch")
    costs = measure_costs()
    sizes = sorted({*NODES, nodes})
    points = tuple(
        _point(size, ranks_per_node, observers, costs, _seeds(seed, size, trials)) for size in sizes
    )
    return Report(ranks_per_node, observers, seed, trials, costs, points)


def _seeds(seed: int, nodes: int, trials: int) -> Sequence[int]:
    first = (seed * 1_000_003 + nodes) * 1009
    return range(first, first + trials)


def _point(
    nodes: int, ranks_per_node: int, observers: int, costs: Costs, seeds: Sequence[int]
) -> Point:
    preset = "small" if nodes <= SMALL_NODES_MAX else "large"
    interval: float = PRESETS[preset]["heartbeat_interval"]
    ranks = nodes * ranks_per_node
    watchers = min(observers, ranks - 2)
    both_ways = 2 * (ranks - 1) / interval
    coordinator = Coordinator(
        both_ways,
        both_ways * PACKET_BYTES,
        costs.core_share(ranks - 1, interval),
        costs.core_share(nodes - 1, interval),
    )
    told_per_node = coordinator.core_share > CORE_SHARE_MAX
    share = coordinator.per_node_core_share if told_per_node else coordinator.core_share
    decisions = []
    if share <= CORE_SHARE_MAX:
        setting = Setting(
            interval,
            PRESETS[preset]["heartbeat_timeout"],
            watchers,
            CALM.link,
            CALM.node,
            queue_seconds(share, costs.packet_seconds),
        )
        outcomes = (decide(setting, seed) for seed in seeds)
        decisions = [outcome for outcome in outcomes if outcome is not None]
    decided = [decision.decided_seconds for decision in decisions]
    return Point(
        nodes=nodes,
        ranks=ranks,
        preset=preset,
        interval_seconds=interval,
        messages_per_rank_second=(watchers + 1) / interval,
        bytes_per_rank_second=(watchers + 1) / interval * PACKET_BYTES,
        coordinator=coordinator,
        told_per_node=told_per_node,
        suspected_seconds_p50=quantile([d.suspected_seconds for d in decisions], 0.5),
        decision_seconds_p50=quantile(decided, 0.5),
        decision_seconds_p99=quantile(decided, 0.99),
        rebuild_model=rebuild_model(nodes, ranks),
    )


def queue_seconds(load: float, service_seconds: float) -> float:
    """Mean time in an M/D/1 queue, service included, for a load below 1 (Pollaczek, Khinchine)."""
    return service_seconds * (1 + load / (2 * (1 - load)))


def rebuild_model(nodes: int, ranks: int) -> Rebuild:
    """``A log2(ranks) + B log2(nodes)`` through both points, for each end and the middle."""
    local, spread = REBUILD_POINTS

    def through(one: float, other: float) -> float:
        per_rank = one / math.log2(local.ranks)
        per_node = (other - per_rank * math.log2(spread.ranks)) / math.log2(spread.nodes)
        return per_rank * math.log2(max(2, ranks)) + per_node * math.log2(nodes)

    return Rebuild(
        through(local.fastest_seconds, spread.fastest_seconds),
        through(local.middle_seconds, spread.middle_seconds),
        through(local.slowest_seconds, spread.slowest_seconds),
    )
