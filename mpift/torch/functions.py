"""Getting ranks to start alike: broadcasts of parameters, optimizer state and objects."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from mpift import runtime
from mpift.errors import MismatchError, RootLostError
from mpift.reduction.operations import Kind, Operation
from mpift.torch.operations import _broadcast_bytes


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Give every rank the tensors of ``root_rank``, in place.

    ``params`` is a ``state_dict`` or ``named_parameters()``. All tensors travel in one operation,
    so a fault leaves no mixture; should the root die before anybody has them, rank 0 of the
    survivors is the new root.
    """
    items = list(params.items() if isinstance(params, Mapping) else params)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in items):
        raise ValueError("params must be a state_dict or (name, tensor) pairs")
    named = [(name, value) for name, value in items if isinstance(value, torch.Tensor)]
    if not named:
        return
    tensors = [tensor for _, tensor in named]
    flat = [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    plan = digest([f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named])
    mine = np.frombuffer(bytes.fromhex(plan), np.uint8)
    received = _from_any_root(np.concatenate([mine, torch.cat(flat).numpy()]), root_rank)
    if not np.array_equal(received[: len(mine)], mine):
        raise MismatchError(
            "the root broadcast tensors of other names, shapes, dtypes or order than this rank's:"
            " build the same model on every rank"
        )
    start = len(mine)
    with torch.no_grad():
        for tensor, old in zip(tensors, flat, strict=True):
            piece = torch.from_numpy(received[start : start + len(old)].copy())
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
            start += len(old)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state of ``root_rank``: state, learning rates and the rest.

    ``model`` is accepted for Horovod's sake.
    """
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of ``root_rank``, which must be picklable, on every rank; tensors come to the
    CPU. As in ``broadcast_parameters`` the root is replaced if it dies too early."""
    while True:
        data = _pickled(obj)
        try:
            size = _broadcast_bytes(np.array([len(data)]).view(np.uint8), root_rank)
            length = int(size.view(np.int64)[0])
            received = _broadcast_bytes(
                data if len(data) == length else np.zeros(length, np.uint8), root_rank
            )
        except RootLostError as error:
            root_rank = _next_root(error)
            continue
        return torch.load(io.BytesIO(received.tobytes()), map_location="cpu", weights_only=False)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in rank order."""
    current = runtime.current()
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    # One operation for lengths and contents, so that a fault in between can't part them.
    framed = np.concatenate([np.array([len(data)]).view(np.uint8), data])
    everything = current.operate(Operation(Kind.ALLGATHER, framed)).tobytes()
    objects, start = [], 0
    while start < len(everything):
        length = int.from_bytes(everything[start : start + 8], "little")
        objects.append(pickle.loads(everything[start + 8 : start + 8 + length]))  # noqa: S301, from our own ranks
        start += 8 + length
    return objects


def digest(state: Any) -> str:
    """XXH3-128 of a state, as hexadecimal: equal on two ranks only if every bit of it is.

    ``state`` is a tensor, a ``state_dict``, or any nesting of mappings, lists and plain values.
    """
    hasher = xxhash.xxh3_128()
    _feed(hasher, state)
    return hasher.hexdigest()


def _feed(hasher: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        hasher.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            hasher.update(repr(key).encode())
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(str(len(value)).encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(repr(value).encode())


def _pickled(obj: Any) -> np.ndarray:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _from_any_root(data: np.ndarray, root_rank: int) -> np.ndarray:
    while True:
        try:
            return _broadcast_bytes(data, root_rank)
        except RootLostError as error:
            root_rank = _next_root(error)


def _next_root(error: RootLostError) -> int:
    warnings.warn(f"{error}; going on with rank 0 of the survivors", stacklevel=3)
    return 0
