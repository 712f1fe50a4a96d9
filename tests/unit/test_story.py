"""Hangs, suspicions and stops in the story of a job, and what the verdict makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.core import events
from mpift.launch.story import Story
from mpift.launch.verdict import Ending, judge


def struck(member: int, fault: str, at: float) -> Any:
    return events.FaultInjected(at, member, fault, 5)


def ended(member: int, code: int | None = 0, signal: int | None = None, at: float = 9.0) -> Any:
    return events.ProcessEnded(at, member, "vm", 100 + member, code, signal)


def view(
    epoch: int, members: tuple[int, ...], lost: tuple[int, ...], at: float, *reasons: str
) -> Any:
    return events.ViewChanged(at, min(members), epoch, members, lost, 0.02, reasons)


def step(epoch: int, at: float) -> Any:
    return events.StepFinished(at, 0, 7, epoch, 3)


def story_of(ranks: int, *happened: events.Event) -> tuple[Story, list[str]]:
    story = Story(ranks)
    notices = [notice.text for event in happened for notice in story.handle(event)]
    return story, notices


def test_a_hang_that_was_survived_has_its_own_time_and_is_no_failure_of_the_job() -> None:
    story, notices = story_of(
        3,
        struck(2, "kill:2@5", 1.0),
        ended(2, None, 9, at=1.1),
        view(1, (0, 1), (2,), 1.2, ""),
        step(1, 1.25),
        struck(1, "stop:1@5", 2.0),
        view(2, (0,), (1,), 3.3, "stopped for 1.0 s"),
        ended(1, None, 9, at=3.2),
        step(2, 3.5),
        ended(0),
    )
    found = judge(story, Ending(0), strict=True)
    assert (found.exit_code, found.summary["ranks_lost"]) == (0, 2)
    assert found.summary["recovery_seconds"] == [0.25]
    assert found.summary["hang_recovery_seconds"] == [1.5]
    assert (found.summary["faults_injected"], found.summary["faults_survived"]) == (2, 2)
    assert "recovered from stop:1@5 in 1.500 s" in notices


def test_a_fault_that_costs_no_rank_is_survived_without_a_recovery() -> None:
    story, _ = story_of(2, struck(1, "slow:1@5-9:0.5", 1.0), step(0, 2.0), ended(0), ended(1))
    found = judge(story, Ending(0))
    assert (found.summary["faults_injected"], found.summary["faults_survived"]) == (1, 1)
    assert found.summary["hang_recovery_seconds"] == found.summary["recovery_seconds"] == []


def test_a_lock_held_for_too_long_counts_as_a_hang() -> None:
    story, _ = story_of(
        2,
        struck(1, "gil:1@5:100", 1.0),
        view(1, (0,), (1,), 17.0, "its loop stood still"),
        ended(1, None, 9, at=16.9),
        step(1, 17.5),
        ended(0),
    )
    found = judge(story, Ending(0), strict=True)
    assert found.summary["hang_recovery_seconds"] == [16.5]
    assert found.exit_code == 0


def test_the_reason_of_a_rank_that_was_killed_is_what_its_watchdog_said() -> None:
    story, _ = story_of(
        2,
        ended(1, None, 9, at=2.0),
        view(1, (0,), (1,), 2.1, "stopped for 1.0 s while others run"),
        ended(0),
    )
    found = judge(story, Ending(0))
    assert [f.reason for f in found.failures] == ["stopped for 1.0 s while others run"]


def test_what_several_observers_miss_is_said_once_in_a_view() -> None:
    def missed(by: int) -> Any:
        return events.Suspected(1.0, by, 3, "n3", 6.21)

    _, notices = story_of(4, missed(0), missed(1), view(1, (0, 1, 2), (3,), 2.0, ""), missed(0))
    told = [text for text in notices if "not been heard" in text]
    assert told == ["rank 3 on n3 has not been heard for 6.2 s"] * 2


def test_a_suspect_that_is_heard_again_by_several_observers_is_said_once() -> None:
    _, notices = story_of(
        3,
        events.Suspected(1.0, 0, 2, "n3", 6.2),
        events.HeardAgain(2.0, 0, 2, "n3"),
        events.HeardAgain(2.1, 1, 2, "n3"),
    )
    assert notices == [
        "rank 2 on n3 has not been heard for 6.2 s",
        "rank 2 on n3 is heard again",
    ]


def test_a_suspect_s_host_is_not_taken_for_the_observer_s() -> None:
    story, _ = story_of(
        2, events.RankStarted(0.0, 0, "n1", 1, 2), events.Suspected(1.0, 0, 1, "n2", 6.0)
    )
    assert story.member(0).host == "n1"


@pytest.mark.parametrize(("codes", "expected"), [((3, 3), 3), ((3, 1), 3), ((1, 1), 1)])
def test_a_job_that_a_cut_has_ended_has_lost_its_quorum(
    codes: tuple[int, int], expected: int
) -> None:
    stops = [events.RankStopped(1.0 + m, m, code, "cut off") for m, code in enumerate(codes)]
    story, _ = story_of(2, *stops, ended(0, codes[0]), ended(1, codes[1]))
    assert judge(story, Ending(0)).exit_code == expected


def test_a_job_is_given_up_when_the_coordinator_of_its_newest_view_has_stopped() -> None:
    story, _ = story_of(3, events.RankStopped(1.0, 2, 3, "evicted"))
    assert not story.given_up
    story.handle(events.RankStopped(2.0, 0, 3, "cut off"))
    assert story.given_up
    story.handle(view(1, (1, 2), (0,), 3.0, ""))
    assert not story.given_up


def test_a_stall_is_told_with_its_place() -> None:
    _, notices = story_of(2, events.RankStalled(1.0, 1, "n1", 17, 60.0, False, "load (train.py:4)"))
    words = (
        "rank 1 on n1 has made no progress at step 17 of this job for 60 s, and others wait for it;"
    )
    assert notices == [f"{words} it is in load (train.py:4)"]


def test_an_eviction_and_bad_health_are_told_with_their_reasons() -> None:
    _, notices = story_of(
        2,
        events.HealthChanged(1.0, 1, "n2", "degraded", 0.9, "memory 92 % over its threshold 85 %"),
        events.Evicted(2.0, 0, 1, "made no progress at step 3 for 90 s"),
    )
    assert notices == [
        "health of n2: degraded (memory 92 % over its threshold 85 %)",
        "rank 1 is evicted: it made no progress at step 3 for 90 s",
    ]
