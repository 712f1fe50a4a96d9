"""Broadcasts and digests in a world of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mpift.torch as hvd
from mpift import MismatchError


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_an_empty_parameter_is_broadcast_like_any_other(dtype: torch.dtype) -> None:
    full = torch.arange(3).to(dtype)
    given = {"none": torch.empty(0, dtype=dtype), "full": full, "rows": torch.empty(0, 2)}
    hvd.broadcast_parameters(given)
    assert full.tolist() == [0, 1, 2]
    hvd.broadcast_parameters([("none", nn.Parameter(torch.empty(0)))])
    assert hvd.digest(torch.empty(0)) != hvd.digest(torch.empty(0, 2))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
def test_a_tensor_of_any_shape_is_broadcast(shape: tuple[int, ...]) -> None:
    given = torch.ones(shape)
    assert torch.equal(hvd.broadcast(given, root_rank=0), given)


def test_a_root_that_is_no_rank_is_refused() -> None:
    with pytest.raises(MismatchError, match="root_rank 1 is not a rank of 0 to 0"):
        hvd.broadcast_object("text", root_rank=1)
    with pytest.raises(MismatchError, match="root_rank 'a' is not a rank"):
        hvd.broadcast_parameters({"full": torch.ones(1)}, root_rank="a")  # type: ignore[arg-type]
