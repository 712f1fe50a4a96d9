"""Saves that a new view comes in the middle of, with made-up ranks: what is said anew."""

from __future__ import annotations

import pytest

from mpift.core.saving import Origin
from tests.unit.fake_savers import HISTORY, Crew, version, written


def test_a_part_that_was_lost_with_the_view_is_offered_anew() -> None:
    crew = Crew(3)
    crew.capture(1)
    crew.write()  # on its way
    crew.install(0, 1, 2)
    crew.run()
    crew.assemble(0)


def test_a_new_coordinator_gathers_from_the_beginning_and_has_the_dead_one_s_share_written() -> (
    None
):
    crew = Crew(3)
    crew.capture(1)
    crew.write()
    crew.run()
    crew[0].scribe.take("assemble")  # it dies with that
    crew.install(1, 2)
    crew.run()
    job = crew[2].scribe if "write" in crew[2].scribe.names() else crew[1].scribe
    job.take("write").end(written(Origin(HISTORY, "layout", (0, 1, 2)), 0, 9))
    crew.run()
    assert crew.assemble(1)[0] == b"share 0 by 9 of first"
    crew.run()
    crew.check()
    crew.decide(1)
    crew.publish(1)
    crew.run()
    assert [rank.committed for rank in crew] == [[1], [1]]


def announced() -> Crew:
    crew = Crew(3)
    crew.capture(1)
    crew.write()
    crew.run()
    crew.assemble(0)
    return crew


def test_after_the_announcement_the_next_coordinator_publishes_what_is_decided() -> None:
    crew = announced()
    crew.run()
    crew.check()
    crew.install(1, 2)
    crew.decide(1)
    crew.publish(1)
    crew.run()
    assert [rank.committed for rank in crew] == [[1], [1]]


def test_what_was_decided_but_not_published_is_published_by_the_next_coordinator() -> None:
    crew = announced()
    crew.run()
    crew.check()
    crew.decide(1)
    crew[0].scribe.take("publish")  # it dies before that is done
    crew.install(1, 2)
    crew.publish(1)
    crew.run()
    assert [rank.committed for rank in crew] == [[1], [1]]


def test_a_coordinator_that_has_not_heard_of_the_announcement_publishes_all_the_same() -> None:
    crew = announced()
    crew.deliver_to(2)
    crew.check(2)
    crew.install(1, 2)
    crew.decide(1)
    job = crew[1].scribe.take("publish")
    assert job.arguments["folder"] == ""
    assert job.arguments["found"] == "digest"


@pytest.mark.parametrize("reached", [(1,), (2,)])
def test_an_announcement_that_reached_only_some_is_announced_anew_to_all(
    reached: tuple[int, ...],
) -> None:
    crew = announced()
    crew.deliver_to(*reached)
    crew.install(1, 2)
    crew.run()
    for member in (1, 2):
        for job in tuple(crew[member].scribe.jobs):
            if job.name == "write":
                crew[member].scribe.jobs.remove(job)
                job.end(written(Origin(HISTORY, "layout", (0, 1, 2)), 0, member))
    crew.run()
    if "assemble" in crew[1].scribe.names():
        crew.assemble(1, "another digest")
        crew.run()
    for rank in crew:
        while "check" in rank.scribe.names():
            rank.scribe.take("check").end()
    crew.run()
    found = set(crew.held[version(1)].values())
    assert sorted(crew.held[version(1)]) == [1, 2]
    assert len(found) == 1  # so that a majority votes for the same


@pytest.mark.parametrize("view", [(0, 1, 2), (0, 1), (1, 2)])
def test_who_has_not_heard_that_a_save_is_published_before_the_view_changes_hears_it_then(
    view: tuple[int, ...],
) -> None:
    crew = announced()
    crew.run()
    crew.check()
    crew.decide(1)
    crew.publish(0)
    if 0 not in view:
        crew.deliver_to(1)  # the next coordinator knows it, the other one does not
    crew.install(*view)
    crew.run()
    for rank in crew:
        while "publish" in rank.scribe.names():
            rank.scribe.take("publish").end(error="COMMIT is there already, and says the same")
        crew.run()
        assert rank.committed == [1]


@pytest.mark.parametrize("view", [(0, 1, 2), (0, 1), (1, 2)])
def test_who_has_not_heard_that_a_save_is_given_up_before_the_view_changes_hears_it_then(
    view: tuple[int, ...],
) -> None:
    crew = Crew(3)
    crew.capture(1)
    crew.write()
    crew.run()
    crew[0].scribe.take("assemble").end(error="a block is missing")
    crew.run_calls()
    if 0 not in view:
        crew.deliver_to(1)
    crew.install(*view)
    crew.run()
    for rank in crew:
        assert rank.failed == ["a block is missing"]


def test_a_neighbour_that_was_asked_for_a_share_is_asked_again_if_that_was_lost() -> None:
    crew = Crew(4)
    crew.capture(1)
    crew.write(0, 1, 2)
    crew.run()
    crew.install(0, 1, 2)  # the owner of share 3 is dead
    crew.run_calls()
    asked = [letter.receiver for letter in crew.letters if letter.word == "write"]
    if not asked:  # the coordinator asks itself first
        crew[0].scribe.take("write").end(error="not in the memory of this node")
        crew.run_calls()
        asked = [letter.receiver for letter in crew.letters if letter.word == "write"]
    assert asked == [1]
    crew.install(0, 1)  # another one dies, and the word is lost
    crew.run()
    assert "write" in crew[1].scribe.names()


def test_a_part_of_a_dead_rank_s_own_history_keeps_nobody() -> None:
    """Rank 1 alone has finished the round before it died; rank 0 does it anew without it."""
    for first in ("a history", "z history"):
        crew = Crew(2)
        crew.capture(1, 1, history=first)
        crew.write(1, history=first, owners=(0, 1))
        crew.run()
        crew.install(0)
        crew.capture(1, 0, history="m history")
        crew.write(0, history="m history", owners=(0,))
        crew.run()
        assert crew.assemble(0) == [b"share 0 by 0 of m history"]


def test_parts_of_two_histories_never_make_one_checkpoint() -> None:
    crew = Crew(3)
    crew.capture(1, 2, history="first try")
    crew.write(2, history="first try", owners=(0, 1, 2))
    crew.run()
    crew.install(0, 1)
    crew.capture(1, 0, 1, history="second try")
    crew.write(0, history="second try", owners=(0, 1))
    crew.run()
    assert "assemble" not in crew[0].scribe.names()
    crew.write(1, history="second try", owners=(0, 1))
    crew.run()
    parts = crew.assemble(0)
    assert parts == [b"share 0 by 0 of second try", b"share 1 by 1 of second try"]


def test_an_answer_that_comes_after_the_end_changes_nothing() -> None:
    crew = Crew(2)
    crew.capture(1)
    late = crew[1].scribe.take("write")
    crew[0].saves.skipped(version(1), "busy")
    crew.run()
    late.end(written(Origin(HISTORY, "layout", (0, 1)), 1, 1))
    crew.run()
    assert [len(rank.outcomes) for rank in crew] == [1, 1]
