"""What a push does to a value: optimizers on the server's side, in numpy.

The formulas are those of ``torch.optim`` (single tensor, dense), up to rounding: torch fuses
multiplications and additions. A state is one array of a row for the value and one for each *slot*
(momentum, sum of squares), so that it travels as one. Settings travel with each push, so a schedule
at the client takes effect; an optimizer here holds those for pushes that bring none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """``rows`` is dtype[1 + slots, n], read-only; ``steps`` counts the updates in it."""

    rows: np.ndarray
    steps: int = 0

    @property
    def value(self) -> np.ndarray:
        """dtype[n], read-only."""
        return self.rows[0]


class ServerOptimizer(Protocol):
    """How updates are applied. The same on all ranks."""

    @property
    def slots(self) -> int:
        """Rows beside the value."""

    @property
    def settings(self) -> tuple[float, ...]:
        """What a push brings along if its client doesn't say otherwise."""

    def first(self, value: np.ndarray) -> State:
        """The state before any update; ``value`` is dtype[n]."""

    def apply(self, state: State, update: np.ndarray, settings: Sequence[float]) -> State:
        """A new state; ``update`` is dtype[n]. Nothing given is changed."""


def frozen(rows: np.ndarray, steps: int) -> State:
    """A state of ``rows``, which nobody may write to any more."""
    rows.flags.writeable = False
    return State(rows, steps)


@dataclass(frozen=True, slots=True)
class Assign:
    """A push is the new value."""

    @property
    def slots(self) -> int:
        return 0

    @property
    def settings(self) -> tuple[float, ...]:
        return ()

    def first(self, value: np.ndarray) -> State:
        return frozen(np.array(value)[np.newaxis], 0)

    def apply(self, state: State, update: np.ndarray, settings: Sequence[float]) -> State:
        return frozen(np.array(update)[np.newaxis], state.steps + 1)


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent, as ``torch.optim.SGD``: a push is a gradient."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def slots(self) -> int:
        """A row for the momentum; it's there only if the optimizer begins with some."""
        return int(self.momentum != 0)

    @property
    def settings(self) -> tuple[float, ...]:
        return tuple(float(value) for value in astuple(self))

    def first(self, value: np.ndarray) -> State:
        return _zero_slots(value, self.slots)

    def apply(self, state: State, update: np.ndarray, settings: Sequence[float]) -> State:
        lr, momentum, dampening, weight_decay, nesterov, maximize = map(_of(update), settings)
        gradient = -update if maximize else update
        rows = np.empty_like(state.rows)
        if weight_decay:
            gradient = gradient + weight_decay * state.value
        rows[1:] = state.rows[1:]
        if len(rows) > 1 and momentum:
            if state.steps == 0:  # torch begins with the gradient itself, undamped
                rows[1] = gradient
            else:
                rows[1] *= momentum
                rows[1] += (1 - dampening) * gradient
            gradient = gradient + momentum * rows[1] if nesterov else rows[1]
        np.subtract(state.value, lr * gradient, out=rows[0])
        return frozen(rows, state.steps + 1)


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad``: a push is a gradient."""

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    initial_accumulator_value: float = 0.0

    @property
    def slots(self) -> int:
        return 1

    @property
    def settings(self) -> tuple[float, ...]:
        return tuple(float(value) for value in astuple(self)[:-1])

    def first(self, value: np.ndarray) -> State:
        rows = np.empty((2, value.size), value.dtype)
        rows[0] = value
        rows[1] = self.initial_accumulator_value
        return frozen(rows, 0)

    def apply(self, state: State, update: np.ndarray, settings: Sequence[float]) -> State:
        lr, lr_decay, weight_decay, eps, maximize = settings
        of = _of(update)
        gradient = -update if maximize else update
        rows = np.empty_like(state.rows)
        if weight_decay:
            gradient = gradient + of(weight_decay) * state.value
        rate = lr / (1 + state.steps * lr_decay)
        np.multiply(gradient, gradient, out=rows[1])
        rows[1] += state.rows[1]
        denominator = np.sqrt(rows[1])
        denominator += of(eps)
        np.subtract(state.value, of(rate) * (gradient / denominator), out=rows[0])
        return frozen(rows, state.steps + 1)


def _of(array: np.ndarray) -> type[np.generic]:
    """Scalars in the array's own dtype, so that no product becomes wider."""
    return array.dtype.type


def _zero_slots(value: np.ndarray, slots: int) -> State:
    rows = np.zeros((1 + slots, value.size), value.dtype)
    rows[0] = value
    return frozen(rows, 0)
