"""What old scripts ask for that is not there: the answer says what to do instead."""

from __future__ import annotations

import inspect

import pytest
import torch

import mpift.torch as hvd
from mpift.torch import optimizer

ABSENT = ["start_timeline", "add_process_set", "sparse_allreduce_async", "poll", "SyncBatchNorm"]
# Horovod's, in its order: scripts may give them by position.
ARGUMENTS = [
    "optimizer",
    "named_parameters",
    "compression",
    "backward_passes_per_step",
    "op",
    "gradient_predivide_factor",
    "num_groups",
    "groups",
    "sparse_as_dense",
    "process_set",
]


@pytest.mark.parametrize("name", ABSENT)
def test_a_name_that_is_absent_says_what_to_do(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"hvd\.{name} is not available in this version: \w+"):
        getattr(hvd, name)


def test_arguments_are_those_of_horovod_and_then_ours() -> None:
    known = list(inspect.signature(hvd.DistributedOptimizer).parameters)
    assert known[: len(ARGUMENTS)] == ARGUMENTS


def test_a_process_set_is_refused() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="process sets are not available"):
        optimizer._check(plain, hvd.Average, 1.0, object())
