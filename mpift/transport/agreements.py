"""Agreements: the three-phase commit of ``core.commit`` on the control communicator.

A *subject* is something that all ranks hold versions of; all ranks open theirs in the same order.
Ranks ``hold`` versions as they reach them, which nobody waits for: the coordinator of the view
proposes what it or another holds, all vote once they hold it too, or say that they have passed it
by. Whatever a rank has held comes to an end: ``Subject.decided``, whether that was before or after
it held the version, or ``Subject.stale``.

A part of the service's loop; ``hold`` may be called from any thread. A coordinator asks for missing
votes again every ``sync_timeout``, ``retries`` times; the others wait for it that long and more,
one after the other in rank order, before they take its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpift.config import Config
from mpift.core.ballots import Ballot, Content, Message, Proposal, State, Word
from mpift.core.commit import Commit
from mpift.core.commit_events import (
    Decided,
    Entry,
    Event,
    Held,
    Installed,
    Instruction,
    Prepare,
    Prepared,
    Received,
    Remember,
    Send,
    Stale,
    TimedOut,
)
from mpift.transport.messages import Kind
from mpift.transport.messages import Message as Letter
from mpift.transport.part import Post
from mpift.transport.world import World

# Versions that a rank still answers for; nobody asks for one that so many others have followed.
_HELD = 8
_EARLY = 256
_NOTHING = "-"


class Subject(Protocol):
    """Whose versions are agreed on. Called on the service thread."""

    def remember(self, entry: Entry) -> None:
        """Keep ``entry`` as long as this rank's promises are to last: through a crash where the
        subject is durable. Nothing is sent before this returns."""

    def decided(self, decided: Decided) -> None:
        """A version is decided: committed with a content, or aborted."""

    def stale(self, version: int, newest: int) -> None:
        """Nothing comes of this rank's ``version``: it or others are at ``newest`` already."""

    def passed(self, version: int) -> bool:
        """Whether this rank will never hold ``version``, if it does not yet."""


@dataclass(slots=True)
class _Topic:
    subject: Subject
    machine: Commit
    held: dict[int, Content] = field(default_factory=dict)
    unsettled: set[int] = field(default_factory=set)  # of those it has held
    asked: list[Proposal] = field(default_factory=list)  # for a vote that this rank can't give yet
    deadlines: dict[Proposal, float] = field(default_factory=dict)

    def vote(self, proposal: Proposal) -> Prepared | None:
        """What this rank says to ``proposal``; None as long as it may still get there."""
        if proposal.version in self.held:
            return Prepared(proposal, self.held[proposal.version])
        if max(self.held, default=-1) > proposal.version or self.subject.passed(proposal.version):
            return Prepared(proposal, None)
        return None

    def settle(self, version: int) -> None:
        """Something has become of ``version``."""
        self.unsettled.discard(version)
        self.asked = [proposal for proposal in self.asked if proposal.version != version]


class Agreements:
    """See the module's docstring."""

    requests: Sequence[Any] = ()

    def __init__(
        self,
        post: Post,
        config: Callable[[], Config],
    ) -> None:
        self._post = post
        self._config = config  # asked late: how large the job is is not known at first
        self._world: World
        self._topics: list[_Topic] = []
        # About subjects that are not open here yet.
        self._early: deque[Letter] = deque(maxlen=_EARLY)
        post.mailbox.register(Kind.COMMIT, self._take)

    def open(self, subject: Subject, entries: Iterable[Entry] = ()) -> int:
        """On the service thread: agree on ``subject`` too; returns its number. ``entries`` are the
        last that it remembered of each proposal, if it comes back after a crash."""
        here, view = self._world.member, self._world.view
        machine = Commit.recovered(here, view, entries, self._config().retries or 0)
        self._topics.append(_Topic(subject, machine))
        number = len(self._topics) - 1
        early = tuple(self._early)
        self._early.clear()
        for letter in early:
            self._take(letter)
        return number

    def hold(self, number: int, version: int, content: Content) -> None:
        """This rank has reached ``version`` of a subject, and holds ``content``."""

        def reached() -> None:
            self._post.hurry()  # the others get there at about the same time
            topic = self._topics[number]
            topic.held[version] = content
            for old in sorted(topic.held)[:-_HELD]:
                del topic.held[old]
            topic.unsettled.add(version)
            self._vote_again(number)
            self._feed(number, Held(version, content))

        self._post.call(reached)

    # -- the machine -------------------------------------------------------------------------------

    def _feed(self, number: int, event: Event) -> None:
        topic = self._topics[number]
        topic.machine, instructions = topic.machine.handle(event)
        for instruction in instructions:
            self._carry_out(number, topic, instruction)

    def _carry_out(self, number: int, topic: _Topic, instruction: Instruction) -> None:
        match instruction:
            case Send(message, members):
                self._post.hurry()
                self._post.mailbox.send(Kind.COMMIT, encode(number, message), members)
            case Remember(entry):
                topic.subject.remember(entry)
            case Prepare(proposal):
                self._vote(number, proposal)
            case Decided():
                topic.settle(instruction.proposal.version)
                topic.subject.decided(instruction)
            case Stale(version, newest):
                topic.settle(version)
                topic.subject.stale(version, newest)

    def _vote_again(self, number: int) -> None:
        """Something may have changed about what was asked for."""
        waiting, self._topics[number].asked = self._topics[number].asked, []
        for proposal in waiting:
            self._vote(number, proposal)

    def _vote(self, number: int, proposal: Proposal) -> None:
        topic = self._topics[number]
        vote = topic.vote(proposal)
        if vote is not None:
            self._feed(number, vote)
        elif proposal not in topic.asked:
            topic.asked.append(proposal)

    def _take(self, letter: Letter) -> None:
        if letter.epoch != self._world.view.epoch:
            return
        number, message = decode(letter)
        if number >= len(self._topics):
            self._early.append(letter)
            return
        self._feed(number, Received(message))

    # -- the service's loop ------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        for number, topic in enumerate(self._topics):
            if topic.asked:
                self._vote_again(number)
            still_open = topic.machine.open
            if not still_open:
                continue
            topic.deadlines = {p: d for p, d in topic.deadlines.items() if p in still_open}
            for proposal in still_open:
                due = topic.deadlines.setdefault(proposal, now + self._wait(topic, proposal))
                if now >= due:
                    del topic.deadlines[proposal]
                    self._feed(number, TimedOut(proposal))

    def _wait(self, topic: _Topic, proposal: Proposal) -> float:
        patience = self._config().sync_timeout or 0.0
        if topic.machine.leads(proposal):
            return patience
        return patience * (topic.machine.retries + 2 + self._world.view.rank_of(self._world.member))

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def fault(self) -> None:
        pass

    def install(self, world: World) -> None:
        self._world = world
        self._early.clear()
        for number, topic in enumerate(self._topics):
            topic.deadlines = {}
            topic.asked = [p for p in topic.asked if p.proposer in world.view.members]
            self._feed(number, Installed(world.view))
            for version in sorted(topic.unsettled):
                self._feed(number, Held(version, topic.held.get(version)))


def encode(number: int, message: Message) -> str:
    """A word of subject ``number`` as text; epoch and sender are the letter's."""
    history, digest = message.content or (_NOTHING, _NOTHING)
    fields = (
        number,
        int(message.word),
        *message.proposal,
        *message.ballot,
        int(message.state),
        *message.attempt,
        message.newest,
        history,
        digest,
    )
    return " ".join(map(str, fields))


def decode(letter: Letter) -> tuple[int, Message]:
    """The subject's number, and the word."""
    *numbers, history, digest = letter.text.split()
    number, word, version, epoch, proposer, size, in_epoch, ballot, state, *rest = map(int, numbers)
    attempt_epoch, attempt, newest = rest
    return number, Message(
        Word(word),
        Proposal(version, epoch, proposer, size),
        letter.epoch,
        letter.sender,
        Ballot(in_epoch, ballot),
        None if digest == _NOTHING else Content(history, digest),
        State(state),
        Ballot(attempt_epoch, attempt),
        newest,
    )
