"""Checkpoints of jobs in which ranks and writers die, stop or are late.

After any of that, what restores is a checkpoint that was committed, not older than the last that
was reported, and holds what all ranks held at its step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpift.checkpoint import CheckpointManager
from mpift.checkpoint.directory import Directory
from mpift.testing.ranks import Outcome, run_ranks
from tests.mpi import checkpoint_fault_scenarios as scenarios
from tests.mpi.checkpoint_scenarios import shared_digest

pytestmark = pytest.mark.timeout(300)

LIMIT_SECONDS = 100.0


def restored_digests(folder: Path) -> dict[int, str]:
    """What each committed checkpoint holds, read by a process of its own group."""
    found = {}
    directory = Directory(folder)
    assert directory.damaged() == []
    with CheckpointManager(folder, keep=100) as manager:
        for committed in directory.committed():
            directory.check(committed, thorough=True)
            restored = manager.restore(committed.step)
            assert restored is not None
            model, optimizer = restored.values["model"], restored.values["optimizer"]
            parameters = {
                name: value
                for name, value in model.items()
                if not name.startswith("1.") or name in ("1.weight", "1.bias")
            }
            found[committed.step] = shared_digest(parameters, optimizer)
        newest = manager.restore()
        assert newest is not None
        assert newest.step == max(found)
    return found


def check_kills(outcome: Outcome, folder: Path, dead: set[int], ranks: int) -> list[int]:
    """What must hold after any deaths; returns the committed steps."""
    assert set(outcome.results) == set(range(ranks)) - dead, str(outcome)
    found = restored_digests(folder)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["size"] == ranks - len(dead)
        assert result["reported"] <= max(found)
        assert {step: result["digests"][str(step)] for step in found} == found
    return sorted(found)


@pytest.mark.parametrize(
    ("chaos", "there", "not_there"),
    [
        # Another rank of the node writes what the dead one had captured; what it had not captured
        # nobody has.
        pytest.param(
            "kill:0@4:captured,kill:3@8:snapshot",
            {2, 4, 6, 10, 12},
            {8},
            marks=pytest.mark.long,
        ),
        ("kill:0@4:snapshot,kill:3@8:captured", {2, 6, 8, 10, 12}, {4}),
        # Training may have gone on by then; what the dead rank took part in is not captured.
        pytest.param(
            "kill:0@4:announced,kill:1@8:published",
            {2, 4, 8, 12},
            set(),
            marks=pytest.mark.long,
        ),
        pytest.param("kill:0@4:voting,kill:3@8:voting", {2, 12}, set(), marks=pytest.mark.long),
    ],
)
def test_a_death_at_any_point_of_a_save_costs_that_checkpoint_at_most(
    chaos: str, there: set[int], not_there: set[int], tmp_path: Path
) -> None:
    outcome = run_ranks(
        4,
        scenarios.train_through_kills,
        str(tmp_path),
        12,
        2,
        environment={"MPIFT_CHAOS": chaos},
        timeout_seconds=LIMIT_SECONDS,
    )
    dead = {int(item[5]) for item in chaos.split(",")}
    committed = set(check_kills(outcome, tmp_path, dead, 4))
    assert there <= committed, str(outcome)
    assert not committed & not_there


@pytest.mark.parametrize("chaos", ["kill:1@4:bucket1,kill:3@9:bucket0"])
def test_blocks_of_a_round_that_was_done_anew_never_mix_with_those_of_the_first_try(
    chaos: str, tmp_path: Path
) -> None:
    outcome = run_ranks(
        4,
        scenarios.train_through_kills,
        str(tmp_path),
        12,
        1,
        environment={"MPIFT_CHAOS": chaos},
        timeout_seconds=LIMIT_SECONDS,
    )
    committed = check_kills(outcome, tmp_path, {1, 3}, 4)
    assert {1, 2, 3, 4, 7, 8, 9, 12} <= set(committed), str(outcome)


@pytest.mark.long
def test_a_killed_or_stopped_writer_costs_no_checkpoint(tmp_path: Path) -> None:
    outcome = run_ranks(3, scenarios.writers_fail, str(tmp_path), timeout_seconds=LIMIT_SECONDS)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    for result in outcome.results.values():
        assert result["committed"] == [1, 2, 3, 4, 5, 6], str(outcome)
        assert result["steps"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_late_rank_saves_the_same_steps_as_the_others(tmp_path: Path) -> None:
    steps, every = 24, 4
    outcome = run_ranks(
        3,
        scenarios.one_is_late,
        str(tmp_path),
        steps,
        every,
        environment={"MPIFT_CHAOS": "slow:2@5-23:0.15"},
        timeout_seconds=LIMIT_SECONDS,
    )
    results: dict[int, Any] = outcome.results
    assert sorted(results) == [0, 1, 2], str(outcome)
    assert results[2]["missed"] > 0
    applied = results[0]["applied"]
    expected = list(range(every, applied + 1, every))
    for result in results.values():
        assert result["applied"] == applied
        assert result["saved"] == expected
        assert result["committed"] == expected
        assert result["alike"]
