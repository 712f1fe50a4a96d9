"""Mixed precision: let ``GradScaler`` look at reduced gradients, as it does with DDP.

The scaler unscales and checks ``p.grad`` before it calls ``step``. On local gradients one rank may
find an overflow and skip the step that the others take. So its two places that look at gradients
complete the reduction first; all ranks then see the same values and decide alike.
"""

from __future__ import annotations

from typing import Any

import torch

_LOOKS_AT_GRADIENTS = ("_unscale_grads_", "_check_inf_per_device")


def install() -> None:
    """Prepare torch's ``GradScaler``, once; other optimizers are not concerned."""
    for name in _LOOKS_AT_GRADIENTS:
        original = getattr(torch.amp.GradScaler, name)
        if not hasattr(original, "_mpift_reduces_first"):
            setattr(torch.amp.GradScaler, name, _reduce_first(original))


def _reduce_first(original: Any) -> Any:
    def reduced_first(scaler: Any, optimizer: Any, *arguments: Any) -> Any:
        reducer = getattr(optimizer, "_mpift_reducer", None)
        if reducer is not None and not reducer.synchronized:
            reducer.synchronize()
        return original(scaler, optimizer, *arguments)

    reduced_first._mpift_reduces_first = True  # type: ignore[attr-defined]
    return reduced_first
