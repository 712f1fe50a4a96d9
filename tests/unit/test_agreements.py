"""Agreements of a few members whose letters go through the hands of a test."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.config import Config
from mpift.core.ballots import Ballot, Content, Message, Proposal, State, Word
from mpift.core.commit_events import Decided, Entry
from mpift.core.membership import View
from mpift.transport.agreements import Agreements, decode, encode
from mpift.transport.messages import Kind
from mpift.transport.messages import Message as Letter
from mpift.transport.part import Post

SAME, OTHER = Content("history", "same"), Content("history", "other")


class Member:
    """One member: its agreements, the mailbox and world that they see, and their only subject."""

    def __init__(self, post: Network, member: int, entries: Iterable[Entry] = ()) -> None:
        self.post, self.member = post, member
        self.view = post.view
        self.control = None
        self.decisions: list[tuple[int, bool, Content | None]] = []
        self.refused: list[tuple[int, int]] = []
        self.known: dict[Proposal, tuple[bool, Content | None]] = {}
        self.memory: dict[Proposal, Entry] = {}
        self.by: set[int] = set()  # passed without having been held
        self.agreements = Agreements(
            Post(self, None, lambda function: function(), lambda: None),  # type: ignore[arg-type]
            lambda: Config(sync_timeout=10.0, retries=1),
        )
        self.agreements.install(self)  # type: ignore[arg-type]
        self.number = self.agreements.open(self, entries)

    def register(self, kind: Kind, handler: Any) -> None:
        self.handler = handler

    def send(self, kind: Kind, text: str, members: tuple[int, ...]) -> None:
        letter = Letter(kind, self.view.epoch, self.member, text)
        self.post.letters += [(to, letter) for to in members]

    def remember(self, entry: Entry) -> None:
        self.memory[entry.proposal] = entry

    def decided(self, decided: Decided) -> None:
        version = decided.proposal.version
        self.known[decided.proposal] = (decided.committed, decided.content)
        self.decisions.append((version, decided.committed, decided.content))

    def passed(self, version: int) -> bool:
        return version in self.by

    def stale(self, version: int, newest: int) -> None:
        self.refused.append((version, newest))

    def hold(self, version: int, content: Content = SAME) -> None:
        self.agreements.hold(self.number, version, content)


class Network:
    """Carries letters between the members that are alive and not ``silent``."""

    def __init__(self, size: int) -> None:
        self.view = View(0, tuple(range(size)))
        self.letters: list[tuple[int, Letter]] = []
        self.silent: set[int] = set()
        self.members = {m: Member(self, m) for m in self.view.members}
        self.now = 0.0

    def __getitem__(self, member: int) -> Member:
        return self.members[member]

    def deliver(self, only: set[Word] | None = None) -> None:
        while self.letters:
            to, letter = self.letters.pop(0)
            if to in self.silent or letter.sender in self.silent or to not in self.members:
                continue
            if only is None or decode(letter)[1].word in only:
                self.members[to].handler(letter)

    def pass_time(self, seconds: float) -> None:
        for _ in range(2):  # to notice what is open, and that it has waited
            for number, member in self.members.items():
                if number not in self.silent:
                    member.agreements.turn(self.now)
            self.now += seconds
        self.deliver()

    def lose(self, *lost: int) -> None:
        """A new view without these."""
        self.view = self.view.successor(self.view.epoch + 1, set(self.view.members) - set(lost))
        self.members = {m: self.members[m] for m in self.view.members}
        self.letters = []
        for member in self.members.values():
            member.view = self.view
        for member in self.members.values():
            member.agreements.install(member)  # type: ignore[arg-type]
        self.deliver()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_all_hold_is_committed(size: int) -> None:
    post = Network(size)
    for member in range(size):
        post[member].hold(3)
    post.deliver()
    assert [m.decisions for m in post.members.values()] == [[(3, True, SAME)]] * size


def test_a_silent_minority_is_not_waited_for_and_hears_of_it_later() -> None:
    post = Network(4)
    post.silent = {3}
    for member in range(4):
        post[member].hold(3)
    post.deliver()
    assert [post[m].decisions for m in range(3)] == [[(3, True, SAME)]] * 3
    post.silent = set()
    post.pass_time(1000.0)  # member 3 has not even heard of it, and asks for nothing
    post[0].hold(4)
    post[1].hold(4)
    post[3].hold(4)
    post.deliver()
    assert post[3].decisions == [(4, True, SAME)]


def test_whoever_gets_there_later_votes_later() -> None:
    post = Network(3)
    post[0].hold(3)
    post.deliver()
    assert not post[0].decisions
    post[2].hold(3)
    post.deliver()
    assert post[0].decisions == [(3, True, SAME)]


def test_whoever_has_passed_a_version_by_says_so_at_once() -> None:
    post = Network(3)
    post[0].hold(3)
    for member in (1, 2):
        post[member].hold(4)
    post.deliver()
    # What two of three hold is proposed although the coordinator does not hold it.
    assert post[0].decisions == [(3, False, None), (4, True, SAME)]


def test_whoever_holds_a_version_after_its_decision_is_told_of_it() -> None:
    post = Network(3)
    for member in (0, 1):
        post[member].hold(3)
    post.deliver()
    assert post[2].decisions == [(3, True, SAME)]
    post[2].hold(3, OTHER)
    assert post[2].decisions == [(3, True, SAME)] * 2


def test_what_a_coordinator_never_gets_to_is_decided_by_the_others() -> None:
    post = Network(4)
    for member in (1, 2, 3):
        post[member].hold(3)
    post.deliver()
    assert [post[m].decisions for m in (1, 2, 3)] == [[(3, True, SAME)]] * 3


def test_a_rank_that_will_never_hold_a_version_is_not_waited_for() -> None:
    post = Network(4)
    for member, content in ((0, SAME), (1, SAME), (2, OTHER)):
        post[member].hold(3, content)
    post.deliver()
    assert not post[0].decisions  # the vote of member 3 may still make a majority
    post[3].by = {3}
    post[3].agreements.turn(0.0)
    post.deliver()
    assert post[0].decisions == [(3, False, None)]


def test_whatever_was_held_comes_to_an_end_when_the_coordinator_dies() -> None:
    post = Network(4)
    for version in (3, 4, 5):
        for member in (1, 2, 3):
            post[member].hold(version)
    post.lose(0)
    for member in (1, 2, 3):
        assert {version for version, *_ in post[member].decisions} == {3, 4, 5}
        assert (5, True, SAME) in post[member].decisions


def test_without_a_majority_that_holds_the_same_it_is_aborted() -> None:
    post = Network(4)
    for member, content in enumerate((SAME, SAME, OTHER, OTHER)):
        post[member].hold(3, content)
    post.deliver()
    assert {m.decisions[0] for m in post.members.values()} == {(3, False, None)}


def test_a_version_that_nobody_gets_to_is_aborted_when_patience_is_over() -> None:
    post = Network(3)
    post[0].hold(3)
    for _ in range(3):
        post.pass_time(11.0)
    assert post[0].decisions == [(3, False, None)]


def test_others_take_the_place_of_a_coordinator_that_falls_silent() -> None:
    post = Network(3)
    for member in range(3):
        post[member].hold(3)
    post.deliver(only={Word.PREPARE, Word.VOTE})
    # Of its PRE_COMMIT only member 1 has heard.
    word = Message(Word.PRE_COMMIT, Proposal(3, 0, 0, 3), 0, 0, Ballot(0, 0), SAME)
    post[1].handler(Letter(Kind.COMMIT, 0, 0, encode(0, word)))
    post.letters, post.silent = [], {0}
    post.pass_time(1000.0)
    post.pass_time(1000.0)
    assert [post[m].decisions for m in (1, 2)] == [[(3, True, SAME)]] * 2


@pytest.mark.parametrize(
    ("heard", "committed"),
    [({Word.PREPARE, Word.VOTE, Word.PRE_COMMIT}, True), ({Word.PREPARE}, False)],
)
def test_a_new_view_decides_what_its_coordinator_left_open(
    heard: set[Word], committed: bool
) -> None:
    post = Network(4)
    for member in range(4):
        post[member].hold(3)
    post.deliver(only=heard)
    post.lose(0)
    for member in (1, 2, 3):
        assert post[member].decisions == [(3, committed, SAME if committed else None)]


def test_the_new_coordinator_proposes_what_the_old_one_never_did() -> None:
    post = Network(3)
    for member in (1, 2):
        post[member].hold(3)
    post.lose(0)
    assert [post[m].decisions for m in (1, 2)] == [[(3, True, SAME)]] * 2


def test_a_version_that_others_have_passed_is_refused_with_both_named() -> None:
    post = Network(3)
    for version in (5, 3):
        for member in range(3):
            post[member].hold(version)
        post.deliver()
    assert [m.refused for m in post.members.values()] == [[(3, 5)]] * 3
    assert [m.decisions for m in post.members.values()] == [[(5, True, SAME)]] * 3


def test_a_member_that_comes_back_answers_from_what_it_remembered() -> None:
    post = Network(3)
    for member in range(3):
        post[member].hold(3)
    post.deliver(only={Word.PREPARE, Word.VOTE, Word.PRE_COMMIT})
    post.members[1] = Member(post, 1, post[1].memory.values())
    post.silent = {0}
    for _ in range(3):
        post.pass_time(1000.0)
    assert post[1].decisions == post[2].decisions == [(3, True, SAME)]


def test_a_word_about_a_subject_that_is_opened_later_is_kept() -> None:
    post = Network(2)
    letter = encode(1, Message(Word.PREPARE, Proposal(3, 0, 0, 2), 0, 0, Ballot(0, 0)))
    post[1].handler(Letter(Kind.COMMIT, 0, 0, letter))
    assert post[1].agreements.open(post[1]) == 1
    post[1].agreements.hold(1, 3, SAME)
    assert [decode(letter)[1].word for _, letter in post.letters] == [Word.VOTE]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_held_comes_to_one_end_among_random_delays_and_deaths(seed: int) -> None:
    chance = random.Random(seed)
    post = Network(chance.choice([2, 3, 4, 5]))
    dead: list[Member] = []
    plans = {m: sorted(chance.sample(range(40), chance.randint(20, 40))) for m in post.members}
    held = {m: set[int]() for m in post.members}
    while any(plans[m] for m in post.members) or post.letters:
        member = chance.choice(list(post.members))
        if plans[member] and chance.random() < 0.4:
            version = plans[member].pop(0)
            held[member].add(version)
            post[member].hold(version, chance.choice([SAME, SAME, SAME, OTHER]))
        elif post.letters:
            # In order from each sender, but between senders in any.
            sender = chance.choice([letter.sender for _, letter in post.letters])
            index = next(i for i, (_, each) in enumerate(post.letters) if each.sender == sender)
            to, letter = post.letters.pop(index)
            post[to].handler(letter)
        if chance.random() < 0.01 and len(post.members) > 1:
            victim = chance.choice(list(post.members))
            dead.append(post[victim])
            post.lose(victim)
    for member in post.members.values():
        member.by = set(range(40))
    for _ in range(12):
        post.pass_time(1000.0)
    decided: dict[Proposal, Any] = {}
    for member in (*post.members.values(), *dead):
        for proposal, state in member.known.items():
            assert decided.setdefault(proposal, state) == state, proposal
    for number, member in post.members.items():
        ended = {version for version, *_ in (*member.decisions, *member.refused)}
        assert held[number] <= ended, held[number] - ended


numbers = st.integers(-1, 2**53)


@given(
    st.sampled_from(Word),
    st.tuples(numbers, numbers, numbers, numbers),
    st.tuples(numbers, numbers),
    st.sampled_from(State),
    st.sampled_from([None, SAME]),
    numbers,
)
def test_a_word_survives_its_way_as_text(
    word: Word, proposal: Any, ballot: Any, state: State, content: Any, newest: int
) -> None:
    message = Message(
        word, Proposal(*proposal), 4, 2, Ballot(*ballot), content, state, Ballot(*ballot), newest
    )
    assert decode(Letter(Kind.COMMIT, 4, 2, encode(9, message))) == (9, message)
