"""Where checkpoints of real jobs lie: memory that outlives a job, shared folders, full disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpift import memory
from mpift.checkpoint import CheckpointManager
from mpift.testing.ranks import Outcome, run_ranks
from tests.mpi import checkpoint_place_scenarios as scenarios
from tests.mpi.checkpoint_scenarios import shared_digest

pytestmark = pytest.mark.timeout(300)

LIMIT_SECONDS = 100.0


@pytest.fixture
def ram() -> Iterator[Path]:
    """A folder in memory, under a name of its own."""
    folder = memory.default_folder() / f"checkpoint-test-{uuid.uuid4().hex}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
def test_memory_outlives_a_killed_job_and_is_given_back_after_a_clean_end(
    tmp_path: Path, ram: Path
) -> None:
    notes, directory = tmp_path / "notes", str(tmp_path / "checkpoints")
    notes.mkdir()
    killed = run_ranks(
        2,
        scenarios.ends_with_snapshots_in_memory,
        directory,
        str(ram),
        str(notes),
        timeout_seconds=LIMIT_SECONDS,
    )
    assert not killed.timed_out, str(killed)
    assert killed.results == {}
    outcome = run_ranks(
        2, scenarios.goes_on_from_memory, directory, str(ram), timeout_seconds=LIMIT_SECONDS
    )
    assert sorted(outcome.results) == [0, 1], str(outcome)
    for rank, result in outcome.results.items():
        note = (notes / f"10-{rank}").read_text().split()
        assert result["found"][0] == ["memory", 10, *note]
        # The step after it was damaged; the other slot still holds this one.
        assert result["found"][1] == ["memory", 10, *note]
        assert any("the snapshot in memory is damaged" in line for line in result["said"])
        assert result["committed"] == 12
        assert not result["left"]
    assert list(ram.iterdir()) == []


@pytest.mark.long
def test_a_second_job_is_kept_out_and_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    notes, directory = tmp_path / "notes", str(tmp_path / "checkpoints")
    notes.mkdir()
    second: list[Outcome] = []

    def meanwhile(_: list[psutil.Process]) -> None:
        second.append(
            run_ranks(
                2,
                scenarios.is_refused,
                directory,
                str(notes),
                timeout_seconds=LIMIT_SECONDS,
            )
        )

    first = run_ranks(
        2,
        scenarios.holds_the_directory,
        directory,
        str(notes),
        timeout_seconds=LIMIT_SECONDS,
        during=meanwhile,
    )
    assert sorted(second[0].results) == [0, 1], str(second[0])
    for result in second[0].results.values():
        held, unwritable = result["refusals"]
        assert held.startswith(f"{directory} is written to by job ")
        assert "choose another checkpoint directory" in held
        assert unwritable.startswith(f"checkpoints can't be written to {notes / 'file'}")
        assert "a file is in the way" in unwritable
        assert result["saved"]
    assert sorted(first.results) == [0, 1], str(first)
    for result in first.results.values():
        assert result == {"first": True, "second": True, "steps": [1, 2]}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    with contextlib.suppress(FileNotFoundError):
        (place / "filler").unlink()
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_at_the_next_save_and_at_the_end_and_costs_nothing_older(
    small_disk: Path,
) -> None:
    directory, filler = small_disk / "checkpoints", small_disk / "filler"
    outcome = run_ranks(
        2,
        scenarios.fills_the_disk,
        str(directory),
        str(filler),
        timeout_seconds=LIMIT_SECONDS,
    )
    assert sorted(outcome.results) == [0, 1], str(outcome)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["committed"] == 4
        assert result["said"]["2"] == []
        for told, of in (("3", "step 2"), ("4", "step 3")):
            assert any(of in line and "has 0 free" in line for line in result["said"][told])
        assert result["said"]["5"] == []
    assert outcome.exit_code != 0
    assert f"mpift: the last save to {directory} failed" in outcome.stderr
    filler.unlink()
    with CheckpointManager(directory) as manager:
        restored: Any = manager.restore()
    assert restored.step == 4
    model = restored.values["model"]
    parameters = {
        name: value for name, value in model.items() if "running" not in name and "num_" not in name
    }
    assert shared_digest(parameters, restored.values["optimizer"]) == outcome.results[0]["digest"]
