"""The state that an optimizer's rounds keep equal on all ranks, piece by piece and as one number.

Pieces are the parameters, the tensors of the optimizer's state, and all plain values as one text:
the optimizer's own settings and what else the state holds. State that an optimizer makes in its
first step, and parameters added later, are pieces from then on. Not among them: sparse tensors,
objects that are neither tensors nor plain values, and what scripts put into parameter groups.

Bytes in this machine's memory are seen where they are. Those on a device are read by pinned memory
on a stream of its own, so whoever looks at them on a helper thread holds up neither the training
thread nor the device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from mpift.devices import staging
from mpift.torch.records import own_settings_of, set_own_settings

_PLAIN = (bool, int, float, str, type(None))


class OptimizerState:
    """See the module's docstring. ``name_of`` gives a parameter's name.

    What is in memory of this machine is seen through arrays that are made once: a look costs little
    more than to hash. They are made anew when a tensor, its memory or the optimizer's dictionaries
    are others than before."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str]
    ) -> None:
        self._optimizer = optimizer
        self._name_of = name_of
        self._known: _Arrays | None = None
        self._reader = staging.Reader()

    def arrays(self) -> Look:
        """All tensors' bytes as they are now."""
        known = self._known
        if known is None or not known.is_current(self._optimizer):
            known = self._known = _Arrays(self._optimizer)
        return known.look(self._reader)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        found: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(_parameters(self._optimizer)):
            name = self._name_of(parameter)
            found[f"{name} ({index})" if name in found else name] = parameter
        return found

    def pieces(self) -> dict[str, torch.Tensor]:
        """Tensors by name: a parameter's own, and behind a colon which part of its state it is."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters().items():
            if _is_dense(parameter):
                found[name] = parameter
            for key, value in _state_of(self._optimizer, parameter):
                if _is_dense(value):
                    found[f"{name}: {key}"] = value
        return found

    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's own settings, of each parameter group."""
        return own_settings_of(self._optimizer)

    def plain(self) -> str:
        """All plain values as JSON, whatever their order here; floats keep all their bits in it."""
        others = [
            [index, str(key), value]
            for index, parameter in enumerate(_parameters(self._optimizer))
            for key, value in _state_of(self._optimizer, parameter)
            if isinstance(value, _PLAIN)
        ]
        return json.dumps([self.settings(), others], sort_keys=True)

    def take_plain(self, text: str) -> None:
        """Let the plain values be those that ``plain`` found on another rank, no more and no less.
        Settings of other parameter groups than here are left as they are."""
        settings, others = json.loads(text)
        set_own_settings(self._optimizer, settings)
        wanted = {(index, name): value for index, name, value in others}
        for index, parameter in enumerate(_parameters(self._optimizer)):
            for key, value in _state_of(self._optimizer, parameter):
                if isinstance(value, _PLAIN) and (index, str(key)) not in wanted:
                    del self._optimizer.state[parameter][key]
        parameters = list(_parameters(self._optimizer))
        for (index, name), value in wanted.items():
            state = self._optimizer.state[parameters[index]]
            state[next((key for key in state if str(key) == name), name)] = value


class Look:
    """The bytes of tensors at one moment: uint8 arrays, always in the same order. To be gone
    through once, on any thread, while nothing changes the tensors; an array is valid until the next
    is asked for, and one tensor may come in several. ``on_device``: some are read from a device,
    so going through them waits for it and raises its errors, torch's ``RuntimeError``."""

    def __init__(self, arrays: Sequence[np.ndarray | torch.Tensor], reader: staging.Reader) -> None:
        self._arrays = arrays
        self.size_bytes = sum(array.nbytes for array in arrays)
        away = [array for array in arrays if isinstance(array, torch.Tensor)]
        self.on_device = bool(away)
        self._read = reader.begin(away)

    def __iter__(self) -> Iterator[np.ndarray]:
        arrivals = self._read()
        for array in self._arrays:
            if isinstance(array, np.ndarray):
                yield array
                continue
            left = array.nbytes
            while left:
                arrived = next(arrivals)
                left -= arrived.nbytes
                yield arrived


def differences(text: str, other: str) -> dict[str, str]:
    """What differs between two texts of ``plain``: by name, the values "here" and "there"."""
    (mine, my_others), (theirs, their_others) = json.loads(text), json.loads(other)
    found = {}
    if len(mine) != len(theirs):
        found["number of param_groups"] = f"{len(mine)} here, {len(theirs)} there"
    rows = [
        (f"param_groups[{index}][{name!r}]", name, one, another)
        for index, (one, another) in enumerate(zip(mine, theirs, strict=False))
        for name in sorted({*one, *another})
    ]
    here, there = (
        {(index, name): value for index, name, value in others}
        for others in (my_others, their_others)
    )
    rows += [(f"{key[1]} of parameter {key[0]}", key, here, there) for key in {**here, **there}]
    for name, key, one, another in rows:
        values = [json.dumps(side[key]) if key in side else "none" for side in (one, another)]
        if values[0] != values[1]:
            found[name] = f"{values[0]} here, {values[1]} there"
    return found


def hash_of(arrays: Iterable[np.ndarray], text: str) -> int:
    """64 bits (XXH3) over all arrays, however they are cut, and the text."""
    hasher = xxhash.xxh3_64()
    for array in arrays:
        hasher.update(array.data)
    hasher.update(text.encode())
    return hasher.intdigest()


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """uint8[n]: the bytes of a dense tensor in the order of its indices. Shares its memory where
    it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def write_bytes(data: np.ndarray, tensor: torch.Tensor) -> None:
    """Let ``tensor`` have these bytes, as ``bytes_of`` gives them."""
    if not data.size:  # torch can't see an empty array as another dtype
        return
    values = torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)
    if tensor.device.type != "cpu":
        staging.fence()  # it may be part of a snapshot that is being copied
    with torch.no_grad():
        tensor.copy_(values)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return iter(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))


def _state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[tuple[Any, Any]]:
    """Sorted, since the order of a dictionary may differ between ranks. No entry is made."""
    state: Mapping[Any, Any] = optimizer.state.get(parameter) or {}
    return sorted(state.items(), key=lambda item: str(item[0]))


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class _Arrays:
    """Arrays over the memory of one optimizer's tensors, and how to tell that they still are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._state = optimizer.state
        self._sizes = [len(group["params"]) for group in self._groups]
        # (parameter, its state, entries in that)
        self._states: list[tuple[torch.Tensor, Any, int]] = []
        # (where it is, under which key or index, the tensor, address of its data)
        self._places: list[tuple[Any, Any, torch.Tensor, int]] = []
        # None: no array can share a tensor's memory.
        self._arrays: list[np.ndarray | torch.Tensor | None] = []
        for group in self._groups:
            for index, parameter in enumerate(group["params"]):
                self._add(group["params"], index, parameter)
                state = optimizer.state.get(parameter)
                self._states.append((parameter, state, len(state or ())))
                for key, value in _state_of(optimizer, parameter):
                    if isinstance(value, torch.Tensor):
                        self._add(state, key, value)

    def _add(self, holder: Any, key: Any, tensor: torch.Tensor) -> None:
        if not _is_dense(tensor):
            return
        self._places.append((holder, key, tensor, tensor.data_ptr()))
        if tensor.device.type != "cpu":
            self._arrays.append(tensor.detach())
            return
        array = bytes_of(tensor)
        shares = array.size == 0 or array.ctypes.data == tensor.data_ptr()
        self._arrays.append(array if shares else None)

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether there are the same tensors, at the same places in memory."""
        groups, state = optimizer.param_groups, optimizer.state
        if groups is not self._groups or state is not self._state:
            return False
        if [len(group["params"]) for group in groups] != self._sizes:
            return False
        for parameter, known, entries in self._states:
            present = state.get(parameter)
            if present is not known or len(present or ()) != entries:
                return False
        try:
            return all(
                holder[key] is tensor and tensor.data_ptr() == address
                for holder, key, tensor, address in self._places
            )
        except (KeyError, IndexError):
            return False

    def look(self, reader: staging.Reader) -> Look:
        """At all of them; of tensors whose memory no array can share, at copies made now."""
        arrays = [
            bytes_of(place[2]) if array is None else array
            for array, place in zip(self._arrays, self._places, strict=True)
        ]
        return Look(arrays, reader)


# -- a fault on purpose ------------------------------------------------------------------------


def flip_bit(parameters: Mapping[str, torch.Tensor], member: int, step: int) -> str:
    """Flip one bit of one floating-point parameter, as a fault of memory would; returns where.

    The place follows from ``member`` and ``step``. The bit is the second of the mantissa, worth a
    quarter of the value at most, so that training goes on as if nothing had happened; and the
    element is the next one from that place on that is not small for its tensor, or the next update
    would round the difference away."""
    names = [name for name, tensor in parameters.items() if tensor.is_floating_point()]
    seed = xxhash.xxh3_64_intdigest(f"{member} {step}".encode())
    name = names[seed % len(names)]
    tensor = parameters[name]
    data = bytes_of(tensor).copy()
    values = torch.from_numpy(data).view(tensor.dtype).double().abs()
    large = torch.nonzero(values >= values.mean()).reshape(-1).tolist()
    start = seed // len(names) % max(1, len(values))
    element = next((index for index in large if index >= start), large[0])
    mantissa = round(-math.log2(torch.finfo(tensor.dtype).eps))
    size = tensor.element_size()
    bit = mantissa - 2
    data[element * size + bit // 8] ^= np.uint8(1 << bit % 8)
    write_bytes(data, tensor)
    return f"{name}[{element}]"
