"""What faults cost, in a job's summary: the time of each recovery, steps lost, ranks at the end."""

from __future__ import annotations

import json

from mpift.core import events
from tests.unit.job_events import ended, failed, kill, left, step, verdict, view


def test_a_recovery_lasts_from_the_fault_to_the_first_step_of_the_next_view() -> None:
    found = verdict(
        4,
        *(step(49, 0, at=9.9), kill(2, at=10.0), step(50, 0, at=10.01)),
        *(view(1, (0, 1, 3), (2,), at=10.1), step(51, 1, at=10.25), step(52, 1, at=10.4)),
        *(ended(2, None, 9), ended(0), ended(1), ended(3)),
    )
    assert found.summary["recovery_seconds"] == [0.25]
    assert (found.summary["world_start"], found.summary["world_end"]) == (4, 3)


def test_two_faults_that_one_rebuild_recovers_get_a_number_each() -> None:
    found = verdict(
        4,
        *(kill(2, at=10.0), kill(1, at=10.1), view(1, (0, 3), (1, 2), at=10.3)),
        step(50, 1, at=10.5),
    )
    assert found.summary["recovery_seconds"] == [0.5, 0.4]
    assert found.summary["faults_survived"] == 2


def test_the_order_in_which_ranks_are_heard_does_not_matter() -> None:
    happened = [
        *(kill(2, at=10.0), view(1, (0, 1, 3), (2,), at=10.1), step(50, 1, at=10.2)),
        *(kill(0, at=11.0), view(2, (1, 3), (0,), at=11.2), step(60, 2, at=11.5, member=1)),
    ]
    for order in (happened, happened[::-1], happened[3:] + happened[:3]):
        assert verdict(4, *order).summary["recovery_seconds"] == [0.2, 0.5]


def test_a_recovery_is_known_by_its_steps_where_nobody_reported_the_view() -> None:
    found = verdict(2, step(9, 3, at=9.0), kill(0, at=10.0), step(10, 4, at=10.5, member=1))
    assert found.summary["recovery_seconds"] == [0.5]


def test_a_fault_that_no_step_followed_was_not_recovered() -> None:
    found = verdict(1, step(9, 0, at=9.0), kill(0, at=10.0), ended(0, None, 9), code=0)
    assert found.summary["recovery_seconds"] == []
    assert found.summary["faults_survived"] == 0
    assert found.exit_code == 1


def test_steps_lost_are_those_called_for_but_not_applied_and_those_jumped_over() -> None:
    assert verdict(1, left(0, 10, 10), step(9, 0, at=1.0), ended(0)).summary["steps_lost"] == 0
    assert verdict(2, left(0, 10, 9), left(1, 10, 8)).summary["steps_lost"] == 3
    assert verdict(1, left(0, 10, 10), step(11, 0, at=1.0), ended(0)).summary["steps_lost"] == 2
    # Of a rank that failed nothing is known: it may well have had a step under way.
    assert verdict(2, left(0, 10, 9), failed(0, at=9.0), ended(1)).summary["steps_lost"] == 0


def test_the_summary_holds_the_last_values_reported_and_the_jobs_own_count_of_steps() -> None:
    found = verdict(
        1,
        events.Reported(1.0, 0, {"loss": 0.5, "steps": "mine"}),
        events.Reported(2.0, 0, {"loss": 0.25, "accuracy": 0.97}),
        *(step(9, 0, at=1.0), left(0), ended(0)),
    )
    assert found.summary["loss"] == 0.25
    assert found.summary["accuracy"] == 0.97
    assert found.summary["steps"] == 10
    assert found.summary["exit_code"] == 0
    json.dumps(found.summary)
