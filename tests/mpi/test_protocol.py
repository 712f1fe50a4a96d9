"""Collectives and rounds on real ranks with real kills, over shared memory and over TCP."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from mpift.testing.ranks import TCP, run_ranks
from tests.mpi import protocol_scenarios as scenarios
from tests.mpi import round_scenarios as rounds

STEPS = scenarios.STEPS
MPI = {"MPIFT_REDUCTION": "mpi"}
NODE = {"MPIFT_REDUCTION": "node"}
WAYS = pytest.mark.parametrize("way", [(), TCP], ids=["shared-memory", "tcp"])


def test_every_operation_and_every_mistake_on_three_ranks() -> None:
    outcome = run_ranks(3, scenarios.collectives)
    assert set(outcome.results) == {0, 1, 2}, str(outcome)
    for seen in outcome.results.values():
        assert seen["sum"] == [3, 6, 9, 12, 15]
        assert (seen["min"], seen["max"], seen["product"]) == (0, [[2]], [6, 6])
        assert (seen["empty"], seen["any"]) == ([0, 3], [True])
        assert seen["broadcast"] == [1, 1, 1]
        assert seen["gather"] == [[1, 1], [2, 2], [2, 2]]
        assert seen["gather_scalars"] == [0, 1, 2]
        assert seen["strided"] == [[0, 9], [3, 12], [6, 15]]
        assert "rank 0 allreduce (sum) of float64 (2,), rank 1" in seen["mismatch"]
        assert "barrier" in seen["other_call"]
        assert "unknown operator 'xor'" in seen["bad_operator"]
        assert "datetime64" in seen["bad_dtype"]
        assert "root 9 is not a rank of 0 to 2" in seen["bad_root"]
        assert seen["still_works"] == [3]


@WAYS
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param({"2": 10}, id="one"),
        pytest.param({"0": 10}, id="rank-0"),
        pytest.param({"1": 10, "2": 10}, id="two-at-once"),
        pytest.param({"0": 5, "1": 15, "3": 15}, id="all-but-one"),
    ],
)
def test_survivors_of_kills_finish_with_the_same_results(
    kills: dict[str, int], way: tuple[str, ...]
) -> None:
    outcome = run_ranks(4, scenarios.survive, kills, mpi_arguments=way)
    survivors = {0, 1, 2, 3} - {int(member) for member in kills}
    assert set(outcome.results) == survivors, str(outcome)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["sizes"][-1] == len(survivors)
        assert result["sums"][-1] == sum(10.0**member for member in survivors)
        # The size changes at the operation whose result lacks the dead, at no other.
        for size, total in zip(result["sizes"], result["sums"], strict=True):
            assert str(int(total)).count("1") == size


@WAYS
@pytest.mark.parametrize(
    ("chaos", "survivors"),
    [
        ("kill:2@10", [0, 1, 3]),
        ("kill:0@10:bucket1", [1, 2, 3]),
        ("kill:1@10,kill:3@5:shrink", [0, 2]),
        ("kill:1@10,kill:0@5:split", [2, 3]),
        ("kill:1@10,kill:2@5:agree", [0, 3]),
    ],
)
def test_rounds_go_on_with_the_survivors_and_lose_nothing_of_theirs(
    chaos: str, survivors: list[int], way: tuple[str, ...]
) -> None:
    environment = {"MPIFT_CHAOS": chaos, **(MPI if way == TCP else NODE)}
    outcome = run_ranks(4, rounds.train, 30, 20_000, environment=environment, mpi_arguments=way)
    assert sorted(outcome.results) == survivors, str(outcome)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["view"] == survivors
        assert len(result["participants"]) == 30
        # Round 9 may be redone without those that alone had finished it; what is older is not.
        assert result["participants"][8] == [0, 1, 2, 3]
        assert result["participants"][-1] == survivors
        # In every round all that were alive took part.
        assert all(set(survivors) <= set(members) for members in result["participants"])


def test_what_a_rank_had_in_place_when_it_died_counts_where_memory_is_shared() -> None:
    # It dies when it has just begun the last bucket of its round.
    environment = {"MPIFT_CHAOS": "kill:0@10:bucket3", **NODE}
    outcome = run_ranks(3, rounds.train, 20, 20_000, environment=environment)
    assert sorted(outcome.results) == [1, 2], str(outcome)
    for result in outcome.results.values():
        assert result["participants"] == [[0, 1, 2]] * 11 + [[1, 2]] * 9


def run_random_deaths(seeds: range) -> None:
    """Whatever dies when: the survivors end alike and in time. MPI itself crashes or wedges in some
    double faults; then the job ends with a named reason, and no more often than measured."""
    given_up = []
    for seed in seeds:
        way = TCP if seed % 2 else ()
        outcome = run_ranks(
            4,
            scenarios.random_deaths,
            seed,
            mpi_arguments=way,
            timeout_seconds=30,
            environment={"MPIFT_REBUILD_TIMEOUT": "8"},
        )
        assert not outcome.timed_out, f"seed {seed} hangs\n{outcome}"
        if not outcome.results:
            assert "took longer than rebuild_timeout" in outcome.stderr, f"seed {seed}\n{outcome}"
            given_up.append(seed)
        assert all(result["alike"] for result in outcome.results.values()), f"seed {seed}"
    assert len(given_up) <= max(1, len(seeds) // 25), f"given up in seeds {given_up}"


def test_runs_with_random_deaths_all_end_in_time() -> None:
    run_random_deaths(range(4))


@pytest.mark.long
def test_two_hundred_runs_with_random_deaths_all_end_in_time() -> None:
    run_random_deaths(range(100, 300))


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002])
def test_a_death_while_all_are_leaving_keeps_nobody(delay: float) -> None:
    outcome = run_ranks(3, rounds.death_in_shutdown, 1, delay, timeout_seconds=30)
    assert not outcome.timed_out, str(outcome)
    assert sorted(outcome.results) == [0, 2], str(outcome)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    left: list[psutil.Process] = []

    def kill_the_launcher(processes: list[psutil.Process]) -> None:
        wait_for(started)
        processes[0].parent().kill()
        left.extend(psutil.wait_procs(processes, timeout=10)[1])

    run_ranks(2, rounds.train, 100_000, 1000, str(started), during=kill_the_launcher)
    assert not left


def test_a_majority_goes_on_when_no_kernel_can_confirm_a_death_and_a_half_does_not() -> None:
    off = {"MPIFT_WATCHDOG": "0"}
    outcome = run_ranks(3, scenarios.on_separate_nodes, {"2": 10}, environment=off)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    outcome = run_ranks(3, scenarios.on_separate_nodes, {"2": 10, "1": 20}, environment=off)
    assert outcome.results == {}, str(outcome)
    assert "gives up with code 3: only 1 of 2 members of epoch 1 are left" in outcome.stderr
    assert outcome.exit_code == 3


def test_the_other_nodes_watchdog_confirms_a_death_that_no_kernel_here_can() -> None:
    outcome = run_ranks(3, scenarios.on_separate_nodes, {"2": 10, "1": 20})
    assert sorted(outcome.results) == [0], str(outcome)


def test_a_farewell_confirms_a_death_that_no_kernel_can() -> None:
    outcome = run_ranks(2, scenarios.on_separate_nodes, {"1": 10}, True)
    assert outcome.results == {0: {"size": 1}}, str(outcome)


def test_a_farewell_that_is_found_together_with_the_death_counts() -> None:
    outcome = run_ranks(
        *(2, scenarios.on_separate_nodes, {"1": 10}, True, True),
        mpi_arguments=TCP,
        environment={"MPIFT_WATCHDOG": "0"},  # its word would count as well
    )
    assert outcome.results == {0: {"size": 1}}, str(outcome)


def test_fewer_than_min_size_stop() -> None:
    outcome = run_ranks(
        3, scenarios.survive, {"1": 10}, environment={"MPIFT_MIN_SIZE": "3"}, timeout_seconds=20
    )
    assert outcome.results == {}, str(outcome)
    assert "too few ranks are left: 2, fewer than min_size=3" in outcome.stderr
    assert outcome.exit_code == 3


def members_of(processes: list[psutil.Process]) -> dict[int, psutil.Process]:
    return {int(p.environ()["OMPI_COMM_WORLD_RANK"]): p for p in processes}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


@WAYS
@pytest.mark.parametrize(
    "delay", [0.0, *(pytest.param(delay, marks=pytest.mark.long) for delay in (0.004, 0.009))]
)
def test_a_sender_stopped_in_mid_transfer_that_goes_on_later_corrupts_nothing(
    delay: float, way: tuple[str, ...], tmp_path: Path
) -> None:
    started = tmp_path / "started"

    def stop_kill_and_continue(processes: list[psutil.Process]) -> None:
        wait_for(started)
        members = members_of(processes)
        time.sleep(delay)
        members[2].suspend()
        time.sleep(0.05)
        members[1].kill()
        time.sleep(0.15)  # the others have revoked by now, and wait in the rebuild
        members[2].resume()

    outcome = run_ranks(
        3,
        rounds.train,
        150,
        400_000,
        str(started),
        mpi_arguments=way,
        environment=MPI,
        during=stop_kill_and_continue,
    )
    # Every value of every result is checked by the ranks themselves.
    assert sorted(outcome.results) == [0, 2], str(outcome)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["participants"][-1] == [0, 2]
    assert max(result["quarantined"] for result in outcome.results.values()) > 0


def test_a_rebuild_that_takes_too_long_is_given_up_with_a_named_reason(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def stop_and_kill(processes: list[psutil.Process]) -> None:
        wait_for(started)
        members = members_of(processes)
        members[2].suspend()
        members[1].kill()
        members[0].wait(timeout=20)  # gives up
        members[2].resume()

    outcome = run_ranks(
        3,
        rounds.train,
        200,
        10_000,
        str(started),
        environment={"MPIFT_REBUILD_TIMEOUT": "2", "MPIFT_WATCHDOG": "0"},
        during=stop_and_kill,
    )
    # The one that was stopped finds itself alone, and all others confirmed dead.
    assert sorted(outcome.results) == [2], str(outcome)
    assert "rebuilding took longer than rebuild_timeout=2 s" in outcome.stderr


def test_ranks_that_finish_early_count_as_joined_until_the_last_is_through() -> None:
    outcome = run_ranks(3, rounds.uneven, {"0": 3, "1": 6, "2": 1})
    assert outcome.results[0]["counts"] == [3, 2, 2], str(outcome)
    # Once most have left, a step opens no round.
    assert outcome.results[1]["counts"] == [3, 2, 2]
    assert outcome.results[2]["counts"] == [3]


@pytest.mark.parametrize("looks_late", [None, 2], ids=["all look", "one looks late"])
def test_it_may_be_shut_down_and_started_again_even_after_a_death(looks_late: int | None) -> None:
    outcome = run_ranks(3, scenarios.again_and_again, 1, looks_late)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    for result in outcome.results.values():
        assert result["sums"] == [7, 5, 5]
        assert "shut down" in result["after"]


@pytest.mark.parametrize("how", ["kill", "os._exit"])
def test_a_rank_that_ends_before_it_starts_is_not_waited_for_for_ever(how: str) -> None:
    outcome = run_ranks(
        3,
        scenarios.one_never_comes,
        how,
        environment={"MPIFT_START_TIMEOUT": "2"},
        timeout_seconds=20,
    )
    assert not outcome.timed_out, str(outcome)
    assert outcome.results == {}
    assert "starting MPI took longer than start_timeout=2 s" in outcome.stderr


@pytest.mark.parametrize(("dies", "members"), [(True, [0, 2]), (False, [0, 1, 2])])
def test_what_goes_wrong_on_one_rank_in_the_start_is_tried_again(
    dies: bool, members: list[int]
) -> None:
    outcome = run_ranks(3, scenarios.stumbles_in_the_start, 1, dies, timeout_seconds=30)
    expected = {"sum": sum(1 << member for member in members)}
    assert outcome.results == dict.fromkeys(members, expected), str(outcome)


def test_a_script_may_end_without_shutdown() -> None:
    outcome = run_ranks(2, scenarios.leave_without_goodbye)
    assert outcome.exit_code == 0, str(outcome)
    assert [r["sum"] for r in outcome.results.values()] == [[2], [2]]
    assert not outcome.stderr


def test_a_script_may_load_mpi_first() -> None:
    outcome = run_ranks(2, scenarios.mpi4py_first)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.results[0] == {"before": 2, "after": [2]}
    assert outcome.stderr.count("too late for these settings") == 1


def test_a_script_that_loaded_mpi_first_ends_well_after_a_death() -> None:
    outcome = run_ranks(3, scenarios.mpi4py_first_and_a_death)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    assert outcome.exit_code == 0
    assert outcome.stdout.count("exit handlers run") == 2
    assert outcome.seconds < 20


def test_operations_of_several_threads_and_an_interrupted_one_keep_their_order() -> None:
    outcome = run_ranks(2, scenarios.two_threads_and_an_interrupt)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    for rank, result in outcome.results.items():
        assert result == {"found": [2], "interrupted": rank == 0, "after": [14]}


def test_a_second_communicator_on_other_processes_is_refused() -> None:
    outcome = run_ranks(2, scenarios.other_communicator)
    for result in outcome.results.values():
        assert result["same"] == 2
        assert "another communicator" in result["error"]
    assert sorted(outcome.results) == [0, 1], str(outcome)


def test_a_communicator_of_some_of_the_processes_stands_alone() -> None:
    outcome = run_ranks(4, scenarios.sub_communicator)
    found = [result["found"] for result in outcome.results.values()]
    assert found == [[0, 2], [1, 3], [0, 2], [1, 3]], str(outcome)


def test_without_fault_tolerance_it_runs_and_names_the_missing_flag_once() -> None:
    outcome = run_ranks(2, scenarios.leave_without_goodbye, fault_tolerant=False)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.stderr.count("mpirun --with-ft ulfm") == 1
