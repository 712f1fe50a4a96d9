"""States on the simulated NPU, on real ranks: operations, checks, replays, versions, scalers."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.testing.ranks import run_ranks
from tests.npu import state_scenarios as scenarios
from tests.npu.training_scenarios import NPU

SHARED = [
    scenarios.operations,
    scenarios.objects,
    scenarios.commits,
    scenarios.mixed_precision,
    scenarios.through_a_server,
    scenarios.fault_in_a_check,
    scenarios.checked_beside,
    scenarios.late_and_clipped,
    scenarios.saved_while_late,
    scenarios.flipped,
]
ADAM = ["exp_avg npu", "exp_avg_sq npu", "step cpu"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By scenario, what the three ranks returned."""
    folder = tmp_path_factory.mktemp("checkpoints")
    environment = {**NPU, scenarios.FOLDER_VARIABLE: str(folder)}
    outcome = run_ranks(3, SHARED, timeout_seconds=150, environment=environment)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    return {
        scenario.__name__: [outcome.results[member][index] for member in (0, 1, 2)]
        for index, scenario in enumerate(SHARED)
    }


def test_operations_and_digests_are_those_of_the_cpu(seen: dict[str, Any]) -> None:
    assert seen["operations"] == [[], [], []]


def test_objects_of_other_ranks_come_to_the_host_and_states_to_their_device(
    seen: dict[str, Any],
) -> None:
    for found in seen["objects"]:
        assert found == {
            "sent": ["cpu", [1.0, 1.0], 1],
            "gathered": [["cpu", [float(rank)] * 2] for rank in range(3)],
            "alike": True,
            "as_on_cpu": True,
            "devices": ADAM,
            "lr": 0.2,
        }


def test_a_flipped_bit_on_a_device_is_found_and_repaired(seen: dict[str, Any]) -> None:
    found = seen["flipped"]
    assert len({each["digest"] for each in found}) == 1
    assert [each["repairs"] for each in found] == [0, 0, 1]
    assert all(each["false_alarms"] == 0 and each["checks"] == 8 for each in found)
    assert all(each["devices"] == ADAM for each in found)


def test_a_check_holds_neither_the_training_thread_nor_the_device_up(seen: dict[str, Any]) -> None:
    for found in seen["checked_beside"]:
        assert found["checks"] == 3
        assert found["waited_for"] == []
        assert found["seen"]


def test_a_device_that_fails_in_a_check_is_met_with_in_the_next_step(seen: dict[str, Any]) -> None:
    first, second, third = seen["fault_in_a_check"]
    assert first["digest"] == second["digest"] == third["digest"]
    assert first["calls"] == third["calls"] == list(range(8))
    assert second["calls"] == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert "507046" in second["errors"][0]


def test_a_late_rank_takes_over_clipped_gradients_and_ends_alike(seen: dict[str, Any]) -> None:
    found = seen["late_and_clipped"]
    assert len({each["digest"] for each in found}) == 1
    assert all(each["devices"] == ADAM for each in found)
    assert found[-1]["replayed"] >= 2


def test_versions_are_committed_and_restored_on_the_device(seen: dict[str, Any]) -> None:
    for found in seen["commits"]:
        assert found == {
            "decided": True,
            "back": True,
            "kept": [True, [3.0, 3.0]],
            "devices": ADAM,
            "alike": True,
            "parameters": [True],
            "kept after sync": [True, [3.0, 3.0]],
        }


def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(seen: dict[str, Any]) -> None:
    for found in seen["mixed_precision"]:
        for run in found:
            assert run == {
                "moved": [True, True, False, True, True, True],
                "scale": 2048.0,
                "alike": True,
                "finite": True,
            }


def test_a_parameter_server_takes_gradients_of_a_device(seen: dict[str, Any]) -> None:
    found = seen["through_a_server"]
    assert len({each["digest"] for each in found}) == 1
    assert found[0]["as_plain"]
    for each in found:
        assert each["on_device"]
        assert each["pulled"] == ["cpu", [2.0, 2.0, 2.0], 1]


def test_a_late_rank_saves_the_same_as_the_others(seen: dict[str, Any]) -> None:
    for each in seen["saved_while_late"]:
        assert each["steps"] == {"4": True, "8": True}
        assert each["devices"] == ADAM
    assert seen["saved_while_late"][-1]["replayed"] >= 3
