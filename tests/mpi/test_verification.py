"""Verification on real ranks: whoever deviates is repaired, and nobody goes on with other bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpift.testing.ranks import run_job, run_ranks
from tests.mpi import verification_scenarios as scenarios

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 4
SHARED = [
    scenarios.flipped,
    scenarios.damaged_state,
    scenarios.temporarily_other,
    scenarios.late_and_damaged,
    scenarios.cannot_come,
    scenarios.scaled_and_skipped,
    scenarios.notes,
    scenarios.other_settings,
    scenarios.other_groups,
    scenarios.two_against_two,
    scenarios.two_and_one_and_one,
]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """By scenario, what the ranks returned."""
    outcome = run_ranks(RANKS, SHARED, timeout_seconds=120)
    assert sorted(outcome.results) == list(range(RANKS)), str(outcome)
    return {
        scenario.__name__: [outcome.results[member][index] for member in range(RANKS)]
        for index, scenario in enumerate(SHARED)
    }


def check_repaired(results: list[dict[str, Any]], member: int) -> None:
    """All are equal, and this one alone was repaired."""
    assert len({each["digest"] for each in results}) == 1
    assert [each["repairs"] for each in results] == [int(m == member) for m in range(RANKS)]
    assert len({each["examinations"] for each in results}) == 1


def test_a_flipped_bit_of_a_parameter_is_found_and_repaired(seen: dict[str, Any]) -> None:
    check_repaired(seen["flipped"], scenarios.DAMAGED)
    for each in seen["flipped"]:
        assert (each["examinations"], each["false_alarms"], each["checks"]) == (1, 0, 5)


def test_optimizer_state_and_settings_are_repaired_too(seen: dict[str, Any]) -> None:
    check_repaired(seen["damaged_state"], scenarios.DAMAGED)
    assert len({each["late"] for each in seen["damaged_state"]}) == 1


def test_a_digest_of_what_a_script_held_for_a_while_only_costs_an_examination(
    seen: dict[str, Any],
) -> None:
    results = seen["temporarily_other"]
    check_repaired(results, member=-1)
    assert [each["false_alarms"] for each in results] == [1] * RANKS


def test_a_rank_that_is_late_is_repaired_when_it_replays(seen: dict[str, Any]) -> None:
    check_repaired(seen["late_and_damaged"], scenarios.LATE)


def test_ranks_that_wait_for_each_other_put_the_examination_off(seen: dict[str, Any]) -> None:
    check_repaired(seen["cannot_come"], scenarios.LATE)
    for each in seen["cannot_come"]:
        assert each["declined"] == [0, 0]


def test_overflows_and_steps_left_out_are_no_mismatch(seen: dict[str, Any]) -> None:
    check_repaired(seen["scaled_and_skipped"], member=-1)
    assert [each["examinations"] for each in seen["scaled_and_skipped"]] == [0] * RANKS


def test_notes_in_a_parameter_group_and_its_order_are_no_mismatch(seen: dict[str, Any]) -> None:
    assert [each["examinations"] for each in seen["notes"]] == [0] * RANKS


def test_a_rank_is_repaired_but_not_evicted_for_its_settings(seen: dict[str, Any]) -> None:
    results = seen["other_settings"]
    assert len({each["digest"] for each in results}) == 1
    assert len({each["unchecked"]["digest"] for each in results}) == 1
    for member, each in enumerate(results):
        damaged = member == scenarios.DAMAGED
        assert each["repairs"] >= 4 * damaged
        assert each["unchecked"]["repairs"] == 3 * damaged
        assert len(each["said"]) == 2 * damaged  # once by each optimizer
    first, second = results[scenarios.DAMAGED]["said"]
    assert "most ranks (param_groups[0]['foreach']: false here, null there): repaired" in first
    assert "settings differed from those of most ranks in an earlier round" in second
    for said in (first, second):
        assert "optimizer.register_scheduler" in said


def test_what_no_repair_can_change_is_said_once_and_training_goes_on(seen: dict[str, Any]) -> None:
    results = seen["other_groups"]
    assert len({each["digest"] for each in results}) == 1
    assert [each["repairs"] for each in results] == [0] * RANKS
    assert [len(each["said"]) for each in results] == [0, 0, 1, 0]
    assert (
        "can't be made the same (number of param_groups: 2 here, 1 there)"
        in (results[scenarios.DAMAGED]["said"][0])
    )


@pytest.mark.parametrize(
    ("scenario", "groups"),
    [("two_against_two", "0, 1 | 2, 3"), ("two_and_one_and_one", "0, 1 | 2 | 3")],
)
def test_without_a_majority_all_ranks_refuse_to_go_on(
    seen: dict[str, Any], scenario: str, groups: str
) -> None:
    for said in seen[scenario]:
        assert f"members: {groups} differ in 2.weight. " in said


def test_ranks_that_leave_or_die_in_an_examination_leave_the_others_alike() -> None:
    outcome = run_ranks(5, scenarios.one_after_the_other, 5, timeout_seconds=120)
    assert sorted(outcome.results) == [1, 2], str(outcome)
    first, second = outcome.results.values()
    assert first["digest"] == second["digest"], str(outcome)
    assert first["sizes"] == second["sizes"] == [5, 5, 5, 4, 3]  # as seen in the next round
    assert (first["repairs"], second["repairs"]) == (0, 1)
    assert "evicted: it deviates from the other ranks after it was repaired 1 times" in (
        outcome.stderr
    )
    assert outcome.stderr.count("rank 4 repaired: 0.weight, ") == 1
    assert outcome.stderr.count("rank 2 repaired: 0.weight, ") == 1


@pytest.mark.long
def test_the_launcher_says_once_who_was_repaired_and_counts_it(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    words = ["-m", "mpift", "run", "-np", "3", "--chaos", "flip:1@12", "--summary", str(summary)]
    script = [str(REPOSITORY / "examples/digits.py"), "--epochs", "1", "--verify-every", "5"]
    outcome = run_job([sys.executable, *words, sys.executable, *script], ranks=3)
    assert outcome.exit_code == 0, str(outcome)
    begin = "mpift run: rank 1 repaired: "
    said = [line for line in outcome.stderr.splitlines() if line.startswith(begin)]
    assert len(said) == 1, str(outcome)
    assert " bytes differed (host " in said[0]
    found = json.loads(summary.read_text())
    assert found["ranks_repaired"] == 1
    assert found["parameters_identical"]
