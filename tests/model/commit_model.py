"""A small world of members around ``core.commit``: losses, repeats, any order, crashes, views.

Messages are a set that only grows within a view. Any of them may arrive at any moment, again and
again, or never: so loss, repetition, reordering and every cut of the network are in every world. A
member times out when it likes, as often as a budget allows; members die, and those that remember
come back; a view without the dead is installed at once, as the transport does it. What keeps the
walk small leaves nothing out: a message that can have no effect any more is dropped (``_matters``).

``violation`` looks for two decisions, for a decision of what no majority held, and for versions
that go back. It also asks of every state whether a majority whose members can talk to each other
would decide all that is open if nothing more went wrong: every message among them arrives, and the
first of them with something open times out. That needs no fairness of the walk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from mpift.core.ballots import (
    DECISIONS,
    NO_BALLOT,
    TABLE,
    Content,
    Message,
    Proposal,
    Standing,
    State,
    Word,
    majority,
    needed,
)
from mpift.core.commit import Commit
from mpift.core.commit_events import (
    Answer,
    Entry,
    Event,
    Held,
    Installed,
    Instruction,
    Prepare,
    Prepared,
    Propose,
    Received,
    Remember,
    Send,
    TimedOut,
)
from mpift.core.membership import View
from mpift.core.participant import REMEMBERED

# Enough for every member of a majority of five to be outbid once and to be silent once.
_TIMEOUTS_UNTIL_DECIDED = 12

SAME = Content("history", "same")
OTHER = Content("history", "other")


class Budget(NamedTuple):
    """How many of each may still happen."""

    timeouts: int = 0
    deaths: int = 0
    restarts: int = 0


class World(NamedTuple):
    machines: tuple[int, ...]  # numbers, see CommitModel
    messages: int  # a bit for each that was sent in this view
    to_propose: tuple[tuple[int, int], ...]  # member, version
    budget: Budget
    dead: frozenset[int] = frozenset()
    memories: tuple[int, ...] = ()  # what each would still know after a crash
    wrong: str = ""
    to_hold: tuple[tuple[int, int], ...] = ()  # member, version


class CommitModel:
    """``contents[m]`` is what member m holds, None if it can't; ``proposals`` are (member,
    version), made in any order; ``holds`` are versions that members hold and let the coordinator
    propose. Decided proposals are remembered up to ``remembered``. ``begun`` are labels of what
    has happened already."""

    def __init__(
        self,
        contents: Sequence[Content | None],
        proposals: Sequence[tuple[int, int]] = ((0, 1),),
        machine: type[Commit] = Commit,
        lively: bool = True,
        begun: Sequence[str] = (),
        holds: Sequence[tuple[int, int]] = (),
        remembered: int = REMEMBERED,
        **budget: int,
    ) -> None:
        self.contents, self.machine, self.lively = contents, machine, lively
        self.restarts = budget.get("restarts", 0)
        view = View(0, tuple(range(len(contents))))
        self.states: list[Commit] = []
        self._numbers: dict[Commit, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Instruction, ...]]] = {}
        self.mail: list[tuple[int, Message]] = []
        self._bits: dict[tuple[int, Message], int] = {}
        self.memories: list[tuple[Entry, ...]] = [()]
        self._memory_numbers: dict[tuple[Entry, ...], int] = {(): 0}
        self._settled: dict[tuple[tuple[int, ...], tuple[int, ...], int], str] = {}
        self._masks: dict[tuple[int, ...], tuple[int, int]] = {}
        self._checked: dict[tuple[int, ...], str] = {}
        self._mattering: dict[tuple[int, int, int], bool] = {}
        machines = tuple(
            self._number(machine(m, view, remembered=remembered)) for m in view.members
        )
        self.first = World(
            machines,
            0,
            tuple(proposals),
            Budget(**budget),
            memories=(0,) * len(contents),
            to_hold=tuple(holds),
        )
        for label in begun:
            self.first = dict(self.actions(self.first))[label]

    def initial(self) -> World:
        return self.first

    # -- what can happen -----------------------------------------------------------------------

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        alive = self._alive(world)
        for index, (member, version) in enumerate(world.to_propose):
            if member in alive and self.contents[member] is not None:
                rest = world.to_propose[:index] + world.to_propose[index + 1 :]
                content = self.contents[member]
                assert content is not None
                after = self._feed(world, member, Propose(version, content))
                yield f"{member} proposes version {version}", after._replace(to_propose=rest)
        for index, (member, version) in enumerate(world.to_hold):
            content = self.contents[member]
            if member in alive and content is not None:
                rest = world.to_hold[:index] + world.to_hold[index + 1 :]
                after = self._feed(world, member, Held(version, content))
                yield f"{member} holds version {version}", after._replace(to_hold=rest)
        yield from self._deliveries(world)
        budget = world.budget
        if budget.timeouts:
            for member in alive:
                for proposal in self.states[world.machines[member]].open:
                    after = self._feed(world, member, TimedOut(proposal))
                    less = budget._replace(timeouts=budget.timeouts - 1)
                    yield f"{member} times out on {proposal}", after._replace(budget=less)
        for member in alive:
            if budget.deaths:
                less = budget._replace(deaths=budget.deaths - 1)
                after = world._replace(budget=less, dead=world.dead | {member})
                yield f"{member} dies", after._replace(messages=self._that_matter(after))
            if budget.restarts:
                less = budget._replace(restarts=budget.restarts - 1)
                yield f"{member} restarts", self._restart(world, member)._replace(budget=less)
        if set(self._view(world).members) & world.dead:
            yield "the rest installs a new view", self._rebuild(world)

    def _deliveries(self, world: World) -> Iterator[tuple[str, World]]:
        for _, member, message in self._each(world.messages):
            after = self._feed(world, member, Received(message))
            if after != world:
                yield f"{member} hears {message.word.name} of {message.sender}", after

    def _restart(self, world: World, member: int) -> World:
        view = self.states[world.machines[member]].view
        entries = self.memories[world.memories[member]]
        back = self._number(self.machine.recovered(member, view, entries))
        machines = (*world.machines[:member], back, *world.machines[member + 1 :])
        return world._replace(machines=machines)

    def _rebuild(self, world: World) -> World:
        old, alive = self._view(world), self._alive(world)
        view = View(old.epoch + 1, tuple(alive))
        after = world._replace(messages=0)  # those of the old view are void
        if len(alive) < majority(old.size):
            # Decisions may have gone with the majority that made them.
            blank = [self._number(self.machine(m, old)) for m in range(len(world.machines))]
            machines = tuple(
                number if m in alive else blank[m] for m, number in enumerate(world.machines)
            )
            after = after._replace(machines=machines)
        for member in alive:
            after = self._feed(after, member, Installed(view))
        return after

    # -- machines --------------------------------------------------------------------------------

    def _alive(self, world: World) -> list[int]:
        return [m for m in range(len(world.machines)) if m not in world.dead]

    def _view(self, world: World) -> View:
        return self.states[world.machines[self._alive(world)[0]]].view

    def _number(self, state: Commit) -> int:
        if state not in self._numbers:
            self._numbers[state] = len(self.states)
            self.states.append(state)
        return self._numbers[state]

    def _step(self, number: int, event: Event) -> tuple[int, tuple[Instruction, ...]]:
        found = self._steps.get((number, event))
        if found is None:
            after, instructions = self.states[number].handle(event)
            found = self._steps[number, event] = self._number(after), instructions
        return found

    def _bit(self, member: int, message: Message) -> int:
        key = (member, message)
        if key not in self._bits:
            self._bits[key] = 1 << len(self.mail)
            self.mail.append(key)
        return self._bits[key]

    def _remember(self, number: int, entry: Entry) -> int:
        others = [e for e in self.memories[number] if e.proposal != entry.proposal]
        memory = tuple(sorted((*others, entry), key=lambda e: e.proposal))
        if memory not in self._memory_numbers:
            self._memory_numbers[memory] = len(self.memories)
            self.memories.append(memory)
        return self._memory_numbers[memory]

    def _feed(self, world: World, member: int, event: Event) -> World:
        before = world.machines[member]
        number, instructions = self._step(before, event)
        machines = (*world.machines[:member], number, *world.machines[member + 1 :])
        messages, memory = world.messages, world.memories[member]
        asked: list[Proposal] = []
        for instruction in instructions:
            match instruction:
                case Send(message, members):
                    for to in members:
                        messages |= self._bit(to, message)
                case Remember(entry) if self.restarts:
                    memory = self._remember(memory, entry)
                case Prepare(proposal):
                    asked.append(proposal)
        memories = (*world.memories[:member], memory, *world.memories[member + 1 :])
        old, new = self.states[before], self.states[number]
        wrong = world.wrong
        if new.committed < old.committed or new.newest < old.newest:
            wrong = f"member {member} goes back from version {old.committed} to {new.committed}"
        after = world._replace(machines=machines, messages=messages, memories=memories, wrong=wrong)
        for proposal in asked:
            after = self._feed(after, member, Prepared(proposal, self.contents[member]))
        return after._replace(messages=self._that_matter(after))

    # -- messages ----------------------------------------------------------------------------------

    def _that_matter(self, world: World) -> int:
        found = 0
        for bit, member, message in self._each(world.messages):
            if member not in world.dead:
                key = (bit, world.machines[member], world.machines[message.sender])
                if key not in self._mattering:
                    self._mattering[key] = self._matters(message, *key[1:])
                if self._mattering[key]:
                    found |= bit
        return found

    def _each(self, messages: int) -> Iterator[tuple[int, int, Message]]:
        while messages:
            bit = messages & -messages
            messages ^= bit
            yield bit, *self.mail[bit.bit_length() - 1]

    def _matters(self, message: Message, receiver: int, sender: int) -> bool:
        """Whether ``message`` may still change anything, now or later."""
        here = self.states[receiver]._entry(message.proposal)
        there = self.states[sender]._entry(message.proposal)
        lead, word, ballot = here.lead, message.word, message.ballot
        if word is Word.HELD:
            return self.states[sender]._of_version(message.proposal.version) is None
        if word is Word.PASSED:
            return here in self.states[receiver].entries and not here.state.decided
        if word is Word.OUTBID:
            return lead is not None and ballot > lead.ballot
        if word in (Word.VOTE, Word.STANDS, Word.ACKNOWLEDGE):
            if lead is None or lead.ballot != ballot or TABLE[lead.phase][1] is not word:
                return False
            standing = Standing(message.state, message.attempt, message.content)
            return Answer(message.sender, standing, message.newest) not in lead.answers
        if here.state.decided:
            return word not in DECISIONS and not there.state.decided
        if word in DECISIONS:
            return True
        if word is Word.OPEN:
            return not there.state.decided
        if ballot > here.promised or (word is Word.PREPARE and here.promised == NO_BALLOT):
            return True
        # All that is left of it is its answer.
        asks = there.lead is not None and there.lead.ballot == ballot
        return asks and there.lead is not None and there.lead.phase is word

    # -- what must hold --------------------------------------------------------------------------

    def violation(self, world: World) -> str | None:
        if world.machines not in self._checked:
            self._checked[world.machines] = self._contradiction(world.machines)
        wrong = world.wrong or self._checked[world.machines]
        if not wrong and self.lively:
            wrong = self._stuck(world)
        return wrong or None

    def _contradiction(self, machines: tuple[int, ...]) -> str:
        """Two decisions, or one of what no majority held."""
        decided: dict[Proposal, Entry] = {}
        versions: dict[int, Proposal] = {}
        for number in machines:
            for entry in self.states[number].entries:
                if not entry.state.decided:
                    continue
                first = decided.setdefault(entry.proposal, entry)
                if (first.state, first.content) != (entry.state, entry.content):
                    return (
                        f"two decisions on {entry.proposal}: {first.state.name} {first.content}"
                        f" and {entry.state.name} {entry.content}"
                    )
                if entry.state is State.COMMITTED:
                    other = versions.setdefault(entry.proposal.version, entry.proposal)
                    if other != entry.proposal:
                        return f"two proposals are committed: {other} and {entry.proposal}"
                    if not self._is_held(entry):
                        return f"{entry.proposal} is committed, but no majority held it"
        return ""

    def _is_held(self, entry: Entry) -> bool:
        holders = sum(content == entry.content for content in self.contents)
        return holders >= majority(entry.proposal.size)

    def _stuck(self, world: World) -> str:
        """Which majority would not decide although its members hear each other."""
        alive, view = self._alive(world), self._view(world)
        present = [m for m in view.members if m in alive]
        for size in range(majority(view.size), len(present) + 1):
            for group in combinations(present, size):
                key = (
                    group,
                    tuple(world.machines[m] for m in group),
                    self._among(world.messages, group),
                )
                if key not in self._settled:
                    self._settled[key] = self._settle(world, group)
                if self._settled[key]:
                    return self._settled[key]
        return ""

    def _among(self, messages: int, group: tuple[int, ...]) -> int:
        mask, known = self._masks.get(group, (0, 0))
        if known < len(self.mail):
            for index in range(known, len(self.mail)):
                member, message = self.mail[index]
                if member in group and message.sender in group:
                    mask |= 1 << index
            self._masks[group] = mask, len(self.mail)
        return messages & mask

    def _settle(self, world: World, group: tuple[int, ...]) -> str:
        """Let everything arrive in ``group``, then somebody time out, until nothing is open."""
        numbers = {m: world.machines[m] for m in group}
        events: deque[tuple[int, Event]] = deque(
            (member, Received(message))
            for _, member, message in self._each(self._among(world.messages, group))
        )
        for _ in range(_TIMEOUTS_UNTIL_DECIDED):
            while events:
                member, event = events.popleft()
                numbers[member], instructions = self._step(numbers[member], event)
                for instruction in instructions:
                    match instruction:
                        case Send(message, members):
                            events += [(m, Received(message)) for m in members if m in group]
                        case Prepare(proposal):
                            events.append((member, Prepared(proposal, self.contents[member])))
            waiting = [
                (member, proposal)
                for member in group
                for proposal in self.states[numbers[member]].open
                if needed(proposal, self._view(world).size) <= len(group)
            ]
            if not waiting:
                return ""
            member, proposal = waiting[0]
            events.append((member, TimedOut(proposal)))
        return f"members {group} hear each other and don't decide {proposal}"

    def final(self, world: World) -> bool:
        return True  # any state may be the last: whatever is under way may be lost
