"""What ranks do in the tests of ``hvd.elastic``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import mpift.torch as hvd


def _training(**attributes: Any) -> tuple[torch.nn.Module, Any, hvd.elastic.TorchState]:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, **attributes)


def _step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).square().sum().backward()
    optimizer.step()


def _digests(model: torch.nn.Module) -> list[str]:
    return hvd.allgather_object(hvd.digest(dict(model.named_parameters())))


def commits_and_restores() -> dict[str, Any]:
    """Four ranks; commits as they train, then back to one, exactly."""
    model, optimizer, state = _training(batch=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler)
    first = hvd.digest(model.state_dict())
    state.restore()
    untouched = hvd.digest(model.state_dict()) == first
    versions, seconds = [], []
    for batch in range(8):
        _step(model, optimizer, batch)
        state.batch = batch
        began = time.perf_counter()
        versions.append((state.commit(wait=True), state.version))
        seconds.append(time.perf_counter() - began)
    kept = hvd.digest([model.state_dict(), optimizer.state_dict()])
    scheduler.step()
    other.commit(wait=True)
    _step(model, optimizer, 8)
    state.batch = 8
    moved = hvd.digest([model.state_dict(), optimizer.state_dict()]) != kept
    state.restore()
    back = hvd.digest([model.state_dict(), optimizer.state_dict()]) == kept
    result = {
        "untouched": untouched,
        "versions": versions,
        "moved": moved,
        "back": back and state.batch == 7,
        "other": other.version,
        "milliseconds": sorted(1e3 * s for s in seconds)[len(seconds) // 2],
        "alike": len(set(_digests(model))) == 1,
    }
    result |= _stale_and_corrupt(model, optimizer, state)
    return result | _uneven(model, optimizer, state)


def _stale_and_corrupt(
    model: torch.nn.Module, optimizer: Any, state: hvd.elastic.TorchState
) -> dict[str, Any]:
    """A version that is not newer; a rank whose parameters are not what the others hold."""
    try:
        state.commit(version=3)
        refusal = ""
    except hvd.StaleVersionError as error:
        refusal = str(error)
    _step(model, optimizer, 9)
    if hvd.rank() == 2:
        with torch.no_grad():
            model[0].weight[1, 1] += 1
    wanted = hvd.allgather_object(hvd.digest(dict(model.named_parameters())))[0]
    version = state.commit(wait=True)
    decided = state.version
    state.restore()  # rank 2 is given what the majority holds
    repaired = _digests(model)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].weight[2, 2] += 1
            state.batch = -1
    state.sync()
    return {
        "refusal": refusal,
        "majority": decided == version,
        "repaired": set(repaired) == {wanted},
        "synchronized": set(_digests(model)) == {wanted} and state.batch == 7,
    }


def _uneven(
    model: torch.nn.Module, optimizer: Any, state: hvd.elastic.TorchState
) -> dict[str, Any]:
    """Ranks that commit late, not at all, or more often than others."""
    _step(model, optimizer, 10)
    if hvd.rank() == 3:
        while state.version < 11_000:  # the others have decided it
            time.sleep(0.001)
    late = state.commit(wait=True)
    hvd.barrier()
    _step(model, optimizer, 11)
    if hvd.rank() != 0:
        state.commit(wait=True)
    while state.version < 12_000:
        time.sleep(0.001)
    without = state.version
    hvd.barrier()
    if hvd.rank() == 1:
        state.commit()
    state.sync()
    versions = hvd.allgather_object(state.version)
    return {"late": late, "without_the_coordinator": without, "after_sync": len(set(versions))}


def a_member_is_stopped_and_the_coordinator_dies(folder: str) -> dict[str, Any]:
    """Five ranks: one is stopped while the others commit, then rank 0 dies with a commit open."""
    model, optimizer, state = _training()
    _step(model, optimizer, 0)
    process = Path(folder) / str(hvd.rank())
    process.with_suffix(".new").write_text(str(os.getpid()))
    process.with_suffix(".new").rename(process)
    hvd.barrier()
    if hvd.rank() == 3:
        state.commit(wait=True)
    else:
        stopped = int((Path(folder) / "3").read_text())
        if hvd.rank() == 1:
            os.kill(stopped, signal.SIGSTOP)
            (Path(folder) / "stopped").touch()
        while not (Path(folder) / "stopped").exists():
            time.sleep(0.001)
        state.commit(wait=True)
        (Path(folder) / f"committed{hvd.rank()}").touch()
        if hvd.rank() == 1:
            while len(list(Path(folder).glob("committed*"))) < 4:
                time.sleep(0.001)
            os.kill(stopped, signal.SIGCONT)
    with_one_stopped = state.version
    hvd.barrier()
    _step(model, optimizer, 1)
    if hvd.rank() == 0:
        state.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    state.commit(wait=True)
    _step(model, optimizer, 2)
    state.commit(wait=True)
    return {
        "with_one_stopped": with_one_stopped,
        "after": state.version,
        "size": hvd.size(),
        "alike": len(set(hvd.allgather_object(state.version))) == 1,
    }
