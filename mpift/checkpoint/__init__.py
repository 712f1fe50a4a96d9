"""Checkpoints: incremental, verified block by block, committed by all ranks, plain HDF5 inside.

``CheckpointManager`` is all that a script needs. Importing this package loads neither torch nor
h5py: the writer process and the command line use parts of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpift.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]


def __getattr__(name: str) -> Any:
    if name == "CheckpointManager":
        from mpift.checkpoint.manager import CheckpointManager

        return CheckpointManager
    raise AttributeError(f"module 'mpift.checkpoint' has no attribute {name!r}")
