"""The models that benchmarks train, as data; building one is what loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BenchModel:
    """An MLP with a ReLU between its layers, in float32.

    ``widths`` are the features from input to classes, ``batch`` the samples a rank and step.
    """

    name: str
    widths: tuple[int, ...]
    batch: int

    @property
    def parameters(self) -> int:
        """Elements of all weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.widths))

    @property
    def gradient_bytes(self) -> int:
        """What one step reduces."""
        return 4 * self.parameters

    def build(self) -> torch.nn.Module:
        """The model, from torch's present random state."""
        from torch import nn

        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def make_batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs float32[batch, widths[0]] and labels int64[batch]."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.batch, self.widths[0], generator=generator)
        return inputs, torch.randint(self.widths[-1], (self.batch,), generator=generator)


MODELS = {
    model.name: model
    for model in (
        # 12 million parameters and little computation for them, so that communication shows: a
        # step without it takes about 45 ms on one core. Twelve layers of 4 MB leave room for
        # overlap with backward.
        BenchModel("mlp12m", (1024,) * 12 + (512,), batch=32),
        # For tests of the benchmark itself.
        BenchModel("mlp30k", (64,) * 8 + (16,), batch=8),
    )
}
