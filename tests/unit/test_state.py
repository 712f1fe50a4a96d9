"""The state of an optimizer as pieces and as one number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpift.torch.state import (
    OptimizerState,
    bytes_of,
    differences,
    flip_bit,
    hash_of,
    write_bytes,
)


def trained(steps: int = 2) -> tuple[nn.Linear, torch.optim.Adam, OptimizerState]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return model, optimizer, OptimizerState(optimizer, lambda p: names.get(p, "other"))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def value(state: OptimizerState) -> int:
    return hash_of(state.arrays(), state.plain())


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a parameter": lambda model, _: model.weight.data.view(torch.int32)[0, 0].bitwise_xor_(1),
    "a moment": lambda model, opt: opt.state[model.bias]["exp_avg"].add_(1),
    "a step": lambda model, opt: opt.state[model.bias]["step"].add_(1),
    "a setting": lambda _, opt: opt.param_groups[0].update(lr=0.2),
    "new memory": lambda model, _: setattr(model.weight, "data", model.weight.data + 1),
    "a new tensor": lambda model, opt: opt.state[model.bias].update(exp_avg=torch.ones(3)),
    "one more": lambda model, opt: opt.state[model.bias].update(more=torch.ones(1)),
    "a plain value": lambda model, opt: opt.state[model.bias].update(more=7),
    "a group": lambda _, opt: opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "less": lambda model, opt: opt.state.pop(model.bias),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_whatever_changes_changes_the_hash(change: Callable[[Any, Any], Any]) -> None:
    model, optimizer, state = trained()
    before = value(state)
    assert value(state) == before
    change(model, optimizer)
    assert value(state) != before


def test_state_that_was_loaded_or_made_in_the_first_step_is_seen() -> None:
    model, optimizer, state = trained(steps=0)
    before = value(state)
    step(model, optimizer)
    after = value(state)
    assert after != before
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert value(state) == after
    optimizer.state[model.bias]["exp_avg"].add_(1)
    assert value(state) != after


def test_pieces_have_names_and_can_be_written_back() -> None:
    model, _, state = trained()
    other, other_optimizer, other_state = trained(steps=5)
    assert list(state.pieces())[:3] == ["weight", "weight: exp_avg", "weight: exp_avg_sq"]
    for name, tensor in other_state.pieces().items():
        write_bytes(bytes_of(state.pieces()[name]).copy(), tensor)
    other_optimizer.param_groups[0]["lr"] = 3.0
    other_state.take_plain(state.plain())
    assert value(other_state) == value(state)
    assert torch.equal(other.weight, model.weight)


def test_what_scripts_keep_in_a_group_and_the_order_of_its_keys_make_no_difference() -> None:
    _, optimizer, state = trained()
    before = state.plain()
    group = optimizer.param_groups[0]
    optimizer.param_groups[0] = dict(reversed([*group.items(), ("last_loss", 0.3)]))
    assert state.plain() == before
    optimizer.param_groups[0]["initial_lr"] = 7.0  # a scheduler's; what comes of it is in lr
    assert state.plain() == before
    optimizer.param_groups[0]["eps"] = 7.0
    assert state.plain() != before


ALTERED: dict[str, Callable[[Any, Any], Any]] = {
    "less": lambda _, opt: opt.param_groups[0].pop("eps"),
    "a list": lambda _, opt: opt.param_groups[0].update(betas=[0.1, 0.2]),
    "a tensor of another type": lambda _, opt: opt.param_groups[0].update(lr=torch.tensor(1)),
    "numpy": lambda _, opt: opt.param_groups[0].update(lr=np.float32(0.3)),
    "nothing": lambda _, opt: opt.param_groups[0].update(lr=None),
    "a note": lambda model, opt: opt.state[model.bias].update(more=7),
    "no number": lambda model, opt: opt.state[model.bias].update(more=float("nan")),
}


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED.keys())
def test_a_repair_makes_plain_values_equal_in_both_directions(
    alter: Callable[[Any, Any], Any],
) -> None:
    for altered_is_right in (False, True):
        model, optimizer, altered = trained()
        alter(model, optimizer)
        _, _, usual = trained()
        right, wrong = (altered, usual) if altered_is_right else (usual, altered)
        assert len(differences(right.plain(), wrong.plain())) == 1
        wrong.take_plain(right.plain())
        assert wrong.plain() == right.plain()


def test_settings_that_no_repair_can_change_are_left_and_named() -> None:
    _, optimizer, state = trained()
    _, other, other_state = trained()
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 3.0})
    optimizer.param_groups[0]["lr"] = 5.0
    before = state.plain()
    state.take_plain(other_state.plain())
    assert state.plain() == before
    assert differences(before, other_state.plain()) == {
        "number of param_groups": "1 here, 2 there",
        "param_groups[0]['lr']": "5.0 here, 0.1 there",
    }
    other.param_groups.pop()
    optimizer.param_groups[0]["foreach"] = object()
    other_state.take_plain(state.plain())
    names = list(differences(other_state.plain(), state.plain()))
    assert names == ["param_groups[0]['foreach']"]


def test_an_empty_tensor_is_written_back_like_any_other() -> None:
    tensor = torch.empty(0, 3)
    write_bytes(bytes_of(tensor).copy(), tensor)
    assert tensor.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_layout_and_dtype_comes_back_as_it_was(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last)
    data = bytes_of(tensor).copy()
    expected = tensor.clone()
    tensor.zero_()
    write_bytes(data, tensor)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_bit_flips_at_a_place_that_the_member_and_the_step_decide(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(40).to(dtype)
    places = set()
    for number in range(4):
        first, again = tensor.clone(), tensor.clone()
        place = flip_bit({"a": first}, 2, number)
        assert flip_bit({"a": again}, 2, number) == place
        assert torch.equal(first, again)
        differing = np.bitwise_xor(bytes_of(first), bytes_of(tensor))
        assert int(np.unpackbits(differing).sum()) == 1
        assert torch.allclose(first, tensor, rtol=0.34, atol=0)
        places.add(place)
    assert len(places) > 1
