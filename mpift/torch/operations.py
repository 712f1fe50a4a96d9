"""Collectives on tensors, by Horovod's names. All ranks call the same ones in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpift import runtime
from mpift.devices import staging
from mpift.errors import MismatchError
from mpift.reduction.operations import Kind, Operation
from mpift.torch.compression import Compression, compressor_of
from mpift.torch.reduce_ops import Average, ReduceOp, Sum

_HALF = (torch.float16, torch.bfloat16)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks; returns a new tensor of its shape, dtype and device.

    ``op`` is Average (the default), Sum, Min, Max or Product; ``average`` is its old form. Integer
    averages truncate. Half types are summed in float32. No gradient flows through it. Raises
    ``MismatchError`` on every rank if shapes, dtypes or operators differ.

    ``compression`` is one of ``Compression`` or a ``Compressor``, the same on every rank; it holds
    for sums and averages of floating-point numbers, everything else is exact. Each call stands
    alone: what compression loses is lost. ``Compressor`` in ``mpift.reduction.codecs`` says what
    that is.
    """
    compressor = compressor_of(compression)
    op = _operator(average, op)
    wide = tensor.detach().to("cpu", torch.float32 if tensor.dtype in _HALF else tensor.dtype)
    scaled = _scaled(wide, prescale_factor)
    mpi_op = Sum if op is Average else op
    data = scaled.contiguous().numpy()
    operation = Operation(Kind.ALLREDUCE, data, mpi_op.value, compressor=compressor)
    combined = torch.from_numpy(runtime.current().operate(operation))
    if op is Average:  # over those that called it; ranks that have left don't dilute it
        rounding = None if combined.is_floating_point() else "trunc"
        combined = torch.div(combined, operation.participants, rounding_mode=rounding)
    return _scaled(combined, postscale_factor).to(tensor.device, tensor.dtype)


def allreduce_(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
    """``allreduce`` in place; returns ``tensor``."""
    return _into(tensor, allreduce(tensor, *arguments, **keywords))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of ``root_rank``, as a new tensor on every rank.

    Raises ``RootLostError`` on every rank if the root died before anybody had its data.
    """
    data = tensor.detach().to("cpu").contiguous()
    received = _broadcast_bytes(data.reshape(-1).view(torch.uint8).numpy(), root_rank)
    result = torch.empty_like(data)
    result.view(-1).view(torch.uint8).copy_(torch.from_numpy(received))
    return result.to(tensor.device)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """``broadcast`` in place; returns ``tensor``."""
    return _into(tensor, broadcast(tensor, root_rank, name))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors, joined along the first dimension in rank order; it may differ by rank."""
    data = torch.atleast_1d(tensor.detach().to("cpu")).contiguous()
    half = data.dtype in _HALF
    rows = (data.view(torch.int16) if half else data).numpy()
    gathered = torch.from_numpy(runtime.current().operate(Operation(Kind.ALLGATHER, rows)))
    return (gathered.view(data.dtype) if half else gathered).to(tensor.device)


def barrier() -> None:
    """Wait until every live rank has called this."""
    runtime.current().operate(Operation(Kind.BARRIER))


def _into(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        staging.fence()  # it may be part of a snapshot that is being copied
    with torch.no_grad():
        return tensor.copy_(result)


def _broadcast_bytes(data: np.ndarray, root_rank: int) -> np.ndarray:
    members = runtime.current().view.members
    if not isinstance(root_rank, int) or not 0 <= root_rank < len(members):
        raise MismatchError(f"root_rank {root_rank!r} is not a rank of 0 to {len(members) - 1}")
    operation = Operation(Kind.BROADCAST, data, root=members[root_rank])
    return runtime.current().operate(operation)


def _operator(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise ValueError("give op or average, not both")
    if average is not None:
        return Average if average else Sum
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(f"op {op!r} is not one of hvd.Average, Sum, Min, Max, Product")
    return op or Average


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor`` * ``factor``, in the tensor's dtype also where that is an integer."""
    return tensor if factor == 1.0 else (tensor * factor).to(tensor.dtype)
