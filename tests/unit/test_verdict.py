"""From what ranks reported to what the launcher says: verdict, notices, status, last words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpift.core import events
from mpift.launch.display import status_text
from mpift.launch.last_words import exception_of, last_words
from mpift.launch.story import Story
from mpift.launch.verdict import Ending, judge
from tests.unit.job_events import TRACEBACK, ended, failed, kill, left, step, told, verdict, view

END_OF_IT = "\n".join(TRACEBACK[2:])


# -- verdicts ----------------------------------------------------------------------------------


def test_all_ranks_that_end_with_0_are_a_success_with_nothing_to_say() -> None:
    for happened in (
        (ended(0), ended(1)),
        (left(0), ended(0), left(1), ended(1)),
        (left(0), left(1)),
    ):
        found = verdict(2, *happened)
        assert (found.exit_code, found.lines, found.failures) == (0, (), ())


def test_a_failed_rank_among_others_is_a_warning_with_its_traceback() -> None:
    happened = (failed(1, at=5.0), ended(1, 1, at=5.1), ended(0), ended(2))
    found = verdict(3, *happened)
    assert found.exit_code == 0
    assert found.lines[0] == "warning: rank 1 on vm failed: ValueError: boom"
    assert '    File "train.py", line 3, in <module>' in found.lines[1]
    assert found.summary["failed_ranks"] == [
        {"rank": 1, "host": "vm", "reason": "ValueError: boom", "exit_code": 1, "signal": None}
    ]
    assert verdict(3, *happened, strict=True).exit_code == 1


def test_a_rank_that_reports_nothing_is_judged_by_what_it_wrote() -> None:
    story = Story(2)
    for line in ["starting", *TRACEBACK]:
        story.hear(1, line)
    for event in (ended(1, 1), ended(0)):
        story.handle(event)
    found = judge(story, Ending(0))
    assert found.lines[0] == "warning: rank 1 on vm failed: ValueError: boom"
    assert "starting" not in found.lines[1]
    assert "ValueError: boom" in found.lines[1]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (ended(1, 3), "exit code 3"),
        (ended(1, None, 11), "ended by SIGSEGV"),
        (ended(1, 137), "exit code 137 (SIGKILL)"),
        (ended(1, None, 99), "ended by signal 99"),
    ],
)
def test_ends_without_a_word_are_named(end: events.Event, reason: str) -> None:
    assert verdict(2, end, ended(0)).failures[0].reason == reason


def test_when_all_fail_the_first_by_time_is_the_cause_whatever_arrives_first() -> None:
    found = verdict(
        4,
        *(failed(3, at=7.0), ended(3, 1, at=7.1), failed(0, at=6.0), ended(0, 1, at=8.0)),
        *(ended(1, None, 9, at=7.5), failed(2, at=5.0, reason="OSError: full"), ended(2, 1)),
    )
    assert found.exit_code == 1
    assert found.lines[0] == "all 4 ranks failed:"
    assert found.lines[1] == "first, rank 2 on vm: OSError: full"
    assert "Traceback" in found.lines[2]
    assert found.lines[3:] == (
        "also on ranks 0, 3: ValueError: boom",
        "also on rank 1: ended by SIGKILL",
    )


def test_a_traceback_that_is_just_above_is_not_shown_again() -> None:
    story = told(2, failed(0, at=5.0), failed(1, at=5.1))
    above = ("ValueError: another", "\n".join(["said before", *TRACEBACK]))
    found = judge(story, Ending(0, tracebacks=above))
    assert found.lines == (
        "all 2 ranks failed:",
        "first, rank 0 on vm: ValueError: boom",
        "  (its traceback is above)",
        "also on rank 1",
    )
    assert "Traceback" in judge(story, Ending(0, tracebacks=above[:1])).lines[2]


def test_a_traceback_that_an_event_had_no_room_for_is_known_by_its_end() -> None:
    cut = events.RankFailed(
        5.0, 0, "vm", 1, "ValueError: boom", "...e 3, in <module>\n" + END_OF_IT
    )
    above = ("\n".join(TRACEBACK),)
    assert "  (its traceback is above)" in judge(told(1, cut), Ending(0, tracebacks=above)).lines


def test_ranks_that_failed_alike_among_others_are_all_named_with_one_traceback() -> None:
    found = verdict(4, *(failed(n, at=5.0) for n in (0, 1)), failed(2, 6.0, "OSError"), ended(3))
    assert [line for line in found.lines if not line.startswith("  Traceback")] == [
        "warning: rank 0 on vm failed: ValueError: boom",
        "warning: rank 1 on vm failed: ValueError: boom",
        "  (with the same last words as rank 0)",
        "warning: rank 2 on vm failed: OSError",
        "  (with the same last words as rank 0)",
    ]


def test_mpiruns_0_is_not_believed_when_no_rank_ended_well() -> None:
    found = verdict(2)
    assert found.exit_code == 1
    assert "no rank ended normally" in found.lines[0]
    assert "node" in found.lines[0]


def test_mpirun_that_starts_no_rank_is_a_failure_that_points_at_its_words() -> None:
    found = verdict(2, code=255)
    assert found.exit_code == 1
    assert found.lines == (
        "no rank ended normally, and mpirun ended with code 255: what it said is above",
    )


def test_mpirun_that_gives_up_after_some_rank_was_through_is_a_failure() -> None:
    assert verdict(2, ended(0), ended(1, 7), code=7).exit_code == 1


def test_a_rank_whose_end_nobody_saw_is_a_failed_one() -> None:
    found = verdict(2, ended(0))
    assert found.exit_code == 0
    assert found.lines == ("warning: rank 1 failed: nobody saw its end: was its node lost?",)


def test_a_stopped_job_leaves_with_its_own_code_even_if_some_rank_was_through() -> None:
    stop = events.JobStopped(5.0, 1, 3, "quorum lost")
    found = verdict(3, ended(2), stop, ended(1, 3, at=5.1), ended(0, None, 9, at=5.2), code=3)
    assert found.exit_code == 3
    assert found.lines[0] == "the job stopped with code 3: quorum lost (rank 1)"
    assert found.failures[0].reason == "quorum lost"


def test_ranks_that_all_gave_up_for_want_of_a_quorum_leave_with_its_code() -> None:
    stops = [events.RankStopped(5.0, member, 3, "no majority") for member in (0, 1)]
    found = verdict(3, ended(2, None, 9), *stops, ended(0, 3), ended(1, 3))
    assert found.exit_code == 3
    assert found.failures[1].reason == "no majority"


def test_a_minority_that_gives_up_does_not_end_the_others() -> None:
    stop = events.RankStopped(5.0, 1, 3, "no majority")
    found = verdict(2, stop, ended(1, 3), ended(0))
    assert found.exit_code == 0
    assert "no majority" in found.lines[0]


def test_a_rank_that_ended_before_the_others_started_is_waited_for_in_vain() -> None:
    story = told(3, events.RankStarting(1.0, 0), events.RankStarting(1.0, 2))
    assert story.waited_for_in_vain == []
    story.handle(ended(1))
    assert story.waited_for_in_vain == [1]
    for member in (0, 2):
        story.handle(events.RankStarted(2.0, member, "vm", 1, 3))
    assert story.waited_for_in_vain == []


def test_a_start_that_was_given_up_names_the_ranks_that_had_ended_once_and_by_what() -> None:
    story = told(4, *(events.RankStarting(1.0, member) for member in (0, 1)))
    notices = [*story.handle(ended(2, None, 9, at=2.0)), *story.handle(ended(3, 0, at=2.5))]
    assert [notice.text for notice in notices] == ["rank 2 on vm failed: ended by SIGKILL"]
    story.start_given_up = True
    found = judge(story, Ending(1))
    assert found.exit_code == 1
    assert found.lines == (
        "the job stopped with code 1: MPI cannot start without all ranks:",
        "first, rank 2 on vm: ended by SIGKILL",
        "also on rank 3: exit code 0",
    )
    failed = {rank["rank"]: rank["signal"] for rank in found.summary["failed_ranks"]}
    assert failed == {0: None, 1: None, 2: 9}


def test_an_aborted_job_is_a_failure_even_if_some_rank_was_through() -> None:
    story = told(2, ended(1))
    assert len(story.abort(0)) == 1
    assert story.abort(1) == []
    story.handle(ended(0, 7))
    found = judge(story, Ending(0))
    assert found.exit_code == 1
    assert found.lines[0] == "rank 0 aborted the job (MPI_Abort)"


def test_a_signal_to_the_launcher_gives_its_code_and_blames_no_rank() -> None:
    found = verdict(2, ended(0, None, 15), signal=2)
    assert (found.exit_code, found.lines, found.failures) == (130, ("ended by SIGINT",), ())


def test_a_rehearsed_death_is_no_warning_and_no_matter_for_strict() -> None:
    happened = (kill(1, at=5.0), ended(1, None, 9, at=5.0), ended(0))
    found = verdict(2, *happened, strict=True)
    assert (found.exit_code, found.lines) == (0, ())
    assert found.summary["failed_ranks"][0]["reason"] == "fault schedule: kill:1@5"
    assert (found.summary["faults_injected"], found.summary["faults_survived"]) == (1, 1)
    assert found.summary["recovery_seconds"] == []  # no step followed


# -- notices and status ------------------------------------------------------------------------


def test_a_fault_and_its_recovery_are_told_as_they_happen() -> None:
    story = Story(3)
    story.handle(events.RankStarted(1.0, 0, "vm", 1, 3))
    texts = [
        notice.text
        for event in (
            *(kill(2, at=10.0), view(1, (0, 1), (2,), at=10.1)),
            *(ended(2, None, 9, at=10.0), step(50, 1, at=10.25), step(51, 1, at=10.3)),
        )
        for notice in story.handle(event)
    ]
    assert texts == [
        "chaos: kill:2@5 strikes rank 2",
        "lost rank 2; 2 go on, rebuilt in 0.020 s",
        "recovered from kill:2@5 in 0.250 s",
    ]
    story.handle(events.Reported(11.0, 0, {"loss": 0.123456}))
    assert status_text(story) == "step 51 | 2 of 3 ranks | loss 0.1235"  # no notice comes twice


def test_after_a_restore_the_status_tells_the_steps_of_the_job_from_those_of_the_run() -> None:
    story = told(2, events.CheckpointRestored(1.0, 0, 4000, "storage", 4, 100), step(119, 0, 2.0))
    assert status_text(story) == "step 119 of this job, which restored step 4000 | 2 of 2 ranks"
    story.handle(events.Reported(3.0, 0, {"step": 4120}))  # the script knows better
    assert status_text(story) == "step 4120 | 2 of 2 ranks"


def test_a_failure_is_told_once_although_rank_and_guard_both_report_it() -> None:
    story = Story(2)
    told_first, told_second = story.handle(failed(1, at=5.0)), story.handle(ended(1, 1))
    assert [notice.text for notice in told_first] == ["rank 1 on vm failed: ValueError: boom"]
    assert told_first[0].warning
    assert told_second == []


# -- last words --------------------------------------------------------------------------------


def test_a_chain_of_tracebacks_is_kept_whole() -> None:
    chain = [
        *TRACEBACK,
        *("", "During handling of the above exception, another exception occurred:", ""),
        *("Traceback (most recent call last):", '  File "x.py", line 1, in f', "pkg.Error"),
    ]
    lines = ["unrelated", *TRACEBACK, "handled", *chain]
    assert last_words(lines) == "\n".join(chain)
    assert exception_of(lines) == "pkg.Error"


def test_without_a_traceback_the_last_lines_must_do() -> None:
    assert last_words(map(str, range(20))) == "15\n16\n17\n18\n19"
    assert exception_of(["a", "b: c"]) == ""


def test_the_guard_starts_without_what_it_does_not_need() -> None:
    code = (
        "import sys, mpift.launch.guard;"
        "print(*({'torch', 'numpy', 'rich', 'typer', 'psutil', 'mpi4py', 'subprocess'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == []


def test_a_scheduled_fault_that_never_struck_is_said() -> None:
    story = Story(2, ["kill:1@5", "kill:0@99"])
    for event in (
        events.FaultInjected(2.0, 1, "kill:1@5", 5),
        events.ViewChanged(2.1, 0, 1, (0,), (1,), 0.0251),
        ended(1, None, 9),
        left(0),
        ended(0),
    ):
        story.handle(event)
    found = judge(story, Ending(0))
    assert found.exit_code == 0
    assert found.lines == ("warning: scheduled fault kill:0@99 never struck",)
    assert found.summary["ranks_lost"] == 1
    assert found.summary["rebuild_seconds"] == [0.0251]
