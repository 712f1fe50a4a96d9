"""What a record of a round says, and how it is laid out in bytes.

A record holds what this rank's script gave the inner optimizer in a round: the settings of its
parameter groups, whether the step was skipped, the state of a ``GradScaler``, and the gradients if
the script may have changed them. JSON for the settings, since nothing from another rank is
unpickled; floats keep all their bits in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpift.reduction.buckets import Layout

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Record:
    """``settings`` has one entry a parameter group. ``gradients`` are buckets as in the layout,
    with the used-counts 0 or 1; None if the gradients were the round's result."""

    settings: list[dict[str, Any]]
    skipped: bool = False
    scaler: dict[str, float] | None = None
    gradients: Sequence[np.ndarray] | None = None


def encode(record: Record) -> np.ndarray:
    """uint8[n]."""
    head = {
        "settings": record.settings,
        "skipped": record.skipped,
        "scaler": record.scaler,
        "gradients": record.gradients is not None,
    }
    text = json.dumps(head).encode()
    parts = [np.array([len(text)], np.int64).view(np.uint8), np.frombuffer(text, np.uint8)]
    parts += [array.view(np.uint8) for array in record.gradients or ()]
    return np.concatenate(parts)


def decode(data: np.ndarray, layout: Layout) -> Record:
    """The record in ``data`` (uint8[n]); its gradients are views of it where they are aligned."""
    length = int(data[:_LENGTH_BYTES].view(np.int64)[0])
    start = _LENGTH_BYTES + length
    head = json.loads(data[_LENGTH_BYTES:start].tobytes())
    gradients = None
    if head["gradients"]:
        gradients = []
        for bucket in layout.buckets:
            stop = start + bucket.length * bucket.dtype.itemsize
            gradients.append(data[start:stop].copy().view(bucket.dtype))
            start = stop
    return Record(head["settings"], head["skipped"], head["scaler"], gradients)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain values of each parameter group: learning rate, momentum, betas..."""
    return [
        {name: _plain(value) for name, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def set_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Give each parameter group the values that ``settings_of`` found elsewhere."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for name, value in values.items():
            present = group.get(name)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, int | float | str)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
