"""What ranks do in the tests of where checkpoints lie: memory, shared directories, full disks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import mpift.torch as hvd
from mpift.checkpoint import CheckpointManager
from mpift.errors import CheckpointError
from tests.mpi.checkpoint_scenarios import Training

LIMIT_SECONDS = 60.0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.01)


def ends_with_snapshots_in_memory(folder: str, memory: str, notes: str) -> None:
    """Ten steps, the last two of which are in memory alone; then all ranks die at once."""
    training = Training()
    manager = CheckpointManager(
        folder, every=4, ram_every=1, ram_directory=memory, when_busy="wait"
    )
    manager.follow(training.optimizer, training.state)
    for step in range(1, 11):
        training.step()
        manager.wait()
        note = Path(notes) / f"{step}-{training.member}"
        note.write_text(f"{training.everything_shared()} {training.own()}")
    hvd.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on_from_memory(folder: str, memory: str) -> dict[str, Any]:
    """Restore what memory holds; one step later, when a bit of the newest snapshot there has
    flipped, restore what is left; then train on to a save on storage, and end."""
    training = Training(seed=9)
    manager = CheckpointManager(
        folder, every=4, ram_every=1, ram_directory=memory, when_busy="wait"
    )
    manager.follow(training.optimizer, training.state)
    found: list[Any] = []

    def restore() -> None:
        restored = manager.restore(state=training.state)
        assert restored is not None
        found.append([restored.source, restored.step, *training.digests().values()])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restore()
        training.step()
        manager.wait()
        hvd.barrier()
        if training.member == 0:
            flip_newest(manager)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(1.0)  # what is in place already is not read
        hvd.barrier()
        restore()
        for _ in range(found[1][1], 12):
            training.step()
        manager.wait()
    assert manager._ram is not None
    committed = manager.committed_step
    manager.close()
    hvd.barrier()
    left = manager._ram.folder.exists()
    hvd.shutdown()
    said = [str(warning.message) for warning in caught]
    return {"found": found, "said": said, "left": left, "committed": committed}


def flip_newest(manager: CheckpointManager) -> None:
    """One bit of the newest snapshot in memory flips."""
    assert manager._ram is not None
    path = manager._ram.arena(manager._ram.newest()[1], 0)
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-8, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def holds_the_directory(folder: str, notes: str) -> dict[str, Any]:
    """Keep a directory until the other job has been there; saves work meanwhile and after."""
    training = Training()
    with CheckpointManager(folder) as manager:
        training.step()
        first = manager.save(1, training.state, wait=True)
        (Path(notes) / f"held-{training.member}").touch()
        wait_for(Path(notes) / "been-there")
        training.step()
        second = manager.save(2, training.state, wait=True)
        steps = manager.steps()
    hvd.shutdown()
    return {"first": first, "second": second, "steps": steps}


def is_refused(folder: str, notes: str) -> dict[str, Any]:
    """Want a directory that another job has, and one that can't be written to."""
    hvd.init()
    for member in (0, 1):
        wait_for(Path(notes) / f"held-{member}")
    file = Path(notes) / "file"
    if hvd.rank() == 0:
        file.touch()
    hvd.barrier()
    refusals = []
    for directory in (folder, str(file / "checkpoints")):
        try:
            CheckpointManager(directory)
            refusals.append("none")
        except CheckpointError as error:
            refusals.append(str(error))
    hvd.barrier()
    (Path(notes) / "been-there").touch()
    with CheckpointManager(Path(notes) / "another") as manager:  # the job is none the worse
        saved = manager.save(1, {"x": torch.zeros(4)}, wait=True)
    hvd.shutdown()
    return {"refusals": refusals, "saved": saved}


def fills_the_disk(folder: str, filler: str) -> dict[str, Any]:
    """Saves while storage is full, after it was cleared, and full again to the end."""
    training = Training()
    manager = CheckpointManager(folder, keep=5, full_every=1)
    said: dict[int, list[str]] = {}

    def save(step: int) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.step()
            manager.save(step, training.state)
        said[step] = [str(warning.message) for warning in caught]
        manager.wait(LIMIT_SECONDS)
        hvd.barrier()

    def fill(full: bool) -> None:
        if hvd.rank() == 0:
            path = Path(filler)
            path.unlink(missing_ok=True)
            if full:
                with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
        hvd.barrier()

    save(1)
    fill(True)
    save(2)
    save(3)
    fill(False)
    save(4)
    committed = manager.committed_step
    digest = training.shared()
    fill(True)
    save(5)
    alike = len(set(hvd.allgather_object(training.everything_shared()))) == 1
    return {"said": said, "committed": committed, "digest": digest, "alike": alike}
