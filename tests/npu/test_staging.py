"""Copies of device tensors beside what the device does next. Needs a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpift.devices.staging import Piece, Staging

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@needs_cuda
def test_a_copy_holds_what_the_tensor_was_before_the_optimizer_changed_it() -> None:
    weight = torch.nn.Parameter(torch.arange(1 << 24, dtype=torch.float32, device="cuda"))
    before = weight.detach().cpu().numpy().copy()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    target = np.zeros(before.nbytes, np.uint8)
    staging = Staging()
    finish = staging.begin([Piece(weight, 0, target.nbytes, target)])
    optimizer.step()
    finish()
    assert np.array_equal(target.view(np.float32), before)
    assert not np.array_equal(weight.detach().cpu().numpy(), before)
    staging.close()


@needs_cuda
def test_pieces_of_several_tensors_and_dtypes_arrive_where_they_belong() -> None:
    tensors = [
        torch.randn(1001, device="cuda"),
        torch.randn(77, 3, device="cuda").bfloat16().t(),
        torch.arange(5, device="cuda"),
    ]
    wholes = [t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors]
    pieces = [
        Piece(tensor, 0, 8 * (len(whole) // 16), np.zeros(8 * (len(whole) // 16), np.uint8))
        for tensor, whole in zip(tensors, wholes, strict=True)
    ]
    staging = Staging()
    staging.begin(pieces)()
    for piece, whole in zip(pieces, wholes, strict=True):
        assert np.array_equal(piece.target, whole[: piece.stop])
    staging.close()
