"""Training on the simulated NPU, on real ranks, under faults of ranks and of devices."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.testing.ranks import Outcome, run_ranks
from tests.npu import training_scenarios as scenarios

SHARED = [
    scenarios.with_sgd,
    scenarios.with_adam,
    scenarios.accumulated,
    scenarios.compressed,
    scenarios.memory_runs_out,
]


def on_npus(ranks: int, scenario: Any, *arguments: Any) -> Outcome:
    return run_ranks(ranks, scenario, *arguments, timeout_seconds=100, environment=scenarios.NPU)


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """By scenario, what the two ranks returned."""
    outcome = on_npus(2, SHARED)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    return {
        scenario.__name__: [outcome.results[member][index] for member in (0, 1)]
        for index, scenario in enumerate(SHARED)
    }


@pytest.mark.parametrize("scenario", ["with_sgd", "with_adam", "accumulated"])
def test_training_is_bit_for_bit_that_of_the_cpu(seen: dict[str, Any], scenario: str) -> None:
    for on_cpu, on_npu in seen[scenario]:
        assert on_cpu["alike"]
        assert on_npu["digest"] == on_cpu["digest"]


def test_ranks_that_narrow_their_gradients_on_the_device_stay_alike(seen: dict[str, Any]) -> None:
    for found in seen["compressed"]:
        assert all(run["alike"] and run["finite"] for run in found), found


@pytest.mark.parametrize(
    ("code", "first", "last", "stride"),
    [
        (507046, 0, 60, 14),
        (507053, 3, 60, 19),
        pytest.param(507046, 0, 90, 1, marks=pytest.mark.long),
        pytest.param(507053, 0, 90, 1, marks=pytest.mark.long),
    ],
)
def test_wherever_in_a_step_the_device_fails_all_ranks_end_alike(
    code: int, first: int, last: int, stride: int
) -> None:
    outcome = on_npus(2, scenarios.fault_at_every_call, code, first, last, stride)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    for rank, (on_cpu, *runs) in outcome.results.items():
        for run in runs:
            assert run["alike"], (rank, run)
            assert run["finite"], (rank, run)
        undisturbed = [run for run in runs if not run["repairs"] and not run["missed"]]
        if rank == 0:
            continue
        # A step that was made again as it was is as if nothing had happened.
        assert all(run["digest"] == on_cpu["digest"] for run in undisturbed), (on_cpu, runs)
        assert any(run["calls"] > scenarios.STEPS - run["missed"] for run in runs)


@pytest.mark.parametrize("guarded", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_rank_whose_device_is_lost_leaves_and_the_others_know_why(guarded: bool) -> None:
    outcome = on_npus(3, scenarios.device_lost, guarded)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    assert all(found["alike"] for found in outcome.results.values())
    assert "507010" in outcome.stderr
    assert "lost member 1 (" in outcome.stderr


@pytest.mark.long
def test_a_device_that_fails_again_and_again_is_given_up() -> None:
    outcome = on_npus(3, scenarios.fails_again_and_again)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    assert "again and again" in outcome.stderr


@pytest.mark.long
def test_a_fault_before_there_is_a_state_to_take_over_costs_no_other_rank_anything() -> None:
    outcome = on_npus(3, scenarios.fault_in_the_first_step)
    assert {0, 2} <= set(outcome.results), str(outcome)
    assert all(found["alike"] and found["finite"] for found in outcome.results.values())


def test_late_ranks_and_deaths_leave_the_others_alike() -> None:
    outcome = on_npus(3, scenarios.late_and_dying)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    assert all(found["alike"] for found in outcome.results.values())


@pytest.mark.long
def test_a_rank_whose_device_hangs_does_not_hold_the_others_up_for_ever() -> None:
    outcome = on_npus(3, scenarios.hanging_device)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    assert all(found["alike"] for found in outcome.results.values())


def test_running_out_of_memory_is_the_scripts_own_matter(seen: dict[str, Any]) -> None:
    for found in seen["memory_runs_out"]:
        assert "out of memory" in found["text"]
        assert found["calls"] == 2


def test_after_a_fault_each_gradient_counts_once_and_no_hook_sees_a_state_given_up() -> None:
    outcome = on_npus(2, [scenarios.what_counted, scenarios.what_hooks_see])
    assert sorted(outcome.results) == [0, 1], str(outcome)
    for rank, (counted, hooks) in outcome.results.items():
        assert counted["rounds"] == scenarios.STEPS
        assert counted["counted"][0] == [1.0] * scenarios.STEPS
        assert max(counted["counted"][1]) == 1.0  # a round may be missed, none counts twice
        assert counted["counted"][1][2] == 1.0
        assert hooks["alike"]
        assert all(hooks["seen"]), (rank, hooks)
    assert outcome.results[1][1]["struck"]
