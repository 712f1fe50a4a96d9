"""Whether all ranks have built the same: an error that says so beats a broken sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from mpift.errors import MismatchError
from mpift.reduction.operations import Kind, Operation
from mpift.runtime import Runtime


def check_alike(runtime: Runtime, tensors: Sequence[str], rules: str) -> None:
    """Raise ``MismatchError`` on all ranks unless they reduce the same ``tensors`` by the same
    ``rules``, both in words. An operation: all ranks call it."""
    text = "\n".join([*tensors, rules])
    mine = np.array([[xxhash.xxh3_64_intdigest(text.encode()) >> 1, len(tensors)]], dtype=np.int64)
    everybody = runtime.operate(Operation(Kind.ALLGATHER, mine))
    for rank, row in enumerate(everybody):
        if not np.array_equal(row, everybody[0]):
            raise MismatchError(
                f"rank {rank} has other parameters than rank 0 ({row[1]} against"
                f" {everybody[0][1]} tensors, or other names, shapes or dtypes), or other"
                " rules for its rounds: build the same model and optimizer on every rank"
            )
