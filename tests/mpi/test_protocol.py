"""Collectives and rounds on real ranks with real kills, over shared memory and over TCP."""

from __future__ import annotations

import pytest

from mpift.testing.ranks import TCP, run_ranks
from tests.mpi import protocol_scenarios as scenarios

STEPS = scenarios.STEPS
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
    outcome = run_ranks(
        4, scenarios.train, 30, 20_000, environment={"MPIFT_CHAOS": chaos}, mpi_arguments=way
    )
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


@pytest.mark.parametrize("seed", range(4))
def test_random_deaths_in_the_middle_of_operations(seed: int) -> None:
    way = TCP if seed % 2 else ()
    outcome = run_ranks(4, scenarios.random_deaths, seed, mpi_arguments=way)
    assert outcome.results, str(outcome)
    assert not outcome.timed_out, str(outcome)
    assert all(result["alike"] for result in outcome.results.values())


def test_ranks_that_finish_early_count_as_joined_until_the_last_is_through() -> None:
    outcome = run_ranks(3, scenarios.uneven, {"0": 3, "1": 6, "2": 1})
    assert outcome.results[0]["counts"] == [3, 2, 2], str(outcome)
    assert outcome.results[1]["counts"] == [3, 2, 2, 1, 1, 1]
    assert outcome.results[2]["counts"] == [3]


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


def test_a_communicator_of_some_of_the_processes_stands_alone() -> None:
    outcome = run_ranks(4, scenarios.sub_communicator)
    found = [result["found"] for result in outcome.results.values()]
    assert found == [[0, 2], [1, 3], [0, 2], [1, 3]], str(outcome)


def test_without_fault_tolerance_it_runs_and_names_the_missing_flag_once() -> None:
    outcome = run_ranks(2, scenarios.leave_without_goodbye, fault_tolerant=False)
    assert outcome.exit_code == 0, str(outcome)
    assert outcome.stderr.count("mpirun --with-ft ulfm") == 1
