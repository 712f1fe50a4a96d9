"""A seeded discrete-event network: links that delay, lose and repeat, and nodes that pause.

Events lie in one heap and happen in the order of their time; ties in the order in which they were
made. Every link and every node draws from its own stream of random numbers, made from the seed and
its name, so that one more node changes nothing for the others. The adversity, each part optional:

* a link delays each message by a draw of a distribution, may lose or repeat it, and keeps the order
  or not (``ordered``; MPI over TCP does);
* *storms*: times of congestion, each of a severity of its own, in which messages are delayed much
  more and lost more often;
* *pauses* of a node (garbage collection, a held interpreter lock, swapping, suspension): timers and
  messages wait until it wakes, and it learns for how long it slept;
* clocks that run too fast or too slow by a constant factor;
* hangs, for good, and cuts between groups: what is under way across a cut is lost.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from mpift.errors import MpiftError


class Distribution(Protocol):
    """Random durations, in seconds."""

    def draw(self, random: Random) -> float:
        """One of them, never negative."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    seconds: float

    def draw(self, random: Random) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless: what is left does not depend on what has passed."""

    mean_seconds: float

    def draw(self, random: Random) -> float:
        return random.expovariate(1.0) * self.mean_seconds


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Skewed, as most latencies are: ``sigma`` is the deviation of the natural logarithm."""

    median_seconds: float
    sigma: float

    def draw(self, random: Random) -> float:
        return self.median_seconds * math.exp(self.sigma * random.gauss(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Pareto:
    """A heavy tail from ``least_seconds`` on, cut at ``most_seconds``."""

    least_seconds: float
    alpha: float
    most_seconds: float = math.inf

    def draw(self, random: Random) -> float:
        return min(self.least_seconds * random.paretovariate(self.alpha), self.most_seconds)


@dataclass(frozen=True, slots=True)
class Storms:
    """Times of congestion on a link.

    ``severity`` is drawn once a storm: the mean of the exponential delay that each message has on
    top. ``loss`` is the share of messages lost meanwhile.
    """

    separation: Distribution
    duration: Distribution
    severity: Distribution
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction of a connection. ``loss`` and ``duplication`` are shares of the messages."""

    delay: Distribution
    loss: float = 0.0
    duplication: float = 0.0
    ordered: bool = True
    storms: Storms | None = None


@dataclass(frozen=True, slots=True)
class Pauses:
    """Times in which a node does nothing: from the end of one to the next, and how long."""

    separation: Distribution
    duration: Distribution


@dataclass(frozen=True, slots=True)
class NodeModel:
    """What befalls every node by itself; clocks are wrong by up to ``drift`` either way."""

    pauses: Pauses | None = None
    drift: float = 0.0


def described(model: Any) -> Any:
    """A model as plain data, with the names of its distributions."""
    if not dataclasses.is_dataclass(model) or isinstance(model, type):
        return model
    parts = {f.name: described(getattr(model, f.name)) for f in dataclasses.fields(model)}
    return {"kind": type(model).__name__, **parts}


def random_of(seed: int, *name: Hashable) -> Random:
    """The stream of random numbers of the named part of a simulation."""
    return Random(repr((seed, *name)))


class Episodes:
    """Times at which something is the case, one after the other; to be asked in order of time."""

    __slots__ = ("_duration", "_random", "_separation", "_severity", "end", "severity", "start")

    def __init__(
        self,
        separation: Distribution,
        duration: Distribution,
        random: Random,
        severity: Distribution | None = None,
    ) -> None:
        self._separation, self._duration, self._severity = separation, duration, severity
        self._random = random
        self.start = self.end = self.severity = 0.0
        self.advance()

    def advance(self) -> None:
        """Go to the next one."""
        self.start = self.end + self._separation.draw(self._random)
        self.end = self.start + self._duration.draw(self._random)
        if self._severity is not None:
            self.severity = self._severity.draw(self._random)

    def covers(self, now: float) -> bool:
        """Whether one is going on; ``end`` and ``severity`` are then its own."""
        while now >= self.end:
            self.advance()
        return now >= self.start


class Link:
    """One direction of a connection; to be used in order of time."""

    __slots__ = ("_last_arrival", "_model", "_random", "_storms")

    def __init__(self, model: LinkModel, random: Random) -> None:
        self._model, self._random = model, random
        self._last_arrival = 0.0
        self._storms: Episodes | None = None
        if (storms := model.storms) is not None:
            self._storms = Episodes(storms.separation, storms.duration, random, storms.severity)

    def transmit(self, now: float) -> list[float]:
        """When a message that is sent now arrives: never, once, or twice."""
        model, random = self._model, self._random
        delay_seconds, loss = model.delay.draw(random), model.loss
        storms = self._storms
        if storms is not None and model.storms is not None and storms.covers(now):
            delay_seconds += random.expovariate(1.0) * storms.severity
            loss = max(loss, model.storms.loss)
        if loss and random.random() < loss:
            return []
        arrival = now + delay_seconds
        if model.ordered:
            # A message behind a late one waits for it: TCP hands on bytes in their order.
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        if model.duplication and random.random() < model.duplication:
            return [arrival, arrival + model.delay.draw(random)]
        return [arrival]


class Process(Protocol):
    """What runs on a node. ``now`` is the time on the node's own clock."""

    def received(self, now: float, source: int, message: Any) -> None:
        """A message has arrived."""

    def woke(self, now: float, slept_seconds: float) -> None:
        """The node was paused for so long; what came meanwhile follows."""


class _Node:
    __slots__ = ("clock_rate", "halted", "paused_at", "pauses", "process", "waiting", "wakes_at")

    def __init__(self, process: Process, clock_rate: float, pauses: Episodes | None) -> None:
        self.process, self.clock_rate, self.pauses = process, clock_rate, pauses
        self.halted = False
        self.paused_at = self.wakes_at = -math.inf
        self.waiting: list[Callable[[], None]] = []


class Network:
    """Nodes by number, and the messages between them. ``now`` is the true time in seconds."""

    def __init__(self, seed: int, link: LinkModel, node: NodeModel | None = None) -> None:
        self.now = 0.0
        self._seed, self._link_model, self._node_model = seed, link, node or NodeModel()
        self._nodes: dict[int, _Node] = {}
        self._links: dict[tuple[int, int], Link] = {}
        self._cuts: list[tuple[frozenset[int], frozenset[int]]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def add(self, number: int, process: Process) -> None:
        """Put a node there."""
        random = random_of(self._seed, "node", number)
        rate = 1.0 + self._node_model.drift * random.uniform(-1.0, 1.0)
        pauses = self._node_model.pauses
        episodes = None
        if pauses is not None:
            episodes = Episodes(pauses.separation, pauses.duration, random)
        self._nodes[number] = _Node(process, rate, episodes)
        self._plan_pause(number)

    def clock(self, number: int) -> float:
        """What the clock of a node shows."""
        return self.now * self._nodes[number].clock_rate

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let ``action`` happen at a true time, by no node's doing."""
        if time < self.now:
            raise MpiftError(f"an event at {time} s would lie before the present, {self.now} s")
        heapq.heappush(self._heap, (time, next(self._order), action))

    def after(self, number: int, seconds: float, action: Callable[[], None]) -> None:
        """A timer of a node: in so many seconds on its own clock, or when it wakes after that."""
        rate = self._nodes[number].clock_rate
        self.at(self.now + seconds / rate, lambda: self._on_node(number, action))

    def send(self, source: int, target: int, message: Any) -> None:
        """Hand ``message`` to the link from ``source`` to ``target``."""
        link = self._links.get((source, target))
        if link is None:
            random = random_of(self._seed, "link", source, target)
            link = self._links[source, target] = Link(self._link_model, random)

        def arrive() -> None:
            if not self._is_cut(source, target):
                node = self._nodes[target]
                self._on_node(
                    target,
                    lambda: node.process.received(self.clock(target), source, message),
                )

        for arrival in link.transmit(self.now):
            if not self._is_cut(source, target):
                self.at(arrival, arrive)

    def pause(self, number: int, seconds: float) -> None:
        """Stop a node now for so long, or for longer if it is stopped already."""
        node = self._nodes[number]
        end = self.now + seconds
        if node.wakes_at <= self.now:
            node.paused_at = self.now
        elif end <= node.wakes_at:
            return
        node.wakes_at = end
        self.at(end, lambda: self._wake(number))

    def halt(self, number: int) -> None:
        """Stop a node for good: a hang, or a death; what it has sent still arrives."""
        self._nodes[number].halted = True
        self._nodes[number].waiting.clear()

    def cut(self, left: Collection[int], right: Collection[int]) -> None:
        """From now on nothing passes between the two groups."""
        self._cuts.append((frozenset(left), frozenset(right)))

    def heal(self) -> None:
        """Undo all cuts; what they have stopped is lost."""
        self._cuts.clear()

    def run(self, until: float) -> None:
        """Let everything happen up to and including a true time."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = max(self.now, until)

    def _is_cut(self, one: int, other: int) -> bool:
        return any(
            (one in left and other in right) or (other in left and one in right)
            for left, right in self._cuts
        )

    def _on_node(self, number: int, action: Callable[[], None]) -> None:
        node = self._nodes[number]
        if node.halted:
            return
        if node.waiting or node.wakes_at > self.now:
            node.waiting.append(action)
        else:
            action()

    def _wake(self, number: int) -> None:
        node = self._nodes[number]
        if node.halted or node.wakes_at > self.now:  # it was put to sleep for longer meanwhile
            return
        waiting, node.waiting = node.waiting, []
        slept_seconds = (self.now - node.paused_at) * node.clock_rate
        node.process.woke(self.clock(number), slept_seconds)
        for action in waiting:
            self._on_node(number, action)

    def _plan_pause(self, number: int) -> None:
        """Let the node's next pause begin when it is due, and the one after it."""
        node = self._nodes[number]
        if node.pauses is None or node.halted:
            return
        episode = node.pauses
        start, seconds = episode.start, episode.end - episode.start
        episode.advance()

        def begin() -> None:
            self.pause(number, seconds)
            self._plan_pause(number)

        self.at(max(start, self.now), begin)
