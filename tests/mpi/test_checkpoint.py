"""Checkpoints of real jobs under plain ``mpirun``: saved together, restored by any number of ranks.

What a checkpoint promises after faults is in ``test_checkpoint_faults``, what becomes of memory,
shared directories and full disks in ``test_checkpoint_places``.
"""

from __future__ import annotations

from typing import Any

import pytest

from mpift.testing.ranks import run_ranks
from tests.mpi import checkpoint_scenarios as scenarios

pytestmark = pytest.mark.timeout(300)

HALF = 8
LIMIT_SECONDS = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def whole(folder: str) -> dict[int, Any]:
    """Two ranks that train without an interruption, and save in the middle."""
    outcome = run_ranks(2, scenarios.uninterrupted, folder, HALF, timeout_seconds=LIMIT_SECONDS)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    return outcome.results


def resume(ranks: int, folder: str) -> dict[int, Any]:
    outcome = run_ranks(ranks, scenarios.resumed, folder, HALF, timeout_seconds=LIMIT_SECONDS)
    assert sorted(outcome.results) == list(range(ranks)), str(outcome)
    return outcome.results


def test_a_save_is_committed_behind_the_training_and_known_to_all_ranks(
    whole: dict[int, Any],
) -> None:
    for result in whole.values():
        assert result["through"]
        assert result["committed"] == 2 * HALF
        assert result["steps"] == [HALF, 2 * HALF]


def test_training_that_is_resumed_by_as_many_ranks_equals_uninterrupted_bit_for_bit(
    whole: dict[int, Any], folder: str
) -> None:
    again = resume(2, folder)
    for rank in (0, 1):
        assert again[rank]["from"] == [HALF, "storage", 2]
        assert again[rank]["half"] == whole[rank]["half"]
        assert again[rank]["end"] == whole[rank]["end"]
    assert again[0]["end"]["own"] != again[1]["end"]["own"]
    assert again[0]["end"]["shared"] == again[1]["end"]["shared"]


@pytest.mark.long
def test_a_run_that_went_back_saves_the_same_steps_once_more_and_they_are_the_newest(
    whole: dict[int, Any], folder: str
) -> None:
    again = resume(2, folder)
    for result in again.values():
        assert result["newest"] == 2 * HALF
        assert result["again"][:2] == [2 * HALF, 2]
        assert result["again"][2] <= 10  # generators are read in any case; the rest is in place


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_any_number_of_ranks_restores_what_two_have_saved_and_trains_on(
    ranks: int, whole: dict[int, Any], folder: str
) -> None:
    found = resume(ranks, folder)
    first, second = whole[0]["losses"]
    for result in found.values():
        assert result["from"] == [HALF, "storage", 2]
        assert result["half"]["shared"] == whole[0]["half"]["shared"]
        assert result["again"][:2] == [2 * HALF, ranks]
        assert abs(result["loss"] - second) < 0.5 * first
    assert len({result["end"]["shared"] for result in found.values()}) == 1
