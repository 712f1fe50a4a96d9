"""Mixed precision: let ``GradScaler`` look at reduced gradients, as it does with DDP.

The scaler unscales and checks ``p.grad`` before it calls ``step``. On local gradients one rank may
find an overflow and skip the step that the others take. So its places that look at gradients
complete the reduction first; all ranks then see the same values and decide alike. A rank that was
late takes over what the others' scalers said.

A scaler's state belongs to the rounds like an optimizer's: records carry it. Late gradients bear
the scale of their own round, so with a scaler they are dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_LOOKS_AT_GRADIENTS = ("_unscale_grads_", "_check_inf_per_device")


def install() -> None:
    """Prepare torch's ``GradScaler``, once; other optimizers are not concerned."""
    for name in _LOOKS_AT_GRADIENTS:
        _wrap(name, _reduce_first)
    _wrap("_maybe_opt_step", _step_by_rounds)
    _wrap("update", _update_after_rounds)


def _wrap(name: str, wrapper: Any) -> None:
    original = getattr(torch.amp.GradScaler, name)
    if not hasattr(original, "_mpift"):
        wrapped = wrapper(original)
        wrapped._mpift = True
        setattr(torch.amp.GradScaler, name, wrapped)


def _reduce_first(original: Any) -> Any:
    def reduced_first(scaler: Any, optimizer: Any, *arguments: Any) -> Any:
        reducer = getattr(optimizer, "_mpift_reducer", None)
        if reducer is not None and not (reducer.synchronized or reducer.declined):
            reducer.use_scaler(scaler)
            reducer.synchronize()
        return original(scaler, optimizer, *arguments)

    return reduced_first


def _step_by_rounds(original: Any) -> Any:
    def step_by_rounds(
        scaler: Any, optimizer: Any, state: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        reducer = getattr(optimizer, "_mpift_reducer", None)
        if reducer is None or not (reducer.late or reducer.declined):
            result = original(scaler, optimizer, state, *arguments, **keywords)
        else:
            result = optimizer.step(*arguments, **keywords)  # goes by the others' record
        if reducer is not None and reducer.synchronized:
            reducer.step_skipped()
        return result

    return step_by_rounds


def _update_after_rounds(original: Any) -> Any:
    def update(scaler: Any, new_scale: Any = None) -> None:
        if getattr(scaler, "_mpift_declined", False):
            # No round came of this step: the scale stays as the rounds have left it.
            scaler._mpift_declined = False
            before = (float(scaler._scale), int(scaler._growth_tracker))
            original(scaler, new_scale)
            _set(scaler, *before)
            return
        original(scaler, new_scale)

    return update


# -- the scaler's state in records -----------------------------------------------------------------


def state(scaler: Any, optimizer: Any) -> dict[str, float] | None:
    """Scale and growth tracker before this round's update, and whether it found an overflow; and
    what a fused optimizer was told to unscale by."""
    if scaler is None or scaler._scale is None:
        return None
    found = scaler._per_optimizer_states[id(optimizer)].get("found_inf_per_device", {})
    values = {
        "scale": float(scaler._scale),
        "growth_tracker": float(scaler._growth_tracker),
        "found_inf": max((float(value) for value in found.values()), default=0.0),
    }
    if getattr(optimizer, "grad_scale", None) is not None:
        values["grad_scale"] = float(optimizer.grad_scale)
    return values


@contextlib.contextmanager
def scaled_step(optimizer: Any, record: dict[str, float] | None) -> Iterator[None]:
    """Around a replayed step: a fused optimizer unscales by itself, as it did elsewhere."""
    if record is None or "grad_scale" not in record:
        yield
        return
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.grad_scale = torch.tensor(record["grad_scale"], device=device)
    optimizer.found_inf = torch.tensor(record["found_inf"], device=device)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def restore(scaler: Any, optimizer: Any, record: dict[str, float] | None) -> None:
    """Let the scaler stand where another rank's stood in this round, before its update."""
    if scaler is None or record is None:
        return
    _set(scaler, record["scale"], int(record["growth_tracker"]))
    found = scaler._per_optimizer_states[id(optimizer)].get("found_inf_per_device", {})
    for value in found.values():
        value.fill_(record["found_inf"])


def update(scaler: Any, record: dict[str, float] | None) -> None:
    """Do the update of a round that was replayed."""
    if scaler is None or record is None:
        return
    torch._amp_update_scale_(
        scaler._scale,
        scaler._growth_tracker,
        torch.full_like(scaler._scale, record["found_inf"]),
        scaler._growth_factor,
        scaler._backoff_factor,
        scaler._growth_interval,
    )


def declined(scaler: Any) -> None:
    """No round comes of the present step."""
    if scaler is not None:
        scaler._mpift_declined = True


def rewound(scaler: Any, optimizer: Any) -> None:
    """The present step is made again: nothing of its gradients is unscaled or stepped with."""
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def _set(scaler: Any, scale: float, growth_tracker: int) -> None:
    if scaler._scale is not None:
        scaler._scale.fill_(scale)
        scaler._growth_tracker.fill_(growth_tracker)
