"""Encoded blocks: the same bytes come back, any zlib reads them, and damage is told."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpift.checkpoint import encoding
from mpift.errors import CheckpointDamagedError

Bytes = NDArray[np.uint8]
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def weights(dtype: str, elements: int) -> Bytes:
    """What trained parameters look like."""
    values = np.random.default_rng(0).normal(0, 0.02, elements)
    if dtype == "bfloat16":
        return (values.astype("f4").view("u4") >> 16).astype("u2").view("u1")
    return values.astype(dtype).view("u1")


def there_and_back(block: Bytes, itemsize: int) -> bytes:
    stored = encoding.encode(block, itemsize)
    np.testing.assert_array_equal(encoding.decode(stored, itemsize, block.nbytes), block)
    return stored


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("float16", 1.1), ("bfloat16", 1.45), ("float32", 1.18), ("float64", 1.1)]
)
def test_weights_get_smaller_and_come_back(dtype: str, ratio: float) -> None:
    block = weights(dtype, 1 << 17)
    stored = there_and_back(block, ITEMSIZES[dtype])
    assert block.nbytes / len(stored) > ratio


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@given(data=st.binary(max_size=400))
def test_any_bytes_come_back(itemsize: int, data: bytes) -> None:
    whole = data[: len(data) // itemsize * itemsize]
    there_and_back(np.frombuffer(whole, np.uint8), itemsize)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_payloads_denormals_and_infinities_come_back(dtype: str) -> None:
    tiny = float(np.finfo(dtype).smallest_subnormal)
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, tiny, -tiny, 0.0, -0.0] * 50, dtype)
    bits = values.view(f"u{values.itemsize}")
    bits[::8] += 5
    there_and_back(values.view("u1"), values.itemsize)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_noise_of_more_than_one_deflate_block_comes_back(itemsize: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 700_000, np.uint8)
    there_and_back(noise, itemsize)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_a_constant_block_becomes_next_to_nothing(itemsize: int) -> None:
    assert len(there_and_back(np.full(1 << 20, 7, np.uint8), itemsize)) < 4096


def test_the_encoding_is_the_shuffled_block_for_any_zlib() -> None:
    block = weights("float32", 1000)
    planes = block.reshape(-1, 4).T
    assert zlib.decompress(encoding.encode(block, 4)) == planes.tobytes()


def test_a_block_is_decoded_into_given_memory() -> None:
    block = weights("float32", 1000)
    out = np.zeros_like(block)
    assert encoding.decode(encoding.encode(block, 4), 4, block.nbytes, out) is out
    np.testing.assert_array_equal(out, block)


def test_only_floating_point_of_16_bits_or_more_pays() -> None:
    assert all(map(encoding.pays, ITEMSIZES))
    assert not any(map(encoding.pays, ["int64", "bool", "complex64", "float8_e4m3fn", "uint8"]))


def test_what_is_no_encoding_of_that_length_is_refused() -> None:
    block = weights("float32", 1000)
    stored = encoding.encode(block, 4)
    flipped = bytearray(stored)
    flipped[200] ^= 1
    bomb = zlib.compress(bytes(50_000_000))
    for damaged in (b"", b"rubbish", stored[:-1], stored + b"x", bytes(flipped), bomb):
        with pytest.raises(CheckpointDamagedError, match="encoding"):
            encoding.decode(damaged, 4, block.nbytes)
    with pytest.raises(CheckpointDamagedError, match="not that of 3996 bytes"):
        encoding.decode(stored, 4, block.nbytes - 4)
