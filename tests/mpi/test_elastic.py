"""``hvd.elastic.TorchState`` and the three-phase commit behind it, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpift.testing.ranks import run_ranks
from tests.mpi import elastic_scenarios as scenarios


@pytest.fixture(scope="module")
def seen() -> dict[int, Any]:
    outcome = run_ranks(4, scenarios.commits_and_restores, timeout_seconds=60)
    assert sorted(outcome.results) == [0, 1, 2, 3], str(outcome)
    return outcome.results


def test_every_commit_of_ranks_that_train_together_is_decided(seen: dict[int, Any]) -> None:
    for result in seen.values():
        assert result["versions"] == [[1000 * n, 1000 * n] for n in range(1, 9)]
        assert result["other"] == 8000


def test_a_state_goes_back_to_the_last_decided_version_bit_for_bit(seen: dict[int, Any]) -> None:
    for result in seen.values():
        assert result["untouched"]
        assert result["moved"]
        assert result["back"]
        assert result["alike"]


def test_a_version_that_is_not_newer_is_refused_with_both_named(seen: dict[int, Any]) -> None:
    for result in seen.values():
        assert "version 3 " in result["refusal"]
        assert "version 8000 " in result["refusal"]


def test_what_a_majority_holds_is_decided_and_given_to_the_rank_that_deviates(
    seen: dict[int, Any],
) -> None:
    for result in seen.values():
        assert result["majority"]
        assert result["repaired"]


def test_sync_gives_all_ranks_what_most_of_them_hold(seen: dict[int, Any]) -> None:
    assert all(result["synchronized"] for result in seen.values())


def test_ranks_that_commit_late_not_at_all_or_more_often_keep_nobody(seen: dict[int, Any]) -> None:
    for result in seen.values():
        assert result["late"] == 11_000
        assert result["without_the_coordinator"] == 12_000
        assert result["after_sync"] == 1


def test_a_commit_needs_neither_a_stopped_minority_nor_the_coordinator(tmp_path: Path) -> None:
    outcome = run_ranks(
        5,
        scenarios.a_member_is_stopped_and_the_coordinator_dies,
        str(tmp_path),
        environment={"MPIFT_STOP_TIMEOUT": "30", "MPIFT_HANG_TIMEOUT": "40"},
        timeout_seconds=60,
    )
    assert sorted(outcome.results) == [1, 2, 3, 4], str(outcome)
    for result in outcome.results.values():
        assert result["with_one_stopped"] == 1000
        assert result["after"] == 3000
        assert result["size"] == 4
        assert result["alike"]
