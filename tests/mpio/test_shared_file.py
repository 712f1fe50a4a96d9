"""Checkpoints in one shared file, on real ranks and through parallel HDF5."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpift.testing.ranks import run_ranks
from tests.mpio import shared_file_scenarios as scenarios

STOCK = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"
READ_INDEX = """
import json, sys
import h5py
with h5py.File(sys.argv[1]) as file:
    shapes = {}
    file.visititems(lambda name, item: shapes.update({name: getattr(item, "shape", None)}))
    weight = file["model/0.weight"]
    print(json.dumps({
        "mpi": h5py.get_config().mpi,
        "step": int(file.attrs["step"]),
        "sum": float(weight[...].astype("float64").sum()),
        "pieces": len(weight.virtual_sources()),
        "flags": [file[f"ranks/{rank}/flags"][...].tolist() for rank in range(3)],
        "halves": file["more/halves"].attrs["torch_dtype"],
    }))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A directory in which three ranks have saved steps 2 and 3, and what they say of it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    outcome = run_ranks(3, scenarios.trains_and_saves, str(directory), timeout_seconds=100)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    assert not outcome.left_running, str(outcome)
    return directory, outcome.results


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What three ranks say that tried to write in all kinds of trouble."""
    directory = tmp_path_factory.mktemp("failed")
    (directory / "blocks").mkdir()
    outcome = run_ranks(
        3,
        scenarios.fails_in_all_ways,
        str(directory),
        str(tmp_path_factory.mktemp("arenas")),
        fault_tolerant=False,
        timeout_seconds=100,
    )
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    return outcome.results


@pytest.fixture
def error(failed: dict[int, Any]) -> Callable[[str], str]:
    """The error of a case, which is the same on all ranks and leaves no file behind."""

    def of(case: str) -> str:
        errors = {result[case]["error"] for result in failed.values()}
        assert len(errors) == 1
        assert not failed[0][case]["left"]
        return str(errors.pop())

    return of


def test_each_save_is_one_file_that_all_ranks_wrote(saved: tuple[Path, dict[int, Any]]) -> None:
    directory, results = saved
    for result in results.values():
        assert (result["begun2"], result["begun3"], result["steps"]) == (True, True, [2, 3])
    files = sorted((directory / "blocks").iterdir())
    assert [file.name.partition("-")[0] for file in files] == ["0000000002", "0000000003"]
    for file, step in zip(files, (2, 3), strict=True):
        manifest = json.loads((directory / f"steps/{step:010d}/manifest.json").read_text())
        assert [(name, size) for name, size, _ in manifest["files"]] == [
            (f"blocks/{file.name}", file.stat().st_size)
        ]
        assert manifest["world_size"] == 3
        assert {"bool", "bfloat16", "float32"} <= set(manifest["datasets"])


def test_any_h5py_reads_a_copied_checkpoint_with_each_tensor_in_one_piece(
    saved: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    if not STOCK.exists():
        pytest.skip(f"there is no stock h5py in {STOCK}: make setup")
    directory, results = saved
    shutil.copytree(directory, tmp_path / "copy")
    index = tmp_path / "copy/steps/0000000003/index.h5"
    found = subprocess.run(
        [STOCK, "-c", READ_INDEX, index], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    read = json.loads(found.stdout)
    assert not read["mpi"]
    assert (read["step"], read["pieces"], read["halves"]) == (3, 1, "bfloat16")
    assert read["sum"] == pytest.approx(results[0]["weight"], rel=1e-12)
    assert read["flags"] == [results[rank]["flags"] for rank in range(3)]


def test_the_command_line_finds_nothing_damaged(saved: tuple[Path, dict[int, Any]]) -> None:
    directory, _ = saved
    command = [sys.executable, "-m", "mpift", "ckpt", "verify", str(directory), "--all"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("ranks", [2, 1])
def test_another_number_of_ranks_restores_the_same_bits_and_goes_on(
    ranks: int, saved: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(saved[0], directory)
    outcome = run_ranks(ranks, scenarios.restores, str(directory), 3, timeout_seconds=100)
    assert sorted(outcome.results) == list(range(ranks)), str(outcome)
    for result in outcome.results.values():
        assert result["restored"] == 3
        assert result["before"] != result["after"] == saved[1][0]["digest3"]
        assert result["trained"] != result["after"]
        assert result["again"] == result["trained"]


def test_a_read_only_folder_is_told_to_all(error: Callable[[str], str]) -> None:
    assert "creating it failed on rank 0: [Errno 13] Permission denied" in error("read_only")


def test_a_rank_that_does_not_see_the_folder_is_named_to_all(error: Callable[[str], str]) -> None:
    assert "opening it failed on rank 2: " in error("not_seen")
    assert "all nodes must share the checkpoint directory" in error("not_seen")


def test_too_little_space_is_noticed_before_anything_is_written(
    error: Callable[[str], str],
) -> None:
    assert "has 1000 free: make room there" in error("full_before")
    assert "creating it failed on rank 0: [Errno 27] File too large" in error("too_large")


def test_writes_that_mpi_fails_to_make_without_a_word_are_noticed_by_reading_back(
    error: Callable[[str], str],
) -> None:
    assert "model/weights, block 4 of 12" in error("full_later")
    assert "is the disk full" in error("full_later")


def test_what_can_not_be_synced_or_named_is_told_to_all(error: Callable[[str], str]) -> None:
    assert "syncing it failed on rank 1: [Errno 5]" in error("not_synced")
    assert "naming it failed on rank 0: [Errno 30]" in error("not_named")
    assert "syncing its folder failed on rank 0: [Errno 5]" in error("folder_not_synced")


def test_what_reads_back_otherwise_is_told_to_all(error: Callable[[str], str]) -> None:
    assert "reading it back failed on rank " in error("altered")
    assert "its digest is " in error("altered")


def test_ranks_that_save_different_steps_are_told(error: Callable[[str], str]) -> None:
    assert "theirs are of steps 8, 7, 7 " in error("apart")


def test_after_all_that_they_still_write_and_replace_nothing(failed: dict[int, Any]) -> None:
    for result in failed.values():
        assert not result["good"]["error"]
        assert "was written already" in result["again"]["error"]
        assert result["again"]["left"] == ["good.h5"]
        assert result["untouched"]
        assert result["mode"] == "0o444"
