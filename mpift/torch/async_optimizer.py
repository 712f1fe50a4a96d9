"""``AsyncDistributedOptimizer``: an optimizer whose ``step`` goes through a parameter server.

No rank waits for another: ``step`` pushes this rank's gradients, which the server applies one
after the other by the optimizer's formula, and pulls the newest parameters. The optimizer given is
the one returned, its class a subclass of what it was, so schedulers made before keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpift import runtime
from mpift.errors import GradientError
from mpift.parameter_server.optimizers import SGD, Adagrad, ServerOptimizer
from mpift.torch.mixing import mix_in, reduce_to_plain
from mpift.torch.naming import name_parameters
from mpift.torch.parameter_server import ParameterServer

_STALENESS_A_RANK = 4


class AsyncMixin:
    """What an asynchronous optimizer does differently; mixed in before its own class."""

    _mpift_exchange: Exchange

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, then pull the newest parameters.

        The momentum and other state are the server's; learning rates and the other settings are
        those of ``param_groups`` at this moment. A gradient that is too stale is not applied, but
        counted. Raises ``KeyLostError`` if parameters are lost.
        """
        exchange = self._mpift_exchange
        exchange.strike()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange.step()
        return loss

    # For torch this function has its hooks already.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def server(self) -> ParameterServer:
        """The parameters, by name."""
        return self._mpift_exchange.server

    @property
    def versions(self) -> dict[str, int]:
        """Of each parameter the version that this rank computes with."""
        return dict(self._mpift_exchange.versions)

    @property
    def stale_gradients(self) -> int:
        """Gradients of this rank that were refused, counted by parameter."""
        return self._mpift_exchange.stale

    def pull(self) -> None:
        """Take the newest parameters, without a step: before an evaluation."""
        self._mpift_exchange.pull()

    def close(self) -> None:
        """Give up the server, when all ranks have called this; not needed at a script's end."""
        self._mpift_exchange.server.close()

    # A copy has no server of its own.
    __reduce_ex__ = reduce_to_plain

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Refused: the server's keys are those that it began with."""
        raise ValueError("an asynchronous optimizer takes no more parameters: make a new one")


def AsyncDistributedOptimizer(  # noqa: N802, the counterpart of DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    staleness: int | None = None,
) -> Any:
    """Let ``optimizer``, a plain ``torch.optim.SGD`` or ``Adagrad``, train through a parameter
    server; returns the same object.

    All ranks call this alike, after ``init``; the parameters of rank 0 count. ``staleness`` is how
    many versions behind a gradient may be; None stands for 4 a rank. ``named_parameters`` gives
    names to the parameters, as in ``model.named_parameters()``.

    Raises ``ValueError`` for optimizers that the server has no formula for or that have state
    already, and ``MismatchError`` if ranks hold other parameters.
    """
    if isinstance(optimizer, AsyncMixin):
        raise ValueError("this optimizer is asynchronous already")
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise ValueError(
            f"a parameter server has no formula for {type(optimizer).__name__}: use a plain"
            " torch.optim.SGD or torch.optim.Adagrad, or hvd.DistributedOptimizer"
        )
    if any(_has_history(state) for state in optimizer.state.values()):
        raise ValueError(
            "the optimizer has made steps already, and the server begins without its state: make a"
            " new one"
        )
    if staleness is None:
        staleness = _STALENESS_A_RANK * runtime.current().view.size
    names = name_parameters(optimizer, named_parameters)
    exchange = Exchange(optimizer, names, rule, staleness)
    mix_in(optimizer, AsyncMixin, _mpift_exchange=exchange)
    return optimizer


class Exchange:
    """Between the parameters of one optimizer and their server."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        rule: Callable[[dict[str, Any]], ServerOptimizer],
        staleness: int,
    ) -> None:
        self._runtime = runtime.current()
        self._optimizer = optimizer
        self._rule = rule
        groups = optimizer.param_groups
        self._parameters = {names[p]: p for g in groups for p in g["params"] if p.requires_grad}
        if not self._parameters:
            raise GradientError("the optimizer has no parameter that requires a gradient")
        self._names = names
        # Slots for the state are there if any group has a use for them.
        first = max((rule(group) for group in groups), key=lambda found: found.slots)
        self.server = ParameterServer(self._parameters, first, staleness)
        self.versions: dict[str, int] = {}
        self.stale = self.steps = 0
        self.pull()

    def strike(self) -> None:
        """A place for the fault schedule."""
        self._runtime.strike(self.steps, "step")

    def step(self) -> None:
        """Push what there is in ``p.grad``, and pull everything."""
        current = self._runtime
        current.steps_called += 1
        updates: dict[str, Any] = {}
        settings: dict[str, tuple[float, ...]] = {}
        for group in self._optimizer.param_groups:
            given = self._rule(group).settings
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.requires_grad:
                    continue
                name = self._names[parameter]
                updates[name] = (self._dense(name, parameter.grad), self.versions[name])
                settings[name] = given
        self.stale += len(self.server.push_many(updates, settings).stale)
        self.pull()
        current.steps_applied += 1
        current.step_finished(self.steps, together=False)
        self.steps += 1

    def pull(self) -> None:
        """Let all parameters be the newest committed ones."""
        with torch.no_grad():
            for name, (value, version) in self.server.pull_many(self._parameters.keys()).items():
                self._parameters[name].copy_(value)
                self.versions[name] = version

    def _dense(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.is_sparse:
            raise GradientError(
                f"the gradient of {name!r} is sparse, which a parameter server cannot apply: build"
                " the layer with sparse=False"
            )
        return gradient


def _has_history(state: dict[str, Any]) -> bool:
    """Whether a parameter's state is of steps made before; Adagrad has one from the beginning."""
    return state.get("momentum_buffer") is not None or bool(state.get("step", 0))


def _sgd(group: dict[str, Any]) -> SGD:
    return SGD(
        float(group["lr"]),
        float(group["momentum"]),
        float(group["dampening"]),
        float(group["weight_decay"]),
        bool(group["nesterov"]),
        bool(group["maximize"]),
    )


def _adagrad(group: dict[str, Any]) -> Adagrad:
    return Adagrad(
        float(group["lr"]),
        float(group["lr_decay"]),
        float(group["weight_decay"]),
        float(group["eps"]),
        bool(group["maximize"]),
        float(group["initial_accumulator_value"]),
    )


_RULES: dict[type, Callable[[dict[str, Any]], ServerOptimizer]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
