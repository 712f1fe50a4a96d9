"""States that are not what the checkpoint holds: what differs is named, or let go if asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpift.errors import CheckpointError
from tests.unit.saved_states import contents, put_back, saved
from tests.unit.test_checkpoint_state import OnlySaves, same
from tests.unit.trainings import one_thread

__all__ = ["one_thread"]  # a fixture for these tests too


def test_names_that_are_missing_or_too_many_are_listed(tmp_path: Path) -> None:
    manifest = saved(tmp_path, {"model": nn.Linear(2, 2), **dict.fromkeys("abcdefg", 1)})
    state = {"model": nn.BatchNorm1d(2), "new": 5}
    words = (
        "not in it: model/num_batches_tracked, model/running_mean, model/running_var, new;"
        " only in it: a, b, c, d, e and 2 more"
    )
    with pytest.raises(CheckpointError, match=words):
        put_back(tmp_path, manifest, {**state, "model": nn.BatchNorm1d(2)})


def test_names_that_differ_are_let_go_if_asked_for(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    manifest = saved(tmp_path, {"model": first, "gone": 1})
    result = put_back(tmp_path, manifest, {"model": second, "new": 5}, strict=False)
    assert not result.values
    assert same(second.weight.detach(), first.weight.detach())


def test_a_wrong_shape_or_dtype_is_named_before_anything_is_changed(tmp_path: Path) -> None:
    first = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)}
    manifest = saved(tmp_path, first)
    for other, words in [
        (nn.Linear(2, 4), r"b/weight is float32 of shape \[3, 2\] .* float32 of shape \[4, 2\]"),
        (nn.Linear(2, 3).double(), r"b/weight is float32 .* float64 of shape \[3, 2\]"),
    ]:
        second = {"a": nn.Linear(2, 2), "b": other}
        before = contents(second)
        with pytest.raises(CheckpointError, match=words):
            put_back(tmp_path, manifest, second)
        assert same(contents(second), before)


def test_other_parameter_groups_and_shapes_of_an_optimizer_are_named(tmp_path: Path) -> None:
    def stepped(*shapes: int) -> dict[str, Any]:
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = torch.optim.Adam(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"optimizer": optimizer}

    manifest = saved(tmp_path, stepped(2, 3))
    with pytest.raises(CheckpointError, match=r"optimizer has \[2\] parameters .* and \[1\] here"):
        put_back(tmp_path, manifest, stepped(2))
    words = r"optimizer/state/1/exp_avg has shape \[3\] in the checkpoint, and \[4\] here"
    with pytest.raises(CheckpointError, match=words):
        put_back(tmp_path, manifest, stepped(2, 4))


def test_tensors_that_are_tied_only_here_are_named(tmp_path: Path) -> None:
    first = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    second = copy.deepcopy(first)
    second[1].weight = second[0].weight
    with pytest.raises(CheckpointError, match=r"model/1\.weight is the same tensor as another"):
        put_back(tmp_path, saved(tmp_path, {"model": first}), {"model": second})


def test_tensors_that_were_tied_only_then_are_both_restored(tmp_path: Path) -> None:
    first = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    second = copy.deepcopy(first)
    first[1].weight = first[0].weight
    put_back(tmp_path, saved(tmp_path, {"model": first}), {"model": second})
    assert same(contents({"model": second}), contents({"model": first}))


def test_another_kind_of_object_is_named(tmp_path: Path) -> None:
    manifest = saved(tmp_path, {"a": 1, "b": {"x": 2}})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(CheckpointError, match="b is an optimizer here"):
        put_back(tmp_path, manifest, {"a": 1, "b": optimizer})
    with pytest.raises(CheckpointError, match="a is a module here"):
        put_back(tmp_path, manifest, {"a": nn.Linear(1, 1), "b": 1}, strict=False)
    with pytest.raises(CheckpointError, match="OnlySaves"):
        put_back(tmp_path, manifest, {"a": OnlySaves(), "b": 1})
