"""Gathering the parts of one checkpoint: who has written which share, and who takes over whose.

The coordinator of the view gathers. Each member that took part in the snapshot owns one share of
the state, the one of its position among them, writes it and offers its part. Where an owner dies or
is slow, another member that still holds the snapshot of that share is asked; who does not have it
says so. Once every share is there, with one history and one layout, the parts are assembled; where
that can't be any more, the checkpoint is given up, which costs nothing that was committed before.

``Gathering`` is a frozen value: ``handle`` returns the next state and the instructions, in order.
It has no clock: whoever drives it says that the patience with slow owners is over, or the time for
all of it. A new coordinator starts with an empty one, and members offer again. What is assembled is
decided by the three-phase commit (``core.commit``), not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias


class Origin(NamedTuple):
    """What parts must have in common: blocks of different origins never mix."""

    history: str  # running hash of the rounds applied
    layout: str  # digest of the list of tensors
    owners: tuple[int, ...]  # members of the view of the snapshot; share i is owners[i]'s


@dataclass(frozen=True, slots=True)
class Offered:
    """``member`` has written ``share``, its own or another's."""

    member: int
    share: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Refused:
    """``member`` was asked for ``share`` and does not hold it, or can't write it; or its own, of
    ``origin``."""

    member: int
    share: int
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """``member`` takes no snapshot at this step: nobody will ever have its share."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class Installed:
    """The members of a new view."""

    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """Slow owners have had enough time."""


@dataclass(frozen=True, slots=True)
class TimeOver:
    """The checkpoint as a whole has."""

    reason: str


Event: TypeAlias = Offered | Refused | Skipped | Installed | PatienceOver | TimeOver


@dataclass(frozen=True, slots=True)
class Assign:
    """Ask ``member`` to write ``share``, whose owner is ``owner``."""

    member: int
    share: int
    owner: int


@dataclass(frozen=True, slots=True)
class Assemble:
    """All is there: share i as it was offered by ``sources[i]``."""

    origin: Origin
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing comes of this checkpoint; ``skipped``: because a rank was not ready for it, which is
    no failure."""

    reason: str
    skipped: bool = False


Instruction: TypeAlias = Assign | Assemble | Abandon
Instructions: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Gathering:
    """See the module's docstring. ``nodes`` has (member, its node) of the members of the launch."""

    living: frozenset[int]
    nodes: tuple[tuple[int, str], ...]
    origins: frozenset[Origin] = frozenset()  # that somebody has a snapshot of
    parts: frozenset[tuple[Origin, int, int]] = frozenset()  # (origin, share, who wrote it)
    asked: frozenset[tuple[int, int]] = frozenset()  # (share, member), not answered yet
    refused: frozenset[tuple[int, int]] = frozenset()  # (share, member)
    impatient: bool = False
    over: bool = False  # assembled or given up

    def handle(self, event: Event) -> tuple[Gathering, Instructions]:
        """The state after ``event``, and what to do, in order."""
        if self.over:
            return self, ()
        match event:
            case Offered(member, share, origin):
                if not 0 <= share < len(origin.owners) or share in self._sources(origin):
                    return self, ()
                parts = self.parts | {(origin, share, member)}
                asked = frozenset(pair for pair in self.asked if pair[0] != share)
                return replace(self, parts=parts, asked=asked)._seen(origin)._advance()
            case Refused(member, share, of):
                pair = (share, member)
                refused = self.refused | {pair}
                state = replace(self, asked=self.asked - {pair}, refused=refused)
                return (state if of is None else state._seen(of))._advance()
            case Skipped(member, reason):
                told = f"rank {member} took no snapshot: {reason}"
                return replace(self, over=True), (Abandon(told, skipped=True),)
            case Installed(members):
                living = frozenset(members)
                # Who was asked may not have heard of it, or the answer is lost with the view.
                return replace(self, living=living, asked=frozenset())._advance()
            case PatienceOver():
                return replace(self, impatient=True)._advance()
            case TimeOver(reason):
                return self._give_up(f"{reason}{self._missing_words()}")

    @property
    def origin(self) -> Origin | None:
        """That of the living, who all have one history; else the one that most shares are there
        of."""
        return max(self.origins, key=self._precedence, default=None)

    def _precedence(self, origin: Origin) -> tuple[bool, int, Origin]:
        sources = self._sources(origin)
        lives = any(origin.owners[share] in self.living for share in sources)
        return lives, len(sources), origin

    def _seen(self, origin: Origin) -> Gathering:
        return replace(self, origins=self.origins | {origin})

    @property
    def missing(self) -> tuple[int, ...]:
        """Shares of ``origin`` that are not there."""
        origin = self.origin
        if origin is None:
            return ()
        there = self._sources(origin)
        return tuple(share for share in range(len(origin.owners)) if share not in there)

    def _sources(self, origin: Origin) -> dict[int, int]:
        return {share: member for of, share, member in self.parts if of == origin}

    def _advance(self) -> tuple[Gathering, Instructions]:
        origin = self.origin
        if origin is None:
            return self, ()
        missing = self.missing
        if not missing:
            sources = tuple(member for _, member in sorted(self._sources(origin).items()))
            return replace(self, over=True), (Assemble(origin, sources),)
        asked, instructions = dict(self.asked), []
        for share in missing:
            owner = origin.owners[share]
            gone, failed = owner not in self.living, (share, owner) in self.refused
            if share in asked or not (gone or failed or self.impatient):
                continue
            candidate = next(self._candidates(share, owner), None)
            if candidate is not None:
                asked[share] = candidate
                instructions.append(Assign(candidate, share, owner))
            elif gone or failed:
                what = "is lost" if gone else "can't write its share"
                return self._give_up(f"rank {owner} {what}, and nobody else holds it or can")
        return replace(self, asked=frozenset(asked.items())), tuple(instructions)

    def _candidates(self, share: int, owner: int) -> Iterator[int]:
        """Snapshots are in the memory of a node."""
        nodes = dict(self.nodes)
        return (
            member
            for member in sorted(self.living)
            if member != owner
            and nodes.get(member) == nodes.get(owner)
            and (share, member) not in self.refused
        )

    def _give_up(self, reason: str) -> tuple[Gathering, Instructions]:
        return replace(self, over=True), (Abandon(reason),)

    def _missing_words(self) -> str:
        origin = self.origin
        if origin is None:
            return ""
        owners = ", ".join(str(origin.owners[share]) for share in self.missing)
        return f"; missing are the shares of ranks {owners}"
