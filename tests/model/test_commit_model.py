"""Every order of messages, losses, crashes and views around ``core.commit``; broken variants are
caught. What was walked, and each counter-example, is printed at the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from mpift.core.ballots import (
    NO_BALLOT,
    Ballot,
    Content,
    Message,
    Proposal,
    State,
    Word,
    conclude,
    majority,
)
from mpift.core.commit import Commit
from mpift.core.commit_events import Entry, Instructions, Lead
from mpift.core.membership import View
from mpift.testing.explorer import explore, wander
from tests.model.commit_model import OTHER, SAME, CommitModel

long = pytest.mark.long
TWICE_ONE = ((0, 1), (1, 1))
ONE_AND_TWO = ((0, 1), (1, 2))
# Members 0 to 2 of five have decided, and the first two die; the others have yet to hear of it.
DECIDED_BY_THREE = (
    "0 proposes version 1",
    "1 hears PREPARE of 0",
    "2 hears PREPARE of 0",
    "0 hears VOTE of 1",
    "0 hears VOTE of 2",
    "1 hears PRE_COMMIT of 0",
    "2 hears PRE_COMMIT of 0",
    "0 hears ACKNOWLEDGE of 1",
    "0 hears ACKNOWLEDGE of 2",
    "3 hears PREPARE of 0",
    "0 dies",
    "1 dies",
)


def world(name: str, *marks: pytest.MarkDecorator, **given: Any) -> Any:
    members = given.pop("members", 3)
    given.setdefault("contents", [SAME] * members)
    return pytest.param(given, id=name.replace(" ", "_"), marks=marks)


@pytest.mark.parametrize(
    "given",
    [
        world("three time out twice", timeouts=2),
        world("three and one dies", timeouts=1, deaths=1),
        world("three and two die", deaths=2),
        world("three and one restarts", timeouts=1, restarts=1),
        world("one holds something else", contents=[SAME, SAME, OTHER], timeouts=1),
        world("the proposer holds something else", contents=[OTHER, SAME, SAME], timeouts=1),
        world("one does not have it", contents=[SAME, SAME, None], timeouts=1, deaths=1),
        world("one version twice", proposals=TWICE_ONE),
        world("two versions", proposals=ONE_AND_TWO),
        world("what others than the coordinator hold", proposals=(), holds=((1, 1), (2, 1))),
        world("what is held when one dies", proposals=(), holds=((0, 1), (1, 1)), deaths=1),
        world("two versions of which one is forgotten", proposals=ONE_AND_TWO, remembered=1),
        world("one of them is forgotten", long, proposals=TWICE_ONE, timeouts=1, remembered=1),
        world("two versions and one dies", long, proposals=ONE_AND_TWO, deaths=1),
        world("three time out twice and one dies", long, timeouts=2, deaths=1),
        world("three time out twice and one restarts", long, timeouts=2, restarts=1),
        world("three and two die after each other", long, timeouts=1, deaths=2),
        world("one version twice with timeouts", long, proposals=TWICE_ONE, timeouts=1),
        world("four", long, members=4, timeouts=1),
        world("four and one dies", long, members=4, deaths=1),
    ],
)
def test_there_is_one_decision_and_a_majority_comes_to_it(
    given: dict[str, Any], walked: Callable[[object], None]
) -> None:
    report = explore(CommitModel(**given))
    walked(report)
    assert report.violation is None, str(report)
    assert report.states > 100


@pytest.mark.parametrize(
    "given",
    [
        world("three", walks=1500, timeouts=4, deaths=2, restarts=2),
        world("five", walks=500, members=5, timeouts=2, deaths=3),
        world("five", long, walks=4000, members=5, timeouts=3, deaths=3, proposals=ONE_AND_TWO),
        world("four", long, walks=4000, members=4, timeouts=3, deaths=2, restarts=1),
    ],
)
def test_long_walks_of_more_members_and_faults_find_nothing(
    given: dict[str, Any], walked: Callable[[object], None]
) -> None:
    walks = given.pop("walks")
    report = wander(CommitModel(**given), walks, seed=101)
    walked(report)
    assert report.violation is None, str(report)


# -- what is known to be wrong is caught -----------------------------------------------------------


class TimeoutsDecide(Commit):
    """Three-phase commit as it is usually drawn: who has pre-committed commits when nobody speaks
    any more, everybody else aborts."""

    __slots__ = ()

    def _time_out(self, entry: Entry) -> tuple[Commit, Instructions]:
        if entry.lead is not None or entry.state not in (State.VOTED, State.PRE_COMMITTED):
            return Commit._time_out(self, entry)
        word = Word.COMMITTED if entry.state is State.PRE_COMMITTED else Word.ABORTED
        return self._decide(entry, word, entry.content)


class MajorityOfTheReachable(Commit):
    """Whoever has answered until the time is over is all there is."""

    __slots__ = ()

    def _time_out(self, entry: Entry) -> tuple[Commit, Instructions]:
        lead = entry.lead
        if lead is None or lead.phase is Word.PREPARE:
            return Commit._time_out(self, entry)
        if lead.phase is Word.ASK:
            return self._drive(entry, *conclude([a.standing for a in lead.answers]))
        word = Word.COMMITTED if lead.phase is Word.PRE_COMMIT else Word.ABORTED
        return self._announce(entry, word, lead.content)


class MajorityOfTheNewView(Commit):
    """What an old view has left open needs a majority of those who are left."""

    __slots__ = ()

    def _needed(self, lead: Lead, proposal: Proposal) -> int:
        return majority(self.view.size)


class NoBallotCheck(Commit):
    """A coordinator that others have given up is obeyed all the same."""

    __slots__ = ()

    def _is_below(self, ballot: Ballot, entry: Entry) -> bool:
        return False


class ForgetsPreCommit(Commit):
    """A new coordinator's question makes a member forget that it has pre-committed."""

    __slots__ = ()

    def _obey(self, entry: Entry, message: Message) -> tuple[Commit, Instructions]:
        if message.word is Word.ASK and entry.state is State.PRE_COMMITTED:
            entry = replace(entry, state=State.VOTED, attempt=NO_BALLOT)
        return Commit._obey(self, entry, message)


class AbortsAtOnce(Commit):
    """A later coordinator aborts without asking a majority to pre-abort first."""

    __slots__ = ()

    def _drive(
        self, entry: Entry, word: Word, content: Content | None
    ) -> tuple[Commit, Instructions]:
        if word is Word.PRE_ABORT:
            return self._announce(entry, Word.ABORTED, None)
        return Commit._drive(self, entry, word, content)


class AcceptsEqualVersion(Commit):
    """A member votes for a version that it has voted for before."""

    __slots__ = ()

    def _refuses(self, version: int) -> bool:
        return version < self.newest


class RemembersNothing(Commit):
    """A crash makes a member forget what it has promised and pre-committed."""

    __slots__ = ()

    @classmethod
    def recovered(
        cls, member: int, view: View, entries: Iterable[Entry], retries: int = 0
    ) -> Commit:
        return cls(member, view, retries)


FIVE: dict[str, Any] = {"contents": [SAME] * 5, "deaths": 2, "timeouts": 1}


@pytest.mark.parametrize(
    ("machine", "complaint", "given"),
    [
        (TimeoutsDecide, "two decisions", {"timeouts": 1}),
        (MajorityOfTheReachable, "two decisions", {"timeouts": 2}),
        (MajorityOfTheNewView, "two decisions", FIVE | {"begun": DECIDED_BY_THREE}),
        (NoBallotCheck, "two decisions", {"timeouts": 1}),
        (ForgetsPreCommit, "two decisions", {"timeouts": 1}),
        (AbortsAtOnce, "two decisions", {"timeouts": 2}),
        (AcceptsEqualVersion, "two proposals", {"proposals": TWICE_ONE}),
        (RemembersNothing, "two decisions", {"timeouts": 1, "restarts": 1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_broken_variant_is_caught_with_a_counter_example(
    machine: type[Commit], complaint: str, given: dict[str, Any], walked: Callable[[object], None]
) -> None:
    world = {"contents": [SAME] * 3} | given
    report = explore(CommitModel(machine=machine, lively=False, **world))
    walked(report)
    assert report.violation is not None
    assert report.violation.startswith(complaint)
    assert len(report.trace) > 3
