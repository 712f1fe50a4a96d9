"""What goes into and comes out of ``commit``: events, instructions, and what a member remembers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from mpift.core.ballots import NO_BALLOT, Ballot, Content, Message, Proposal, Standing, State, Word
from mpift.core.membership import View

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Propose:
    """This member proposes ``version``, of which it holds ``content``; None: not yet."""

    version: int
    content: Content | None


@dataclass(frozen=True, slots=True)
class Held:
    """This member holds ``version``, or has held it: it is to be proposed, if nobody has."""

    version: int
    content: Content | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """This member's part of ``proposal`` is ready; None: it does not have it, and won't."""

    proposal: Proposal
    content: Content | None


@dataclass(frozen=True, slots=True)
class Received:
    """A message has arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class TimedOut:
    """``proposal`` has waited too long for others."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Installed:
    """A new view is in force; its members are some of the old one's."""

    view: View


Event = Propose | Held | Prepared | Received | TimedOut | Installed

# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to these members."""

    message: Message
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make this member's part of ``proposal`` ready, then say ``Prepared``."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep this entry, through a crash where the subject says so, before anything else is done."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Decided:
    """``proposal`` is decided: with ``content`` it is committed, else aborted. ``refused`` are the
    newest versions of members that voted no, as far as this one has heard of them."""

    proposal: Proposal
    committed: bool
    content: Content | None
    refused: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Stale:
    """Nothing comes of this member's ``version``, or it won't learn what did: it or others are at
    ``newest`` already."""

    version: int
    newest: int


Instruction = Send | Prepare | Remember | Decided | Stale
Instructions = tuple[Instruction, ...]

# -- what a member knows of a proposal ---------------------------------------------------------


class Answer(NamedTuple):
    """What a coordinator has heard from one member in its present phase."""

    member: int
    standing: Standing
    newest: int = -1


@dataclass(frozen=True, slots=True)
class Lead:
    """A member as coordinator of one ballot. ``phase`` is the word that it waits for answers to."""

    ballot: Ballot
    phase: Word
    content: Content | None = None
    answers: tuple[Answer, ...] = ()
    tries: int = 0

    def hear(self, answer: Answer) -> Lead:
        others = tuple(known for known in self.answers if known.member != answer.member)
        return replace(self, answers=tuple(sorted((*others, answer))))


@dataclass(frozen=True, slots=True)
class Entry:
    """Where this member stands in one proposal."""

    proposal: Proposal
    state: State = State.WAITING
    promised: Ballot = NO_BALLOT
    attempt: Ballot = NO_BALLOT
    content: Content | None = None
    lead: Lead | None = None

    @property
    def standing(self) -> Standing:
        return Standing(self.state, self.attempt, self.content)
