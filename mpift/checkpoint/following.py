"""Hearing of an optimizer's steps, so that saves need no line in the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def follow(optimizer: Any, stepped: Callable[[int], None]) -> Callable[[], int]:
    """Call ``stepped`` with the number of steps after each step of ``optimizer``, from now on;
    returns what tells their number. Steps of a distributed optimizer are the rounds it applied,
    those that this rank was late for included: after each the state is the same on all ranks."""
    if hasattr(optimizer, "after_round"):
        optimizer.after_round(stepped)
        return lambda: int(optimizer.rounds_applied)
    steps = 0

    def after_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        stepped(steps)

    optimizer.register_step_post_hook(after_step)
    return lambda: steps
