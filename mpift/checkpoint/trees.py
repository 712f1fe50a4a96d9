"""Values as trees of JSON with their tensors apart, and back: exact, and never pickled.

What JSON has, stands in a tree as it is. Everything else is an object with a tag:
``{"#": "tuple", "v": [...]}``. A tensor's leaf is ``{"#": "tensor", "name": "model/fc.weight"}``.
Its name is the path of keys to it, and a valid path of HDF5: in a key, "/", "%", control characters
and lone surrogates are percent-encoded as in a URL, "." and ".." wholly, and an empty key is "%".
No name is the beginning of another's path, since a leaf is no container. A tensor that stands in
several places is stored once and is one again afterwards. What can't be told exactly in this way
(functions, enums, objects of other classes) is refused by path, never left out.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mpift.checkpoint.blocks import BLOCK_BYTES, SPARSE_BLOCK_BYTES, TensorSpec, storage_dtype
from mpift.checkpoint.scalars import (
    FROM_TAG,
    SCALARS,
    TAG,
    as_numpy_scalar,
    is_text,
    numpy_scalar,
    tagged,
)
from mpift.errors import CheckpointError

# Leaves whose content is a tensor.
TENSOR_TAGS = frozenset({"tensor", "array", "numbers"})
# From this length on the numbers of a list are stored as a tensor: a sampler's indices would
# otherwise stand in the manifest once a rank.
LONG_LIST = 256
_DEEPEST = 200
_UNSAFE = re.compile("[/%\x00-\x1f\x7f\ud800-\udfff]")
_LONGEST_KEY = 64


def component(key: str) -> str:
    """``key`` as one part of a path; different keys give different parts."""
    if key in {"", ".", ".."}:
        return key.replace(".", "%2E") or "%"
    return _UNSAFE.sub(_percent, key)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def leaves(tree: Any) -> Iterator[dict[str, Any]]:
    """All leaves of a tree that are tensors, in order."""
    if isinstance(tree, list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        if tree.get(TAG) in TENSOR_TAGS:
            yield tree
        else:
            for item in tree.values():
                yield from leaves(item)


def renamed(tree: Any, prefix: str) -> Any:
    """A copy of a tree with ``prefix`` before the name of each tensor."""
    if isinstance(tree, list):
        return [renamed(item, prefix) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get(TAG) in TENSOR_TAGS:
        return {**tree, "name": prefix + tree["name"]}
    return {key: renamed(item, prefix) for key, item in tree.items()}


def pairs(saved: Any, live: Any) -> Iterator[tuple[str, str | None]]:
    """For each tensor of ``saved`` its name, and that of the tensor at its place in ``live``."""
    if isinstance(saved, list):
        others = live if isinstance(live, list) else []
        for index, item in enumerate(saved):
            yield from pairs(item, others[index] if index < len(others) else None)
    elif isinstance(saved, dict):
        tag = saved.get(TAG)
        other = live if isinstance(live, dict) and live.get(TAG) == tag else {}
        if tag in TENSOR_TAGS:
            yield saved["name"], other.get("name")
        elif tag == "dict":  # the order of entries may differ
            at = {json.dumps(key): value for key, value in other.get("v", ())}
            for key, value in saved["v"]:
                yield from pairs(value, at.get(json.dumps(key)))
        else:
            for key, value in saved.items():
                yield from pairs(value, other.get(key))


# -- encoding ----------------------------------------------------------------------------------


class Encoder:
    """Makes trees, and keeps the tensors that it meets under their names, in order.

    It holds references to the tensors; nothing of them is copied, but for arrays that torch can't
    share and long lists. Tensors whose ``id`` is in ``sparse`` get small blocks. ``compact``: long
    lists of numbers become tensors.
    """

    def __init__(self, sparse: Collection[int] = (), compact: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._sparse = sparse
        self._compact = compact
        # By id of the object; the objects are held, or another might get the id of one that went.
        self._names: dict[int, tuple[str, Any]] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """The tree of ``value``, whose tensors get names from ``path`` on.

        Raises ``CheckpointError`` for what has no exact form, naming its path and type.
        """
        kind = type(value)
        scalar = SCALARS.get(kind)
        if scalar is not None:
            return scalar(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic):
            return numpy_scalar(value, path)
        if depth > _DEEPEST:
            raise CheckpointError(
                f"{path} is nested more than {_DEEPEST} deep, or contains itself: leave it out of"
                " the state, or make it flat"
            )
        if kind is np.ndarray:
            return self._array(value, path)
        if kind in _MAPPINGS:
            return self._mapping(value, path, depth)
        if kind in _SEQUENCES:
            return self._sequence(value, path, depth)
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold,"
            " since nothing is pickled: give it state_dict() and load_state_dict(), put its plain"
            " values and tensors in its place, or leave it out of the state"
        )

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        keys = list(value)
        if all(type(key) is str and key != TAG and is_text(key) for key in keys):
            plain = {
                key: self.encode(item, f"{path}/{component(key)}", depth + 1)
                for key, item in value.items()
            }
            return plain if type(value) is dict else tagged(type(value).__name__, plain)
        used = {component(key) for key in keys if type(key) is str}
        rows = []
        for key, item in value.items():
            part = component(key if type(key) is str else str(key)[:_LONGEST_KEY])
            if type(key) is not str:
                while part in used:  # 0 and "0"; a single "%" at the end is no other key's
                    part += "%"
                used.add(part)
            row = [self._key(key, path), self.encode(item, f"{path}/{part}", depth + 1)]
            rows.append(row)
        node = tagged("dict", rows)
        return node if type(value) is dict else tagged(type(value).__name__, node)

    def _sequence(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        numbers = self._numbers(value, path) if self._compact else None
        if numbers is not None:
            return numbers
        if kind in {set, frozenset}:
            return self._key(value, path)
        items = [self.encode(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)]
        if kind is list:
            return items
        if kind is deque:
            return {TAG: "deque", "v": items, "maxlen": value.maxlen}
        return tagged(kind.__name__, items)

    def _numbers(self, value: Any, path: str) -> Any:
        if type(value) not in {list, tuple, set} or len(value) < LONG_LIST:
            return None
        dtype = {int: np.int64, float: np.float64}.get(next(iter(kinds := set(map(type, value)))))
        if len(kinds) > 1 or dtype is None:
            return None
        try:
            array = np.array(sorted(value) if type(value) is set else value, dtype)
        except OverflowError:  # beyond 64 bits
            return None
        name = self._add(torch.from_numpy(array), path)
        return {TAG: "numbers", "name": name, "of": type(value).__name__}

    def _key(self, value: Any, path: str) -> Any:
        """A key of a dictionary, or a member of a set."""
        kind = type(value)
        if kind is tuple:
            return tagged("tuple", [self._key(item, path) for item in value])
        if kind in {set, frozenset}:
            members = sorted((self._key(item, path) for item in value), key=json.dumps)
            return tagged(kind.__name__, members)
        if kind in SCALARS:
            return SCALARS[kind](value)
        if isinstance(value, np.generic):
            return numpy_scalar(value, path)
        raise CheckpointError(
            f"{path} has a {kind.__module__}.{kind.__qualname__} as a key or in a set, which a"
            " checkpoint can't hold: use numbers, strings, bytes or tuples of them"
        )

    def _array(self, value: np.ndarray, path: str) -> Any:
        known = self._names.get(id(value))
        if known is not None:
            name = known[0]
        else:
            if value.dtype.hasobject or value.dtype.names is not None:
                raise CheckpointError(
                    f"{path} is an array of {value.dtype}, which a checkpoint can't hold: make it"
                    " arrays of numbers or strings"
                )
            name = self._add(_as_tensor(value), path)
            self._names[id(value)] = name, value
        return {TAG: "array", "name": name, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        known = self._names.get(id(value))
        name = known[0] if known is not None else self._add(value, path)
        return {TAG: "tensor", "name": name}

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        dtype = _checked(tensor, path)
        size = SPARSE_BLOCK_BYTES if id(tensor) in self._sparse else BLOCK_BYTES
        self.specs[path] = TensorSpec(path, dtype, tuple(tensor.shape), size)
        self.tensors[path] = tensor
        self._names[id(tensor)] = path, tensor
        return path


def _checked(tensor: torch.Tensor, path: str) -> str:
    """Name of the dtype of a tensor that has plain bytes."""
    what = None
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = f"a tensor of layout {tensor.layout}"
    elif tensor.is_quantized:
        what = "a quantized tensor"
    elif tensor.is_meta:
        what = "a tensor on the meta device, without values"
    elif torch.nn.parameter.is_lazy(tensor):
        what = "a lazy parameter that has no shape yet"
    elif hasattr(type(tensor), "__tensor_flatten__"):
        what = f"a {type(tensor).__qualname__}, made of other tensors"
    dtype = _dtype_name(tensor.dtype)
    if what is None and dtype is None:
        what = f"a tensor of {tensor.dtype}"
    if what is not None or dtype is None:
        raise CheckpointError(
            f"{path} is {what}, and a checkpoint holds dense tensors of whole bytes only: make it"
            " one, or leave it out of the state"
        )
    return dtype


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    try:
        storage_dtype(name)
    except TypeError:
        return None
    return name


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """What torch has no dtype for, as its bytes."""
    # Not by size: numpy's long double has 16 bytes too, and torch does not know it.
    native = array.dtype.isnative and array.dtype.kind in "biufc"
    if native and array.dtype.char not in "gG":
        if not array.flags.writeable or any(step < 0 for step in array.strides):
            array = array.copy()
        return torch.from_numpy(array)
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())


_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})


# -- decoding ----------------------------------------------------------------------------------


def decode(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that a tree stands for; ``tensor`` gives its tensors by name. Arrays share the
    memory of their tensors.

    Raises ``CheckpointError`` for a tag that is not known here.
    """
    if isinstance(tree, list):
        return [decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(item, tensor) for key, item in tree.items()}
    tag = tree[TAG]
    if tag in TENSOR_TAGS:
        return _TENSORS[tag](tree, tensor(tree["name"]))
    if tag == "numpy":
        return as_numpy_scalar(tree)
    if tag == "deque":
        return deque((decode(item, tensor) for item in tree["v"]), tree["maxlen"])
    if tag in FROM_TAG:
        return FROM_TAG[tag](tree["v"])
    if tag == "dict":
        return {decode(key, tensor): decode(item, tensor) for key, item in tree["v"]}
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(tree["v"], tensor))
    raise CheckpointError(
        f"the checkpoint holds a value of kind {tag!r}, which this version of mpift does not know:"
        " use the version that wrote it, or a later one"
    )


def _as_array(leaf: Mapping[str, Any], tensor: torch.Tensor) -> np.ndarray:
    array = tensor.detach().cpu().numpy()
    dtype = np.dtype(leaf["dtype"])
    if array.dtype == dtype:
        return array
    if not dtype.itemsize:
        return np.zeros(leaf["shape"], dtype)
    return np.frombuffer(array.tobytes(), dtype).reshape(leaf["shape"]).copy()


_KINDS: Mapping[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set}
_TENSORS: Mapping[str, Callable[[Any, torch.Tensor], Any]] = {
    "tensor": lambda _, tensor: tensor,
    "array": _as_array,
    "numbers": lambda leaf, tensor: _KINDS[leaf["of"]](tensor.tolist()),
}
_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {
    **_KINDS,
    "frozenset": frozenset,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    # What a whole state stands for: its state_dict.
    "module": dict,
    "state": lambda content: content,
}
