"""From silence to a new view: carries out what ``core/suspicion.py`` says.

A part of the service's loop. Questions to the system and to other nodes' watchdogs are asked on
threads of their own, which make no MPI call; what they find comes back through the loop. Where no
watchdog answers, a rank on the suspect's node is asked by a control message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from mpift.config import Config
from mpift.core.suspicion import (
    STAND_INS_MAX,
    Condemned,
    Ended,
    Event,
    Examine,
    Examined,
    Finding,
    Heard,
    Installed,
    Missed,
    Rebuild,
    Stop,
    Suspicion,
    Tell,
    Tick,
    Told,
)
from mpift.errors import ExitCode, TransportError
from mpift.transport.messages import Kind, Message
from mpift.transport.service import Service
from mpift.transport.world import World

# How long a rank that ends tries to tell the others, and waits until they say the same.
_END_SECONDS = 1.0
_ASKED_AT_ONCE = 16

T = TypeVar("T")


class Evictions:
    """See the module's docstring; a ``Part`` of the service.

    ``silence`` gives the seconds since a member was heard; ``end`` ends this process. ``machine``
    holds what this rank knows of the others.
    """

    def __init__(
        self,
        service: Service,
        config: Config,
        silence: Callable[[int], float],
        end: Callable[[int, str], NoReturn],
    ) -> None:
        self.requests: Sequence[Any] = ()
        self._service = service
        self._config = config
        self._silence = silence
        self._end = end
        view = service.world.view
        self.machine = Suspicion(service.world.member, view, _nodes_of(service.world))
        self.may_coordinate = False  # whether others may take this rank for the coordinator
        self._asked: dict[int, float] = {}  # members asked about by message, and until when
        self._ending: tuple[float, Stop, threading.Event] | None = None
        self._end_known: set[int] = set()  # members that have said that they end
        self._tick_due = 0.0
        self._pool = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="mpift-examine")
        mailbox = service.mailbox
        mailbox.register(Kind.SUSPECTS, self._take_suspects)
        mailbox.register(Kind.EXAMINE, self._take_question)
        mailbox.register(Kind.FINDING, self._take_finding)
        mailbox.register(Kind.END, self._take_end)

    # -- what the others tell ----------------------------------------------------------------------

    def missed(self, member: int, for_good: bool) -> None:
        """The heartbeat finds a peer overdue."""
        known = self.machine.for_good if for_good else self.machine.suspects
        if member not in known:
            self._feed(Missed(self.machine.view.epoch, member, for_good))

    def heard(self, member: int) -> None:
        """A peer that was overdue is heard again."""
        self._feed(Heard(self.machine.view.epoch, member))

    def condemn(self, member: int) -> None:
        """The settings say that this member has to go."""
        self._feed(Condemned(self.machine.view.epoch, member))

    # -- a part of the loop ------------------------------------------------------------------------

    def install(self, world: World) -> None:
        self._asked.clear()
        self._service.fencing.epoch = world.view.epoch
        self._feed(Installed(world.view, _nodes_of(world)))
        self.may_coordinate = world.member in self.machine.line[: 1 + STAND_INS_MAX]

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def fault(self) -> None:
        # The others have ended already: a rebuild would wait for those that nobody can reach.
        if self._ending is not None:
            self._end(ExitCode.QUORUM_LOST, self._ending[1].reason)

    def turn(self, now: float) -> None:
        if self._ending is not None:
            deadline, stop, told = self._ending
            if (told.is_set() and self._all_know) or now > deadline:
                self._end(ExitCode.QUORUM_LOST, stop.reason)
        for member, deadline in list(self._asked.items()):
            if now > deadline:
                del self._asked[member]
                self._learn(self.machine.view.epoch, member, Finding.UNREACHABLE)
        if now > self._tick_due:
            self._tick_due = now + self._config.heartbeat_interval
            machine = self.machine
            if machine.suspects or machine.condemned or machine.told:
                self._feed(Tick())

    @property
    def _all_know(self) -> bool:
        """Whether all that could have answered have said that they end too. One that meets this
        rank's death before it has read the word begins a rebuild, which waits for the silent, and
        the word may be lost with the connection: that it was sent is not enough."""
        machine = self.machine
        silent = machine.suspects | machine.away | machine.gone
        return set(machine.view.members) - silent <= self._end_known | {machine.member}

    # -- instructions ------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        self.machine, instructions = self.machine.handle(event)
        for instruction in instructions:
            match instruction:
                case Tell(to, suspects):
                    text = " ".join(map(str, sorted(suspects)))
                    self._service.mailbox.send(Kind.SUSPECTS, text, [to], only_newest=True)
                case Examine(epoch, member, kill):
                    self._examine(epoch, member, kill)
                case Rebuild(gone):
                    words = ", ".join(map(str, sorted(gone)))
                    self._service.leave_behind(TransportError(f"members {words} are gone"))
                case Stop():
                    self._stop(instruction)

    def _stop(self, stop: Stop) -> None:
        # A majority may end everybody; others that may be on another side decide for themselves.
        machine = self.machine
        others = set(machine.view.members)
        if not stop.may_restart:
            others -= machine.suspects | machine.away
        told = threading.Event()
        text = f"{int(stop.may_restart)} {stop.reason}"
        self._service.mailbox.send(Kind.END, text, sorted(others), told)
        self._ending = (time.monotonic() + _END_SECONDS, stop, told)

    def _examine(self, epoch: int, member: int, kill: bool) -> None:
        fencing = self._service.fencing
        suspect = self._service.world.identities[member]

        self._aside(
            lambda: fencing.examine(suspect, kill),
            lambda finding: self._found(epoch, member, kill, finding),
        )

    def _aside(self, look: Callable[[], T], then: Callable[[T], None]) -> None:
        """``look`` on another thread, ``then`` with what it returns in the loop. If it fails, so
        does the loop, loudly: a suspect that is examined for ever would never be left out."""

        def run() -> None:
            try:
                found = look()
            except Exception as error:  # noqa: BLE001, it is raised again in the loop
                problem = error
                self._service.call(lambda: _fail(problem))
            else:
                self._service.call(lambda: then(found))

        self._pool.submit(run)

    def _found(self, epoch: int, member: int, kill: bool, finding: Finding | None) -> None:
        if finding is not None:
            self._learn(epoch, member, finding)
            return
        identities, machine = self._service.world.identities, self.machine
        there = [
            m
            for m in machine.view.members
            if identities[m].node == identities[member].node and (m != member or not kill)
        ]
        # One that is heard answers soonest; where nobody is, this rank may be the deaf one.
        neighbours = sorted(there, key=lambda m: (m in machine.suspects, m == member))
        if epoch != machine.view.epoch or not neighbours:
            self._learn(epoch, member, Finding.UNREACHABLE)
            return
        self._asked[member] = time.monotonic() + 2 * self._config.fence_timeout
        self._service.mailbox.send(Kind.EXAMINE, f"{member} {int(kill)}", neighbours[:1])

    def _learn(self, epoch: int, member: int, finding: Finding) -> None:
        patience = self._config.heartbeat_timeout
        suspected = member in self.machine.suspects
        if finding is Finding.UNREACHABLE and suspected and self._silence(member) < patience:
            # Its node may just be slow: it is asked again before the whole job is given up.
            finding = Finding.ALIVE
        self._feed(Examined(epoch, member, finding))

    # -- messages ----------------------------------------------------------------------------------

    def _take_suspects(self, message: Message) -> None:
        suspects = frozenset(map(int, message.text.split()))
        self._feed(Told(message.epoch, message.sender, suspects))

    def _take_question(self, message: Message) -> None:
        """Another rank asks about a process of this node."""
        member, kill = map(int, message.text.split())
        fencing = self._service.fencing
        suspect = self._service.world.identities[member]

        self._aside(
            lambda: fencing.examine_here(suspect, bool(kill)),
            lambda finding: self._answer(message, f"{member} {finding.name}"),
        )

    def _answer(self, question: Message, text: str) -> None:
        view = self._service.world.view
        if question.epoch == view.epoch and question.sender in view.members:
            self._service.mailbox.send(Kind.FINDING, text, [question.sender])

    def _take_finding(self, message: Message) -> None:
        member, name = message.text.split()
        if self._asked.pop(int(member), None) is not None:
            self._learn(message.epoch, int(member), Finding[name])

    def _take_end(self, message: Message) -> None:
        self._end_known.add(message.sender)
        may_restart, _, reason = message.text.partition(" ")
        self._feed(Ended(may_restart == "1", reason))


def _fail(error: Exception) -> NoReturn:
    raise error


def _nodes_of(world: World) -> tuple[int, ...]:
    """A number for the node of each member of the view."""
    names = [world.identities[m].node for m in world.view.members]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)
