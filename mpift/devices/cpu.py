"""Tensors in host memory: one copy in, one copy out, nothing to wait for."""

from __future__ import annotations

import torch


class CpuDevice:
    """See ``mpift.devices.tensors.Device``."""

    def copy_in(self, gradient: torch.Tensor, host: torch.Tensor, factor: float) -> None:
        host = host.view(gradient.shape)
        if factor == 1.0:
            host.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=host)

    def fence(self) -> None:
        pass

    def copy_out(self, host: torch.Tensor, divisor: float, gradient: torch.Tensor) -> None:
        host = host.view(gradient.shape)
        if divisor == 1.0:
            gradient.copy_(host)
        else:
            torch.div(host, divisor, out=gradient)
