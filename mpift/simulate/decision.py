"""From a hang to the decision to rebuild: the ranks around it, each with the real machines.

Simulated are the rank that hangs, its ring observers, the coordinator, and an agent on the hung
rank's node that can kill it: each rank with one ``AdaptiveTimeout`` for each peer that it hears and
one ``Suspicion``. The other ranks of the job touch this story only through the time that a message
waits at the coordinator, which the caller gives. Nobody vouches for processes on the hung rank's
node (its watchdog is off or gone): so the heartbeats alone must find it, and the agent is asked
twice, once what it knows and once to kill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpift.core.detector import START_ARRIVALS, Detector, make_detector
from mpift.core.membership import View
from mpift.core.suspicion import (
    Event,
    Examine,
    Examined,
    Finding,
    Heard,
    Instruction,
    Missed,
    Rebuild,
    Suspicion,
    Tell,
    Tick,
    Told,
)
from mpift.simulate.network import LinkModel, Network, NodeModel, random_of

# How often a rank goes through its detectors.
LOOK_SECONDS = 0.25
# From the agent's signal to the kernel's word that the process is gone.
KILL_SECONDS = 0.01
# Calm arrivals before the hang, so that the detectors have settled.
SETTLED_ARRIVALS = START_ARRIVALS + 20

COORDINATOR = 0
_EPOCH = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """How heartbeats are sent, over what, and how long a message waits at the coordinator."""

    interval_seconds: float
    timeout_seconds: float
    observers: int
    link: LinkModel
    node: NodeModel
    coordinator_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Seconds from the hang to the first suspicion anywhere, and to the decision to rebuild."""

    suspected_seconds: float
    decided_seconds: float


@dataclass(frozen=True, slots=True)
class _Beat:
    sequence: int


class _Rank:
    """One simulated rank; ``peers`` are those that it hears, ``targets`` those that hear it."""

    def __init__(self, story: _Story, member: int, peers: list[int], targets: list[int]) -> None:
        self._story, self._member, self._targets = story, member, targets
        self._sequence = 0
        setting = story.setting
        self._detectors: dict[int, Detector] = {}
        for peer in peers:
            detector = make_detector("adaptive", setting.interval_seconds, setting.timeout_seconds)
            detector.watch(0.0)
            self._detectors[peer] = detector
        # Every rank has a node to itself here: several on one node would change no message.
        self._suspicion = Suspicion(member, story.view, story.view.members)

    def beat(self) -> None:
        network = self._story.network
        for target in self._targets:
            network.send(self._member, target, _Beat(self._sequence))
        self._sequence += 1
        self._handle(Tick())
        network.after(self._member, self._story.setting.interval_seconds, self.beat)

    def look(self) -> None:
        network = self._story.network
        now = network.clock(self._member)
        for peer, detector in self._detectors.items():
            if peer not in self._suspicion.suspects and detector.overdue(now):
                self._story.suspected()
                self._handle(Missed(_EPOCH, peer))
        network.after(self._member, LOOK_SECONDS, self.look)

    def received(self, now: float, source: int, message: Any) -> None:
        if isinstance(message, _Beat):
            self._detectors[source].heard(now, message.sequence)
            if source in self._suspicion.suspects:
                self._handle(Heard(_EPOCH, source))
        elif self._member != COORDINATOR:
            self._handle(message)
        else:
            # It stands in a queue behind the heartbeats of the whole job.
            wait = self._story.setting.coordinator_wait_seconds
            self._story.network.after(self._member, wait, lambda: self._handle(message))

    def woke(self, now: float, slept_seconds: float) -> None:
        for detector in self._detectors.values():
            detector.slept(slept_seconds)

    def _handle(self, event: Event) -> None:
        self._suspicion, instructions = self._suspicion.handle(event)
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        network = self._story.network
        match instruction:
            case Tell(to, suspects):
                network.send(self._member, to, Told(_EPOCH, self._member, suspects))
            case Examine():
                network.send(self._member, self._story.agent, instruction)
            case Rebuild():
                self._story.decided()


class _Agent:
    """What can look at the hung rank on its node, and kill it; no watchdog."""

    def __init__(self, story: _Story) -> None:
        self._story = story

    def received(self, now: float, source: int, message: Examine) -> None:
        network, agent = self._story.network, self._story.agent
        finding = Finding.GONE if message.kill else Finding.UNWATCHED
        answer = Examined(message.epoch, message.member, finding)
        network.after(
            agent,
            KILL_SECONDS if message.kill else 0.0,
            lambda: network.send(agent, source, answer),
        )

    def woke(self, now: float, slept_seconds: float) -> None:
        """It has no timers of its own."""


class _Story:
    """The cast, and when what happened."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.hung = 1
        observers = list(range(2, 2 + setting.observers))
        self.agent = 2 + setting.observers
        self.view = View(_EPOCH, (COORDINATOR, self.hung, *observers))
        self.network = Network(seed, setting.link, setting.node)
        self.suspected_at: float | None = None
        self.decided_at: float | None = None
        others = [self.hung, *observers]
        ranks = {
            COORDINATOR: _Rank(self, COORDINATOR, others, []),
            self.hung: _Rank(self, self.hung, [], [COORDINATOR, *observers]),
        }
        for observer in observers:
            ranks[observer] = _Rank(self, observer, [self.hung], [COORDINATOR])
        for member, rank in ranks.items():
            self.network.add(member, rank)
        self.network.add(self.agent, _Agent(self))
        random = random_of(seed, "phases")
        self.hung_at = setting.interval_seconds * (SETTLED_ARRIVALS + random.random())
        for rank in ranks.values():
            self.network.at(random.random() * setting.interval_seconds, rank.beat)
            # Nothing is overdue in calm before the hang, so nobody needs to look.
            self.network.at(self.hung_at + random.random() * LOOK_SECONDS, rank.look)
        self.network.at(self.hung_at, self._hang)

    def suspected(self) -> None:
        self.suspected_at = self.suspected_at or self.network.now

    def decided(self) -> None:
        self.decided_at = self.decided_at or self.network.now

    def _hang(self) -> None:
        self.network.halt(self.hung)


def decide(setting: Setting, seed: int) -> Decision | None:
    """Let one rank hang at a random moment; None if nobody has decided after four timeouts."""
    story = _Story(setting, seed)
    end = story.hung_at + 4 * setting.timeout_seconds
    _run_until(story.network, end, lambda: story.decided_at is not None)
    if story.suspected_at is None or story.decided_at is None:
        return None
    return Decision(story.suspected_at - story.hung_at, story.decided_at - story.hung_at)


def _run_until(network: Network, end: float, done: Callable[[], bool]) -> None:
    while network.now < end and not done():
        network.run(network.now + 1.0)
