"""Gradients in host memory: one copy in, one copy out, nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class CpuCarrier:
    """See ``mpift.devices.carriers.Carrier``."""

    def __init__(self, slots: Sequence[tuple[int, int]], factor: float) -> None:
        self._slots = slots
        self._factor = factor

    def place(
        self, position: int, gradient: torch.Tensor | None, host: torch.Tensor, add: bool
    ) -> None:
        start, stop = self._slots[position]
        part = host[start:stop]
        if gradient is None:
            if not add:
                part.zero_()
            return
        part = part.view(gradient.shape)
        if add and self._factor == 1.0:
            part.add_(gradient)
        elif add:
            part.add_(torch.mul(gradient, self._factor, out=torch.empty_like(part)))
        elif self._factor == 1.0:
            part.copy_(gradient)
        else:
            torch.mul(gradient, self._factor, out=part)

    def send(self, done: Callable[[], None]) -> None:
        done()

    def rewind(self) -> Sequence[int]:
        return ()

    def forget(self) -> None:
        pass

    def fetch(
        self, host: torch.Tensor, divisor: float, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        for (start, stop), gradient in zip(self._slots, gradients, strict=True):
            if gradient is None:
                continue
            part = host[start:stop].view(gradient.shape)
            if divisor == 1.0:
                gradient.copy_(part)
            else:
                torch.div(part, divisor, out=gradient)

    def settle(self) -> None:
        pass
