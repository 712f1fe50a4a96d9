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

from mpift.errors import MismatchError
from mpift.reduction.buckets import Layout

_LENGTH_BYTES = 8
_PLAIN = (int, float, str, np.integer, np.floating, np.bool_)
_USUAL = frozenset((bool, int, float, str, type(None)))
# Stands for a setting that is no plain value.
_NOT_PLAIN: dict[str, Any] = {}


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
    """The plain values of each parameter group: learning rate, momentum, betas... and what scripts
    and schedulers have put there."""
    return [
        {name: _plain(value) for name, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def set_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Give each parameter group the values that ``settings_of`` found elsewhere. Raises
    ``MismatchError`` if there were more groups, or less."""
    groups = optimizer.param_groups
    if len(groups) != len(settings):
        raise MismatchError(
            f"this rank's optimizer has {len(groups)} parameter groups, that of the rank whose"
            f" settings it is to take over {len(settings)}: make the same groups on every rank"
        )
    for group, values in zip(groups, settings, strict=True):
        for name, value in values.items():
            _set(group, name, value)


def own_settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each parameter group what the optimizer itself goes by: the keys of its ``defaults``.

    What else is in a group is a script's or a scheduler's (notes of a logger, ``initial_lr``), and
    may differ between ranks."""
    return [
        {name: _own(group[name]) for name in optimizer.defaults if name in group}
        for group in optimizer.param_groups
    ]


def set_own_settings(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Let ``own_settings_of`` give ``settings``, which it found elsewhere. What can't be had stays
    as it is: other groups, and values that are not plain."""
    if len(optimizer.param_groups) != len(settings):
        return
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for name in [name for name in optimizer.defaults if name in group]:
            if name not in values:
                del group[name]
        for name, value in values.items():
            if value == _NOT_PLAIN:
                continue
            _set(group, name, value)
            if json.dumps(_plain(group[name])) != json.dumps(value):  # a tensor of another dtype
                group[name] = value


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    present = group.get(name)
    if isinstance(present, torch.Tensor) and _is_number(value):
        present.fill_(value)  # it stays the one that a graph may hold
    else:
        group[name] = tuple(value) if isinstance(value, list) else value


def _own(value: Any) -> Any:
    if type(value) in _USUAL:  # asked for in each round
        return value
    return _plain(value) if _is_plain(value) else _NOT_PLAIN


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, tuple | list):
        return all(_is_number(item) for item in value)
    return value is None or isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value
