"""Saving together, with made-up ranks: who says what, and that each save comes to one end."""

from __future__ import annotations

from mpift.core.ballots import Content
from mpift.core.saving import Origin
from tests.unit.fake_savers import HISTORY, Crew, version, written


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
    job.end(written(Origin(HISTORY, "layout", (0, 1, 2)), 1, 0))
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
