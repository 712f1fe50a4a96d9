"""Results on their way back into ``p.grad``, before their round is complete and after."""

from __future__ import annotations

import numpy as np
import torch

from mpift.devices.courier import Courier
from mpift.reduction.codecs import Compressor
from mpift.reduction.gradients import GradientRounds, RoundRules
from mpift.reduction.results import Summed
from mpift.torch.carriage import Carriage, layout_of


def parts() -> tuple[list[torch.Tensor], GradientRounds, Carriage]:
    parameters = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 7.0)
    layout = layout_of(parameters, ["a", "b"], 1, 1)
    workload = GradientRounds(layout, RoundRules("majority", 10.0, True, 2))
    carriage = Carriage(parameters, layout, workload, True, 1.0, Compressor(), Courier())
    return parameters, workload, carriage


def sum_up(workload: GradientRounds, bucket: int, value: float, used: int = 2) -> Summed:
    """A sum of two ranks' gradients."""
    result = workload.results.receive(bucket)
    places = workload.contributions.layout.buckets[bucket]
    result[:] = 0
    result[: places.elements] = value
    result[places.slots[0].used], result[places.participation] = used, 2
    workload._or_summed(bucket, [])
    return workload._summed[bucket]


def gradients(parameters: list[torch.Tensor]) -> list[float | None]:
    return [None if p.grad is None else p.grad[0].item() for p in reversed(parameters)]


def test_what_was_taken_early_is_not_taken_again_unless_it_was_summed_again() -> None:
    parameters, workload, carriage = parts()
    for bucket in range(2):
        carriage.take_early(sum_up(workload, bucket, 10.0 + bucket))
    assert gradients(parameters) == [5.0, 5.5]
    again = sum_up(workload, 1, 20.0)
    sums = frozenset(workload._summed.values())
    workload.results.complete(0)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(-1.0)  # shows who is written to
    carriage.take(0, sums)
    assert again in sums
    assert gradients(parameters) == [-1.0, 10.0]


def test_what_is_no_longer_open_is_not_taken_early() -> None:
    parameters, workload, carriage = parts()
    summed = sum_up(workload, 0, 10.0)
    workload.abandon([0])
    carriage.take_early(summed)
    assert gradients(parameters) == [7.0, 7.0]


def test_parameters_that_somebody_or_nobody_used_wait_for_the_whole_round() -> None:
    parameters, workload, carriage = parts()
    carriage.take_early(sum_up(workload, 0, 10.0, used=0))
    parameters[0].grad = None
    carriage.take_early(sum_up(workload, 1, 10.0))
    assert gradients(parameters) == [7.0, None]
    sums = frozenset(workload._summed.values())
    workload.results.complete(0)
    carriage.take(0, sums)
    assert gradients(parameters) == [None, 5.0]


def test_what_the_script_may_have_changed_since_is_taken_again() -> None:
    parameters, workload, carriage = parts()
    for bucket in range(2):
        carriage.take_early(sum_up(workload, bucket, 10.0))
    sums = frozenset(workload._summed.values())
    workload.results.complete(0)
    for parameter in parameters:
        parameter.grad = torch.full((3,), np.nan)
    carriage.forget_early()
    carriage.take(0, sums)
    assert gradients(parameters) == [5.0, 5.0]
