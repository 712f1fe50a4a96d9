"""Words and tables of the quorum three-phase commit; ``commit`` is the machine that goes by them.

A *proposal* is one version of something that all members hold a copy of. Its *electorate* is the
view in which it was made. Members vote with the *content* that they hold; a version is committed
only if a majority of the electorate holds the same. A *ballot* is one coordinator's try to decide a
proposal, an *attempt* the last ballot in which a member has pre-committed or pre-aborted.

``TABLE`` says what a member does with a word, ``conclude`` is the termination rule. The tables of
the documentation are made from both.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Proposal(NamedTuple):
    """Which version, in which view and by whom; ``size`` is the number of members of that view."""

    version: int
    epoch: int
    proposer: int
    size: int

    def __str__(self) -> str:
        return f"version {self.version} (of member {self.proposer} in epoch {self.epoch})"


def wished(version: int) -> Proposal:
    """What stands for a version that nobody may have proposed."""
    return Proposal(version, -1, -1, 0)


class Content(NamedTuple):
    """What a member holds of a version: the history that it comes from, and a digest of it."""

    history: str
    digest: str


class Ballot(NamedTuple):
    """Ballots are ordered; 0 of an epoch is the proposer's, the others go round in rank order."""

    epoch: int
    number: int


NO_BALLOT = Ballot(-1, -1)


class State(enum.IntEnum):
    """What a member has done with a proposal."""

    WAITING = 0  # it has not voted
    VOTED = 1  # for the content that it holds
    REFUSED = 2
    PRE_COMMITTED = 3
    PRE_ABORTED = 4
    COMMITTED = 5
    ABORTED = 6

    @property
    def decided(self) -> bool:
        return self >= State.COMMITTED


class Word(enum.IntEnum):
    """What a message says. The first six are a coordinator's."""

    PREPARE = 0
    ASK = 1  # a later coordinator: "promise me this ballot, and say where you stand"
    PRE_COMMIT = 2
    PRE_ABORT = 3
    COMMITTED = 4
    ABORTED = 5
    VOTE = 6
    STANDS = 7  # where the sender stands, to a coordinator that has asked
    ACKNOWLEDGE = 8  # of a pre-commit or pre-abort
    OUTBID = 9  # the sender has promised a higher ballot
    OPEN = 10  # in a new view: "decide this one"
    HELD = 11  # to the coordinator: "I hold this version, propose it"
    PASSED = 12  # the sender can't say any more, or never could: it is past that version


@dataclass(frozen=True, slots=True)
class Message:
    """One word about one proposal. ``epoch`` is the sender's view; in another one it is void.

    ``state`` and ``attempt`` are the sender's, in ``VOTE`` and ``STANDS``; ``newest`` is the newest
    version that it has voted for, which tells why it refuses. In ``HELD``, and where that is
    answered with ``PASSED``, the proposal is ``wished(version)``.
    """

    word: Word
    proposal: Proposal
    epoch: int
    sender: int
    ballot: Ballot
    content: Content | None = None
    state: State = State.WAITING
    attempt: Ballot = NO_BALLOT
    newest: int = -1


# What a member that has not decided does with a coordinator's word whose ballot is not below the
# one that it has promised: its next state (None: as before) and its answer. With a lower ballot it
# answers OUTBID, but for a decision, which is true whatever its ballot; once it has decided, it
# answers with the decision.
TABLE: Mapping[Word, tuple[State | None, Word | None]] = {
    Word.PREPARE: (None, Word.VOTE),  # once its own part is ready
    Word.ASK: (None, Word.STANDS),
    Word.PRE_COMMIT: (State.PRE_COMMITTED, Word.ACKNOWLEDGE),
    Word.PRE_ABORT: (State.PRE_ABORTED, Word.ACKNOWLEDGE),
    Word.COMMITTED: (State.COMMITTED, None),
    Word.ABORTED: (State.ABORTED, None),
}
DECISIONS = (Word.COMMITTED, Word.ABORTED)


class Standing(NamedTuple):
    """Where one member stands, as a coordinator of a later ballot hears it."""

    state: State
    attempt: Ballot = NO_BALLOT
    content: Content | None = None


def conclude(standings: Collection[Standing]) -> tuple[Word, Content | None]:
    """The termination rule: what a later coordinator does once a quorum has said where it stands.

    Any decision wins. Otherwise the members with the highest attempt count: where they have
    pre-committed, that is driven on; else the proposal is pre-aborted (E3PC, Keidar and Dolev
    1995).
    """
    for state, word in ((State.COMMITTED, Word.COMMITTED), (State.ABORTED, Word.ABORTED)):
        for standing in standings:
            if standing.state is state:
                return word, standing.content
    last = max(standings, key=lambda standing: standing.attempt)
    if last.state is State.PRE_COMMITTED:
        return Word.PRE_COMMIT, last.content
    return Word.PRE_ABORT, None


def majority(size: int) -> int:
    """How many of ``size`` are more than half."""
    return size // 2 + 1


def needed(proposal: Proposal, present: int) -> int:
    """How many members have to agree on ``proposal`` in a view of ``present`` of its electorate.

    A majority of the electorate, so that any two quorums have a member in common, also across
    views. Where so many are gone for certain that there is none, all who are left: a view is made
    of fewer than half only if the others are known to be dead.
    """
    return min(majority(proposal.size), present)


def chosen(
    proposal: Proposal, votes: Iterable[Content | None], present: int
) -> tuple[Content | None, bool]:
    """Of the votes so far, None for a no: the content that enough members hold, if any, and whether
    there still can be one."""
    votes = list(votes)
    counts: dict[Content, int] = {}
    for vote in votes:
        if vote is not None:
            counts[vote] = counts.get(vote, 0) + 1
    enough = needed(proposal, present)
    best = max(counts, key=lambda content: counts[content], default=None)
    most = counts[best] if best is not None else 0
    return (best if most >= enough else None), most + present - len(votes) >= enough


# -- for the documentation ---------------------------------------------------------------------


def tables() -> str:
    """``TABLE`` and the termination rule's cases, as Markdown."""
    rows = ["| word | next state | answer |", "|---|---|---|"]
    for word, (state, answer) in TABLE.items():
        after = state.name if state is not None else "as before"
        rows.append(f"| {word.name} | {after} | {answer.name if answer is not None else 'none'} |")
    first, second = Ballot(0, 1), Ballot(0, 2)
    cases: Iterable[tuple[str, tuple[Standing, ...]]] = (
        (
            "somebody has committed",
            (Standing(State.COMMITTED), Standing(State.PRE_ABORTED, second)),
        ),
        ("somebody has aborted", (Standing(State.ABORTED), Standing(State.PRE_COMMITTED, first))),
        (
            "the highest attempt is a pre-commit",
            (Standing(State.PRE_COMMITTED, second), Standing(State.PRE_ABORTED, first)),
        ),
        (
            "the highest attempt is a pre-abort",
            (Standing(State.PRE_COMMITTED, first), Standing(State.PRE_ABORTED, second)),
        ),
        ("nobody has attempted anything", (Standing(State.VOTED), Standing(State.WAITING))),
    )
    rows += ["", "| of a quorum | the coordinator says |", "|---|---|"]
    rows += [f"| {words} | {conclude(standings)[0].name} |" for words, standings in cases]
    return "\n".join(rows) + "\n"
