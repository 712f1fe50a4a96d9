"""How tensors are cut: blocks, even parts, and boxes of an index space."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.checkpoint.blocks import TensorSpec, cut, digest, hyperslabs, storage_dtype


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    stop = draw(st.integers(0, math.prod(shape)))
    return shape, draw(st.integers(0, stop)), stop


@given(ranges())
def test_boxes_one_after_the_other_are_the_flat_range(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(hyperslabs(shape, start, stop))
    flat = [int(number) for box, _, _ in boxes for number in np.atleast_1d(numbers[box]).flat]
    assert flat == list(range(start, stop))
    assert [limit for _, *limits in boxes for limit in limits][1:-1:2] == [
        high for _, _, high in boxes[:-1]
    ]
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
def test_parts_are_in_order_without_gaps_and_even_up_to_one_entry(
    sizes: list[int], parts: int
) -> None:
    ranges = cut(sizes, parts)
    assert len(ranges) == parts
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(sizes)
    assert all(low[1] == high[0] for low, high in itertools.pairwise(ranges))
    for start, stop in ranges:
        assert sum(sizes[start:stop]) <= sum(sizes) / parts + max(sizes, default=0)


def test_blocks_cover_a_tensor_and_the_last_one_is_what_is_left() -> None:
    spec = TensorSpec("w", "bfloat16", (3, 7), 16)
    assert list(spec.blocks()) == [(0, 16), (16, 32), (32, 42)]
    assert TensorSpec("none", "float32", (0, 4)).block_count == 0
    assert list(TensorSpec("scalar", "float64", ()).blocks()) == [(0, 8)]


def test_equal_bytes_of_another_dtype_or_length_have_another_digest() -> None:
    zeros = np.zeros(64, np.uint8)
    assert digest(zeros, "float32") == digest(bytes(64), "float32")
    assert len({digest(zeros, "float32"), digest(zeros, "int32"), digest(zeros[:60], "int32")}) == 3


def test_a_dtype_that_has_no_storage_is_refused() -> None:
    assert storage_dtype("bfloat16") == np.uint16
    with pytest.raises(TypeError):
        storage_dtype("quint8")
