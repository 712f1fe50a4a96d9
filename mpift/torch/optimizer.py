"""``DistributedOptimizer``: an optimizer whose ``step`` averages gradients over all ranks first.

The optimizer given is the one returned. Its class becomes a subclass of what it was, so it stays an
instance of it, schedulers made before keep working, and its ``state_dict`` is the plain one. Copies
and pickles of it are plain optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpift import runtime
from mpift.errors import GradientError
from mpift.torch import amp
from mpift.torch.compression import Compression, require_none
from mpift.torch.reduce_ops import Average, ReduceOp, Sum
from mpift.torch.reducer import Reducer, name_parameters


class DistributedMixin:
    """What a distributed optimizer does differently; mixed in before its own class."""

    _mpift_reducer: Reducer
    _mpift_skip: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then do the optimizer's own step.

        With a ``closure`` each of its evaluations is reduced, so all ranks must evaluate it equally
        often. Ranks that die meanwhile are left out; no exception tells of it.
        """
        reducer = self._mpift_reducer
        reducer.strike()
        own_step: Callable[..., Any] = super().step  # type: ignore[misc]
        if closure is not None:
            given = closure

            def reduced() -> Any:
                loss = given()
                self.synchronize()
                return loss

            loss = own_step(reduced)
        else:
            if not (self._mpift_skip or reducer.synchronized):
                self.synchronize()
            loss = own_step()
        reducer.step_finished()
        return loss

    # For torch this function has its hooks already: the plain step inside has them.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Complete the reduction: afterwards ``p.grad`` holds the averages, to be clipped or
        looked at. The next ``step`` then does not reduce again."""
        self._mpift_reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step`` takes ``p.grad`` as it is: for use after ``synchronize``."""
        self._mpift_skip = True
        try:
            yield
        finally:
            self._mpift_skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate this many backward passes from now on; between steps only."""
        if self._mpift_reducer.pending:
            raise GradientError("set_backward_passes_per_step was called between backward and step")
        self._mpift_reducer.passes_per_step = _positive(passes, "backward_passes_per_step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; refused while a reduction of them is under way."""
        if self._mpift_reducer.pending:
            raise GradientError(
                "zero_grad() was called after backward() but before step() or synchronize():"
                " gradients that are being reduced would be lost"
            )
        self._mpift_reducer.synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters; they are reduced from the next round on."""
        super().add_param_group(group)  # type: ignore[misc]
        number = len(self.param_groups) - 1  # type: ignore[attr-defined]
        for position, parameter in enumerate(self.param_groups[-1]["params"]):  # type: ignore[attr-defined]
            name = f"group{number}.parameter{position}"
            self._mpift_reducer.names.setdefault(parameter, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy has no lane of its own: it is the plain optimizer that this one was made from.
        return _blank, (_plain_class(self),), self.__getstate__()  # type: ignore[attr-defined]


def _plain_class(optimizer: DistributedMixin) -> type:
    """The class that the optimizer had before it was distributed."""
    return type(optimizer).__mro__[2]


def _blank(plain: type) -> Any:
    """An instance without state, for copies and pickles to fill."""
    return object.__new__(plain)


def DistributedOptimizer(  # noqa: N802, the name that scripts use
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
) -> Any:
    """Make ``optimizer`` average its gradients over all ranks; returns the same object.

    All ranks must call this in the same order, with the same parameters; call it after ``init``.
    ``op`` is ``Average`` (over the ranks that took part) or ``Sum``. With
    ``gradient_predivide_factor`` f, gradients are divided by f before the sum and multiplied by f
    after it, against overflow. ``backward_passes_per_step`` sums that many backward passes locally.

    Raises ``ValueError`` for wrong arguments, ``MismatchError`` if ranks hold other parameters, and
    ``GradientError`` for gradients that can't be reduced.
    """
    require_none(compression)
    if op not in (Average, Sum):
        raise ValueError(f"op {op} is not available for gradients: use Average or Sum")
    if not 0 < gradient_predivide_factor < float("inf"):
        raise ValueError(f"gradient_predivide_factor must be positive: {gradient_predivide_factor}")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS steers by the local loss, so ranks would part: it is not supported")
    if isinstance(optimizer, DistributedMixin):
        raise ValueError("this optimizer is distributed already")
    runtime.current()
    reducer = Reducer(
        optimizer,
        name_parameters(optimizer, named_parameters),
        op,
        _positive(backward_passes_per_step, "backward_passes_per_step"),
        gradient_predivide_factor,
        sparse_as_dense,
    )
    amp.install()
    _distribute(optimizer, reducer)
    return optimizer


def _positive(number: int, name: str) -> int:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
    return number


def _distribute(optimizer: Any, reducer: Reducer) -> None:
    """Turn ``optimizer`` into an instance of its distributed class."""
    scheduled = optimizer.__dict__.pop("step", None)
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (DistributedMixin, plain), {})
    optimizer._mpift_reducer = reducer
    optimizer._mpift_skip = False
    if scheduled is not None and hasattr(scheduled, "_wrapped_by_lr_sched"):
        # A scheduler made before had put its counter around the plain step.
        step = optimizer.step

        def counted(*arguments: Any, **keywords: Any) -> Any:
            optimizer._opt_called = True
            return step(*arguments, **keywords)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = counted
