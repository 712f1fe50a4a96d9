"""What goes to the writer process and comes back, apart from what does it.

A training process loads this and not ``writing``: HDF5 is the writer's, so that neither its start
nor its libraries are the script's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpift.core.saving import Origin


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written: the persistent share of the one of ``arenas`` that holds ``version``,
    into ``root``; changed blocks go into a file ``name``. ``base`` is the version of a committed
    checkpoint to compare with, None to write everything. ``encode``: yes, no, or ("auto") where
    storage is slower than the encoder."""

    root: Path
    arenas: tuple[Path, ...]
    version: int
    name: str
    base: int | None
    encode: bool | str = "auto"
    compact_below: float = 0.5


@dataclass(frozen=True, slots=True)
class Written:
    """What was stored of a snapshot, as it is sent to others: an encoded ``Part``. ``digests`` are
    those of all blocks in the arena, in order (``blocks.digest_bytes``), if all were made."""

    origin: Origin
    part: bytes
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class Summary:
    """A committed checkpoint in numbers: step compared with; blocks in all, and written for it;
    bytes of the state, of those blocks, and as they are stored."""

    base: int | None
    blocks: int
    new_blocks: int
    state_bytes: int
    changed_bytes: int
    new_bytes: int
