"""What a script gives a ``CheckpointManager``: refused at once where it can't be meant so."""

from __future__ import annotations

from collections.abc import Mapping


def check_options(every: int | None, when_busy: str, layout: str) -> None:
    """Raises ``ValueError`` for what a manager can't be made with."""
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if when_busy not in ("skip", "wait"):
        raise ValueError(f'when_busy must be "skip" or "wait", not {when_busy!r}')
    if layout not in ("blocks", "shared"):
        raise ValueError(f'layout must be "blocks" or "shared", not {layout!r}')


def check_arguments(step: object, state: object) -> None:
    """Raises ``TypeError``: the two are easily confused."""
    if step is not None and not isinstance(step, int):
        raise TypeError(f"the step must be a whole number, not a {type(step).__name__}")
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(
            "the state must be a dictionary of names to objects, such as"
            f' {{"model": model, "optimizer": optimizer}}, not a {type(state).__name__}'
        )
