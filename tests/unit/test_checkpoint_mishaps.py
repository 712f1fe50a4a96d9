"""What goes wrong around a manager, and must stay a matter of that one save: in one process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpift import memory
from mpift.checkpoint import CheckpointManager
from mpift.checkpoint.directory import Directory
from mpift.checkpoint.ram import RamTier
from mpift.errors import CheckpointError, MpiftError

STATE = {"x": torch.ones(3)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("ram_every", [0, 1])
def test_a_state_that_is_refused_holds_up_none_of_the_later_saves(
    directory: Path, tmp_path: Path, ram_every: int
) -> None:
    with CheckpointManager(directory, ram_every=ram_every, ram_directory=tmp_path) as manager:
        assert manager.save(1, STATE, wait=True)
        with pytest.raises(CheckpointError, match="x"):
            manager.save(2, {"x": object()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert manager.save(3, STATE, wait=True)
        assert manager.steps() == [1, 3]


@pytest.mark.parametrize("ram_every", [0, 1])
def test_where_memory_is_full_that_save_fails_and_training_goes_on(
    directory: Path, tmp_path: Path, ram_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> memory.Region:
        raise MpiftError("it needs more shared memory than there is")

    manager = CheckpointManager(directory, ram_every=ram_every, ram_directory=tmp_path)
    assert manager.save(1, STATE, wait=True)
    larger = {"x": torch.ones(1 << 20)}
    with monkeypatch.context() as patch:
        patch.setattr(memory, "create", full)
        assert not manager.save(2, larger)
        with pytest.warns(UserWarning, match="step 2 was not saved: it needs more shared memory"):
            assert not manager.save(3, larger)
    with pytest.warns(UserWarning, match="step 3 was not saved"):
        assert manager.save(4, larger, wait=True)
    manager.close()  # a later save has succeeded
    assert manager.steps()[-1] == 4


def test_a_failure_at_the_end_is_an_error_also_where_warnings_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(directory)
    (directory / "blocks").rmdir()
    manager.save(1, STATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=r"the last save to .* failed"):
            manager.close()


def test_a_skipped_last_save_is_told_at_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(directory)
    assert manager.save(1, STATE, wait=True)
    nothing_free: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(manager._slots, "find", nothing_free)
    with pytest.warns(UserWarning, match="checkpoint of step 2 skipped"):
        assert not manager.save(2, STATE)
    with pytest.warns(UserWarning, match="the last save, of step 2, was skipped"):
        manager.close()


FORKS = """
import os, sys, torch
from mpift.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1])
manager.save(1, {"x": torch.ones(3)}, wait=True)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
manager.save(2, {"x": torch.ones(3)}, wait=True)
manager.close()
print(manager.steps())
"""


def test_a_forked_child_that_ends_leaves_its_parents_checkpoints_alone(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(directory)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[1, 2]"), done.stderr


def test_memory_of_a_directory_that_was_removed_is_not_that_of_one_made_anew(
    directory: Path, tmp_path: Path
) -> None:
    Directory(directory).prepare()
    old = RamTier(directory, tmp_path).folder
    assert RamTier(directory, tmp_path).folder == old
    shutil.rmtree(directory)
    Directory(directory).prepare()
    assert RamTier(directory, tmp_path).folder != old


def test_to_load_nothing_is_an_error(directory: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(directory) as manager:
        manager.save(1, {"model": model}, wait=True)
        with pytest.raises(CheckpointError, match="nothing of 'model' is to be restored"):
            manager.load(state={"model": model}, only=lambda name: name.startswith("modle"))
        with pytest.raises(TypeError, match="must be a dictionary of names"):
            manager.load(state=model)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a whole number"):
            manager.restore("best")  # type: ignore[arg-type]


def test_a_run_that_forgets_to_restore_is_told_and_pushes_no_older_checkpoint_out(
    directory: Path,
) -> None:
    with CheckpointManager(directory, keep=2) as first:
        first.save(10, STATE, wait=True)
        first.save(20, STATE, wait=True)
    second = CheckpointManager(directory, keep=2)
    for step in (1, 2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert second.save(step, STATE, wait=True)
        assert any("begun without restore()" in str(w.message) for w in told) == (step == 2)
    second.close()
    assert second.steps() == [10, 20, 1, 2]
    with CheckpointManager(directory, keep=2) as third:
        assert third.restore(state=dict(STATE)) is not None
        third.save(3, STATE, wait=True)
    assert third.steps() == [2, 3]
