"""One optimizer's state as a function of rounds: every round is applied once, in order.

A rank runs its own code for the rounds that its gradients count in; it *replays* the others, with
the result that its service thread received and the record of a rank that did run its code. Either
way parameters, optimizer state and settings have the same bits on all ranks after a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpift.core import history
from mpift.core.membership import View
from mpift.reduction.buckets import Bucket, Layout, empty_bucket
from mpift.reduction.gradients import Delivered, GradientRounds
from mpift.runtime import Runtime
from mpift.torch import amp
from mpift.torch.carriage import Carriage
from mpift.torch.mixing import plain_class
from mpift.torch.records import Record, decode, encode, set_settings, settings_of
from mpift.torch.verification import Verification

_ROUNDS_REPORTED = 1000


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What happened in one round, as this rank saw it.

    ``participants`` is the number of ranks whose gradients are in its result (in its fullest
    bucket, where one was late for a part), of ``size`` in the view. ``wait_seconds`` is how long
    this rank waited in ``step`` or ``synchronize``. ``late`` are member ids that the others did not
    wait for. ``replayed``: this rank took no part, and applied the round afterwards."""

    round: int
    epoch: int
    size: int
    participants: int
    wait_seconds: float
    late: tuple[int, ...]
    replayed: bool


class _FollowsRounds:
    """What a registered scheduler does differently."""

    def step(self, *_arguments: Any, **_keywords: Any) -> None:
        """Nothing: the rounds have stepped it."""


class Replica:
    """See the module's docstring. ``carriage`` brings results to ``p.grad``; ``verification``
    compares the state with that of the others."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        workload: GradientRounds,
        carriage: Carriage,
        verification: Verification,
    ) -> None:
        self.applied = 0  # rounds
        self.history = history.NO_HISTORY  # of those rounds
        self.reports: deque[RoundReport] = deque(maxlen=_ROUNDS_REPORTED)
        # Called with ``applied`` after each round, replayed ones included.
        self.hooks: list[Callable[[int], None]] = []
        self._missed: list[View] = []  # the view of each round replayed since somebody looked
        self.changing = False  # parameters may be neither old nor new
        self._without_round = 0  # steps since then that no round came of
        self.lane = -1
        self.scaler: Any = None  # the GradScaler that this optimizer steps through
        self.touches = False  # the script changes gradients between synchronize() and step()
        self._optimizer = optimizer
        self._runtime = runtime
        self._workload = workload
        self.carriage = carriage
        self.verification = verification
        self._schedulers: list[Any] = []
        self._settings = settings_of(optimizer)  # of the last applied round

    @property
    def _layout(self) -> Layout:
        return self._workload.contributions.layout

    def register_scheduler(self, scheduler: Any) -> Any:
        """From now on ``scheduler`` makes one step a round, whoever took part in it."""
        if getattr(scheduler, "optimizer", None) is not self._optimizer:
            raise ValueError("register_scheduler takes a scheduler of this optimizer")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau goes by a metric, not by rounds: call its step(metric) yourself,"
                " on all ranks with the same value"
            )
        plain = type(scheduler)
        if not issubclass(plain, _FollowsRounds):
            # A class of its own, not an attribute, which would be part of its state_dict.
            scheduler.__class__ = type(plain.__name__, (_FollowsRounds, plain), {})
            self._schedulers.append(plain.step.__get__(scheduler))
        return scheduler

    def step_without_round(self) -> None:
        """A step was declined: it stands for a round that is yet to come, or was replayed."""
        self._without_round += 1

    def take_missed(self) -> list[View]:
        """The views of the rounds that this rank has made no step for, since it was asked last."""
        count = max(0, len(self._missed) - self._without_round)
        self._without_round -= len(self._missed) - count
        taken, self._missed = self._missed[len(self._missed) - count :], []
        return taken

    def forget_missed(self) -> None:
        """Rounds and steps are counted from here on."""
        self._missed, self._without_round = [], 0

    # -- rounds of this rank's own -----------------------------------------------------------------

    def prepare(self, round_: int, touched: bool, late: bool) -> bool:
        """Before the inner optimizer's step for ``round_``, whose result is in ``p.grad``. Returns
        whether the step has to be skipped.

        A rank that was ``late`` goes by the record of one that was not, since its script's counters
        may be behind. ``touched``: the script may have changed ``p.grad``."""
        self.verification.settle()
        self._settings = settings_of(self._optimizer)
        self.touches = self.touches or touched
        if late and self._is_wanted(round_):
            data = self._runtime.gradients.records.fetch(self.lane, round_, own=True)
            if data is not None:
                record = decode(data, self._layout)
                self._take(record)
                self._keep(round_, data)
                self.changing = not record.skipped
                return record.skipped
        if self._is_wanted(round_):
            gradients = self._gradients() if touched else None
            self._keep(round_, encode(self._record(False, gradients)))
        self.changing = True
        return False

    def _record(self, skipped: bool, gradients: Sequence[np.ndarray] | None = None) -> Record:
        return Record(self._settings, skipped, amp.state(self.scaler, self._optimizer), gradients)

    def finish(self, round_: int, wait_seconds: float = 0.0, replayed: bool = False) -> None:
        """After the step for ``round_``, or instead of it. No hook sees a state that is damaged."""
        self.carriage.settle()  # first: a device may fail in it, and nothing is done twice then
        for step in self._schedulers:
            step()
        delivered = self._delivered(round_)
        size = self._runtime.view_of(delivered.epoch).size
        self.reports.append(
            RoundReport(
                round_,
                delivered.epoch,
                size,
                delivered.participants,
                wait_seconds,
                delivered.late,
                replayed,
            )
        )
        self.history = history.extended(self.history, round_, delivered.epoch)
        self._runtime.see_round(delivered.epoch)
        self._runtime.steps_applied += 1
        self._workload.applied(round_)
        self.applied, self.changing = round_ + 1, False
        self.verification.round_applied(round_, delivered.alarm)
        for hook in () if self.verification.damaged else self.hooks:
            hook(self.applied)

    def skip(self, round_: int) -> None:
        """The script did not step: the round is applied without a change."""
        if self._is_wanted(round_):
            self._settings = settings_of(self._optimizer)
            self._keep(round_, encode(self._record(True)))
        self.finish(round_)

    def _is_wanted(self, round_: int) -> bool:
        """Whether a rank took no part in ``round_`` with all it has, or was late for an earlier
        one, and so may ask for a record."""
        delivered = self._delivered(round_)
        size = self._runtime.view_of(delivered.epoch).size
        return delivered.stale > 0 or delivered.least < size

    def _delivered(self, round_: int) -> Delivered:
        delivered = self._workload.delivered(round_)
        assert delivered is not None
        return delivered

    def _keep(self, round_: int, data: np.ndarray) -> None:
        self._runtime.gradients.records.put(
            self.lane, round_, data, self._workload.rules.max_lag + 2
        )

    # -- rounds of the others ----------------------------------------------------------------------

    def replay(self, rounds: int) -> None:
        """Apply all rounds below ``rounds`` that this rank has not applied."""
        while self.applied < rounds:
            self._replay(self.applied)

    def _replay(self, round_: int) -> None:
        """A state that is damaged is not stepped: it is taken over from others after the round in
        which all compare theirs."""
        self.verification.settle()
        damaged = self.verification.damaged
        local = [parameter.grad for parameter in self.carriage.parameters]
        try:
            if damaged:
                self._pass_over(round_)
            else:
                self._apply(round_)
        finally:
            for parameter, gradient in zip(self.carriage.parameters, local, strict=True):
                parameter.grad = gradient
        self.carriage.settle()
        self._runtime.rounds_missed += 1
        self._missed.append(self._runtime.view_of(self._delivered(round_).epoch))
        self.finish(round_, replayed=True)

    def _apply(self, round_: int) -> None:
        data = self._runtime.gradients.records.fetch(self.lane, round_)
        for parameter in self.carriage.parameters:
            parameter.grad = None
        self.carriage.take(round_)
        if data is None:  # nobody is left who knows: all who lack it go on like this
            if self._schedulers:
                self._settings = settings_of(self._optimizer)
            # Gradients that no script has unscaled or clipped must not be applied as they are.
            data = encode(self._record(self.scaler is not None or self.touches))
        record = decode(data, self._layout)
        self._take(record)
        used = any(parameter.grad is not None for parameter in self.carriage.parameters)
        if used and not record.skipped:
            self.changing = True
            with amp.scaled_step(self._optimizer, record.scaler):
                _plain_step(self._optimizer)
        amp.update(self.scaler, record.scaler)
        self._keep(round_, data)

    def _pass_over(self, round_: int) -> None:
        """A record is asked for where a scaler goes by it; settings are taken over with the state.
        All that are damaged would wait for each other's."""
        if self.scaler is not None:
            data = self._runtime.gradients.records.fetch(self.lane, round_)
            if data is not None:
                record = decode(data, self._layout)
                self._take(record)
                amp.update(self.scaler, record.scaler)
                self._keep(round_, data)

    def _take(self, record: Record) -> None:
        """Let settings and gradients be those of the record."""
        set_settings(self._optimizer, record.settings)
        self._settings = record.settings
        amp.restore(self.scaler, self._optimizer, record.scaler)
        if record.gradients is None:
            return
        with torch.no_grad():
            for bucket, array in zip(self._layout.buckets, record.gradients, strict=True):
                self._write(bucket, array)

    def _write(self, bucket: Bucket, array: np.ndarray) -> None:
        flat = torch.from_numpy(array)
        for slot in bucket.slots:
            parameter = self.carriage.parameters[slot.parameter]
            if not array[slot.used]:
                parameter.grad = None
                continue
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(flat[slot.start : slot.stop].view(parameter.shape))

    def _gradients(self) -> list[np.ndarray]:
        """Copies of what is in ``p.grad``, laid out in buckets."""
        arrays = [empty_bucket(bucket) for bucket in self._layout.buckets]
        with torch.no_grad():
            for bucket, array in zip(self._layout.buckets, arrays, strict=True):
                flat = torch.from_numpy(array)
                for slot in bucket.slots:
                    parameter = self.carriage.parameters[slot.parameter]
                    if parameter.grad is not None:
                        flat[slot.start : slot.stop].view(parameter.shape).copy_(parameter.grad)
                        array[slot.used] = 1
        return arrays


def _plain_step(optimizer: Any) -> None:
    """The step of the class that the optimizer had before it was distributed."""
    optimizer._opt_called = True  # what a scheduler looks for before it complains
    plain_class(optimizer).step(optimizer)
