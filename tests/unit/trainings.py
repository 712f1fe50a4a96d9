"""Small trainings that can go on from a checkpoint: a model, an optimizer, a scheduler, losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of small operations wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.table.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.table(index)))
        return self.out(torch.relu(self.middle(hidden)))


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "capturable lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "rms": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}


def begun(make: Make, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    model = Net()
    optimizer = make(model.parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, 50, cycle_momentum=False)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "losses": []}


def train(state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        index = torch.tensor([random.randrange(10) for _ in range(6)])
        loss = nn.functional.cross_entropy(state["model"](index), index)
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["losses"] = [*state["losses"], loss.item()]
