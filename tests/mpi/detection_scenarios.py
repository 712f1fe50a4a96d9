"""What ranks do in ``test_detection``: train on while faults of the schedule strike."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import mpift
from mpift import introduction, runtime
from mpift.core.packet import Defect
from mpift.testing.ranks import TOKEN_VARIABLE
from tests.mpi.round_scenarios import Trainer


def go_on(seconds: float, started: str = "") -> dict[str, Any]:
    """Rounds under a fault schedule for this long by rank 0's clock, which ends them on all."""
    trainer = Trainer(1000)
    comm = mpift.Communicator()
    begin = time.monotonic()
    steps = 0
    while True:
        for _ in range(10):
            trainer.runtime.strike(steps, "step")
            trainer.step()
            steps += 1
            time.sleep(0.001)
        if started and steps == 10:
            Path(started).touch()
        over = comm.broadcast([int(time.monotonic() - begin > seconds)], root=0)
        if over[0]:
            break
    found = report()
    mpift.shutdown()
    return found | {"steps": steps}


def report() -> dict[str, Any]:
    """What detection has come to on this rank."""
    present = runtime.current()
    service = present._service
    beats = [part for part in service._parts if type(part).__name__ == "Heartbeat"]
    counts = beats[0].counts if beats else None
    return {
        "members": list(service.world.view.members),
        "epoch": service.world.view.epoch,
        "received": counts.received if counts else 0,
        "corrupt": sum(counts.defects.get(d, 0) for d in Defect) if counts else 0,
        "losses": beats[0].losses if beats else 0,
    }


def stall(seconds: float) -> dict[str, Any]:
    """Rank 1 does something else for a while, and the others wait for it."""
    comm = mpift.Communicator()
    comm.barrier()
    if comm.rank == 1:
        lazily_load_data(seconds)
    comm.barrier()
    found = report()
    comm.free()
    return found


def lazily_load_data(seconds: float) -> None:
    threading.Event().wait(seconds)


def different_settings() -> dict[str, Any]:
    """Rank 1 has another idea of a setting."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.environ["MPIFT_BUCKET_BYTES"] = "4096"
    try:
        mpift.init()
    except mpift.ConfigError as error:
        return {"error": str(error)}
    return {"error": ""}


def stop_while_starting(place: str) -> dict[str, Any]:
    """Rank 1 stops in the middle of what the ranks tell each other at the start."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        setattr(introduction, place, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    comm = mpift.Communicator()
    comm.barrier()
    comm.free()
    return {}


def start_and_end(times: int) -> dict[str, Any]:
    """Descriptors that are open after each ``shutdown``, and this job's watchdogs at the end."""
    descriptors = []
    for _ in range(times):
        mpift.init()
        mpift.Communicator().barrier()
        mpift.shutdown()
        descriptors.append(psutil.Process().num_fds())
    deadline = time.monotonic() + 10
    while (left := watchdogs_of_this_job()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"descriptors": descriptors, "watchdogs": left}


def watchdogs_of_this_job() -> int:
    token = os.environ[TOKEN_VARIABLE]
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "mpift.transport.watchdog" in process.cmdline():
                found += process.environ().get(TOKEN_VARIABLE) == token
    return found
