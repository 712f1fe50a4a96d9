"""From missed heartbeats to an eviction: who suspects whom, who decides, and what is asked first.

One ``Suspicion`` is what one rank knows. The rules:

* A rank tells its suspects to the *coordinator*. Where that is a suspect itself, the next in line
  stands in for it: the first of each other node in view order, then the rest.
* The one that coordinates acts on a member once it suspects it too and one more observer of this
  epoch does. A word counts until the second tick after it: what still holds is said again. One that
  finds everybody silent, or all its stand-ins, has no further observer, as in a view of two: it
  asks, but the kernel of the suspect's node has to say that it stands still.
* First the suspect's node is asked. Its watchdog has the last word on processes that it can see:
  one that it vouches for is asked about again at each tick, and killed only once its silence has
  passed the limit for good. Where no watchdog vouches, the suspect is killed by whoever can.
* A member is left out only after the operating system has said that it is gone (``Rebuild``).
* Where nobody on the suspect's node answers, nobody can tell death from a cut. Every other node is
  asked then, so that a cut is seen whole, and the majority rule of ``membership`` decides which
  part may be started again; all parts end.
* Whatever is stamped with another epoch is dropped.

The machine is a frozen value: ``handle`` returns the next state and the instructions to carry out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpift.core.membership import Outcome, View, judge

# Stand-ins that are tried one after the other, each for a timeout, before a rank asks by itself.
STAND_INS_MAX = 3
# A word counts this long: who says it says it again at each tick, for as long as it holds.
WORD_TICKS = 2

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Missed:
    """This rank's own detector finds ``member`` overdue; ``for_good`` once it has been silent for
    so long that no excuse of its node counts any more."""

    epoch: int
    member: int
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat of a suspect has come after all."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class Told:
    """All that ``observer`` suspects at present."""

    epoch: int
    observer: int
    suspects: frozenset[int]


class Finding(enum.Enum):
    """What was found out about a suspect on its node."""

    GONE = "gone"  # the operating system says so
    ALIVE = "alive"  # its watchdog vouches for it, or its loop is seen to turn
    STANDS_STILL = "stands still"  # no watchdog, and the kernel sees that it does not move
    UNWATCHED = "unwatched"  # no watchdog, and nobody looked
    UNREACHABLE = "unreachable"  # nobody on its node answers


@dataclass(frozen=True, slots=True)
class Examined:
    """The answer to ``Examine``."""

    epoch: int
    member: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class Condemned:
    """A member shall go for another reason (stalled, unhealthy) that the user has configured."""

    epoch: int
    member: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A heartbeat interval has passed: what is still true is said and asked again."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A new view is in force: everything starts afresh. ``nodes`` as in ``Suspicion``."""

    view: View
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Somebody has ended this part of the job; see ``Stop``."""

    may_restart: bool
    reason: str


Event = Missed | Heard | Told | Examined | Condemned | Tick | Installed | Ended

# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this rank's suspects to member ``to``."""

    to: int
    suspects: frozenset[int]


@dataclass(frozen=True, slots=True)
class Examine:
    """Ask the node of ``member`` about it; ``kill``: and let it be killed, whatever it says."""

    epoch: int
    member: int
    kill: bool


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Members of this view are gone for certain: make the next view."""

    gone: frozenset[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell all others on this side, then end this process: nobody here goes on in place.

    ``may_restart``: this part is the majority, so the job may be started again from what it has.
    At most one part of a view says so.
    """

    may_restart: bool
    reason: str


Instruction = Tell | Examine | Rebuild | Stop

# -- the machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One rank's knowledge in one view. ``nodes[i]`` is a number for the node of the i-th member.

    Invariants: ``examining`` and ``gone`` hold members of the view other than this one; a member
    that is gone is examined no more; after ``stopped`` nothing happens.
    """

    member: int
    view: View
    nodes: tuple[int, ...]
    suspects: frozenset[int] = frozenset()
    for_good: frozenset[int] = frozenset()  # suspects whom no word of their node excuses
    condemned: frozenset[int] = frozenset()
    # (observer, its suspects, ticks since), by observer
    told: tuple[tuple[int, frozenset[int], int], ...] = ()
    still: frozenset[int] = frozenset()  # seen by their kernel to stand still
    examining: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()  # members of nodes where nobody answers
    unasked: frozenset[int] = frozenset()  # nodes to ask before that is judged
    stopped: bool = False

    def handle(self, event: Event) -> tuple[Suspicion, tuple[Instruction, ...]]:
        """The state after ``event``, and what to do, in order."""
        if self.stopped or self._is_stale(event):
            return self, ()
        match event:
            case Installed(view, nodes):
                return type(self)(self.member, view, nodes), ()
            case Missed(_, member, for_good):
                good = self.for_good | ({member} if for_good else set())
                state = replace(self, suspects=self.suspects | {member}, for_good=good)
                return state._changed(self)
            case Heard(_, member):
                return self._without(member)._changed(self)
            case Told(_, observer, suspects):
                others = [word for word in self.told if word[0] != observer]
                told = sorted([*others, (observer, suspects, 0)], key=lambda word: word[0])
                return replace(self, told=tuple(told))._act()
            case Condemned(_, member):
                return replace(self, condemned=self.condemned | {member})._act()
            case Examined(_, member, finding):
                return self._learn(member, finding)
            case Tick():
                state, instructions = self._changed(None)
                aged = tuple((o, s, age + 1) for o, s, age in state.told if age + 1 < WORD_TICKS)
                return replace(state, told=aged), instructions
            case Ended(may_restart, reason):
                return replace(self, stopped=True), (Stop(may_restart, reason),)
        raise TypeError(f"not an event of suspicion: {event!r}")

    def _is_stale(self, event: Event) -> bool:
        """Whether ``event`` belongs to another view, or to nobody who is in this one."""
        if isinstance(event, (Tick, Ended, Installed)):
            return False
        if event.epoch != self.view.epoch:
            return True
        named = event.observer if isinstance(event, Told) else event.member
        return named == self.member or named not in self.view.members

    # -- who decides -------------------------------------------------------------------------------

    @property
    def line(self) -> tuple[int, ...]:
        """Who coordinates, in order of preference."""
        heads: dict[int, int] = {}
        for member, node in zip(self.view.members, self.nodes, strict=True):
            heads.setdefault(node, member)
        first = set(heads.values())
        return (*heads.values(), *(m for m in self.view.members if m not in first))

    @property
    def coordinator(self) -> int:
        """The member that this rank takes for the one that decides."""
        if self.view.coordinator not in self.suspects:  # as a rule, and cheap in a large view
            return self.view.coordinator
        return next(m for m in self.line if m not in self.suspects)

    @property
    def heads(self) -> tuple[int, ...]:
        """The coordinator last, after all that it stands in for."""
        coordinator = self.coordinator
        if coordinator == self.view.coordinator:
            return (coordinator,)
        return self.line[: self.line.index(coordinator) + 1]

    @property
    def _counted(self) -> frozenset[int]:
        """Suspects of this rank whom somebody else finds silent too."""
        seconds = frozenset().union(*(s for o, s, _ in self.told if o not in self.suspects))
        return self.suspects & (seconds | self.still)

    def _is_alone_with(self, member: int) -> bool:
        """Whether nobody is left who could say of ``member`` what this rank says."""
        silent = self.suspects | self.gone | {self.member, member}
        if len(silent) == self.view.size or self.coordinator == self.view.coordinator:
            return len(silent) == self.view.size
        return self.line.index(self.coordinator) > STAND_INS_MAX

    # -- what follows ------------------------------------------------------------------------------

    def _changed(self, before: Suspicion | None) -> tuple[Suspicion, tuple[Instruction, ...]]:
        """After a change of this rank's own suspects since ``before``, or at a tick (None)."""
        tells: tuple[Instruction, ...] = ()
        told_before = before is not None and before.suspects == self.suspects
        had_any = before is not None and bool(before.suspects)
        if self.coordinator != self.member and not told_before and (self.suspects or had_any):
            tells = (Tell(self.coordinator, self.suspects),)
        state, instructions = self._act()
        return state, (*tells, *instructions)

    def _act(self) -> tuple[Suspicion, tuple[Instruction, ...]]:
        """Examine whoever has to be, if this rank decides."""
        there = self._by_node(self.gone | self.away) if self.unasked else []
        one_of = {node: m for m, node in there if node in self.unasked}
        if self.away and not one_of and not self.examining:
            return self._judge()
        decides = self.coordinator == self.member
        due = kill = frozenset[int]()
        if decides:
            kill = self._counted & (self.for_good | self.still) | self.condemned
            due = kill | self._counted
        due |= {m for m in self.suspects if self._is_alone_with(m)} | set(one_of.values())
        due -= self.examining | self.gone | self.away
        examine = tuple(Examine(self.view.epoch, m, m in kill) for m in sorted(due))
        unasked = frozenset(node for node, m in one_of.items() if m not in due)
        return replace(self, examining=self.examining | due, unasked=unasked), examine

    def _learn(self, member: int, finding: Finding) -> tuple[Suspicion, tuple[Instruction, ...]]:
        state = replace(self, examining=self.examining - {member})
        match finding:
            case Finding.GONE:
                state = replace(state, gone=state.gone | {member})
                return state, (Rebuild(state.gone),)
            case Finding.ALIVE:
                return replace(state, still=state.still - {member}), ()
            case Finding.STANDS_STILL:
                # Not if it was heard since: that says nothing of its next silence.
                state = replace(state, still=state.still | ({member} & state.suspects))
            case Finding.UNWATCHED:
                if member not in state._counted:
                    return state, ()
                state = replace(state, for_good=state.for_good | {member})
            case Finding.UNREACHABLE:
                if not state.away and member not in state.suspects:
                    # Alive, as is heard, and out of reach: the job is worth more than its wish.
                    return replace(state, condemned=state.condemned - {member}), ()
                state = state._cut_off(member)
        return state._act()

    def _by_node(self, without: frozenset[int]) -> list[tuple[int, int]]:
        """(member, its node), the first of each node last."""
        pairs = zip(self.view.members, self.nodes, strict=True)
        return [(m, node) for m, node in pairs if m not in without][::-1]

    def _with(self, member: int) -> frozenset[int]:
        """All members on the node of ``member``."""
        node = self.nodes[self.view.rank_of(member)]
        return frozenset(m for m, other in self._by_node(frozenset()) if other == node)

    def _without(self, member: int) -> Suspicion:
        """``member`` was heard: nothing that was held against it counts any more."""
        away = self.away - self._with(member)
        return replace(
            self,
            suspects=self.suspects - {member},
            for_good=self.for_good - {member},
            still=self.still - {member},
            away=away,
            unasked=self.unasked if away else frozenset(),
        )

    def _cut_off(self, member: int) -> Suspicion:
        """Nobody on the suspect's node answers: all other nodes have to, or they are away too."""
        away = self.away | self._with(member)
        unasked = self.unasked
        if not self.away:
            unasked = frozenset(n for _, n in self._by_node(away | self._with(self.member)))
        return replace(self, away=away, unasked=unasked)

    def _judge(self) -> tuple[Suspicion, tuple[Instruction, ...]]:
        """All nodes were asked: this part of the job ends, one way or the other."""
        reachable = set(self.view.members) - self.suspects - self.condemned - self.away - self.gone
        verdict = judge(self.view, reachable, self.gone, 1)
        where = f"nobody answers on the nodes of members {_words(self.away)}"
        may_restart = verdict.outcome is Outcome.GO_ON
        why = verdict.reason
        if may_restart:
            why = (
                f"the {len(reachable)} of {self.view.size} members on this side are the majority,"
                " but MPI cannot leave out processes that may be alive: start the job again"
                " without those nodes"
            )
        return replace(self, stopped=True), (Stop(may_restart, f"{where}: {why}"),)


def _words(members: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(members)))
