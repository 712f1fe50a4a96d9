"""Getting ranks to start alike: broadcasts of parameters, optimizer state and objects."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from mpift import runtime
from mpift.devices import staging
from mpift.errors import MismatchError, RootLostError
from mpift.reduction.operations import Kind, Operation
from mpift.torch.state import Look, bytes_of, write_bytes

_HEAD_BYTES = 16  # int64[2]: root_rank, length of the object


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
    flat = [bytes_of(tensor) for _, tensor in named]
    plan = digest([f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named])
    mine = np.frombuffer(bytes.fromhex(plan), np.uint8)
    received = _from_any_root(np.concatenate([mine, *flat]), root_rank)
    if not np.array_equal(received[: len(mine)], mine):
        raise MismatchError(
            "the root broadcast tensors of other names, shapes, dtypes or order than this rank's:"
            " build the same model on every rank"
        )
    start = len(mine)
    for (_, tensor), old in zip(named, flat, strict=True):
        write_bytes(received[start : start + len(old)].copy(), tensor)
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
    CPU. As in ``broadcast_parameters`` the root is replaced if it dies too early. Raises
    ``MismatchError`` on all ranks if they name different roots."""
    current = runtime.current()
    for root in _roots(root_rank):
        data = _pickled(obj) if root == current.member else np.zeros(0, np.uint8)
        head = np.array([root_rank, len(data)], np.int64).view(np.uint8)
        # One operation for length and contents: in a second one the same rank may be another
        # member. Two dimensions, so that it can't be taken for the one of allgather_object.
        framed = np.concatenate([head, data]).reshape(-1, 1)
        everything = current.operate(Operation(Kind.ALLGATHER, framed)).reshape(-1)
        found = _first_object(everything, root_rank)
        if found is not None:
            return torch.load(io.BytesIO(found), map_location="cpu", weights_only=False)
    raise AssertionError("there is always another root: this rank in the end")


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, in rank order; tensors of devices come to the CPU."""
    current = runtime.current()
    buffer = io.BytesIO()
    _HostPickler(buffer).dump(obj)
    data = np.frombuffer(buffer.getvalue(), np.uint8)
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
    Mappings count in the order of their keys, as a ``state_dict`` has it, and values that are not
    tensors by their ``repr``: equal ones of other types or in another order differ. On which device
    a tensor is does not count.
    """
    return digest_later(state, staging.Reader())()


def digest_later(state: Any, reader: staging.Reader) -> Callable[[], str]:
    """What computes the ``digest`` of a state as it is after all that this thread has asked for
    so far, on any thread, while nothing changes it. Devices are read by ``reader``, beside what
    they do then."""
    parts = list(_parts(state))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    looks = Look([t if t.device.type != "cpu" else bytes_of(t) for t in tensors], reader)

    def compute() -> str:
        hasher, arrays = xxhash.xxh3_128(), iter(looks)
        for part in parts:
            if not isinstance(part, torch.Tensor):
                hasher.update(part)
                continue
            left = part.nbytes
            while left:
                array = next(arrays)
                hasher.update(array.data)
                left -= array.nbytes
        return hasher.hexdigest()

    return compute


def _parts(value: Any) -> Iterator[bytes | torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.numel():
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


def on_devices_of(present: Any, value: Any) -> Any:
    """``value`` with its tensors, where there is one at the same place in ``present``, on that
    one's device: what comes from another rank comes to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.to(present.device) if isinstance(present, torch.Tensor) else value
    if type(value) is dict and isinstance(present, Mapping):
        return {key: on_devices_of(present.get(key), item) for key, item in value.items()}
    if type(value) in {list, tuple} and isinstance(present, list | tuple):
        others = [*present, *[None] * len(value)]
        return type(value)(map(on_devices_of, others, value))
    return value


class _HostPickler(pickle.Pickler):
    """A rank has no use for memory of another rank's device, and may lack that device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.detach().to("cpu").__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickled(obj: Any) -> np.ndarray:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def _first_object(everything: np.ndarray, root_rank: int) -> bytes | None:
    """The object that was gathered; None if its root is gone."""
    found, start = None, 0
    while start < len(everything):
        stop = start + _HEAD_BYTES
        named, length = everything[start:stop].copy().view(np.int64).tolist()
        if named != root_rank:
            raise MismatchError(
                f"ranks called broadcast_object with different roots: root_rank {root_rank} here,"
                f" {named} elsewhere; give the same on every rank"
            )
        start = stop + length
        # Of two, if a rank was late to see a fault and so took another member for the root, the
        # first counts on all ranks.
        if length and found is None:
            found = everything[stop:start].tobytes()
    return found


def _from_any_root(data: np.ndarray, root_rank: int) -> np.ndarray:
    for root in _roots(root_rank):
        try:
            return runtime.current().operate(Operation(Kind.BROADCAST, data, root=root))
        except RootLostError:
            continue
    raise AssertionError("there is always another root: this rank in the end")


def _roots(root_rank: int) -> Iterator[int]:
    """Member ids: of ``root_rank``, and for as long as those so far are gone, or have left their
    loops, the lowest other one. All ranks see the same view after the same operation."""
    members = runtime.current().view.members
    if not isinstance(root_rank, int) or not 0 <= root_rank < len(members):
        raise MismatchError(f"root_rank {root_rank!r} is not a rank of 0 to {len(members) - 1}")
    tried = [members[root_rank]]
    while True:
        yield tried[-1]
        view = runtime.current().view
        root = next(member for member in view.members if member not in tried)
        warnings.warn(
            f"broadcast: its root, member {tried[-1]}, is gone and nobody has its data; going on"
            f" with rank {view.rank_of(root)} of the survivors",
            stacklevel=3,
        )
        tried.append(root)
