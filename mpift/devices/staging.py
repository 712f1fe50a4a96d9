"""Copies of device tensors for the host that don't hold up the device.

They go to pinned host memory on a stream of their own, so what runs next on the device overlaps
with them. Only what would change the tensors has to wait: optimizers do, on the device, by a hook;
whoever else writes to them in place calls ``fence`` first. The pinned memory is kept for the next
time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a dense tensor, in C order, that ``target`` is to hold:
    uint8[stop - start] in host memory."""

    tensor: torch.Tensor
    start: int
    stop: int
    target: np.ndarray


@dataclass(frozen=True, slots=True)
class _Copy:
    piece: Piece
    source: torch.Tensor  # on the device
    host: np.ndarray  # where its bytes arrive


class Staging:
    """Copies from any number of devices of one process; one set of copies at a time."""

    def __init__(self) -> None:
        self._pinned: dict[torch.device, torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._events: list[tuple[torch.device, Any]] = []  # copies that may still run
        self._hook: Any = None

    def begin(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Begin to copy; returns what waits for the copies, on any thread, and fills the targets.
        Errors of a device are raised there, as torch's ``RuntimeError``."""
        if self._hook is None and pieces:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.fence())
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.tensor.device, []).append(piece)
        moved = [self._copy(device, mine) for device, mine in by_device.items()]

        def finish() -> None:
            for event, copies in moved:
                event.synchronize()
                for copy in copies:
                    np.copyto(copy.piece.target, copy.host)

        return finish

    def fence(self) -> None:
        """Let the devices finish the copies before they do what is asked of them from here on; the
        host does not wait."""
        events, self._events = self._events, []
        for device, event in events:
            with _on(device):
                _module(device).current_stream().wait_event(event)

    def _copy(self, device: torch.device, pieces: Sequence[Piece]) -> tuple[Any, list[_Copy]]:
        """The event after which the copies are done."""
        module = _module(device)
        ends = list(itertools.accumulate(_aligned(piece.stop - piece.start) for piece in pieces))
        copies = []
        with _on(device):
            room = self._room(device, ends[-1])
            stream = self._streams.setdefault(device, module.Stream())
            stream.wait_stream(module.current_stream())
            with module.stream(stream):
                for piece, end in zip(pieces, ends, strict=True):
                    size = piece.stop - piece.start
                    start = end - _aligned(size)
                    host = room[start : start + size]
                    flat = piece.tensor.detach().contiguous().reshape(-1)
                    first, last = (at // flat.element_size() for at in (piece.start, piece.stop))
                    host.view(flat.dtype).copy_(flat[first:last], non_blocking=True)
                    # Who is referred to keeps its memory until the copy is done.
                    copies.append(_Copy(piece, flat, host.numpy()))
                event = module.Event()
                event.record(stream)
        self._events.append((device, event))
        return event, copies

    def _room(self, device: torch.device, size: int) -> torch.Tensor:
        host = self._pinned.get(device)
        if host is None or host.numel() < size:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._pinned[device] = host
        return host

    def close(self) -> None:
        """Give pinned memory and hook back."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        self._pinned.clear()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _module(device: torch.device) -> Any:
    """``torch.cuda``, ``torch.npu``..."""
    return getattr(torch, device.type)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return _module(device).device(device)
