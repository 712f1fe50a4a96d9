"""Optimizers that become distributed ones, in a world of one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mpift.torch as hvd
from mpift.torch.verification import Verification


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("make", [hvd.DistributedOptimizer, hvd.AsyncDistributedOptimizer])
def test_copies_are_plain_optimizers_and_schedulers_made_before_go_on(
    make: Callable[..., Any],
) -> None:
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = make(plain, named_parameters=model.named_parameters())
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.SGD)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_state_is_hashed_before_a_step_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    seen: list[str] = []
    monkeypatch.setattr(Verification, "settle", lambda _: seen.append(hvd.digest(model.weight)))
    before = hvd.digest(model.weight)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen[:1] == [before]
    assert hvd.digest(model.weight) != before
