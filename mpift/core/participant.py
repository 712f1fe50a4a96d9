"""One member of the quorum three-phase commit, apart from its part as a coordinator (``commit``).

Here is what a member knows and must remember, and how it follows a coordinator's words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from mpift.core.ballots import NO_BALLOT, TABLE, Ballot, Content, Message, Proposal, State, Word
from mpift.core.commit_events import Decided, Entry, Instructions, Remember, Send
from mpift.core.membership import View

_Kind = TypeVar("_Kind", bound="Participant")

# Decided proposals that a member can still answer for. Asked about an older one it says only that
# it has passed it.
REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Participant:
    """One member's state for one subject. ``retries`` is how often votes are asked for again."""

    member: int
    view: View
    retries: int = 0
    newest: int = -1  # version that this member has voted for, or knows to be committed
    committed: int = -1  # the newest of those that it knows to be committed
    remembered: int = REMEMBERED
    forgotten: int = -1  # the newest version that this member may have decided and forgotten
    entries: tuple[Entry, ...] = ()  # oldest first

    @property
    def open(self) -> tuple[Proposal, ...]:
        """Proposals that this member waits for others in: they may time out."""
        return tuple(entry.proposal for entry in self.entries if not entry.state.decided)

    @classmethod
    def recovered(
        cls: type[_Kind], member: int, view: View, entries: Iterable[Entry], retries: int = 0
    ) -> _Kind:
        """A member after a crash, from the last ``Remember`` of each proposal. Also what it has
        only pre-committed or pre-aborted counts as voted for: it may have been."""
        kept = sorted((replace(e, lead=None) for e in entries), key=lambda e: e.proposal)
        voted = [e.proposal.version for e in kept if e.state not in (State.WAITING, State.REFUSED)]
        done = [e.proposal.version for e in kept if e.state is State.COMMITTED]
        newest, committed = max(voted, default=-1), max(done, default=-1)
        return cls(member, view, retries, newest, committed, entries=tuple(kept))

    def leads(self, proposal: Proposal) -> bool:
        """Whether this member is coordinator of a ballot for ``proposal``."""
        return self._entry(proposal).lead is not None

    # -- entries -------------------------------------------------------------------------------

    def _entry(self, proposal: Proposal) -> Entry:
        return next((e for e in self.entries if e.proposal == proposal), Entry(proposal))

    def _with(self: _Kind, entry: Entry) -> _Kind:
        others = (e for e in self.entries if e.proposal != entry.proposal)
        entries = sorted((*others, entry), key=lambda e: e.proposal)
        decided = [e.proposal.version for e in entries if e.state.decided]
        forgotten = max([self.forgotten, *decided[: -self.remembered]])
        kept = (e for e in entries if e.proposal.version > forgotten or not e.state.decided)
        return replace(self, entries=tuple(kept), forgotten=forgotten)

    def _of_version(self, version: int) -> Entry | None:
        """What this member knows of any proposal of ``version``, a committed one first."""
        found = [e for e in self.entries if e.proposal.version == version]
        return max(found, key=lambda e: e.state == State.COMMITTED, default=None)

    def _word(self, word: Word, entry: Entry, ballot: Ballot) -> Message:
        message = Message(word, entry.proposal, self.view.epoch, self.member, ballot)
        match word:
            case Word.PRE_COMMIT | Word.COMMITTED:
                return replace(message, content=entry.content)
            case Word.VOTE:
                newest = self.newest if entry.state is State.REFUSED else -1
                return replace(message, content=entry.content, state=entry.state, newest=newest)
            case Word.STANDS:
                attempt, content = entry.attempt, entry.content
                return replace(message, state=entry.state, attempt=attempt, content=content)
        return message

    def _tell(self, word: Word, entry: Entry, ballot: Ballot, *members: int) -> Send:
        return Send(self._word(word, entry, ballot), members)

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(m for m in self.view.members if m != self.member)

    # -- following a coordinator ---------------------------------------------------------------

    def _refuses(self, version: int) -> bool:
        """Versions only grow: nobody votes twice for one, nor for an older one."""
        return version <= self.newest

    def _is_below(self, ballot: Ballot, entry: Entry) -> bool:
        return ballot < entry.promised

    def _decision(self, entry: Entry, member: int) -> Send:
        word = Word.COMMITTED if entry.state is State.COMMITTED else Word.ABORTED
        return self._tell(word, entry, NO_BALLOT, member)

    def _obey(self: _Kind, entry: Entry, message: Message) -> tuple[_Kind, Instructions]:
        """A coordinator's word that this member has to follow, by the table."""
        state, answer = TABLE[message.word]
        assert answer is not None
        lead = entry.lead if message.ballot == entry.promised else None
        after = replace(entry, promised=message.ballot, lead=lead)
        if state is not None:
            after = replace(after, state=state, attempt=message.ballot, content=message.content)
        reply = self._tell(answer, after, message.ballot, message.sender)
        return self._with(after), (Remember(after), reply)

    def _passed(self, message: Message) -> Send:
        newest = max(self.newest, self.forgotten)
        answer = Message(
            Word.PASSED, message.proposal, self.view.epoch, self.member, NO_BALLOT, newest=newest
        )
        return Send(answer, (message.sender,))

    def _decide(
        self: _Kind, entry: Entry, word: Word, content: Content | None
    ) -> tuple[_Kind, Instructions]:
        committed = word is Word.COMMITTED
        refused: tuple[tuple[int, int], ...] = ()
        if entry.lead is not None and not committed:
            refused = tuple(
                (answer.member, answer.newest)
                for answer in entry.lead.answers
                if answer.standing.state is State.REFUSED
            )
        after = replace(
            entry,
            state=TABLE[word][0] or entry.state,
            promised=NO_BALLOT,
            attempt=NO_BALLOT,
            content=content if committed else None,
            lead=None,
        )
        version = entry.proposal.version if committed else -1
        state = replace(
            self._with(after),
            newest=max(self.newest, version),
            committed=max(self.committed, version),
        )
        done = Decided(entry.proposal, committed, after.content, refused)
        return state, (Remember(after), done)
