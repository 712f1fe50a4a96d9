"""A model of how a checkpoint's parts are gathered, for the explorer.

Three ranks on one node or on several save one checkpoint. They write their shares, fail to, skip,
die, or die after they have offered; the coordinator may die, and the next one starts with an empty
machine. Messages are what a rank still has to say to the present coordinator: they arrive in any
order, twice, and are said anew in a new view. Time may run out at any moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpift.core.saving import (
    Abandon,
    Assemble,
    Assign,
    Gathering,
    Installed,
    Instructions,
    Offered,
    Origin,
    PatienceOver,
    Refused,
    Skipped,
    TimeOver,
)

OWNERS = (0, 1, 2)
ORIGIN = Origin("h", "l", OWNERS)
OTHER = Origin("other history", "l", OWNERS)


@dataclass(frozen=True)
class Saving:
    """A state of the whole system. ``written`` has (share, member, origin) of what is durable;
    ``held`` the shares whose snapshot is whole, by owner."""

    living: frozenset[int]
    held: frozenset[int]
    written: frozenset[tuple[int, int, Origin]]
    asked: frozenset[tuple[int, int]]  # (share, member): has to write it or refuse
    skipped: frozenset[int]
    machine: Gathering
    deaths: int
    failures: int  # of writing, that may still happen
    outcome: str = ""
    assembled: tuple[tuple[int, int, Origin], ...] = ()


@dataclass(frozen=True)
class Job:
    """``nodes`` of the members; ``diverged``: members whose snapshot is of another history;
    ``skipping``: members that may take no snapshot."""

    nodes: tuple[str, ...] = ("a", "a", "a")
    deaths: int = 2
    failures: int = 1
    diverged: frozenset[int] = frozenset()
    skipping: frozenset[int] = frozenset()
    machine: type[Gathering] = Gathering

    def initial(self) -> Saving:
        living = frozenset(OWNERS)
        empty: frozenset = frozenset()
        return Saving(
            living, empty, empty, empty, empty, self._fresh(living), self.deaths, self.failures
        )

    def _fresh(self, living: frozenset[int]) -> Gathering:
        return self.machine(living, tuple(enumerate(self.nodes)))

    def _origin(self, share: int) -> Origin:
        return OTHER if share in self.diverged else ORIGIN

    def actions(self, state: Saving) -> Iterable[tuple[str, Saving]]:
        if state.outcome:
            return
        yield from self._writing(state)
        yield from self._saying(state)
        if state.machine.origin is not None:
            yield "patience is over", self._feed(state, PatienceOver())
        yield "time is over", self._feed(state, TimeOver("slow"))
        if state.deaths:
            for member in sorted(state.living):
                if len(state.living) > 1:
                    yield f"{member} dies", self._die(state, member)

    def _writing(self, state: Saving) -> Iterable[tuple[str, Saving]]:
        for member in sorted(state.living - state.held - state.skipped):
            yield f"{member} takes its snapshot", replace(state, held=state.held | {member})
            if member in self.skipping:
                yield f"{member} skips", replace(state, skipped=state.skipped | {member})
        own = {(member, member) for member in state.living & state.held}
        done = {(share, member) for share, member, _ in state.written}
        for share, member in sorted((own | set(state.asked)) - done):
            if share in state.held and self.nodes[share] == self.nodes[member]:
                piece = (share, member, self._origin(share))
                written = replace(state, written=state.written | {piece})
                yield f"{member} writes share {share}", written
            if share not in state.held or state.failures:
                spent = state.failures - (share in state.held)
                after = replace(state, failures=spent, asked=state.asked - {(share, member)})
                yield (
                    f"{member} can't write {share}",
                    self._feed(after, Refused(member, share, self._origin(share))),
                )

    def _saying(self, state: Saving) -> Iterable[tuple[str, Saving]]:
        for share, member, origin in sorted(state.written):
            if member in state.living:
                offered = Offered(member, share, origin)
                yield f"{member} offers share {share}", self._feed(state, offered)
        for member in sorted(state.skipped & state.living):
            yield f"{member} says it skips", self._feed(state, Skipped(member, "busy"))

    def _die(self, state: Saving, member: int) -> Saving:
        living = state.living - {member}
        led = min(state.living) == member
        after = replace(
            state,
            living=living,
            deaths=state.deaths - 1,
            asked=frozenset(pair for pair in state.asked if pair[1] in living and not led),
        )
        if led:  # the next coordinator has heard nothing yet
            return replace(after, machine=self._fresh(living))
        return self._feed(after, Installed(tuple(sorted(living))))

    def _feed(self, state: Saving, event: object) -> Saving:
        machine, instructions = state.machine.handle(event)  # type: ignore[arg-type]
        return self._carry_out(replace(state, machine=machine), instructions)

    def _carry_out(self, state: Saving, instructions: Instructions) -> Saving:
        for instruction in instructions:
            match instruction:
                case Assign(member, share, _):
                    state = replace(state, asked=state.asked | {(share, member)})
                case Assemble(origin, sources):
                    pieces = tuple((share, m, origin) for share, m in enumerate(sources))
                    state = replace(state, outcome="assembled", assembled=pieces)
                case Abandon(_, skipped):
                    state = replace(state, outcome="skipped" if skipped else "abandoned")
        return state

    def violation(self, state: Saving) -> str | None:
        if state.outcome == "assembled":
            if len(state.assembled) != len(OWNERS):
                return "assembled with a share missing"
            if not set(state.assembled) <= state.written:
                return "assembled with a share that nobody has written"
            if self.diverged and self.diverged != frozenset(OWNERS):
                return "assembled of two histories"
        for share, member in state.asked:
            if self.nodes[share] != self.nodes[member]:
                return f"{member} was asked for a snapshot in the memory of another node"
            if member not in state.living:
                return "a dead rank is waited for"
        if state.outcome == "skipped" and not state.skipped:
            return "skipped although nobody has"
        return None

    def final(self, state: Saving) -> bool:
        return bool(state.outcome)
