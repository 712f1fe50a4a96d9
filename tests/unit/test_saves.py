"""Saving together, with made-up ranks: who says what, and that each save comes to one end."""

from __future__ import annotations

import pytest

from mpift.core.ballots import Content
from mpift.core.saving import Origin
from tests.unit.fake_savers import HISTORY, Crew, FakePart, version


def test_parts_are_gathered_read_back_agreed_on_and_published_in_this_order() -> None:
    crew = Crew(3)
    crew.capture(4)
    for rank in crew:
        assert rank.scribe.names() == ["write"]
    crew.write(2, 0)
    crew.run()
    assert crew[0].scribe.names() == []  # a part is missing
    crew.write(1)
    crew.run()
    assert crew.assemble(0) == [f"share {n} by {n} of {HISTORY}".encode() for n in range(3)]
    crew.run()
    assert crew.held == {}
    crew.check(1)
    assert crew.held == {version(4): {1: Content(HISTORY, "digest")}}
    crew.check(0, 2)
    assert sorted(crew.held[version(4)]) == [0, 1, 2]
    crew.decide(4)
    assert "publish" not in crew[1].scribe.names()
    assert [rank.committed for rank in crew] == [[], [], []]  # agreed on, but there is no COMMIT
    crew.publish(0)
    crew.run()
    assert [rank.committed for rank in crew] == [[4], [4], [4]]
    assert crew.struck == [
        *((0, 4, "announced"), (1, 4, "voting"), (0, 4, "voting"), (2, 4, "voting")),
        (0, 4, "published"),
    ]


def test_a_save_is_compared_with_the_newest_committed_one_but_every_nth_is_written_whole() -> None:
    crew = Crew(2, full_every=3)
    bases = []
    for step in range(1, 6):
        crew.capture(step)
        bases.append(crew[1].scribe.jobs[0].arguments["order"].base)
        for rank in crew:
            rank.scribe.jobs = [job for job in rank.scribe.jobs if job.name == "write"]
        crew.write()
        crew.run()
        crew.assemble(0)
        crew.run()
        crew.check()
        crew.decide(step)
        crew.publish(0)
        crew.run()
        crew[0].scribe.take("sweep").end()
    assert bases == [None, version(1), version(2), None, version(4)]


def test_what_was_restored_is_what_the_next_save_is_compared_with() -> None:
    crew = Crew(2)
    crew.commit(1)
    crew[1].saves.restored(version(1) - 1)
    crew.capture(2, 1)
    assert crew[1].scribe.take("write").arguments["order"].base == version(1) - 1


def test_old_checkpoints_are_swept_only_while_none_is_being_gathered() -> None:
    crew = Crew(2)
    crew.commit(1)
    assert "sweep" in crew[0].scribe.names()
    crew[0].scribe.take("sweep").end(error="the disk is gone")
    crew.run()
    assert crew[0].failed == ["cleaning up: the disk is gone"]
    crew.capture(2)
    crew.write()
    crew.run()
    crew.assemble(0)
    crew.run()
    crew.check()
    crew.decide(2)
    crew.capture(3, 1)
    crew.write(1)
    crew.run()  # the next one has begun
    crew.publish(0)
    assert "sweep" not in crew[0].scribe.names()


def test_a_rank_that_takes_no_snapshot_ends_the_save_for_all_and_that_is_no_failure() -> None:
    crew = Crew(3)
    crew.capture(5, 0, 1)
    crew.write(0, 1)
    crew[2].saves.skipped(version(5), "busy")
    crew.run()
    for rank in crew:
        (outcome,) = rank.outcomes
        assert outcome.skipped
        assert outcome.step == 5
        assert outcome.reason == "rank 2 took no snapshot: busy"


def test_a_rank_that_comes_late_to_a_save_that_was_given_up_is_told_so_at_once() -> None:
    crew = Crew(2)
    crew[0].saves.skipped(version(5), "busy")
    crew.run()
    crew.capture(5, 1)
    assert crew[1].scribe.names() == []
    assert [outcome.skipped for outcome in crew[1].outcomes][-1]


def test_a_share_that_its_owner_cannot_write_is_written_by_a_neighbour() -> None:
    crew = Crew(3)
    crew.capture(1)
    crew.write(0, 2)
    crew[1].scribe.take("write").end(error="the writer process 7 ended (SIGKILL)")
    crew.run()
    job = crew[0].scribe.take("write")
    job.end(FakePart(Origin(HISTORY, "layout", (0, 1, 2)), 1, 0))
    crew.run()
    assert crew.assemble(0)[1] == b"share 1 by 0 of first"


def test_where_no_neighbour_holds_a_share_the_reasons_of_all_are_told_to_all() -> None:
    crew = Crew(2)
    crew.capture(1)
    crew.write(0)
    crew[1].scribe.take("write").end(error="no space left")
    crew.run()
    crew[0].scribe.take("write").end(error="not in the memory of this node")
    crew.run()
    for rank in crew:
        (reason,) = rank.failed
        assert "rank 1 can't write its share" in reason
        assert "rank 1: no space left" in reason
        assert "rank 0: not in the memory of this node" in reason
        assert not rank.outcomes[0].skipped


def test_a_disk_that_fails_all_ranks_ends_the_save_on_all() -> None:
    crew = Crew(2)
    crew.capture(1)
    while jobs := [job for rank in crew for job in rank.scribe.jobs if job.name == "write"]:
        for rank in crew:
            rank.scribe.jobs.clear()
        for job in jobs:  # also those for another's share
            job.end(error="no space left")
        crew.run()
    for rank in crew:
        (reason,) = rank.failed
        assert "rank 0: no space left" in reason
        assert "rank 1: no space left" in reason


def test_a_disk_that_fails_the_only_rank_ends_its_save() -> None:
    crew = Crew(1)
    crew.capture(1)
    crew[0].scribe.take("write").end(error="no space left")
    crew.run()
    assert "no space left" in crew[0].failed[0]


def test_a_rank_that_reads_something_else_back_does_not_vote_and_says_why() -> None:
    crew = Crew(3)
    crew.capture(1)
    crew.write()
    crew.run()
    crew.assemble(0)
    crew.run()
    crew.check(0, 1)
    crew[2].scribe.take("check").end(error="it is not the manifest that was announced")
    crew.run()
    assert sorted(crew.held[version(1)]) == [0, 1]
    assert crew[2].saves.passed(version(1))
    assert crew[0].failed == ["rank 2: it is not the manifest that was announced"]
    crew.decide(1)
    crew.publish(0)
    crew.run()
    assert [rank.committed for rank in crew] == [[1], [1], [1]]


def test_what_a_majority_could_not_read_back_is_no_checkpoint() -> None:
    crew = Crew(2)
    crew.capture(1)
    crew.write()
    crew.run()
    crew.assemble(0)
    crew.run()
    for rank in crew:
        rank.saves.decided(version(1), None)
    for rank in crew:
        assert rank.failed == ["too few of the ranks could read it back"]
        assert rank.saves.passed(version(1))


def test_a_commit_file_that_cannot_be_made_fails_the_save_on_all_ranks() -> None:
    crew = Crew(2)
    crew.capture(1)
    crew.write()
    crew.run()
    crew.assemble(0)
    crew.run()
    crew.check()
    crew.decide(1)
    crew[0].scribe.take("publish").end(error="no space left")
    crew.run()
    for rank in crew:
        assert rank.failed == ["agreed on, but it can't be committed: no space left"]


def test_an_assembly_that_fails_ends_the_save_on_all_ranks() -> None:
    crew = Crew(2)
    crew.capture(1)
    crew.write()
    crew.run()
    crew[0].scribe.take("assemble").end(error="a block is missing")
    crew.run()
    assert [rank.failed for rank in crew] == [["a block is missing"]] * 2


# -- views -----------------------------------------------------------------------------------------


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
    job.take("write").end(FakePart(Origin(HISTORY, "layout", (0, 1, 2)), 0, 9))
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
                job.end(FakePart(Origin(HISTORY, "layout", (0, 1, 2)), 0, member))
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
    late.end(FakePart(Origin(HISTORY, "layout", (0, 1)), 1, 1))
    crew.run()
    assert [len(rank.outcomes) for rank in crew] == [1, 1]
