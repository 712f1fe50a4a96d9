"""The way of gradients: from ``p.grad`` into flat buckets during backward, and back after the sum.

A post-accumulate hook places each gradient as soon as backward has it; a bucket whose last gradient
is placed goes to the service thread, which reduces it while backward continues. ``synchronize``
places what no hook has placed, waits for the round in which it counts, and writes the averages into
``p.grad``. Rounds that this rank has missed by then are replayed first (``replica``).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from mpift import runtime
from mpift.devices import simulated
from mpift.devices.courier import Courier
from mpift.errors import DeviceError, GradientError
from mpift.reduction.buckets import Layout
from mpift.reduction.codecs import Compressor
from mpift.reduction.gradients import GradientRounds, RoundRules
from mpift.reduction.records import RecordWithheldError
from mpift.torch import amp
from mpift.torch.alike import check_alike
from mpift.torch.carriage import Carriage, dense_gradient, layout_of, trainable
from mpift.torch.reduce_ops import Average, ReduceOp
from mpift.torch.replica import Replica
from mpift.torch.verification import Verification


class Reducer:
    """Reduces the gradients of the parameters that ``optimizer`` holds; one lane of rounds.

    ``names`` gives a name to each parameter. Averages divide by the participants of the round, so
    a rank that is late, has left or died does not dilute them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        op: ReduceOp,
        passes_per_step: int,
        predivide_factor: float,
        sparse_as_dense: bool,
        rules: RoundRules,
        compressor: Compressor,
        verify_every: int,
    ) -> None:
        self.names = names
        self.passes_per_step = passes_per_step
        self._optimizer = optimizer
        self._op = op
        self._predivide = predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._runtime = runtime.current()
        self._compressor = compressor
        # Whether p.grad holds the result of ``_own`` and nothing newer.
        self.synchronized = False
        self._left = False  # a step is over, and its gradient has yet to count
        self.declined = False  # no round comes of this step: too late, or the others are away
        self.late = False  # rounds were missed before ``_own``
        self._own = -1
        # The round that this step's gradient has counted in, and whether rounds were missed before
        # it, as long as its result is not in ``p.grad``.
        self._due: tuple[int, bool] | None = None
        self._rewound = False  # the script makes a step again
        self._spent = False  # and that step's round was applied already, or in another way
        self._stepped = False  # since the script's step began, its round was applied
        self._waited = 0.0
        self._hooks: list[Any] = []
        self._courier = Courier()
        layout = self._lay_out()
        self.workload = GradientRounds(layout, rules, compressor)
        self._carriage = self._carriage_of(layout)
        self.verification = Verification(
            optimizer, self._runtime, self.workload, self.name_of, verify_every
        )
        self.replica = Replica(
            optimizer, self._runtime, self.workload, self._carriage, self.verification
        )
        self._check_alike()
        lane = self._runtime.gradients.open(self.workload, self)
        self._runtime.examinations.open(lane, self.workload)
        self.replica.lane = self.verification.lane = lane
        self._prepare()

    @property
    def pending(self) -> bool:
        """Whether backward has placed gradients that no ``synchronize`` has fetched yet."""
        return bool(self._carriage.placed) and not self._rewound

    @property
    def touches(self) -> bool:
        """Whether the script changes results before it steps with them."""
        return self.replica.touches

    @touches.setter
    def touches(self, touches: bool) -> None:
        self.replica.touches = touches

    def strike(self) -> None:
        """A place for the fault schedule."""
        step = self.replica.applied
        for fault in self._runtime.strike(step, "step"):
            if fault.verb == "device":
                simulated.strike(self.devices[0], int(fault.amount))
            else:
                self.verification.flip(fault.member, step)

    def use_scaler(self, scaler: Any) -> None:
        """The script scales its losses, so a late gradient has another scale than its round."""
        self.replica.scaler = scaler
        self.workload.carry_nothing()

    # -- the step ----------------------------------------------------------------------------------

    def prepare_step(self, touched: bool) -> bool:
        """Before the inner optimizer's step; returns whether it has to be left out."""
        if self.declined:
            return True
        return self.replica.prepare(self._own, touched, self.late)

    def step_finished(self) -> None:
        """The inner optimizer has used the round's result, or there was no round."""
        synchronized = self.synchronized
        if self.declined:
            amp.declined(self.replica.scaler)
        self.synchronized = self.declined = self.late = False
        if synchronized:
            self.replica.finish(self._own, self._waited)
            self._stepped = True
        self._runtime.step_finished(self.replica.applied - 1)

    def step_skipped(self) -> None:
        """The script has left out the step of the round that it had synchronized."""
        synchronized = self.synchronized
        self.synchronized = self.declined = self.late = False
        if synchronized:
            self.replica.skip(self._own)

    @property
    def history(self) -> str:
        """Of the rounds applied."""
        return self.replica.history

    def catch_up(self) -> None:
        """Apply what is complete, but for a round that the script is about to apply itself."""
        if not self.synchronized:
            self.workload.disown()
            self.replica.replay(self.workload.completed)

    def make_room(self) -> None:
        """If others wait because this rank is too far behind, or to examine states: apply what its
        script isn't about to. If that is too little, they go on without an examination."""
        behind = self.workload.completed - self.replica.applied
        examined = self.verification.awaited
        wanted = behind >= self.workload.rules.max_lag or examined >= self.replica.applied
        if wanted and not self.synchronized:
            if self._left:  # then nobody waits for its round
                self.workload.disown()
                self._left = self.workload.busy
            with contextlib.suppress(RecordWithheldError):  # tried again soon
                self.replica.replay(self.workload.foreign)
        if examined >= self.replica.applied:
            self.verification.decline(examined)

    def flush(self, rounds: int) -> None:
        """Complete all rounds below ``rounds``, as all ranks do, and apply them."""
        self.step_skipped()
        self.workload.flush(rounds)
        while self.replica.applied < rounds:
            self.workload.wait(self.replica.applied + 1)
            self.catch_up()

    # -- layout ------------------------------------------------------------------------------------

    def _lay_out(self) -> Layout:
        self._parameters = trainable(self._optimizer)
        if not self._parameters:
            raise GradientError("the optimizer has no parameter that requires a gradient")
        names = [self.name_of(parameter) for parameter in self._parameters]
        config = self._runtime.config
        return layout_of(self._parameters, names, config.first_bucket_bytes, config.bucket_bytes)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The parameter's name, as the script gave it or by its place in the groups."""
        return self.names.get(parameter, "a parameter without a name")

    def _check_alike(self) -> None:
        """All ranks must reduce the same parameters; an error that says so beats a broken sum."""
        tensors = [f"{self.name_of(p)} {tuple(p.shape)} {p.dtype}" for p in self._parameters]
        rules = f"{self.workload.rules} {self._compressor} {self.verification.every}"
        check_alike(self._runtime, tensors, rules)

    def _carriage_of(self, layout: Layout) -> Carriage:
        return Carriage(
            self._parameters,
            layout,
            self.workload,
            self._op is Average,
            self._predivide,
            self._compressor,
            self._courier,
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
        self._begin_round()

    def _begin_round(self) -> None:
        self._carriage.begin()
        self._called = False
        self._passes = [0] * len(self._parameters)

    def _refresh(self) -> None:
        """Between rounds: a new layout if parameters were added, frozen or unfrozen."""
        present = trainable(self._optimizer)
        if len(present) == len(self._parameters) and all(
            a is b for a, b in zip(present, self._parameters, strict=True)
        ):
            return
        passes = dict(zip(self._parameters, self._passes, strict=True))
        self._runtime.gradients.settle([self])
        layout = self._lay_out()
        self._runtime.gradients.relayout(self.replica.lane, self.workload, layout)
        self.replica.carriage = self._carriage = self._carriage_of(layout)
        self._check_alike()
        self._prepare()
        self._passes = [passes.get(parameter, 0) for parameter in self._parameters]

    # -- in ----------------------------------------------------------------------------------------

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Backward has finished one parameter's gradient, once more."""
        self._rewound = False
        if self._due is not None or self._spent:
            return  # a step that is made again, whose gradient has counted
        if not self._carriage.placed:
            self._refresh()
        if self.synchronized or self.declined:
            self.step_skipped()
        index = self._index[parameter]
        if index in self._carriage.placed and not self._passes[index]:
            return  # likewise
        self._passes[index] += 1
        if self._passes[index] == self.passes_per_step:
            self._carriage.place(
                index, dense_gradient(parameter, self.name_of, self._sparse_as_dense)
            )
        elif self._passes[index] > self.passes_per_step:
            raise GradientError(
                f"the gradient of {self.name_of(parameter)!r} was computed {self._passes[index]}"
                f" times before step(), but backward_passes_per_step is {self.passes_per_step}:"
                " call step() in between, or set it accordingly"
            )

    # -- out ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Complete the round that this rank's gradient counts in: afterwards ``p.grad`` is that
        round's result, the same on every rank, and all rounds before it are applied.

        A parameter that no rank used has ``grad`` None. A fault meanwhile is no error. Where there
        is no such round, ``declined`` says so, and all complete rounds are applied.
        """
        self.step_skipped()  # of a result that the script has not used
        self._rewound = False
        if self._spent:
            self._spent, self.declined = False, True
            return
        if not self._carriage.placed and self._due is None:
            self._refresh()
        if not self._called:  # not again after an interrupt that the script caught
            self._called = True
            self._runtime.steps_called += 1
        if self._due is None:
            for index, parameter in enumerate(self._parameters):
                if index not in self._carriage.placed:
                    self._carriage.place(
                        index, dense_gradient(parameter, self.name_of, self._sparse_as_dense)
                    )
            self._carriage.drain()
        try:
            self._complete()
        except RecordWithheldError:
            # Others wait in an operation, perhaps for this rank: what it has missed comes later.
            self.declined, self._due = True, None
            self.workload.give_up()
        self._left = self.declined and self.workload.busy
        if self.declined:
            self._runtime.steps_called -= 1  # nobody asked for a round then
            self.replica.step_without_round()
        self._begin_round()

    def _complete(self) -> None:
        """Wait for the round that counts as this rank's own, and apply all before it."""
        self._carriage.forget_early()
        if self._due is None:
            began, first = time.monotonic(), self.replica.applied
            own = self._settle()
            self._waited = time.monotonic() - began
            if own is None:
                self.declined = True
                self.replica.replay(self.workload.completed)
                return
            self._due = own, own > first
        own, late = self._due
        self.replica.replay(own)
        delivered = self.workload.delivered(own)
        assert delivered is not None
        self._carriage.take(own, delivered.sums)
        self._own, self.late, self._due, self.synchronized = own, late, None, True

    def _settle(self) -> int | None:
        with self._runtime.waiting():
            return self.workload.settle(
                self.replica.replay, self._runtime.gradients.make_room, self._carriage.take_early
            )

    # -- after a fault of the device ---------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device]:
        """Where the parameters are: accelerators first."""
        devices = dict.fromkeys(parameter.device for parameter in self._parameters)
        return sorted(devices, key=lambda device: device.type == "cpu")

    def begin_step(self) -> None:
        """The script begins a step that it may have to make again."""
        self._stepped = self._spent = False

    @property
    def intact(self) -> bool:
        """Whether this rank's state is what the rounds applied have made of it, although a device
        has just failed: no step was under way, and none that came before can have failed unseen."""
        proven = self.synchronized or self._due is not None or self._carriage.proven
        return proven and not self.replica.changing

    def rewind(self) -> None:
        """Let the script make this step again. What has reached the host of its gradient counts
        once; what it computes of that again does not."""
        if self.synchronized:
            self._due, self.synchronized = (self._own, self.late), False
        self.declined = False
        self._spent = self._spent or self._stepped
        amp.rewound(self.replica.scaler, self._optimizer)
        self._carriage.rewind()
        self._passes = [0] * len(self._parameters)
        self._rewound = True
        for parameter in self._parameters:
            parameter.grad = None

    def take_state_from_others(self) -> None:
        """What this rank holds is of no use: take no part in rounds until all ranks have compared
        their states, and hold then what the others hold. The script may make its step again.

        Raises ``DeviceError`` if there is nobody to take it from."""
        self.rewind()
        if self._runtime.view.size == 1:
            raise DeviceError(
                "no other rank is there to take the state from: go on from a checkpoint"
            )
        self.verification.forget_state()
        self._carriage.forget()
        # The round that the script's step stands for; others are missed.
        counted = self._due is not None or bool(self._carriage.placed)
        while self.verification.damaged:
            self.verification.request_examination()
            own, self._due = (None if self._due is None else self._due[0]), None
            if own is None:
                self._carriage.place_nothing()
                before, own = self.workload.completed, self._settle()
                if own is None and self.workload.completed > before:  # it came too late
                    self.replica.replay(self.workload.completed)
                    self._begin_round()
                    continue
                if own is None:
                    raise DeviceError(
                        "the other ranks make no more rounds in which to give the state"
                    )
            self._pass_over(own, self._spent or not counted)
            self._spent = self._spent or counted
            self._begin_round()
        self._rewound = True

    def _pass_over(self, round_: int, missed: bool) -> None:
        """Apply the rounds up to this one without stepping; whether the last one is ``missed``."""
        self.replica.replay(round_ + missed)
        if not missed:
            self.replica.finish(round_)
