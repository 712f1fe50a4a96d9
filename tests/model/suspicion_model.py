"""A small world of ranks around ``core.suspicion``: hangs, false alarms, cuts, late messages.

The surroundings are adversarial. What is under way arrives in any order and as late as it likes (of
two words of one rank to another in one view the older gives way: the transport posts none while the
last is pending). Detectors err, ranks hang, pause or die, a link is cut, ranks enter a new view one
by one, all at any moment. How often each fault may happen is a budget (``Faults``), and at any
moment the faults may be over for good: so an end must be in reach from everywhere without the help
of one more fault, and a world holds all worlds of smaller budgets.

A rebuild needs every living member of the view: one that is hung or cut off keeps it from
happening, and one that ends behind a cut does so unnoticed.

What keeps the walk small leaves nothing out. What nobody can receive any more is dropped at once,
and of a rank that never moves again only its last word is kept: neither can change what others do.
A tick that changes nothing is no step. Machines are numbered, and each is asked once for each
event, since ``handle`` is pure. Where a question needs no detector that gives up for good, a world
is ``patient``: that is a narrower world, and said where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpift.core.membership import View, initial_view
from mpift.core.suspicion import (
    Condemned,
    Ended,
    Event,
    Examine,
    Examined,
    Finding,
    Heard,
    Installed,
    Instruction,
    Missed,
    Rebuild,
    Stop,
    Suspicion,
    Tell,
    Tick,
    Told,
)
from tests.model.suspicion_world import NO_RESTART, RESTART, Answer, Faults, Word, World

# A word justifies a killing until the second tick of whoever was told.
WORD_TICKS = 2


class SuspicionModel:
    """``nodes[i]`` is the node of member i; ``side`` are the members behind the link that may be
    cut. ``watchdogs`` are "off", "on" (they vouch for what lives, and sooner or later kill what
    hangs) or "blind" (they vouch for whatever is not dead). Where ``deceived`` is given, only those
    make mistakes. With ``slow_answers`` anything can overtake an answer.
    """

    def __init__(
        self,
        nodes: tuple[int, ...],
        side: frozenset[int] = frozenset(),
        watchdogs: str = "off",
        deceived: frozenset[int] | None = None,
        slow_answers: bool = False,
        patient: bool = False,
        machine: type[Suspicion] = Suspicion,
        **faults: int,
    ) -> None:
        self.nodes, self.side, self.watchdogs = nodes, side, watchdogs
        self.deceived = frozenset(range(len(nodes))) if deceived is None else deceived
        self.slow_answers, self.patient = slow_answers, patient
        self.faults = Faults(**faults)
        self.states: list[Suspicion] = []
        self._numbers: dict[Suspicion, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Instruction, ...]]] = {}
        self._last_words: dict[int, int] = {}
        view = initial_view(len(nodes))
        machines = tuple(self._number(machine(m, view, nodes)) for m in view.members)
        self.first = World(machines, self.faults, codes=(0,) * len(nodes))

    def initial(self) -> World:
        return self.first

    # -- what can happen -----------------------------------------------------------------------

    def actions(self, world: World) -> Iterator[tuple[str, World]]:
        for label, after in self._all(world):
            if after != world:
                yield label, self._settled(after)

    def _all(self, world: World) -> Iterator[tuple[str, World]]:
        moving = self._moving(world)
        for number in moving:
            yield from self._detector(world, number)
            yield f"{number} ticks", self._tick(world, number)
        if any(world.faults):
            yield from self._faults(world, moving)
        yield from self._messages(world, moving)
        yield from self._examinations(world, moving)
        yield from self._rebuilds(world, moving)

    def _faults(self, world: World, moving: list[int]) -> Iterator[tuple[str, World]]:
        yield "the faults are over", world._replace(faults=Faults())
        faults = world.faults
        for number in moving if len(moving) > 1 else ():
            if faults.hangs:
                hung = world.hung | {number}
                yield f"{number} hangs", _spend(world, "hangs")._replace(hung=hung)
            if faults.deaths:
                yield f"{number} dies", self._dead(_spend(world, "deaths"), number)
        for number in world.hung if faults.wakings else ():
            hung = world.hung - {number}
            yield f"{number} wakes up", _spend(world, "wakings")._replace(hung=hung)
        if faults.cuts and not world.cut:
            yield "the link is cut", _spend(world, "cuts")._replace(cut=True)
        if faults.heals and world.cut:
            yield "the link heals", _spend(world, "heals")._replace(cut=False)
        for number in moving if faults.condemnations else ():
            machine = self.states[world.machines[number]]
            for other in set(machine.view.members) - {number}:
                if machine.coordinator == number:
                    event = Condemned(machine.view.epoch, other)
                    after = self._feed(_spend(world, "condemnations"), number, event)
                    yield f"{other} is condemned at {number}", after

    def _detector(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        machine = self.states[world.machines[number]]
        epoch = machine.view.epoch
        erring = None
        if world.faults.mistakes and number in self.deceived:
            erring = _spend(world, "mistakes")
        for other in machine.view.members:
            if other == number:
                continue
            silent = self._lost(world, other) or self._apart(world, number, other)
            missing, hearing = (world, erring) if silent else (erring, world)
            word = "" if silent else "wrongly "
            if missing and other not in machine.suspects:
                after = self._feed(missing, number, Missed(epoch, other))
                yield f"{number} {word}misses {other}", after
            elif missing and other not in machine.for_good and not self.patient:
                after = self._feed(missing, number, Missed(epoch, other, for_good=True))
                yield f"{number} {word}waits for {other} no longer", after
            if hearing and other in machine.suspects:
                after = self._feed(hearing, number, Heard(epoch, other))
                yield f"{number} {'wrongly ' * silent}hears {other} again", after

    def _tick(self, world: World, number: int) -> World:
        after = self._feed(world, number, Tick())
        if not after.words:
            return after
        aged = (w if w[0] != number else (*w[:3], w[3] + 1) for w in after.words)
        return after._replace(words=frozenset(w for w in aged if w[3] < WORD_TICKS))

    def _messages(self, world: World, moving: list[int]) -> Iterator[tuple[str, World]]:
        for message in world.told:
            epoch, source, to, suspects = message
            rest = world._replace(told=world.told - {message})
            word = f"the word of {source} to {to} in epoch {epoch} of {sorted(suspects)}"
            if to in moving and not self._apart(world, source, to):
                yield f"{word} arrives", self._told(rest, message)
            if world.faults.losses:
                yield f"{word} is lost", _spend(rest, "losses")
        for to, code in world.ended:
            rest = world._replace(ended=world.ended - {(to, code)})
            if to in moving:
                yield f"{to} is told to end", self._feed(rest, to, Ended(code == RESTART, ""))
            if world.faults.losses:
                yield f"the word to {to} to end is lost", _spend(rest, "losses")

    def _told(self, world: World, message: Word) -> World:
        epoch, source, to, suspects = message
        if self.states[world.machines[to]].view.epoch == epoch:
            rest = frozenset(w for w in world.words if w[:2] != (to, source))
            said = frozenset({(to, source, suspects, 0)} if suspects else ())
            world = world._replace(words=rest | said)
        return self._feed(world, to, Told(epoch, source, suspects))

    def _examinations(self, world: World, moving: list[int]) -> Iterator[tuple[str, World]]:
        for question in world.asked:
            epoch, number, about, kill = question
            rest = world._replace(asked=world.asked - {question})
            for finding, after in self._findings(rest, number, about, kill):
                label = f"{about} is found {finding.value} for {number}" + " by killing it" * kill
                answer = (epoch, number, about, finding)
                if self.slow_answers:
                    yield label, after._replace(answers=after.answers | {answer})
                else:  # a killing that was ordered is done, even if nobody waits for it any more
                    yield label, self._learn(after, answer) if number in moving else after
        for answer in world.answers:
            epoch, number, about, finding = answer
            if number in moving:
                rest = world._replace(answers=world.answers - {answer})
                yield f"{number} learns: {about} {finding.value}", self._learn(rest, answer)

    def _learn(self, world: World, answer: Answer) -> World:
        epoch, number, about, finding = answer
        machine = self.states[world.machines[number]]
        still = world.still - {(number, about)}
        if finding is Finding.STANDS_STILL and about in machine.suspects:
            still |= {(number, about)}
        return self._feed(world._replace(still=still), number, Examined(epoch, about, finding))

    def _findings(
        self, world: World, number: int, about: int, kill: bool
    ) -> Iterator[tuple[Finding, World]]:
        watched = self.watchdogs != "off"
        local = self.nodes[number] == self.nodes[about]
        there = any(self.nodes[m] == self.nodes[about] for m in self._moving(world))
        if self._apart(world, number, about) or not (watched or local or there):
            yield Finding.UNREACHABLE, world
        elif about in world.dead or world.codes[about]:
            yield Finding.GONE, world
        elif kill:
            yield Finding.GONE, self._dead(world, about)
        elif watched:
            yield Finding.ALIVE, world
            if about in world.hung and self.watchdogs == "on":
                yield Finding.GONE, self._dead(world, about)
        elif local:
            yield Finding.STANDS_STILL if about in world.hung else Finding.ALIVE, world
        else:
            yield Finding.UNWATCHED, world

    def _rebuilds(self, world: World, moving: list[int]) -> Iterator[tuple[str, World]]:
        for member, view in world.installing:
            if member in moving:
                rest = world._replace(installing=world.installing - {(member, view)})
                event = Installed(view, tuple(self.nodes[m] for m in view.members))
                yield f"{member} enters epoch {view.epoch}", self._feed(rest, member, event)
        # All living members of the view together, once MPI knows of a death.
        if not moving or any(member in moving for member, _ in world.installing):
            return
        view = self.states[world.machines[moving[0]]].view
        living = [m for m in view.members if m not in world.dead and not world.codes[m]]
        gone = [m for m in view.members if m not in living]
        unknown = [m for m in gone if m not in world.known]
        apart = any(self._apart(world, living[0], m) for m in (*living, *unknown))
        if gone and not apart and not world.hung.intersection(living):
            after = View(view.epoch + 1, tuple(living))
            installing = frozenset((member, after) for member in living)
            yield f"a rebuild without {gone}", world._replace(installing=installing)

    # -- carrying out instructions -------------------------------------------------------------

    def _number(self, machine: Suspicion) -> int:
        number = self._numbers.setdefault(machine, len(self.states))
        if number == len(self.states):
            self.states.append(machine)
        return number

    def _feed(self, world: World, member: int, event: Event) -> World:
        before = world.machines[member]
        step = self._steps.get((before, event))
        if step is None:
            machine, instructions = self.states[before].handle(event)
            step = self._steps[before, event] = self._number(machine), instructions
        number, instructions = step
        if number != before:
            machines = world.machines
            machines = (*machines[:member], number, *machines[member + 1 :])
            world = world._replace(machines=machines)
        if isinstance(event, Installed):
            words = frozenset(w for w in world.words if w[0] != member)
            still = frozenset(s for s in world.still if s[0] != member)
            world = world._replace(words=words, still=still)
        elif world.still and isinstance(event, Heard):
            world = world._replace(still=world.still - {(member, event.member)})
        for instruction in instructions:
            world = self._carry_out(world, member, instruction)
        return world

    def _carry_out(self, world: World, member: int, instruction: Instruction) -> World:
        view = self.states[world.machines[member]].view
        match instruction:
            case Tell(to, suspects):
                channel = (view.epoch, member, to)
                rest = frozenset(t for t in world.told if t[:3] != channel)
                return world._replace(told=rest | {(*channel, suspects)})
            case Examine(epoch, about, kill):
                wrong = world.wrong
                if kill and not self._justified(world, member, about):
                    wrong = f"{about} is killed on the word of {member} alone"
                asked = world.asked | {(epoch, member, about, kill)}
                return world._replace(asked=asked, wrong=wrong)
            case Rebuild(gone):
                living = [m for m in gone if m not in world.dead and not world.codes[m]]
                wrong = f"{living} are left out alive" if living else world.wrong
                return world._replace(wrong=wrong)
            case Stop(may_restart, _):
                code = RESTART if may_restart else NO_RESTART
                others = [m for m in view.members if m != member]
                ended = {(m, code) for m in others if not self._apart(world, member, m)}
                return world._replace(
                    codes=(*world.codes[:member], code, *world.codes[member + 1 :]),
                    known=world.known if world.cut else world.known | {member},
                    ended=world.ended | ended,
                    wrong=self._wrong_end(world, member, code) or world.wrong,
                )

    def _dead(self, world: World, member: int) -> World:
        known = world.known if world.cut else world.known | {member}
        return world._replace(dead=world.dead | {member}, known=known)

    def _settled(self, world: World) -> World:
        """The same without what can have no effect any more."""
        if world.told and world.cut and not world.faults.heals:
            told = frozenset(t for t in world.told if not self._apart(world, t[1], t[2]))
            world = world._replace(told=told)
        over = {m for m, code in enumerate(world.codes) if code} | world.dead
        if not world.faults.wakings:
            over |= world.hung
        if not over:
            return world
        numbers = enumerate(world.machines)
        return world._replace(
            machines=tuple(self._last_word(n) if m in over else n for m, n in numbers),
            hung=world.hung - world.dead,
            ended=frozenset(e for e in world.ended if e[0] not in over),
            told=frozenset(t for t in world.told if t[2] not in over),
            asked=frozenset(q for q in world.asked if q[1] not in over or q[3]),
            answers=frozenset(a for a in world.answers if a[1] not in over),
            installing=frozenset(i for i in world.installing if i[0] not in over),
            words=frozenset(w for w in world.words if w[0] not in over),
            still=frozenset(s for s in world.still if s[0] not in over),
        )

    def _last_word(self, number: int) -> int:
        """A machine of which only what it suspects still matters."""
        if number not in self._last_words:
            machine = self.states[number]
            rest = Suspicion(machine.member, machine.view, machine.nodes, machine.suspects)
            self._last_words[number] = self._number(rest)
        return self._last_words[number]

    # -- what must hold ------------------------------------------------------------------------

    def violation(self, world: World) -> str | None:
        if world.wrong:
            return world.wrong
        moving = self._moving(world)
        for member in moving:
            view = self.states[world.machines[member]].view
            for other in moving:
                if other not in view.members:
                    return f"{member} goes on without {other}, which goes on too"
        return None

    def final(self, world: World) -> bool:
        """Nobody who goes on has a member in its view that never answers again."""
        return not world.installing and not any(
            self._lost(world, other) or self._apart(world, member, other)
            for member in self._moving(world)
            for other in self.states[world.machines[member]].view.members
        )

    def _justified(self, world: World, by: int, about: int) -> bool:
        """Whether ``by`` may have ``about`` killed: it hangs, the user wants it, or ``by`` suspects
        it, and its kernel or another observer of this epoch says so too, or did lately."""
        machine = self.states[world.machines[by]]
        others = [self.states[n] for m, n in enumerate(world.machines) if m not in {by, about}]
        second = (
            any(o.view == machine.view and about in o.suspects for o in others)
            or any(w[0] == by and about in w[2] for w in world.words)
            or (by, about) in world.still
        )
        wanted = self._lost(world, about) or about in machine.condemned
        return wanted or (second and about in machine.suspects)

    def _wrong_end(self, world: World, member: int, code: int) -> str:
        """Nobody ends for nothing, and of the two sides of a cut only the larger may say that it
        could go on."""
        members = self.states[world.machines[member]].view.members
        if not (world.cut or world.dead or self.faults.hangs or self.faults.cuts):
            return f"{member} ends although nothing is wrong"
        away = {m for m in members if self._apart(world, member, m)} - world.known
        here = {m for m in members if not self._apart(world, member, m)} - world.dead
        if code == RESTART and len(here) <= len(away):
            return f"{member} ends as the larger part, with {len(here)} against {len(away)}"
        return ""

    def _moving(self, world: World) -> list[int]:
        """Members whose loop turns."""
        return [m for m in range(len(self.nodes)) if not self._lost(world, m)]

    @staticmethod
    def _lost(world: World, member: int) -> bool:
        return member in world.hung or member in world.dead or world.codes[member] != 0

    def _apart(self, world: World, one: int, other: int) -> bool:
        return world.cut and (one in self.side) != (other in self.side)


def _spend(world: World, fault: str) -> World:
    left = {fault: getattr(world.faults, fault) - 1}
    return world._replace(faults=world.faults._replace(**left))
