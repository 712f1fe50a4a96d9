"""What ``mpift bench checkpoint`` saves: a model and its Adam state, alike on all ranks.

A change writes a number that was never there before into every 64 KiB of a tensor: that alters all
blocks at little cost. 10 % are every tenth MiB, so that each rank's share has its part of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import mpift.torch as hvd

# Of the model's layers: for a state of some hundred MiB, and for less.
_WIDTH, _NARROW_WIDTH, _WIDE_PARAMETERS = 1024, 256, 20_000_000
_MIB = 1 << 20
_CHANGED_EVERY = 16384  # elements in 64 KiB
_SLICE = _MIB // 4  # elements
_TENTHS = 10
# Before the first change; the state of Adam holds small numbers.
_CHANGES = 100


class State:
    """A stack as of a language model, and its Adam state: about ``size_bytes`` together, alike on
    all ranks."""

    def __init__(self, size_bytes: int) -> None:
        torch.manual_seed(0)
        # Adam holds two more numbers for each parameter.
        parameters = size_bytes // 12
        width = _WIDTH if parameters >= _WIDE_PARAMETERS else _NARROW_WIDTH
        layer = 12 * width * width
        layers = parameters * 9 // 10 // layer
        words = (parameters - layers * layer) // width
        blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width) for _ in range(layers)]
        self.model = nn.Sequential(nn.Embedding(words, width), *blocks)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._changes = _CHANGES
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors())

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def dicts(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.objects.items()}

    def load_dicts(self, dicts: Mapping[str, Any]) -> None:
        for name, item in self.objects.items():
            item.load_state_dict(dicts[name])

    def tensors(self) -> list[torch.Tensor]:
        """As they are now: ``load_state_dict`` of an optimizer replaces its."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        states = [s for p in self.model.parameters() for s in self.optimizer.state[p].values()]
        return parameters + states

    def change(self) -> None:
        """Alter every block, on all ranks alike."""
        self._changes += 1
        for tensor in self.tensors():
            tensor.view(-1)[::_CHANGED_EVERY] = float(self._changes)

    def change_tenth(self, which: int = 0) -> None:
        """Alter every tenth MiB, on all ranks alike: one of the ten that there are."""
        self._changes += 1
        before = 0
        for tensor in self.tensors():
            for piece in torch.split(tensor.view(-1), _SLICE):
                if before // _MIB % _TENTHS == which:
                    piece[::_CHANGED_EVERY] = float(self._changes)
                before += piece.nbytes

    def share(self) -> Iterator[np.ndarray]:
        """uint8[n]: this rank's part of all bytes, piece by piece, where they are."""
        first, last = (self.size_bytes * (hvd.rank() + i) // hvd.size() for i in range(2))
        before = 0
        for tensor in self.tensors():
            data = tensor.view(-1).numpy().view(np.uint8)
            piece = data[max(0, first - before) : max(0, last - before)]
            before += data.nbytes
            if piece.nbytes:
                yield piece

    def digest(self) -> str:
        return str(hvd.digest(self.tensors()))
