"""What ranks do in the tests of checkpoints in one shared file."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import mpift.torch as hvd
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.manifest import version_of
from mpift.errors import CheckpointError

STATE_ELEMENTS = 3 << 20  # of float32: several blocks a rank
NOBODY = 65534


# -- a job that trains -----------------------------------------------------------------------------


def _training(seed: int) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 3000), torch.nn.BatchNorm1d(3000), torch.nn.Linear(3000, 64)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    halves = torch.nn.Parameter(torch.randn(70_001).bfloat16(), requires_grad=False)
    more = torch.nn.ParameterDict({"halves": halves})
    flags = torch.arange(5 + hvd.rank()) % 2 == 0
    return model, optimizer, {"model": model, "optimizer": optimizer, "more": more, "flags": flags}


def _train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def _digest(state: dict[str, Any]) -> str:
    parameters = dict(state["model"].named_parameters())
    return hvd.digest([parameters, state["optimizer"].state_dict(), state["more"].state_dict()])


def trains_and_saves(directory: str) -> dict[str, Any]:
    """Saves after the second step, and then, with other values, after the third."""
    hvd.init()
    from mpift.checkpoint import CheckpointManager

    model, optimizer, state = _training(seed=0)
    result: dict[str, Any] = {}
    with CheckpointManager(directory, layout="shared") as manager:
        for step in (2, 3):
            _train(model, optimizer, step)
            result[f"begun{step}"] = manager.save(step, state, wait=True)
            result[f"digest{step}"] = _digest(state)
        result["steps"] = manager.steps()
        result["flags"] = state["flags"].tolist()
        result["weight"] = model[0].weight.double().sum().item()
    return result


def restores(directory: str, step: int) -> dict[str, Any]:
    """Starts from other values, restores, and saves and restores once more."""
    hvd.init()
    from mpift.checkpoint import CheckpointManager

    model, optimizer, state = _training(seed=1)
    result: dict[str, Any] = {"before": _digest(state)}
    with CheckpointManager(directory, layout="shared", keep=5) as manager:
        restored = manager.restore(step, state)
        result["restored"] = restored.step if restored is not None else None
        result["after"] = _digest(state)
        _train(model, optimizer, 1)
        manager.save(step + 10, state, wait=True)
        result["trained"] = _digest(state)
        _train(model, optimizer, 1)
        manager.restore(step + 10, state)
        result["again"] = _digest(state)
    return result


# -- ranks that only write, and what goes wrong in it ----------------------------------------------


class _FailingDisk(Disk):
    """Its ``operation`` fails."""

    def __init__(self, operation: str, code: int) -> None:
        def fail(path: Path, *_: Any) -> None:
            raise OSError(code, os.strerror(code), str(path))

        setattr(self, operation, fail)


class _ReadOnlyDisk(Disk):
    """Its folders may not be written to, not even by root."""

    def create(self, path: Path, data: bytes) -> None:
        mode, root = path.parent.stat().st_mode, os.geteuid() == 0
        path.parent.chmod(0o555)
        if root:
            os.seteuid(NOBODY)
        try:
            super().create(path, data)
        finally:
            if root:
                os.seteuid(0)
            path.parent.chmod(mode)


class _FlippingDisk(Disk):
    """What it names was altered by then."""

    def link(self, old: Path, new: Path) -> None:
        old.chmod(0o600)
        with old.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        super().link(old, new)


@contextlib.contextmanager
def _file_size_limit(size_bytes: int, once_open: bool) -> Iterator[None]:
    """No file of this process gets larger: as on a full disk, with another reason. ``once_open``:
    only once the file that is to be written is open."""
    from mpift.checkpoint import shared_file

    old, really_open = resource.getrlimit(resource.RLIMIT_FSIZE), shared_file._try_to_open

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, old[1]))

    def open_and_limit(path: Path) -> None:
        really_open(path)
        limit()

    if once_open:
        shared_file._try_to_open = open_and_limit
    else:
        limit()
    try:
        yield
    finally:
        shared_file._try_to_open = really_open
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextlib.contextmanager
def _free_bytes(size_bytes: int) -> Iterator[None]:
    """The disk says that it has no more."""
    real = os.statvfs

    def told(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[1], values[4] = 1, size_bytes
        return os.statvfs_result(values)

    os.statvfs = told
    try:
        yield
    finally:
        os.statvfs = real


def fails_in_all_ways(directory: str, arenas: str) -> dict[str, Any]:
    """Three ranks without a runtime. In each case one of them is in trouble, or all are; returns
    each case's error, and what lay in ``blocks/`` afterwards."""
    from mpi4py import MPI

    from mpift.checkpoint.group import Seat
    from mpift.checkpoint.shared_file import write_shared
    from mpift.checkpoint.snapshot import Snapshots

    comm, root = MPI.COMM_WORLD, Path(directory)
    rank, everybody = comm.rank, tuple(range(comm.size))
    blocks = root / "blocks"
    arena = Path(arenas) / f"arena-{rank}"
    snapshots = Snapshots(lambda _: arena, 1)
    generator = torch.Generator().manual_seed(0)
    state = {"weights": torch.nn.Parameter(torch.randn(STATE_ELEMENTS, generator=generator))}
    result: dict[str, Any] = {}

    def write(
        case: str, step: int = 7, disk: Disk | None = None, at: Path = root, name: str = ""
    ) -> None:
        seat = Seat(rank, everybody, everybody, "0" * 16)
        version = version_of((1, step))
        snapshots.take({"model": torch.nn.ParameterDict(state)}, version, seat, 0)
        comm.Barrier()
        try:
            write_shared(comm, disk or Disk(), at, f"{name or case}.h5", arena)
            error = ""
        except CheckpointError as problem:
            error = str(problem)
        comm.Barrier()
        result[case] = {"error": error, "left": sorted(path.name for path in blocks.iterdir())}
        comm.Barrier()

    def with_trouble(who: int, trouble: Callable[[], Any]) -> Any:
        return trouble() if rank == who else contextlib.nullcontext()

    write("read_only", disk=_ReadOnlyDisk())
    write("not_seen", at=root if rank != 2 else root / "elsewhere")
    with with_trouble(0, lambda: _free_bytes(1000)):
        write("full_before")
    with with_trouble(0, lambda: _file_size_limit(1 << 20, once_open=False)):
        write("too_large")
    with with_trouble(0, lambda: _file_size_limit(1 << 20, once_open=True)):
        write("full_later")
    write("not_synced", disk=_FailingDisk("sync", errno.EIO) if rank == 1 else None)
    write("not_named", disk=_FailingDisk("link", errno.EROFS) if rank == 0 else None)
    write("folder_not_synced", disk=_FailingDisk("sync_folder", errno.EIO) if rank == 0 else None)
    write("altered", disk=_FlippingDisk() if rank == 0 else None)
    write("apart", step=7 if rank else 8)
    write("good")
    whole = (blocks / "good.h5").read_bytes()
    write("again", step=9, name="good")
    result["untouched"] = (blocks / "good.h5").read_bytes() == whole
    result["mode"] = oct((blocks / "good.h5").stat().st_mode & 0o777)
    snapshots.close(keep=False)
    return result
