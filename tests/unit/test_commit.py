"""The rules of the three-phase commit, and one member's machine; all orders: tests/model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpift.core.ballots import (
    NO_BALLOT,
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
    tables,
)
from mpift.core.commit import REMEMBERED, Commit
from mpift.core.commit_events import (
    Decided,
    Entry,
    Instruction,
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

VIEW = View(0, (0, 1, 2, 3))
MINE, OTHER = Content("history", "mine"), Content("history", "other")
PROPOSAL = Proposal(7, 0, 0, 4)
FIRST = Ballot(0, 0)


def hear(
    machine: Commit, word: Word, sender: int, ballot: Ballot = FIRST, **fields: object
) -> tuple:
    message = Message(word, PROPOSAL, machine.view.epoch, sender, ballot, **fields)  # type: ignore[arg-type]
    return machine.handle(Received(message))


def sent(instructions: tuple[Instruction, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(i.message.word.name, i.members) for i in instructions if isinstance(i, Send)]


def proposed(retries: int = 0) -> Commit:
    return Commit(0, VIEW, retries).handle(Propose(7, MINE))[0]


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "present", "enough"), [(3, 3, 2), (4, 4, 3), (5, 3, 3), (5, 2, 2), (1, 1, 1)]
)
def test_a_quorum_is_a_majority_of_the_view_it_was_proposed_in_or_all_that_are_left(
    size: int, present: int, enough: int
) -> None:
    assert needed(Proposal(1, 0, 0, size), present) == enough


@pytest.mark.parametrize(
    ("votes", "found"),
    [
        ([MINE, MINE], (None, True)),
        ([MINE, MINE, MINE], (MINE, True)),
        ([MINE, OTHER], (None, True)),
        ([MINE, OTHER, MINE, OTHER], (None, False)),
        ([MINE, None], (None, True)),
        ([MINE, None, None], (None, False)),
        ([OTHER, MINE, OTHER, OTHER], (OTHER, True)),
    ],
)
def test_a_version_needs_a_majority_that_holds_the_same(votes: list, found: tuple) -> None:
    assert chosen(PROPOSAL, votes, 4) == found


def test_a_decision_wins_then_the_highest_attempt_and_otherwise_it_is_aborted() -> None:
    early, late = Ballot(0, 1), Ballot(0, 2)
    pre_committed = Standing(State.PRE_COMMITTED, early, MINE)
    assert conclude([Standing(State.ABORTED), pre_committed]) == (Word.ABORTED, None)
    assert conclude([pre_committed, Standing(State.COMMITTED, NO_BALLOT, MINE)])[1] == MINE
    assert conclude([pre_committed, Standing(State.VOTED)]) == (Word.PRE_COMMIT, MINE)
    assert conclude([pre_committed, Standing(State.PRE_ABORTED, late)]) == (Word.PRE_ABORT, None)
    assert conclude([Standing(State.VOTED, NO_BALLOT, MINE)]) == (Word.PRE_ABORT, None)


# -- a proposer ------------------------------------------------------------------------------------


def test_votes_that_are_missing_are_asked_for_again_until_retries_are_over() -> None:
    machine = proposed(retries=1)
    machine, _ = hear(machine, Word.VOTE, 2, content=MINE, state=State.VOTED)
    machine, instructions = machine.handle(TimedOut(PROPOSAL))
    assert sent(instructions) == [("PREPARE", (1, 3))]
    _, instructions = machine.handle(TimedOut(PROPOSAL))
    assert sent(instructions) == [("ABORTED", (1, 2, 3))]


def test_a_proposer_learns_which_newer_version_others_have() -> None:
    machine = proposed()
    for member in (1, 2):
        fields = {"state": State.REFUSED, "newest": 8 + member}
        machine, instructions = hear(machine, Word.VOTE, member, **fields)
    assert Decided(PROPOSAL, False, None, ((1, 9), (2, 10))) in instructions


def test_an_older_or_equal_version_is_not_proposed() -> None:
    machine = proposed()
    assert machine.handle(Propose(7, OTHER)) == (machine, (Stale(7, 7),))


def test_what_others_hold_is_committed_also_against_the_proposer() -> None:
    machine = proposed()
    for member in (1, 2, 3):
        machine, _ = hear(machine, Word.VOTE, member, content=OTHER, state=State.VOTED)
    for member in (1, 2):
        machine, instructions = hear(machine, Word.ACKNOWLEDGE, member)
    assert Decided(PROPOSAL, True, OTHER) in instructions
    assert machine.committed == 7


# -- a participant ---------------------------------------------------------------------------------


def test_a_vote_is_remembered_before_it_is_sent() -> None:
    machine, instructions = hear(Commit(1, VIEW), Word.PREPARE, 0)
    assert instructions == (Prepare(PROPOSAL),)
    machine, instructions = machine.handle(Prepared(PROPOSAL, MINE))
    assert [type(i) for i in instructions] == [Remember, Send]
    assert instructions[0].entry.state is State.VOTED
    assert sent(instructions) == [("VOTE", (0,))]


def test_nobody_votes_for_a_proposal_once_it_has_promised_a_later_ballot() -> None:
    machine, _ = hear(Commit(1, VIEW), Word.PREPARE, 0)
    machine, _ = hear(machine, Word.ASK, 2, Ballot(0, 2))
    assert machine.handle(Prepared(PROPOSAL, MINE)) == (machine, ())


def test_after_a_crash_a_member_knows_what_it_remembered() -> None:
    voted = Entry(PROPOSAL, State.VOTED, FIRST, NO_BALLOT, MINE)
    done = Entry(Proposal(5, 0, 0, 4), State.COMMITTED, content=MINE)
    machine = Commit.recovered(1, VIEW, [voted, done])
    assert (machine.newest, machine.committed, machine.open) == (7, 5, (PROPOSAL,))
    _, instructions = hear(machine, Word.ASK, 2, Ballot(0, 2))
    (answer,) = [i.message for i in instructions if isinstance(i, Send)]
    assert (answer.state, answer.content) == (State.VOTED, MINE)


def test_what_is_too_old_to_be_remembered_is_neither_answered_nor_waited_for() -> None:
    machine, _ = hear(Commit(1, VIEW), Word.PREPARE, 0)
    assert machine.open == (PROPOSAL,)
    for version in range(100, 100 + REMEMBERED + 1):
        message = Message(Word.COMMITTED, Proposal(version, 0, 0, 4), 0, 0, NO_BALLOT, content=MINE)
        machine, _ = machine.handle(Received(message))
    assert machine.open == ()
    assert len(machine.entries) == REMEMBERED
    assert hear(machine, Word.ASK, 2, Ballot(0, 2)) == (machine, ())


def test_words_of_another_view_are_void() -> None:
    message = Message(Word.PREPARE, PROPOSAL, 1, 0, FIRST)
    machine = Commit(1, VIEW)
    assert machine.handle(Received(message)) == (machine, ())


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "agreement.md"
    text = page.read_text(encoding="utf-8")
    shown = text.partition("<!-- tables -->\n")[2].partition("<!-- end of tables -->")[0]
    assert shown == tables()
