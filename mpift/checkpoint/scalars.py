"""Single values that JSON does not have, as objects with a tag, and back: exact to the last bit.

Floats that are finite JSON has: it writes the shortest decimal that is no other float's. Lone
surrogates, which file names may hold, are text that JSON readers would join.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mpift.errors import CheckpointError

TAG = "#"
# Readers other than Python's have no larger whole numbers.
_LARGEST_PLAIN = 2**53


def tagged(tag: str, value: Any) -> dict[str, Any]:
    """An object of JSON that stands for something else than itself."""
    return {TAG: tag, "v": value}


def is_text(text: str) -> bool:
    """Whether JSON gives it back: of two lone surrogates in a row it would make one character."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _int(value: int) -> Any:
    return value if -_LARGEST_PLAIN <= value <= _LARGEST_PLAIN else tagged("int", hex(value))


def _float(value: float) -> Any:
    if value - value == 0:  # finite
        return value
    return tagged("float", struct.pack(">d", value).hex())


def _string(value: str) -> Any:
    if is_text(value):
        return value
    return tagged("str", value.encode("utf-8", "surrogatepass").hex())


def numpy_scalar(value: np.generic, path: str) -> Any:
    """Its dtype and bytes. Raises ``CheckpointError`` for one of objects or fields."""
    if value.dtype.hasobject or value.dtype.names is not None:
        raise CheckpointError(f"{path} is a numpy value of {value.dtype}: make it plain values")
    data = np.asarray(value).tobytes().hex()
    return {TAG: "numpy", "dtype": value.dtype.str, "v": data}


def _bytes(value: bytes | bytearray) -> Any:
    return tagged(type(value).__name__, base64.b64encode(value).decode())


def _same(value: Any) -> Any:
    return value


SCALARS: Mapping[type, Callable[[Any], Any]] = {
    type(None): _same,
    bool: _same,
    int: _int,
    float: _float,
    str: _string,
    complex: lambda value: tagged("complex", struct.pack(">dd", value.real, value.imag).hex()),
    bytes: _bytes,
    bytearray: _bytes,
    torch.Size: lambda value: tagged("Size", list(value)),
    torch.dtype: lambda value: tagged("dtype", str(value).removeprefix("torch.")),
    torch.device: lambda value: tagged("device", str(value)),
}


def as_numpy_scalar(leaf: Mapping[str, Any]) -> Any:
    """What ``numpy_scalar`` made an object of."""
    data, dtype = bytes.fromhex(leaf["v"]), np.dtype(leaf["dtype"])
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _as_complex(data: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(data)))


FROM_TAG: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda data: struct.unpack(">d", bytes.fromhex(data))[0],
    "str": lambda data: bytes.fromhex(data).decode("utf-8", "surrogatepass"),
    "complex": _as_complex,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "Size": torch.Size,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
}
