"""The way of gradients in a world of one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import mpift.torch as hvd
from mpift import NotInitializedError


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_a_gradient_shares_no_memory_with_a_contribution_or_a_result() -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    for _ in range(2):
        (weight * 3).sum().backward()
        optimizer.synchronize()
        workload = optimizer._mpift_reducer.workload
        kept = [*workload.contributions.buffers, *workload.results.last]
        assert weight.grad is not None
        assert not any(np.shares_memory(weight.grad.numpy(), buffer) for buffer in kept)
        results = [buffer.copy() for buffer in kept]
        weight.grad.zero_()
        assert all(np.array_equal(a, b) for a, b in zip(results, kept, strict=True))
        optimizer.step()


def test_a_step_after_shutdown_is_refused_rather_than_waited_for() -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    (weight * 3).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hvd.shutdown()
    loss = (weight * 3).sum()
    with pytest.raises(NotInitializedError, match="shut down"):
        loss.backward()
