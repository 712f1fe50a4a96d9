"""The rules of the three-phase commit, and one member's machine; all orders: tests/model."""

from __future__ import annotations

from dataclasses import replace
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
    wished,
)
from mpift.core.commit import Commit
from mpift.core.commit_events import (
    Decided,
    Entry,
    Held,
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
from mpift.core.participant import REMEMBERED

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


def test_what_is_too_old_to_be_remembered_is_told_to_be_passed() -> None:
    machine, _ = hear(Commit(1, VIEW), Word.PREPARE, 0)
    assert machine.open == (PROPOSAL,)
    for version in range(100, 100 + REMEMBERED + 1):
        message = Message(Word.COMMITTED, Proposal(version, 0, 0, 4), 0, 0, NO_BALLOT, content=MINE)
        machine, _ = machine.handle(Received(message))
    assert machine.open == (PROPOSAL,)  # others may still tell what became of it
    assert len(machine.entries) == REMEMBERED + 1
    older = Message(Word.ASK, Proposal(50, 0, 0, 4), 0, 2, Ballot(0, 2))
    _, instructions = machine.handle(Received(older))
    assert sent(instructions) == [("PASSED", (2,))]
    newest = 100 + REMEMBERED
    machine, instructions = hear(machine, Word.PASSED, 3, NO_BALLOT, newest=newest)
    assert instructions == (Stale(7, newest),)
    assert machine.open == ()


def test_a_decision_that_is_forgotten_at_once_is_told_whole() -> None:
    machine = replace(proposed(), remembered=1)
    newer = Message(Word.COMMITTED, Proposal(9, 0, 0, 4), 0, 0, NO_BALLOT, content=MINE)
    machine, _ = machine.handle(Received(newer))
    for member in (1, 2):
        machine, _ = hear(machine, Word.VOTE, member, content=MINE, state=State.VOTED)
    for member in (1, 2):
        machine, instructions = hear(machine, Word.ACKNOWLEDGE, member)
    assert Decided(PROPOSAL, True, MINE) in instructions
    assert [i.message.content for i in instructions if isinstance(i, Send)] == [MINE]


# -- what nobody has proposed ----------------------------------------------------------------------


def test_a_member_wishes_for_what_it_holds_and_the_coordinator_proposes_it() -> None:
    _, instructions = Commit(1, VIEW).handle(Held(7, MINE))
    assert sent(instructions) == [("HELD", (0,))]
    (wish,) = [i.message for i in instructions if isinstance(i, Send)]
    coordinator, instructions = Commit(0, VIEW).handle(Received(wish))
    assert sent(instructions) == [("PREPARE", (1, 2, 3))]
    assert Prepare(PROPOSAL) in instructions
    assert coordinator.handle(Received(wish)) == (coordinator, ())  # under way already


def test_a_version_held_after_its_decision_is_told_of_it_and_an_older_one_is_stale() -> None:
    machine, _ = hear(Commit(1, VIEW), Word.COMMITTED, 0, content=OTHER)
    assert machine.handle(Held(7, MINE)) == (machine, (Decided(PROPOSAL, True, OTHER),))
    assert machine.handle(Held(5, MINE)) == (machine, (Stale(5, 7),))


def test_a_wish_for_what_the_coordinator_has_passed_is_answered_so() -> None:
    wish = Message(Word.HELD, wished(5), 0, 1, NO_BALLOT)
    _, instructions = proposed().handle(Received(wish))
    (answer,) = [i.message for i in instructions if isinstance(i, Send)]
    assert (answer.word, answer.newest) == (Word.PASSED, 7)
    machine = Commit(1, VIEW)
    assert machine.handle(Received(answer)) == (machine, (Stale(5, 7),))


def test_words_of_another_view_are_void() -> None:
    message = Message(Word.PREPARE, PROPOSAL, 1, 0, FIRST)
    machine = Commit(1, VIEW)
    assert machine.handle(Received(message)) == (machine, ())


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "explanation" / "agreement.md"
    text = page.read_text(encoding="utf-8")
    shown = text.partition("<!-- tables -->\n")[2].partition("<!-- end of tables -->")[0]
    assert shown == tables()
