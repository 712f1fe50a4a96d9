"""The formulas of a parameter server's optimizers, against those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mpift.parameter_server import SGD, Adagrad
from mpift.parameter_server.optimizers import Assign, ServerOptimizer

PAIRS: list[tuple[ServerOptimizer, Callable[[Any], torch.optim.Optimizer]]] = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (SGD(0.1, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        SGD(0.1, 0.9, 0.3, 0.05),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    ),
    (
        SGD(0.1, 0.9, 0.0, 0.05, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    ),
    (SGD(0.1, maximize=True), lambda p: torch.optim.SGD(p, lr=0.1, maximize=True)),
    (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (
        Adagrad(0.1, 0.01, 0.05, 1e-8, False, 0.5),
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, lr_decay=0.01, weight_decay=0.05, eps=1e-8, initial_accumulator_value=0.5
        ),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=[str(ours) for ours, _ in PAIRS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_are_those_of_torch(
    ours: ServerOptimizer, theirs: Callable[[Any], torch.optim.Optimizer], dtype: type
) -> None:
    chance = np.random.default_rng(1)
    value = chance.standard_normal(100).astype(dtype)
    parameter = torch.nn.Parameter(torch.tensor(value))
    optimizer, state = theirs([parameter]), ours.first(value)
    for _ in range(30):
        gradient = chance.standard_normal(100).astype(dtype)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        state = ours.apply(state, gradient, ours.settings)
    assert state.rows.dtype == dtype
    tolerance = 2e-6 if dtype is np.float32 else 1e-14
    np.testing.assert_allclose(
        state.value, parameter.detach().numpy(), rtol=tolerance, atol=tolerance
    )


def test_a_version_never_changes_once_it_is_handed_out() -> None:
    for optimizer in (Assign(), SGD(0.1, 0.9), Adagrad(0.1)):
        given = np.ones(3)
        first = optimizer.first(given)
        given[:] = 7
        kept = first.rows.copy()
        optimizer.apply(first, np.full(3, 2.0), optimizer.settings)
        np.testing.assert_array_equal(first.rows, kept)
        with pytest.raises(ValueError, match="read-only"):
            first.value[0] = 1.0
