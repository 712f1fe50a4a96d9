"""Hangs, freezes, stalls and silence of real ranks: each ends, and nobody healthy is evicted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpift.testing.ranks import TCP, Outcome, run_ranks
from tests.mpi import detection_scenarios as scenarios

# Beats so often that a test needs no minute; the proportions are those of the presets.
QUICK = {"MPIFT_HEARTBEAT_INTERVAL": "0.2", "MPIFT_HEARTBEAT_TIMEOUT": "1.5"}
ALONE = QUICK | {"MPIFT_WATCHDOG": "0"}


def survivors(outcome: Outcome) -> list[int]:
    assert not outcome.timed_out, str(outcome)
    assert not outcome.left_running, str(outcome)
    for found in outcome.results.values():
        assert found["members"] == sorted(outcome.results), str(outcome)
    return sorted(outcome.results)


@pytest.mark.parametrize("fault", ["stop:1@20", "stop:0@20", "stop:2@20:bucket0"])
def test_a_stopped_rank_is_fenced_by_the_watchdog_and_the_others_go_on(fault: str) -> None:
    outcome = run_ranks(4, scenarios.go_on, 3.0, environment={"MPIFT_CHAOS": fault})
    stopped = int(fault[5])
    assert survivors(outcome) == sorted({0, 1, 2, 3} - {stopped}), str(outcome)
    assert f"lost member {stopped} (stopped" in outcome.stderr


def test_a_rank_that_holds_the_interpreters_lock_for_ever_is_fenced() -> None:
    environment = {"MPIFT_CHAOS": "gil:1@20:100000", "MPIFT_HANG_TIMEOUT": "1.5"}
    outcome = run_ranks(3, scenarios.go_on, 4.0, environment=environment)
    assert survivors(outcome) == [0, 2], str(outcome)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("stopped", [0, 1])
def test_without_a_watchdog_the_heartbeats_find_a_stopped_rank_and_a_neighbour_fences_it(
    ranks: int, stopped: int
) -> None:
    environment = ALONE | {"MPIFT_CHAOS": f"stop:{stopped}@20"}
    outcome = run_ranks(ranks, scenarios.go_on, 6.0, environment=environment)
    assert survivors(outcome) == sorted(set(range(ranks)) - {stopped}), str(outcome)
    assert f"rank {stopped} on" in outcome.stderr
    assert "has not been heard for" in outcome.stderr


def test_a_rank_stopped_in_a_rebuild_does_not_keep_the_others() -> None:
    environment = {"MPIFT_CHAOS": "kill:1@20,stop:2@20:split"}
    outcome = run_ranks(4, scenarios.go_on, 4.0, environment=environment)
    assert survivors(outcome) == [0, 3], str(outcome)


def test_without_a_watchdog_a_rebuild_that_waits_for_a_stopped_rank_ends_it() -> None:
    environment = ALONE | {"MPIFT_CHAOS": "kill:1@20,stop:2@20"}
    outcome = run_ranks(4, scenarios.go_on, 6.0, environment=environment)
    # Of double faults in a rebuild, MPI itself crashes a survivor now and then.
    assert survivors(outcome) in ([0, 3], [0], [3]), str(outcome)


@pytest.mark.parametrize("place", ["agree_on_settings", "watchdog_addresses"])
def test_a_rank_that_stops_before_anybody_watches_over_it_does_not_keep_the_others(
    place: str,
) -> None:
    environment = {"MPIFT_START_TIMEOUT": "4"}
    outcome = run_ranks(3, scenarios.stop_while_starting, place, environment=environment)
    assert not outcome.timed_out, str(outcome)
    assert sorted(outcome.results) in ([], [0, 2]), str(outcome)


def test_many_starts_and_ends_in_one_process_leave_nothing_open() -> None:
    outcome = run_ranks(2, scenarios.start_and_end, 5)
    for found in outcome.results.values():
        assert found["descriptors"][-1] <= found["descriptors"][1] + 1
        assert found["watchdogs"] == 0
    assert sorted(outcome.results) == [0, 1], str(outcome)


def freeze(
    seconds: float, choose: Callable[[list[psutil.Process]], list[int]], started: Path
) -> Any:
    """A ``during`` that stops some processes for a while once all ranks are at work."""

    def during(processes: list[psutil.Process]) -> None:
        while not started.exists():
            time.sleep(0.01)
        pids = choose(processes)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    return during


def whole_job(processes: list[psutil.Process]) -> list[int]:
    launcher = processes[0].parent()
    token = processes[0].environ()["MPIFT_TEST_TOKEN"]
    watchdogs = []
    for process in psutil.process_iter():
        try:
            if "mpift.transport.watchdog" in process.cmdline():
                watchdogs += [process.pid] * (process.environ()["MPIFT_TEST_TOKEN"] == token)
        except (psutil.Error, KeyError):
            continue
    assert len(watchdogs) == 1
    return [*(p.pid for p in processes), launcher.pid, *watchdogs]


@pytest.mark.parametrize(
    ("seconds", "choose"),
    [
        pytest.param(
            0.4,
            lambda processes: [processes[1].pid],
            id="one rank, briefly",
            marks=pytest.mark.long,
        ),
        pytest.param(4.0, lambda processes: [p.pid for p in processes], id="all ranks"),
        pytest.param(4.0, whole_job, id="all ranks, launcher and watchdog", marks=pytest.mark.long),
    ],
)
def test_nobody_is_evicted_for_a_freeze_within_the_limits_or_of_all(
    seconds: float, choose: Callable[[list[psutil.Process]], list[int]], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    environment = QUICK | {"MPIFT_HANG_TIMEOUT": "1.5"}
    outcome = run_ranks(
        3,
        scenarios.go_on,
        seconds + 2.0,
        str(started),
        environment=environment,
        during=freeze(seconds, choose, started),
    )
    assert survivors(outcome) == [0, 1, 2], str(outcome)
    assert all(found["epoch"] == 0 for found in outcome.results.values())


@pytest.mark.long
def test_nobody_is_evicted_for_holding_the_lock_for_a_while_on_a_crowded_machine() -> None:
    faults = ",".join(f"gil:{member}@{20 + 30 * member}:1.2" for member in range(4))
    environment = QUICK | {"MPIFT_CHAOS": faults, "MPIFT_HEARTBEAT_TIMEOUT": "4"}
    outcome = run_ranks(4, scenarios.go_on, 6.0, environment=environment)
    assert survivors(outcome) == [0, 1, 2, 3], str(outcome)
    assert all(found["epoch"] == 0 for found in outcome.results.values())


def test_damaged_heartbeats_are_counted_and_not_believed_and_lost_ones_are_borne() -> None:
    faults = "corrupt:1@0-100000:0.3,drop:2@0-100000:0.3"
    outcome = run_ranks(3, scenarios.go_on, 4.0, environment=QUICK | {"MPIFT_CHAOS": faults})
    assert survivors(outcome) == [0, 1, 2], str(outcome)
    for member in (0, 2):
        assert outcome.results[member]["corrupt"] > 0
    assert outcome.results[0]["losses"] > 0
    assert all(found["received"] > 0 for found in outcome.results.values())


def test_a_reset_connection_between_live_ranks_lets_nobody_train_on_alone() -> None:
    for ranks in (2, 4):
        outcome = run_ranks(
            ranks,
            scenarios.go_on,
            4.0,
            environment={"MPIFT_CHAOS": "reset:1@20"},
            mpi_arguments=TCP,
        )
        # Open MPI may abort an end of the cut; whoever goes on does so with all that live.
        assert "reset:1@20 strikes member 1" in outcome.stderr
        assert "nothing is reset" not in outcome.stderr
        survivors(outcome)


def test_a_stalled_rank_is_named_once_with_the_place_where_it_is() -> None:
    environment = QUICK | {"MPIFT_STALL_WARNING_SECONDS": "1"}
    outcome = run_ranks(3, scenarios.stall, 3.0, environment=environment)
    assert survivors(outcome) == [0, 1, 2], str(outcome)
    assert outcome.stderr.count("has made no progress") == 1
    assert "rank 1 on" in outcome.stderr
    assert "lazily_load_data" in outcome.stderr


def test_a_stalled_rank_is_evicted_where_the_settings_say_so() -> None:
    environment = QUICK | {"MPIFT_STALL_WARNING_SECONDS": "0.5", "MPIFT_STALL_TIMEOUT": "1.5"}
    outcome = run_ranks(3, scenarios.stall, 100.0, environment=environment)
    assert survivors(outcome) == [0, 2], str(outcome)
    assert "rank 1 is evicted: it made no progress at step 0" in outcome.stderr


def test_ranks_with_different_settings_are_told_the_key_and_the_ranks() -> None:
    outcome = run_ranks(3, scenarios.different_settings)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    for found in outcome.results.values():
        assert "bucket_bytes" in found["error"]
        assert "4096" in found["error"]
        assert "rank 1" in found["error"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nobody_is_evicted_in_minutes_on_a_machine_that_others_load_too() -> None:
    """Preset limits, two burning processes a core; each rank holds the lock for 2 s at times."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    faults = ",".join(
        f"gil:{member}@{step}:2"
        for member in range(4)
        for step in range(50 + 20 * member, 2000, 300)
    )
    try:
        outcome = run_ranks(
            4,
            scenarios.go_on,
            150.0,
            environment={"MPIFT_CHAOS": faults},
            timeout_seconds=300,
        )
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert survivors(outcome) == [0, 1, 2, 3], str(outcome)
    assert all(found["epoch"] == 0 for found in outcome.results.values())
    assert "has not been heard" not in outcome.stderr
