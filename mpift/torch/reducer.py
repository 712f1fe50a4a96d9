"""The way of gradients: from ``p.grad`` into flat buckets during backward, and back after the sum.

A post-accumulate hook places each gradient as soon as backward has it; a bucket whose last gradient
is placed goes to the service thread, which reduces it while backward continues. ``synchronize``
places what no hook has placed, waits for the round, and writes the averages into ``p.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from mpift import runtime
from mpift.devices.tensors import device_of
from mpift.errors import GradientError, MismatchError
from mpift.reduction.buckets import Bucket, Layout, ParameterSpec, lay_out
from mpift.reduction.gradients import GradientRounds
from mpift.reduction.operations import Kind, Operation
from mpift.torch.reduce_ops import Average, ReduceOp


class Reducer:
    """Reduces the gradients of the parameters that ``optimizer`` holds; one lane of rounds.

    ``names`` gives a name to each parameter. Averages divide by the participants of the round, so
    a rank that has left or died does not dilute them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        op: ReduceOp,
        passes_per_step: int,
        predivide_factor: float,
        sparse_as_dense: bool,
    ) -> None:
        self.names = names
        self.passes_per_step = passes_per_step
        self._optimizer = optimizer
        self._op = op
        self._predivide = predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._runtime = runtime.current()
        self._round = 0
        # Whether p.grad holds the last round's result and nothing newer.
        self.synchronized = False
        self._hooks: list[Any] = []
        self._views: list[tuple[np.ndarray, list[torch.Tensor]] | None] = []
        self._layout = self._lay_out()
        self._workload = GradientRounds(self._layout)
        self._lane = self._runtime.open_lane(self._workload)
        self._check_alike()
        self._prepare()

    @property
    def pending(self) -> bool:
        """Whether backward has placed gradients that no ``synchronize`` has fetched yet."""
        return bool(self._placed)

    def strike(self) -> None:
        """A place for the fault schedule."""
        self._runtime.strike(self._round, "step")

    def step_finished(self) -> None:
        """The inner optimizer has used the last round's result."""
        self.synchronized = False
        self._runtime.step_finished(self._round - 1)

    # -- layout ------------------------------------------------------------------------------------

    def _trainable(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups
        every = dict.fromkeys(p for group in groups for p in group["params"])
        return [p for p in every if p.requires_grad]

    def _lay_out(self) -> Layout:
        self._parameters = self._trainable()
        if not self._parameters:
            raise GradientError("the optimizer has no parameter that requires a gradient")
        specs = [
            ParameterSpec(self.name_of(p), p.numel(), str(p.dtype).removeprefix("torch."))
            for p in self._parameters
        ]
        for parameter in self._parameters:
            device_of(parameter)
        config = self._runtime.config
        return lay_out(specs, config.first_bucket_bytes, config.bucket_bytes)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The parameter's name, as the script gave it or by its place in the groups."""
        return self.names.get(parameter, "a parameter without a name")

    def _check_alike(self) -> None:
        """All ranks must reduce the same parameters; an error that says so beats a broken sum."""
        text = "\n".join(f"{self.name_of(p)} {tuple(p.shape)} {p.dtype}" for p in self._parameters)
        mine = np.array(
            [[xxhash.xxh3_64_intdigest(text.encode()) >> 1, len(self._parameters)]], dtype=np.int64
        )
        everybody = self._runtime.operate(Operation(Kind.ALLGATHER, mine))
        for rank, row in enumerate(everybody):
            if not np.array_equal(row, everybody[0]):
                raise MismatchError(
                    f"rank {rank} has other parameters than rank 0 ({row[1]} against"
                    f" {everybody[0][1]} tensors, or other names, shapes or dtypes):"
                    " build the same model on every rank"
                )

    def _prepare(self) -> None:
        """Hooks and counters for the present layout."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in self._parameters
        ]
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._places = [(0, 0)] * len(self._parameters)  # (bucket, position in it)
        for number, bucket in enumerate(self._layout.buckets):
            for position, slot in enumerate(bucket.slots):
                self._places[slot.parameter] = (number, position)
        self._views = [None] * len(self._layout.buckets)
        self._begin_round()

    def _begin_round(self) -> None:
        self._placed: set[int] = set()
        self._called = False
        self._passes = [0] * len(self._parameters)
        self._missing = [len(bucket.slots) for bucket in self._layout.buckets]

    def _refresh(self) -> None:
        """Between rounds: a new layout if parameters were added, frozen or unfrozen."""
        present = self._trainable()
        if len(present) == len(self._parameters) and all(
            a is b for a, b in zip(present, self._parameters, strict=True)
        ):
            return
        passes = dict(zip(self._parameters, self._passes, strict=True))
        self._layout = self._lay_out()
        buckets = len(self._layout.buckets)
        self._runtime.relayout(self._lane, lambda: self._workload.relayout(self._layout), buckets)
        self._check_alike()
        self._prepare()
        self._passes = [passes.get(parameter, 0) for parameter in self._parameters]

    # -- in ----------------------------------------------------------------------------------------

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Backward has finished one parameter's gradient, once more."""
        if not self._placed:
            self._refresh()
        self.synchronized = False
        index = self._index[parameter]
        self._passes[index] += 1
        if self._passes[index] == self.passes_per_step:
            self._place(index)
        elif self._passes[index] > self.passes_per_step:
            raise GradientError(
                f"the gradient of {self.name_of(parameter)!r} was computed {self._passes[index]}"
                f" times before step(), but backward_passes_per_step is {self.passes_per_step}:"
                " call step() in between, or set it accordingly"
            )

    def _place(self, index: int) -> None:
        """Copy one gradient into its bucket; the last one of a bucket sends it off."""
        parameter = self._parameters[index]
        number, position = self._places[index]
        bucket = self._layout.buckets[number]
        array = self._workload.buffers.contributions[number]
        slot = bucket.slots[position]
        gradient = self._dense(parameter)
        with torch.no_grad():
            view = self._views_of(number, array)[position]
            if gradient is None:
                view.zero_()
            else:
                device_of(gradient).copy_in(gradient, view, 1.0 / self._predivide)
        array[slot.used] = gradient is not None
        self._placed.add(index)
        self._missing[number] -= 1
        if self._missing[number] == 0:
            array[bucket.participation] = 1
            device_of(parameter).fence()
            self._runtime.contribute(self._lane, number)

    def _dense(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return gradient
        if not self._sparse_as_dense:
            raise GradientError(
                f"the gradient of {self.name_of(parameter)!r} is sparse, which cannot be reduced:"
                " use sparse_as_dense=True, or build the layer with sparse=False"
            )
        parameter.grad = gradient.to_dense()
        return parameter.grad

    def _views_of(self, number: int, array: np.ndarray) -> list[torch.Tensor]:
        """Flat tensors over the slots of a contribution, made anew when its memory changes."""
        known = self._views[number]
        if known is None or known[0] is not array:
            known = (array, slot_views(self._layout.buckets[number], array))
            self._views[number] = known
        return known[1]

    # -- out ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Complete the open round: afterwards ``p.grad`` is the reduced gradient on every rank.

        A parameter that no rank used has ``grad`` None. A fault meanwhile is no error.
        """
        if not self._placed:
            self._refresh()
        if not self._called:  # not again after an interrupt that the script caught
            self._called = True
            self._runtime.steps_called += 1
        for index in range(len(self._parameters)):
            if index not in self._placed:
                self._place(index)
        with self._runtime.waiting():
            epoch = self._workload.wait(self._round)
        with torch.no_grad():
            for number, bucket in enumerate(self._layout.buckets):
                self._copy_out(bucket, self._workload.result(self._round, number))
        self._runtime.see_round(epoch)
        self._runtime.steps_applied += 1
        self.synchronized = True
        self._round += 1
        self._begin_round()

    def _copy_out(self, bucket: Bucket, result: np.ndarray) -> None:
        divisor = 1.0 / self._predivide
        if self._op is Average:
            divisor *= float(result[bucket.participation])
        used = result[bucket.slots[0].used : bucket.participation].tolist()
        for slot, count, host in zip(bucket.slots, used, slot_views(bucket, result), strict=True):
            parameter = self._parameters[slot.parameter]
            if not count:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            device_of(parameter).copy_out(host, divisor, parameter.grad)


def slot_views(bucket: Bucket, array: np.ndarray) -> list[torch.Tensor]:
    """One flat tensor a parameter, over the memory of ``array``."""
    flat = torch.from_numpy(array)
    return [flat[slot.start : slot.stop] for slot in bucket.slots]


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
