"""What ranks do in the tests of compressed sums; without torch, so that they start fast."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import mpift
from mpift.reduction import compressed_arrays
from mpift.reduction.codecs import Compressor

STEPS = 30
ELEMENTS = 300_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sums(type_: str, threshold: float) -> dict[str, Any]:
    """Sums of each kind through one compressor."""
    comm = mpift.Communicator(compressor=Compressor(type_, threshold))
    rank = comm.rank
    compressed_arrays.PART_ELEMENTS = 1000  # several parts an array
    large = comm.allreduce(np.linspace(-1, 1, 4501, dtype=np.float32) * (rank + 1))
    seen = {
        "large": float(np.abs(large - np.linspace(-1, 1, 4501) * 6).max()),
        "alike": len(set(comm.allgather([zlib.crc32(large.tobytes())]).tolist())) == 1,
        "third": comm.allreduce(np.full((2, 2), 1 / 3)).tolist(),
        "small": comm.allreduce(np.array([0.25, rank])).tolist(),
        "overflow": float(comm.allreduce(np.float32(60000.0))),
        "integers": comm.allreduce(np.array([2**40 + 1])).tolist(),
        "maximum": comm.allreduce(np.array([1 / 3 + rank]), "max").tolist(),
        "empty": comm.allreduce(np.zeros((0, 2))).shape,
    }
    comm.free()
    return seen


def survive(type_: str, threshold: float, kills: dict[str, int], delay: float) -> dict[str, Any]:
    """Compressed sums while members die inside given ones; each sum is a whole number a member."""
    comm = mpift.Communicator(compressor=Compressor(type_, threshold))
    member = comm.members[comm.rank]
    found, sizes = [], []
    for step in range(STEPS):
        if kills.get(str(member)) == step:
            threading.Timer(delay, die).start()
        result = comm.allreduce(np.full(ELEMENTS, 1 << member, np.float32))
        assert (result == result[0]).all(), "a result is torn"
        found.append(int(result[0]))
        sizes.append(comm.size)
    digests = comm.allgather([hash(tuple(found))])
    comm.free()
    return {"found": found, "sizes": sizes, "alike": len(set(digests.tolist())) == 1}


def disagree() -> dict[str, Any]:
    """Ranks with different compressors, then with the same."""
    rank = mpift.Communicator().rank
    same = mpift.Communicator(compressor=Compressor("bf16"))
    seen: dict[str, Any] = {}
    compressors: dict[str, Callable[[], Compressor | None]] = {
        "type": lambda: Compressor("fp16" if rank == 1 else "bf16"),
        "threshold": lambda: Compressor("threshold", 0.5 if rank == 1 else 0.25),
        "none": lambda: None if rank == 1 else Compressor("fp16", 10),
    }
    for name, make in compressors.items():
        comm = mpift.Communicator(compressor=make())
        try:
            comm.allreduce(np.ones(20))
            seen[name] = "no error"
        except mpift.MismatchError as error:
            seen[name] = str(error)
        seen[f"{name}, integers"] = comm.allreduce([rank]).tolist()
    seen["afterwards"] = same.allreduce(np.ones(3)).tolist()
    same.free()
    return seen


def leave_early() -> dict[str, Any]:
    """Member 0 leaves first; the others' sums go on without it."""
    comm = mpift.Communicator(compressor=Compressor("fp16"))
    member = comm.members[comm.rank]
    found = [float(comm.allreduce(np.ones(1000, np.float32))[0]) for _ in range(3 + 5 * member)]
    comm.free()
    return {"found": found}


def tensors() -> dict[str, Any]:
    """The same through the torch face."""
    import torch

    import mpift.torch as hvd
    from mpift.torch.compression import Compression

    hvd.init()
    third = torch.full((5,), 1 / 3)
    ways = {
        "none": Compression.none,
        "fp16": Compression.fp16,
        "bf16": Compression.bf16,
        "threshold": Compression.threshold(0.5),
        "from 10": Compressor("bf16", 10),
    }
    seen: dict[str, Any] = {
        name: float(hvd.allreduce(third, compression=way)[0]) for name, way in ways.items()
    }
    integers = torch.full((2,), 2**40 + 3)
    seen["integers"] = hvd.allreduce(integers, compression=Compression.bf16, op=hvd.Sum).tolist()
    seen["half"] = str(hvd.allreduce(third.half(), compression=Compression.fp16).dtype)
    hvd.shutdown()
    return seen
