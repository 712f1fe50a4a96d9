"""Scripts that end with a checkpoint manager open: by themselves, with a failure, by a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpift.errors import ExitCode


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


SCRIPT = """
import sys, torch
from pathlib import Path
from mpift.checkpoint import CheckpointManager
directory = Path(sys.argv[1])
manager = CheckpointManager(directory)
if sys.argv[2] == "breaks":
    (directory / "blocks").rename(directory / "aside")
    (directory / "blocks").touch()
manager.save(1, {"x": torch.ones(3)})
print(manager._slots.path(0, 0))
"""


@pytest.mark.parametrize(("way", "code"), [("works", 0), ("breaks", ExitCode.CHECKPOINT_DAMAGED)])
def test_a_script_that_ends_without_closing_waits_for_its_save_and_tells_of_a_failure(
    way: str, code: int, directory: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), way],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert not Path(done.stdout.strip()).exists()  # the memory is given back
    committed = (directory / "steps" / "0000000001" / "COMMIT").exists()
    assert committed == (way == "works")
    if way == "breaks":
        assert f"mpift: the last save to {directory} failed: " in done.stderr


def test_a_killed_script_leaves_nothing_in_memory(directory: Path) -> None:
    script = SCRIPT + "import os; manager.wait(); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory), "works"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    arena = Path(done.stdout.strip())
    assert arena.is_absolute()
    deadline = time.monotonic() + 20
    while arena.exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the writer looks after its parent
    left = arena.exists()
    arena.unlink(missing_ok=True)
    assert not left
