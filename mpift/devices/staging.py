"""Copies of device tensors for the host that don't hold up the device.

They go to pinned host memory on a stream of their own, so what runs next on the device overlaps
with them. ``Staging`` copies what is to outlive the next step: only what would change the tensors
has to wait for it. Optimizers do, on the device, by a hook; whoever else writes to such tensors in
place calls ``fence`` first. ``Reader`` reads tensors once, through little memory, and its caller
sees to it that nothing changes them meanwhile. The pinned memory is kept for the next time.

Devices fail when they are asked to copy, and when somebody waits for it: as torch's
``RuntimeError``. What was begun then comes to nothing, and the next copies begin anew.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpift.devices import backend

_ALIGNMENT = 64
# Of pinned memory that a ``Reader`` fills at a time; it has two.
WINDOW_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a dense tensor, in C order, that ``target`` is to hold:
    uint8[stop - start] in host memory."""

    tensor: torch.Tensor
    start: int
    stop: int
    target: np.ndarray


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes ``start`` to ``stop`` of a tensor, whole elements."""

    tensor: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Sent:
    """Copies that were asked for: ``host`` has the parts' bytes once ``event`` has come by. Who is
    referred to by ``sources`` keeps its memory until then."""

    device: torch.device
    event: Any
    sources: list[torch.Tensor]
    host: list[np.ndarray]

    def wait(self) -> None:
        backend.wait_for(self.event, self.device)
        self.sources.clear()


class Staging:
    """Copies from any number of devices of one process."""

    def __init__(self) -> None:
        self._rooms: dict[torch.device, _Room] = {}  # those that no copies under way are using
        self._streams: dict[torch.device, Any] = {}
        self._under_way: dict[int, _Sent] = {}  # by id
        self._hook: Any = None

    def begin(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Begin to copy; returns what waits for the copies, on any thread, and fills the targets.
        Errors of a device are raised here and there, as torch's ``RuntimeError``."""
        if self._hook is None and pieces:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.fence())
            _all.add(self)
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.tensor.device, []).append(piece)
        moved: list[tuple[_Sent, _Room, list[Piece]]] = []

        def finish() -> None:
            try:
                for sent, _, mine in moved:
                    sent.wait()
                    for piece, host in zip(mine, sent.host, strict=True):
                        np.copyto(piece.target, host)
            finally:
                # What has failed is nothing to wait for either: once the device was mended, the
                # event may be of no use.
                for sent, room, _ in moved:
                    self._under_way.pop(id(sent), None)
                    self._rooms[sent.device] = room

        try:
            for device, mine in by_device.items():
                room = self._rooms.pop(device, None) or _Room()
                moved.append((self._send(device, room, mine), room, mine))
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                finish()  # of other devices
            raise
        return finish

    def fence(self) -> None:
        """Let the devices finish the copies before they do what is asked of them from here on, on
        this thread's streams; the host does not wait."""
        for sent in list(self._under_way.values()):
            with _on(sent.device):
                backend.of(sent.device).current_stream().wait_event(sent.event)

    def _send(self, device: torch.device, room: _Room, pieces: Sequence[Piece]) -> _Sent:
        module = backend.of(device)
        with _on(device):
            stream = self._streams.setdefault(device, module.Stream())
            stream.wait_stream(module.current_stream())
            parts = [_Part(piece.tensor, piece.start, piece.stop) for piece in pieces]
            sent = _send(device, stream, parts, room)
        self._under_way[id(sent)] = sent
        return sent

    def close(self) -> None:
        """Give pinned memory and hook back."""
        if self._hook is not None:
            self._hook.remove()
            _all.discard(self)
        self._hook = None
        self._rooms.clear()


_all: weakref.WeakSet[Staging] = weakref.WeakSet()


def fence() -> None:
    """``fence`` of all ``Staging`` that there are: whoever writes in place to tensors that might be
    part of a snapshot, and is no optimizer, calls this first."""
    for each in list(_all):
        each.fence()


class Reader:
    """Reads what tensors of devices hold, on any thread, with at most ``2 * WINDOW_BYTES`` of
    pinned memory a device: while one half is looked at, the other is filled."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.device, int], _Room] = {}
        self._streams: dict[torch.device, Any] = {}

    def begin(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Iterator[np.ndarray]]:
        """Mark this moment of this thread's streams: what they do later is not waited for. Returns
        what reads the tensors, on any thread: uint8 arrays, in the order of ``tensors`` and of
        their bytes, each valid until the next is asked for. Nothing may change the tensors until
        all are read. One reading at a time."""
        moments = {}
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            with _on(device):
                moments[device] = backend.of(device).current_stream().record_event()
        return lambda: self._read(tensors, moments)

    def _read(
        self, tensors: Sequence[torch.Tensor], moments: dict[torch.device, Any]
    ) -> Iterator[np.ndarray]:
        for device, moment in moments.items():
            with _on(device):
                stream = self._streams.setdefault(device, backend.of(device).Stream())
                stream.wait_event(moment)
        before: _Sent | None = None
        for half, window in zip(itertools.cycle((0, 1)), _windows(tensors), strict=False):
            device = window[0].tensor.device
            room = self._rooms.setdefault((device, half), _Room())
            with _on(device):
                sent = _send(device, self._streams[device], window, room)
            if before is not None:
                before.wait()
                yield from before.host
            before = sent
        if before is not None:
            before.wait()
            yield from before.host


class _Room:
    """Pinned memory that grows as needed."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, size: int) -> torch.Tensor:
        """uint8[at least size]"""
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # before the next is asked for: both may be more than there is
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory


def _windows(tensors: Sequence[torch.Tensor]) -> Iterator[list[_Part]]:
    """Parts of all that the tensors hold, in order; each list is of one device, and fits."""
    window: list[_Part] = []
    room = WINDOW_BYTES
    for tensor in tensors:
        start, size = 0, tensor.nbytes
        if window and window[0].tensor.device != tensor.device:
            yield window
            window, room = [], WINDOW_BYTES
        while start < size:
            stop = min(size, start + room)
            window.append(_Part(tensor, start, stop))
            room -= _aligned(stop - start)
            start = stop
            if room <= 0:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window


def _send(device: torch.device, stream: Any, parts: Sequence[_Part], room: _Room) -> _Sent:
    """Ask for copies on ``stream``, on the device, which is current."""
    module = backend.of(device)
    ends = list(itertools.accumulate(_aligned(part.stop - part.start) for part in parts))
    memory = room.of(ends[-1])
    sources, arrived = [], []
    with module.stream(stream), torch.no_grad():
        known: torch.Tensor | None = None
        for part, end in zip(parts, ends, strict=True):
            size = part.stop - part.start
            start = end - _aligned(size)
            host = memory[start : start + size]
            if known is not part.tensor:  # the next part of the same tensor needs no second copy
                known, flat = part.tensor, _flat(part.tensor)
                sources.append(flat)
            first, last = (at // flat.element_size() for at in (part.start, part.stop))
            host.view(flat.dtype).copy_(flat[first:last], non_blocking=True)
            arrived.append(host.numpy())
        event = module.Event()
        event.record(stream)
    return _Sent(device, event, sources, arrived)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return backend.of(device).device(device)
