"""The manifest of a checkpoint: which tensors there are, and where each of their blocks lies.

One JSON file, written last but for the COMMIT file that holds its digest. Readers go by it alone:
every block has its file, offset, stored size and digest here, so a restore needs no chain of older
checkpoints, and nothing damaged or swapped passes for good. Values that are no tensors stand in it
as plain JSON (``tree``); nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpift.checkpoint.blocks import TensorSpec
from mpift.errors import CheckpointDamagedError

FORMAT = 1
_STEP_BITS = 44


def version_of(order: tuple[int, int]) -> int:
    """One number for (generation, step), which grows as they do; ranks agree on it."""
    generation, step = order
    return generation << _STEP_BITS | step


def order_of(version: int) -> tuple[int, int]:
    """The inverse of ``version_of``."""
    return version >> _STEP_BITS, version & ((1 << _STEP_BITS) - 1)


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file of blocks. ``name`` is its path below the checkpoint directory; ``digest`` is that of
    all its bytes, or empty where only its blocks have one."""

    name: str
    size_bytes: int
    digest: str = ""


class Stored(NamedTuple):  # there is one for every MiB of a state: it is made quickly
    """One block on storage: ``stored_bytes`` from ``offset`` of ``file`` on, which are the block
    itself or, if they are fewer, its encoding. In HDF5's words these are the elements of
    ``dataset`` from ``place`` on. ``digest`` is that of the raw bytes (``blocks.digest``)."""

    file: str
    dataset: str
    place: int
    offset: int
    stored_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and its blocks, in order."""

    spec: TensorSpec
    blocks: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """See the module's docstring.

    ``order`` says which checkpoint is newer: (generation, step); a generation begins when a job
    opens the directory for writing, or goes back to an older step. ``shared`` is the tree of what
    all ranks hold alike, ``own`` one tree for each rank that took part, None where a node's memory
    has not that of another node's rank; their tensors are named by the trees' leaves, those of rank
    R with "ranks/R/" before. ``base`` is the step whose blocks were compared with, None for a full
    write; ``new_blocks`` and ``new_bytes`` (as stored) were written for this checkpoint,
    ``changed_bytes`` (raw) is what they hold.
    """

    step: int
    order: tuple[int, int]
    history: str
    job: str
    world_size: int
    unix_time: float
    version: str  # of mpift
    files: tuple[BlockFile, ...]
    tensors: tuple[TensorEntry, ...]
    shared: Any
    own: tuple[Any, ...]
    base: int | None = None
    new_blocks: int = 0
    new_bytes: int = 0
    changed_bytes: int = 0
    layout: str = "blocks"  # or "shared": one file for all
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """Raw bytes of all tensors."""
        return sum(entry.spec.size_bytes for entry in self.tensors)

    @property
    def block_count(self) -> int:
        return sum(len(entry.blocks) for entry in self.tensors)

    def named(self) -> dict[str, TensorEntry]:
        return {entry.spec.name: entry for entry in self.tensors}


def encode(manifest: Manifest) -> bytes:
    """As JSON, deterministic. File names and names of datasets stand once; a block is a row of six
    values."""
    files = [file.name for file in manifest.files]
    number = {name: index for index, name in enumerate(files)}
    datasets: dict[str, int] = {}
    tensors = []
    for entry in manifest.tensors:
        spec = entry.spec
        rows = [_row(block, number, datasets) for block in entry.blocks]
        tensors.append(
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "block_bytes": spec.block_bytes,
                "blocks": rows,
            }
        )
    record = {
        "format": FORMAT,
        "step": manifest.step,
        "order": list(manifest.order),
        "history": manifest.history,
        "job": manifest.job,
        "world_size": manifest.world_size,
        "unix_time": manifest.unix_time,
        "version": manifest.version,
        "base": manifest.base,
        "new_blocks": manifest.new_blocks,
        "new_bytes": manifest.new_bytes,
        "changed_bytes": manifest.changed_bytes,
        "layout": manifest.layout,
        "files": [[file.name, file.size_bytes, file.digest] for file in manifest.files],
        "datasets": list(datasets),
        "shared": manifest.shared,
        "own": list(manifest.own),
        "extra": manifest.extra,
        "tensors": tensors,
    }
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()


def _row(block: Stored, files: dict[str, int], datasets: dict[str, int]) -> list[Any]:
    dataset = datasets.setdefault(block.dataset, len(datasets))
    file = files[block.file]
    return [file, dataset, block.place, block.offset, block.stored_bytes, block.digest]


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``; ``where`` names it in errors.

    Raises ``CheckpointDamagedError`` if it is none, or not consistent in itself.
    """
    try:
        record = json.loads(data)
        if record["format"] != FORMAT:
            raise CheckpointDamagedError(
                f"{where} has format {record['format']}, and this version of mpift reads format"
                f" {FORMAT}: use the version that wrote it, {record.get('version', 'unknown')}"
            )
        files = tuple(BlockFile(*row) for row in record["files"])
        tensors = tuple(_tensors(record, files))
        return Manifest(
            record["step"],
            (record["order"][0], record["order"][1]),
            record["history"],
            record["job"],
            record["world_size"],
            record["unix_time"],
            record["version"],
            files,
            tensors,
            record["shared"],
            tuple(record["own"]),
            record["base"],
            record["new_blocks"],
            record["new_bytes"],
            record["changed_bytes"],
            record["layout"],
            record["extra"],
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{where} is no manifest of a checkpoint: {error!r}") from None


def _tensors(record: dict[str, Any], files: Sequence[BlockFile]) -> Iterator[TensorEntry]:
    datasets, names = record["datasets"], [file.name for file in files]
    for tensor in record["tensors"]:
        spec = TensorSpec(
            tensor["name"], tensor["dtype"], tuple(tensor["shape"]), tensor["block_bytes"]
        )
        blocks = tuple(
            Stored(names[file], datasets[dataset], place, offset, stored, found)
            for file, dataset, place, offset, stored, found in tensor["blocks"]
        )
        if len(blocks) != spec.block_count:
            raise ValueError(f"{spec.name} has {len(blocks)} blocks, not {spec.block_count}")
        yield TensorEntry(spec, blocks)


def manifest_digest(data: bytes) -> str:
    """What a COMMIT file says of a manifest: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


class Decoded:
    """The last ``kept`` manifests by their digests: who reads one again need not decode it."""

    def __init__(self, kept: int = 2) -> None:
        self._kept = kept
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()  # the longest unused first

    def take(self, data: bytes, found: str, where: str) -> Manifest:
        """``decode(data, where)``, where ``found`` is the digest of ``data``."""
        if found not in self._manifests:
            self.put(found, decode(data, where))
        self._manifests.move_to_end(found)
        return self._manifests[found]

    def put(self, found: str, manifest: Manifest) -> None:
        """This is what would be decoded from what has that digest."""
        self._manifests[found] = manifest
        while len(self._manifests) > self._kept:
            self._manifests.popitem(last=False)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The contents of a COMMIT file: whose existence is the decision."""

    step: int
    order: tuple[int, int]
    manifest: str  # its digest

    def encode(self) -> bytes:
        return json.dumps(
            {"step": self.step, "order": list(self.order), "manifest": self.manifest}
        ).encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> CommitRecord:
        """Raises ``CheckpointDamagedError`` if ``data`` is none."""
        try:
            record = json.loads(data)
            order = (int(record["order"][0]), int(record["order"][1]))
            return cls(int(record["step"]), order, str(record["manifest"]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointDamagedError(f"{where} is no COMMIT file: {error!r}") from None
