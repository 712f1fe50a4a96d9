"""What ranks do in ``test_detection``: train on while faults of the schedule strike."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import mpift
from mpift import runtime
from mpift.core.packet import Defect
from tests.mpi.protocol_scenarios import Trainer


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
