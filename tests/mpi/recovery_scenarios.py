"""What ranks do in the tests of recovery; no torch here, so that they start fast."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import numpy as np

import mpift
from mpift import runtime
from mpift.recovery.transfer import Transfer, digest
from mpift.transport.messages import Kind
from mpift.transport.parcels import Handler, Parcels


class DyingParcels:
    """Parcels of a rank that dies with its second stripe under way."""

    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self._stripes = 0

    def register(self, kind: Kind, handler: Handler) -> None:
        self._parcels.register(kind, handler)

    def send(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        self._parcels.send(kind, member, text, data)
        self._stripes += bool(data.nbytes)
        if self._stripes == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def state(mebibytes: int) -> dict[str, np.ndarray]:
    """A few arrays; the same on every rank."""
    chance = np.random.default_rng(7)
    sizes = {"embedding": (mebibytes - 5) << 18, "weight": 5 << 18, "bias": 3, "empty": 0}
    return {
        name: chance.integers(0, 1 << 32, size, np.uint32).view(np.float32)
        for name, size in sizes.items()
    }


def fetch_while_a_donor_dies(mebibytes: int, dying: int | None) -> dict[str, Any]:
    """Member 0 fetches what 1 and 2 offer, twice; member ``dying`` doesn't live to see the end."""
    comm = mpift.Communicator()
    here = runtime.current()
    post: Any = here.post
    if here.member == dying:
        post = dataclasses.replace(post, parcels=DyingParcels(post.parcels))
    transfer = Transfer(post)
    here.attach(transfer)
    given = state(mebibytes)
    comm.barrier()
    result: dict[str, Any] = {}
    if here.member:
        transfer.offer("state", given)
    else:
        digests = {name: digest(array) for name, array in given.items()}
        into = {name: np.empty_like(array) for name, array in given.items()}
        began = time.perf_counter()
        transfer.fetch("state", into, digests, [1, 2])
        result["seconds"] = time.perf_counter() - began
        transfer.fetch("state", {"bias": into["bias"]}, digests, [1, 2])  # whoever is left
        result["same"] = all(into[n].tobytes() == given[n].tobytes() for n in given)
        try:
            transfer.fetch("state", {"bias": into["bias"]}, {"bias": bytes(16)}, [1, 2])
        except mpift.MpiftError as error:
            result["error"] = str(error)
    comm.barrier()
    result["members"] = list(comm.members)
    comm.free()
    return result
