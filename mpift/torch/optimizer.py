"""``DistributedOptimizer``: an optimizer whose ``step`` averages gradients over all ranks first.

The optimizer given is the one returned. Its class becomes a subclass of what it was, so it stays an
instance of it, schedulers made before keep working, and its ``state_dict`` is the plain one. Copies
and pickles of it are plain optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpift import runtime
from mpift.config import Config
from mpift.core.closing import Quorum, parse_quorum
from mpift.core.patience import TIMEOUT, parse_patience
from mpift.errors import GradientError
from mpift.reduction.gradients import RoundRules
from mpift.torch import amp
from mpift.torch.compression import Compression, compressor_of
from mpift.torch.mixing import mix_in, reduce_to_plain
from mpift.torch.naming import name_parameters
from mpift.torch.reduce_ops import Average, ReduceOp, Sum
from mpift.torch.reducer import Reducer
from mpift.torch.replica import RoundReport


class DistributedMixin:
    """What a distributed optimizer does differently; mixed in before its own class."""

    _mpift_reducer: Reducer
    _mpift_skip: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then do the optimizer's own step.

        With a ``closure`` each of its evaluations is reduced, so all ranks must evaluate it equally
        often. Ranks that die or are late meanwhile are left out; no exception tells of it. A rank
        that was late itself first applies the rounds that it has missed. Where most ranks have left
        their loops or wait in an operation, no round is opened, and this returns without one.
        """
        reducer = self._mpift_reducer
        reducer.strike()
        own_step: Callable[..., Any] = super().step  # type: ignore[misc]
        if closure is not None:
            loss = own_step(self._reducing(closure))
        elif self._mpift_skip and not (reducer.synchronized or reducer.declined):
            reducer.verification.settle()
            return own_step()  # of gradients that are this rank's own affair
        else:
            touched = reducer.synchronized or reducer.declined
            if not touched:
                reducer.synchronize()
            loss = None if reducer.prepare_step(touched) else own_step()
        reducer.step_finished()
        return loss

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` with its gradients reduced; none where there is no step to do."""

        def reduced() -> Any:
            reducer = self._mpift_reducer
            loss = closure()
            reducer.synchronize()
            if reducer.prepare_step(touched=False):
                super(DistributedMixin, self).zero_grad(set_to_none=True)  # type: ignore[misc]
            return loss

        return reduced

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

    @property
    def rounds(self) -> Sequence[RoundReport]:
        """What happened in the last rounds that this rank has applied (1000 at most), oldest first:
        participants, how long this rank waited, who was late."""
        return tuple(self._mpift_reducer.replica.reports)

    @property
    def rounds_applied(self) -> int:
        """Rounds that this rank has applied, so those that all ranks have in common; a rank that
        was late has made fewer steps of its own. What depends on the step, such as a learning rate
        set by hand, goes by this."""
        return self._mpift_reducer.replica.applied

    def after_round(self, hook: Callable[[int], None]) -> None:
        """Call ``hook`` with ``rounds_applied`` after each round that this rank applies, also those
        that it was late for: then the state is the same on all ranks."""
        self._mpift_reducer.replica.hooks.append(hook)

    def register_scheduler(self, scheduler: Any) -> Any:
        """Let ``scheduler`` make one step a round, whoever took part in it; returns it.

        Its own ``step()`` does nothing from then on, so loops that call it after each step stay as
        they are. Needed where it is called once a step and ranks may be late: a rank that missed
        rounds would lag behind in its learning rate. Raises ``ValueError`` for a scheduler of
        another optimizer or one that goes by a metric."""
        return self._mpift_reducer.replica.register_scheduler(scheduler)

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
        self._mpift_reducer.step_skipped()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters; they are reduced from the next round on."""
        super().add_param_group(group)  # type: ignore[misc]
        number = len(self.param_groups) - 1  # type: ignore[attr-defined]
        for position, parameter in enumerate(self.param_groups[-1]["params"]):  # type: ignore[attr-defined]
            name = f"group{number}.parameter{position}"
            self._mpift_reducer.names.setdefault(parameter, name)

    # A copy has no lane of its own.
    __reduce_ex__ = reduce_to_plain


def DistributedOptimizer(  # noqa: N802, the name that scripts use
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    quorum: Quorum | None = None,
    patience: float | str | None = None,
    late: str | None = None,
    max_lag: int | None = None,
    verify_every: int | None = None,
) -> Any:
    """Make ``optimizer`` average its gradients over all ranks; returns the same object.

    All ranks must call this in the same order, with the same parameters; call it after ``init``.
    ``op`` is ``Average`` (over the ranks that took part) or ``Sum``. With
    ``gradient_predivide_factor`` f, gradients are divided by f before the sum and multiplied by f
    after it, against overflow. ``backward_passes_per_step`` sums that many backward passes locally.
    ``compression`` is ``Compression.none``, ``.fp16``, ``.bf16``, ``.threshold(value)`` or a
    ``Compressor``. ``num_groups`` and ``groups`` change nothing.

    Once ``quorum`` ranks have arrived in a round and ``patience`` is over, it does not wait for the
    others: they take no part, and apply its result later. ``quorum`` is "majority", "all", a number
    of ranks or a fraction (a float) of the view; ``patience`` is in seconds, "adaptive" or
    "timeout". ``late`` says what becomes of a gradient that comes too late for its round: "carry"
    lets it count in the next one, "drop" doesn't count it. A rank that is ``max_lag`` rounds behind
    is waited for. None stands for what the settings say: majority, ``sync_timeout`` seconds, carry,
    4 rounds. With a second distributed optimizer the rounds of both wait for all ranks.

    Every ``verify_every`` rounds the ranks compare hashes of their parameters and optimizer state;
    0 never, None as the settings say. A rank that deviates from most others takes over their state;
    if no state has a majority, ``InconsistentError`` is raised in ``step`` on all ranks.

    Raises ``ValueError`` or ``ConfigError`` for wrong arguments, ``MismatchError`` if ranks hold
    other parameters, and ``GradientError`` for gradients that can't be reduced.
    """
    compressor = compressor_of(compression)
    _check(optimizer, op, gradient_predivide_factor, process_set)
    config = runtime.current().config
    rules = _rules(config, quorum, patience, late, max_lag)
    reducer = Reducer(
        optimizer,
        name_parameters(optimizer, named_parameters),
        op,
        _positive(backward_passes_per_step, "backward_passes_per_step"),
        gradient_predivide_factor,
        sparse_as_dense,
        rules,
        compressor,
        _natural(config.verify_every if verify_every is None else verify_every, "verify_every"),
    )
    amp.install()
    mix_in(optimizer, DistributedMixin, _mpift_reducer=reducer, _mpift_skip=False)
    return optimizer


def _check(
    optimizer: torch.optim.Optimizer,
    op: ReduceOp,
    gradient_predivide_factor: float,
    process_set: Any,
) -> None:
    """Raise ``ValueError`` for what is not available."""
    if process_set is not None:
        raise ValueError("process sets are not available: all ranks take part, so leave it out")
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


def _rules(
    config: Config,
    quorum: Quorum | None,
    patience: float | str | None,
    late: str | None,
    max_lag: int | None,
) -> RoundRules:
    """What is given, and for the rest the settings; checked alike."""
    waits = parse_patience(config.patience if patience is None else patience)
    late = config.late if late is None else late
    if late not in ("carry", "drop"):
        raise ValueError(f'late must be "carry" or "drop", not {late!r}')
    lag = _natural(config.max_lag if max_lag is None else max_lag, "max_lag")
    return RoundRules(
        parse_quorum(config.quorum if quorum is None else quorum),
        config.sync_timeout if waits == TIMEOUT else waits,
        late == "carry",
        lag,
    )


def _natural(number: int, name: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, not {number!r}")
    return number


def _positive(number: int, name: str) -> int:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
    return number
