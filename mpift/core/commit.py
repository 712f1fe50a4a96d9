"""Quorum three-phase commit: versions of a state that all members hold, decided by a majority.

PREPARE: members make their part ready and vote with what they hold. PRE_COMMIT, once a majority of
the view holds the same. COMMITTED, once a majority has acknowledged that: only now it is decided.
Where a coordinator falls silent or a view changes, another one asks a quorum where it stands and
goes by ``ballots.conclude``. So there are never two decisions, and a majority that can talk to each
other always comes to one: which ballots a member has promised, and what it pre-committed, is what
it must remember; ``Remember`` comes before the words that rest on it.

``Commit`` is one member's state for one subject. A frozen value: ``handle`` returns the next state
and the instructions to carry out, in order. It has no clock: whoever drives it says ``TimedOut`` of
a proposal that has waited too long here (``Commit.open``); a member further down in rank order
should wait longer, so that not all become coordinators at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpift.core.ballots import (
    DECISIONS,
    NO_BALLOT,
    TABLE,
    Ballot,
    Content,
    Message,
    Proposal,
    Standing,
    State,
    Word,
    chosen,
    conclude,
    needed,
    wished,
)
from mpift.core.commit_events import (
    Answer,
    Decided,
    Entry,
    Event,
    Held,
    Installed,
    Instruction,
    Instructions,
    Lead,
    Prepare,
    Prepared,
    Propose,
    Received,
    Remember,
    Send,
    Stale,
    TimedOut,
)
from mpift.core.membership import View
from mpift.core.participant import Participant


@dataclass(frozen=True, slots=True)
class Commit(Participant):
    """See the module's docstring."""

    def handle(self, event: Event) -> tuple[Commit, Instructions]:
        """The state after ``event``, and what to do, in order."""
        match event:
            case Propose(version, content):
                return self._propose(version, content)
            case Held(version, content):
                return self._hold(version, content)
            case Prepared(proposal, content):
                return self._vote(self._entry(proposal), content)
            case Received(message):
                return self._receive(message)
            case TimedOut(proposal):
                return self._time_out(self._entry(proposal))
            case Installed(view):
                return self._install(view)

    def _needed(self, lead: Lead, proposal: Proposal) -> int:
        return needed(proposal, self.view.size)

    # -- proposing and voting --------------------------------------------------------------------

    def _hold(self, version: int, content: Content | None) -> tuple[Commit, Instructions]:
        entry = self._of_version(version)
        if entry is not None and entry.state.decided:
            committed = entry.state is State.COMMITTED
            return self, (Decided(entry.proposal, committed, entry.content),)
        if entry is not None:
            return self, ()
        if self._refuses(version):
            return self, (Stale(version, self.newest),)
        if self.view.coordinator == self.member:
            return self._propose(version, content)
        wish = Message(Word.HELD, wished(version), self.view.epoch, self.member, NO_BALLOT)
        return self, (Send(wish, (self.view.coordinator,)),)

    def _take_wish(self, message: Message) -> tuple[Commit, Instructions]:
        """Another member holds a version that it has not been asked for."""
        version = message.proposal.version
        entry = self._of_version(version)
        if entry is not None:
            told = entry.state.decided
            return self, ((self._decision(entry, message.sender),) if told else ())
        if self._refuses(version):
            return self, (self._passed(message),)
        return self._propose(version, None)

    def _propose(self, version: int, content: Content | None) -> tuple[Commit, Instructions]:
        if self._refuses(version):
            return self, (Stale(version, self.newest),)
        proposal = Proposal(version, self.view.epoch, self.member, self.view.size)
        ballot = Ballot(self.view.epoch, 0)
        entry = Entry(proposal, promised=ballot, lead=Lead(ballot, Word.PREPARE))
        asked = self._tell(Word.PREPARE, entry, ballot, *self._others)
        if content is None:
            return self._with(entry), (asked, Prepare(proposal))
        state, voted = self._with(entry)._vote(entry, content)
        return state, (asked, *voted)

    def _vote(self, entry: Entry, content: Content | None) -> tuple[Commit, Instructions]:
        """This member's part of a proposal that it was asked for is ready, or never will be."""
        proposal = entry.proposal
        if entry.state is not State.WAITING or entry.promised != Ballot(self.view.epoch, 0):
            return self, ()  # it has voted, or promised another coordinator not to
        if content is None or self._refuses(proposal.version):
            after, state = replace(entry, state=State.REFUSED), self
        else:
            after = replace(entry, state=State.VOTED, content=content)
            state = replace(self, newest=max(self.newest, proposal.version))
        vote = state._word(Word.VOTE, after, entry.promised)
        state = state._with(after)
        if proposal.proposer == self.member:
            state, more = state._take_answer(vote)
            return state, (Remember(after), *more)
        return state, (Remember(after), Send(vote, (proposal.proposer,)))

    def _prepare(self, entry: Entry, message: Message) -> tuple[Commit, Instructions]:
        if entry.state is not State.WAITING:
            vote = self._tell(Word.VOTE, entry, message.ballot, message.sender)
            return self, (vote,)
        state = self._with(replace(entry, promised=message.ballot))
        if self._refuses(entry.proposal.version):
            return state._vote(state._entry(entry.proposal), None)
        return state, (Prepare(entry.proposal),)

    # -- what comes in -------------------------------------------------------------------------

    def _receive(self, message: Message) -> tuple[Commit, Instructions]:
        if message.epoch != self.view.epoch:
            return self, ()
        if message.word is Word.HELD:
            return self._take_wish(message)
        if message.word is Word.PASSED:
            return self._be_passed(message)
        entry = self._entry(message.proposal)
        if message.proposal.version <= self.forgotten and entry not in self.entries:
            asks = message.word not in DECISIONS
            return self, ((self._passed(message),) if asks else ())
        if message.word is Word.OUTBID:
            return self._outbid(entry, message)
        if message.word in (*TABLE, Word.OPEN):
            return self._follow(entry, message)
        return self._take_answer(message)

    def _follow(self, entry: Entry, message: Message) -> tuple[Commit, Instructions]:
        """A coordinator's word, or the wish for one."""
        if entry.state.decided:
            known = message.word in DECISIONS
            return self, (() if known else (self._decision(entry, message.sender),))
        if message.word is Word.OPEN:
            return self._ask(entry) if entry.lead is None else (self, ())
        if message.word in DECISIONS:
            return self._decide(entry, message.word, message.content)
        if self._is_below(message.ballot, entry):
            return self, (self._tell(Word.OUTBID, entry, entry.promised, message.sender),)
        if message.word is Word.PREPARE:
            return self._prepare(entry, message)
        return self._obey(entry, message)

    def _be_passed(self, message: Message) -> tuple[Commit, Instructions]:
        """Nobody will tell what became of a version, so this member does not say it either."""
        version, entry = message.proposal.version, self._entry(message.proposal)
        told = (Stale(version, message.newest),)
        if entry not in self.entries or entry.state.decided:
            known = self._of_version(version) is not None
            return self, (() if known else told)
        rest = tuple(e for e in self.entries if e != entry)
        forgotten = max(self.forgotten, version)
        return replace(self, entries=rest, forgotten=forgotten), told

    # -- as coordinator --------------------------------------------------------------------------

    def _outbid(self, entry: Entry, message: Message) -> tuple[Commit, Instructions]:
        """Somebody follows another coordinator: so does this member, until that one is silent."""
        lead = entry.lead
        if lead is None or message.ballot <= lead.ballot:
            return self, ()
        return self._with(replace(entry, lead=None, promised=message.ballot)), ()

    def _take_answer(self, message: Message) -> tuple[Commit, Instructions]:
        entry = self._entry(message.proposal)
        lead = entry.lead
        expected = TABLE[lead.phase][1] if lead is not None else None
        if lead is None or lead.ballot != message.ballot or message.word is not expected:
            return self, ()
        standing = Standing(message.state, message.attempt, message.content)
        lead = lead.hear(Answer(message.sender, standing, message.newest))
        entry = replace(entry, lead=lead)
        return self._with(entry)._advance(entry, lead)

    def _advance(self, entry: Entry, lead: Lead) -> tuple[Commit, Instructions]:
        """Go on to the next phase if enough have answered."""
        heard = [answer.standing for answer in lead.answers]
        if lead.phase is Word.PREPARE:
            votes = [s.content if s.state is State.VOTED else None for s in heard]
            content, possible = chosen(entry.proposal, votes, self.view.size)
            if content is not None:
                return self._drive(entry, Word.PRE_COMMIT, content)
            # Nobody can have pre-committed, as only this ballot could have asked for it.
            return (self, ()) if possible else self._announce(entry, Word.ABORTED, None)
        if lead.phase is Word.ASK and any(standing.state.decided for standing in heard):
            return self._announce(entry, *conclude(heard))
        if len(heard) < self._needed(lead, entry.proposal):
            return self, ()
        if lead.phase is Word.ASK:
            return self._drive(entry, *conclude(heard))
        word = Word.COMMITTED if lead.phase is Word.PRE_COMMIT else Word.ABORTED
        return self._announce(entry, word, lead.content)

    def _drive(
        self, entry: Entry, word: Word, content: Content | None
    ) -> tuple[Commit, Instructions]:
        """Ask all to pre-commit or pre-abort, this member first."""
        assert entry.lead is not None
        ballot, after_state = entry.lead.ballot, TABLE[word][0]
        assert after_state is not None
        lead = Lead(ballot, word, content)
        after = replace(entry, state=after_state, attempt=ballot, content=content, lead=lead)
        state = self._with(after)
        asked = self._tell(word, after, ballot, *self._others)
        state, more = state._take_answer(state._word(Word.ACKNOWLEDGE, after, ballot))
        return state, (Remember(after), asked, *more)

    def _announce(
        self, entry: Entry, word: Word, content: Content | None
    ) -> tuple[Commit, Instructions]:
        """It is decided: tell everybody."""
        state, done = self._decide(entry, word, content)
        told = self._tell(word, replace(entry, content=content), NO_BALLOT, *self._others)
        return state, (*done, told)

    def _ask(self, entry: Entry) -> tuple[Commit, Instructions]:
        """Become the coordinator of a new ballot, the next that is this member's."""
        epoch, size, rank = self.view.epoch, self.view.size, self.view.rank_of(self.member)
        last = entry.promised.number if entry.promised.epoch == epoch else 0
        number = last + 1 + (rank - last - 1) % size
        ballot = Ballot(epoch, number)
        after = replace(entry, promised=ballot, lead=Lead(ballot, Word.ASK))
        state = self._with(after)
        asked = self._tell(Word.ASK, after, ballot, *self._others)
        state, more = state._take_answer(state._word(Word.STANDS, after, ballot))
        return state, (Remember(after), asked, *more)

    # -- time and views ----------------------------------------------------------------------------

    def _time_out(self, entry: Entry) -> tuple[Commit, Instructions]:
        lead = entry.lead
        if entry.state.decided or entry.proposal not in self.open:
            return self, ()
        if lead is None:
            return self._ask(entry)
        if lead.phase is Word.PREPARE and lead.tries >= self.retries:
            return self._announce(entry, Word.ABORTED, None)
        heard = {answer.member for answer in lead.answers}
        missing = tuple(m for m in self._others if m not in heard)
        after = replace(entry, lead=replace(lead, tries=lead.tries + 1))
        said = replace(after, content=lead.content) if lead.phase is not Word.ASK else after
        return self._with(after), (self._tell(lead.phase, said, lead.ballot, *missing),)

    def _install(self, view: View) -> tuple[Commit, Instructions]:
        """Ballots of the old view are void: the new coordinator decides what is open."""
        entries = tuple(replace(entry, lead=None) for entry in self.entries)
        state = replace(self, view=view, entries=entries)
        instructions: list[Instruction] = []
        for proposal in state.open:
            entry = state._entry(proposal)
            if view.coordinator == self.member:
                state, more = state._ask(entry)
                instructions += more
            else:
                instructions.append(state._tell(Word.OPEN, entry, NO_BALLOT, view.coordinator))
        return state, tuple(instructions)
