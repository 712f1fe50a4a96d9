"""A small training run that saves with a ``CheckpointManager``, and what its states were."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpift.checkpoint import CheckpointManager
from mpift.checkpoint import group as groups
from mpift.checkpoint.directory import Directory
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.restoring import Restored, Restoring, Wish
from mpift.checkpoint.scribe import Then
from mpift.checkpoint.writer import _answer
from mpift.checkpoint.writing import Workshop
from tests.crash.lives import ROWS_OF_BLOCK, Model

Tensors = dict[str, torch.Tensor]


class Training:
    """Each step changes a quarter of the table, and the small tensors."""

    def __init__(self) -> None:
        self.model = Model()
        self.step = 0
        self.states: dict[int, Tensors] = {}

    def advance(self) -> int:
        """One step; what it leads to is remembered."""
        self.step += 1
        first = self.step % 4 * ROWS_OF_BLOCK
        with torch.no_grad():
            self.model.table.weight[first : first + ROWS_OF_BLOCK] = torch.randn(
                ROWS_OF_BLOCK, self.model.table.embedding_dim
            )
            self.model.bias.add_(1)
        self.model.seen.add_(self.step)
        self.states[self.step] = {k: v.clone() for k, v in self.model.state_dict().items()}
        return self.step

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "note": f"step {self.step}"}

    def require(self, restored: Restored | None) -> int:
        """The step that was restored, bit for bit; nothing else may be."""
        assert restored is not None
        assert restored.values["note"] == f"step {restored.step}"
        same(restored.values["model"], self.states[restored.step])
        return restored.step


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def restored_from(root: Path) -> Restored | None:
    """What a job would restore, as plain values; without a writer process."""
    group = groups.current()
    restoring = Restoring(group, Directory(root), None)
    return restoring.restore(Wish(None, None, None, True, True), group.seat(whole=False))


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of what is done meanwhile, once it is done."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


class ScribeHere:
    """A ``Scribe`` whose writer is this process, so that its disk can be a test's."""

    pid = 0

    def __init__(self, disk: Disk) -> None:
        self._workshop = Workshop(disk, 1)

    def start(self) -> None:
        pass

    def request(self, job: str, then: Then, **arguments: Any) -> None:
        then(*_answer(self._workshop, job, arguments))

    def close(self) -> None:
        pass


class FailingDisk(Disk):
    """Its ``fail_at``-th sync from now on fails, or each from then on if it is ``broken``."""

    def __init__(self) -> None:
        self.syncs = 0
        self.fail_at = 0
        self.broken = False
        self.error = errno.EIO

    def arm(self, fail_at: int, broken: bool = False, error: int = errno.EIO) -> None:
        self.syncs, self.fail_at, self.broken, self.error = 0, fail_at, broken, error

    def _fsync(self, descriptor: int, path: Path) -> None:
        self.syncs += 1
        if self.syncs == self.fail_at or (self.broken and 0 < self.fail_at < self.syncs):
            raise OSError(self.error, errno.errorcode[self.error], str(path))


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own in memory. Raises ``OSError`` where that is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise PermissionError(f"no file system can be mounted at {place}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def manager(root: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"encode": False, "keep": 5, **options})
