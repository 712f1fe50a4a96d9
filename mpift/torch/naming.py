"""Names for the parameters of an optimizer, given or made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """Names for all parameters of ``optimizer``.

    Raises ``ValueError`` where names are given but wrong: not pairs, one name twice, or not one for
    each parameter.
    """
    if named_parameters is None:
        groups: Sequence[dict[str, Any]] = optimizer.param_groups
        return {
            parameter: f"group{g}.parameter{i}"
            for g, group in enumerate(groups)
            for i, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be (name, parameter) pairs: model.named_parameters()"
        )
    counts: dict[str, int] = {}
    for name, _ in pairs:
        counts[name] = counts.get(name, 0) + 1
    doubled = sorted(name for name, count in counts.items() if count > 1)
    if doubled:
        raise ValueError(f"named_parameters has these names twice: {', '.join(doubled)}")
    names = {parameter: name for name, parameter in pairs}
    unnamed = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {unnamed} of the optimizer's parameters: give all of them, as"
            " in model.named_parameters(), or none"
        )
    return names
