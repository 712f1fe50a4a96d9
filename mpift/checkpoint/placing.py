"""Reading tensors of a checkpoint to where they belong: in place, and only what differs.

A tensor that is there already, on the CPU and contiguous, is hashed block by block, and the blocks
that differ are read into its memory. What is elsewhere (a device, another memory format) is read
into host memory first and copied, a bounded amount at a time. What is not there is made. Whether
the shapes fit is decided before anything is written. Every block is verified by the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from mpift.checkpoint.blocks import TensorSpec, digest
from mpift.checkpoint.manifest import TensorEntry
from mpift.checkpoint.reading import Job
from mpift.checkpoint.state import as_bytes
from mpift.errors import CheckpointDamagedError, CheckpointError

# What is hashed, read and copied before the next is begun: bounds the host memory for devices.
_SAMPLE = 6  # blocks
WINDOW_BYTES = 256 << 20


class BlockReader(Protocol):
    """What reads blocks: ``reading.Reader``, or a test's."""

    def read_many(self, jobs: Iterable[Job], threads: int) -> None:
        """Read and verify blocks, each into its array. Raises ``CheckpointDamagedError``."""


@dataclass(slots=True)
class _Wanted:
    """A stored tensor and the live ones that are to have its content. ``result`` is the first of
    those, or a new one. ``memory`` is where its bytes are read to, of ``host`` if not of
    ``result`` itself."""

    entry: TensorEntry
    live: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    host: torch.Tensor | None = None
    memory: np.ndarray | None = None

    @property
    def in_place(self) -> bool:
        return bool(self.live) and is_writable_in_place(self.live[0])

    @property
    def is_staged(self) -> bool:
        return bool(self.live) and not is_writable_in_place(self.live[0])

    def begin(self) -> np.ndarray:
        if self.memory is None:
            if self.in_place:
                self.result = self.live[0]
                self.memory = as_bytes(self.result)
            else:
                self.host = _empty(self.entry.spec)
                self.memory = as_bytes(self.host)
        return self.memory

    def finish(self) -> None:
        """Once all blocks are there: copy to where they could not be read to."""
        self.begin()
        source = self.result if self.host is None else self.host
        assert source is not None
        if self.result is None:
            self.result = self.live[0] if self.live else self.host
        for tensor in self.live:
            if tensor is not source:
                _copy(source, tensor)
        self.host = self.memory = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Blocks ``first`` to ``last`` of a tensor."""

    wanted: _Wanted
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        spec = self.wanted.entry.spec
        return min(self.last * spec.block_bytes, spec.size_bytes) - self.first * spec.block_bytes

    def jobs(self) -> Iterator[Job]:
        memory = self.wanted.begin()
        spec, blocks = self.wanted.entry.spec, self.wanted.entry.blocks
        step = spec.block_bytes
        for index in range(self.first, self.last):
            # The last one ends with the memory.
            yield blocks[index], spec, index, memory[index * step : (index + 1) * step], None


class Placing:
    """What is wanted of a checkpoint, and where it goes; then ``read`` it, and ask for it."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._wanted: dict[str, _Wanted] = {}
        self._taken: dict[int, str] = {}  # by id of a live tensor, for which stored one it is
        # Of storages, by device and address: those of two devices may be equal.
        self._owners: dict[tuple[str, int], object] = {}
        self.blocks_read = 0
        self.blocks_matched = 0
        self.bytes_read = 0

    def spec(self, name: str) -> TensorSpec:
        """Of a stored tensor. Raises ``CheckpointDamagedError`` if there is none."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointDamagedError(
                f"the checkpoint's values name a tensor {name!r} that is not in its manifest:"
                " restore an older checkpoint"
            )
        return entry.spec

    def claim(self, live: torch.Tensor, owner: object) -> bool:
        """Whether ``owner`` may write to a tensor: nobody else has claimed its memory before."""
        address = live.untyped_storage().data_ptr()
        return not address or self._owners.setdefault((str(live.device), address), owner) == owner

    def want(self, name: str, live: torch.Tensor | None = None, owner: object = None) -> bool:
        """Let ``live`` have the stored tensor's content, or a new tensor. Returns False, and makes
        a new one, if ``live`` is of another dtype or shape, is to be another stored tensor, or lies
        in another owner's memory."""
        spec = self.spec(name)
        wanted = self._wanted.setdefault(name, _Wanted(self._entries[name]))
        if live is None:
            return True
        if not fits(spec, live) or self._taken.get(id(live), name) != name:
            return False
        if not self.claim(live, owner):
            return False
        if id(live) not in self._taken:
            self._taken[id(live)] = name
            wanted.live.append(live)
        return True

    def read(self, reader: BlockReader, threads: int, rotate: tuple[int, int] = (0, 1)) -> None:
        """Read what is wanted. With ``rotate`` = (i, n) the i-th of n portions comes first, so that
        n ranks of a node begin with different ones, and find the others' in the page cache."""
        spans = [_Span(w, 0, len(w.entry.blocks)) for w in self._wanted.values()]
        for window in _windows(_rotated(spans, rotate)):
            jobs = [job for span in window if not span.wanted.in_place for job in span.jobs()]
            there = [job for span in window if span.wanted.in_place for job in span.jobs()]
            changed = _changed(there, threads)
            self.blocks_matched += len(there) - len(changed)
            jobs += changed
            self.blocks_read += len(jobs)
            self.bytes_read += sum(job[3].nbytes for job in jobs)
            if jobs:
                reader.read_many(jobs, threads)
            for span in window:
                if span.wanted.is_staged:
                    span.wanted.finish()
        for wanted in self._wanted.values():
            if not wanted.is_staged:
                wanted.finish()

    def tensor(self, name: str) -> torch.Tensor:
        """After ``read``: the live tensor that was given for it first, or the new one."""
        result = self._wanted[name].result
        assert result is not None
        return result

    def is_new(self, name: str) -> bool:
        """Whether the stored tensor has no live one."""
        return not self._wanted[name].live


def fits(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    """Whether a live tensor has the stored one's dtype and shape."""
    return str(tensor.dtype) == f"torch.{spec.dtype}" and tuple(tensor.shape) == spec.shape


def is_writable_in_place(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes in C order are a stretch of host memory."""
    plain = not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and plain


def _empty(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{spec.name} has dtype {spec.dtype}, which torch {torch.__version__} does not have:"
            " use a later torch"
        )
    return torch.empty(spec.shape, dtype=dtype)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    sizes = zip(target.stride(), target.shape, strict=True)
    with torch.no_grad():
        if any(step == 0 < size - 1 for step, size in sizes):
            # Expanded: several elements share one place, which can't take them all.
            target.data = source.detach().clone().to(target.device)
        else:
            target.copy_(source)


def _changed(jobs: Sequence[Job], threads: int) -> list[Job]:
    """Those whose memory is not what was stored; all, where none of a sample is: then nothing would
    come of looking at the others."""

    def differs(job: Job) -> bool:
        stored, spec, _, memory, _ = job
        return digest(memory.data, spec.dtype) != stored.digest

    if len(jobs) > _SAMPLE**2 and all(map(differs, jobs[:: len(jobs) // _SAMPLE])):
        return list(jobs)
    if threads == 1 or len(jobs) <= 1:
        return [job for job in jobs if differs(job)]
    with ThreadPoolExecutor(threads, "mpift-hash") as pool:
        found = pool.map(differs, jobs)
        return [job for job, is_other in zip(jobs, found, strict=True) if is_other]


def _rotated(spans: Sequence[_Span], rotate: tuple[int, int]) -> list[_Span]:
    """Begin with another block; staged tensors are not cut, since they are copied whole."""
    portion, portions = rotate
    start = sum(span.last for span in spans) * portion // portions
    for index, span in enumerate(spans):
        if start < span.last:
            before, after = list(spans[:index]), list(spans[index + 1 :])
            if start == 0 or span.wanted.is_staged:
                return [span, *after, *before]
            ends = [_Span(span.wanted, start, span.last)], [_Span(span.wanted, 0, start)]
            return [*ends[0], *after, *before, *ends[1]]
        start -= span.last
    return list(spans)


def _windows(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    window: list[_Span] = []
    size = 0
    for span in spans:
        if window and size + span.size_bytes > WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(span)
        size += span.size_bytes
    if window:
        yield window
