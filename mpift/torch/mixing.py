"""How an optimizer becomes a distributed one: it stays the same object, and its class becomes a
subclass of what it was. So schedulers made before keep working, and copies are plain optimizers.
"""

from __future__ import annotations

from typing import Any


def mix_in(optimizer: Any, mixin: type, **attributes: Any) -> None:
    """Let ``mixin`` come before the optimizer's own class, and give it ``attributes``."""
    scheduled = optimizer.__dict__.pop("step", None)
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (mixin, plain), {})
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    if scheduled is not None and hasattr(scheduled, "_wrapped_by_lr_sched"):
        # A scheduler made before had put its counter around the plain step.
        step = optimizer.step

        def counted(*arguments: Any, **keywords: Any) -> Any:
            optimizer._opt_called = True
            return step(*arguments, **keywords)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = counted


def plain_class(optimizer: Any) -> Any:
    """The class that a mixed optimizer had before."""
    return type(optimizer).__bases__[1]


def reduce_to_plain(optimizer: Any, protocol: Any) -> Any:
    """For ``__reduce_ex__``: a copy is the plain optimizer that this one was made from."""
    return _blank, (plain_class(optimizer),), optimizer.__getstate__()


def _blank(plain: type) -> Any:
    """An instance without state, for copies and pickles to fill."""
    return object.__new__(plain)
