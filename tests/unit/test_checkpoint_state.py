"""States as tensors and plain trees, and back."""

from __future__ import annotations

import collections
import copy
import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from mpift.checkpoint.blocks import BLOCK_BYTES, SPARSE_BLOCK_BYTES
from mpift.checkpoint.state import (
    as_bytes,
    flatten,
    random_states,
    set_random_states,
    unflatten,
)
from mpift.checkpoint.trees import LONG_LIST, component
from mpift.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    flat = flatten({"x": value}, rng=False)
    text = json.dumps(flat.own, allow_nan=False)
    assert list(flat.specs) == list(flat.own_tensors)
    check_paths(flat.specs)
    return unflatten(json.loads(text)["x"], flat.own_tensors)


def check_paths(names: Any) -> None:
    """As HDF5 needs them: no group is also a dataset, and no part is empty or a dot."""
    for name in names:
        parts = name.split("/")
        assert not {"", ".", ".."} & set(parts)
        assert "\0" not in name
        name.encode()
        assert not {"/".join(parts[:n]) for n in range(1, len(parts))} & set(names)


def same(one: Any, other: Any) -> bool:
    """Alike in every bit and type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool((as_bytes(one) == as_bytes(other)).all())
    if isinstance(one, (np.ndarray, np.generic)):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, collections.deque)):
        if getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return False
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):  # NaN is equal to nothing: told by their text
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return bool(one == other)


texts = st.text(st.characters(codec=None, categories=None), max_size=6)
keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.sampled_from(["#", ".", "..", "", "/", "%", "a/b", "%2E", "0", "1.0", "None"])
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
tensors = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(3, dtype=torch.int16),
        torch.empty(0, 4),
        torch.ones(4, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(1).expand(5),
        torch.tensor([1 + 2j]).conj(),
    ]
)
arrays = st.sampled_from(
    [
        np.arange(4, dtype=np.uint16),
        np.arange(4)[::-1],
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(3, dtype=">i4"),
        np.zeros((0, 2), np.float32),
        np.arange(3, dtype=np.longdouble),
        np.array(["", ""]),
        np.array(2.5),
    ]
)
scalars = keys | st.complex_numbers() | tensors | arrays
scalars |= st.sampled_from(
    [
        torch.float8_e5m2,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        np.float64(0.1),
        np.float32("nan"),
        np.bool_(1),
        np.str_("ab"),
        np.str_(""),
        np.datetime64("2020-01-01T00:00", "m"),
        bytearray(b"ab"),
        2**53 + 1,
        -(2**5000),
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 3)),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=3),
        st.lists(st.integers(0, 5)).map(collections.Counter),
    ),
    max_leaves=12,
)


@given(values)
def test_whatever_values_are_nested_come_back_the_same(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(texts, texts)
def test_different_keys_are_different_parts_of_a_path(one: str, other: str) -> None:
    assert (component(one) == component(other)) == (one == other)
    check_paths([component(one)])


def test_keys_that_look_alike_do_not_clash() -> None:
    tensor = torch.ones(2)
    value = {"0": {"b": tensor.clone()}, 0: tensor.clone(), "0%": tensor.clone(), None: tensor}
    assert same(there_and_back(value), value)


def test_a_tensor_that_stands_in_two_places_is_stored_once_and_is_one_again() -> None:
    tensor = torch.ones(3)
    flat = flatten({"x": [tensor, {"again": tensor}]}, rng=False)
    assert list(flat.own_tensors) == ["x/0"]
    back = unflatten(flat.own["x"], {"x/0": tensor.clone()})
    assert back[0] is back[1]["again"]


@pytest.mark.parametrize("kind", [list, tuple, set])
@pytest.mark.parametrize("element", [int, float])
def test_long_lists_of_numbers_become_tensors(kind: type, element: type) -> None:
    value = kind(element(number) for number in range(LONG_LIST))
    assert same(there_and_back(value), value)
    assert list(flatten({"x": value}, rng=False).own_tensors) == ["x"]


@pytest.mark.parametrize("odd", [1.5, 2**64, True, "one"])
def test_long_lists_of_several_kinds_stay_as_they_are(odd: Any) -> None:
    value = [*range(LONG_LIST), odd]
    assert same(there_and_back(value), value)


def test_the_bits_of_a_nan_are_kept() -> None:
    strange = torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)
    assert same(there_and_back(strange), strange)
    single = struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0]
    assert math.isnan(single)
    assert same(there_and_back([single, -0.0, math.inf]), [single, -0.0, math.inf])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(4)).sum().backward()
        optimizer.step()


def embedding_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))


def test_parameters_and_optimizers_are_shared_and_buffers_are_a_ranks_own() -> None:
    model = embedding_model()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    trained(model, optimizer)
    flat = flatten(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}, rng=False
    )
    parameters = {f"model/{name}" for name, _ in model.named_parameters()}
    buffers = {f"model/{name}" for name, _ in model.named_buffers()}
    state = {
        f"optimizer/state/{index}/{key}"
        for index in range(5)
        for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }
    assert set(flat.shared_tensors) == parameters | state
    assert set(flat.own_tensors) == buffers
    assert list(flat.specs) == [*flat.shared_tensors, *flat.own_tensors]
    assert flat.own["epoch"] == 3
    assert flat.own["model"]["#"] == flat.shared["model"]["#"] == "module"
    assert flat.shared_tensors["model/0.weight"] is model[0].weight
    assert same(unflatten(flat.shared["optimizer"], flat.shared_tensors), optimizer.state_dict())
    assert same(unflatten(flat.shared["scheduler"], {}), scheduler.state_dict())


def test_embeddings_and_their_state_have_small_blocks() -> None:
    model = embedding_model()
    # Not in the model's order.
    optimizer = torch.optim.Adam([*model[1].parameters(), *model[0].parameters()])
    trained(nn.Sequential(model[0], model[1]), optimizer)
    specs = flatten({"optimizer": optimizer, "model": model}, rng=False).specs
    small = {name for name, spec in specs.items() if spec.block_bytes == SPARSE_BLOCK_BYTES}
    state = {f"optimizer/state/2/{key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    assert small == {"model/0.weight", *state}
    assert {spec.block_bytes for name, spec in specs.items() if name not in small} == {BLOCK_BYTES}


def test_tied_parameters_are_stored_once() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4, bias=False))
    model[1].weight = model[0].weight
    flat = flatten({"model": model}, rng=False)
    assert list(flat.shared_tensors) == ["model/0.weight"]
    names = {key: leaf["name"] for key, leaf in flat.shared["model"]["v"].items()}
    assert names == {"0.weight": "model/0.weight", "1.weight": "model/0.weight"}


class WithExtra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = {"scale": (1.5, torch.ones(2))}
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_modules_is_kept_and_buffers_that_do_not_persist_are_not() -> None:
    flat = flatten({"model": WithExtra()}, rng=False)
    assert list(flat.own_tensors) == ["model/_extra_state/scale/1"]
    assert list(flat.shared_tensors) == ["model/weight", "model/bias"]


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        lr_scheduler.StepLR(optimizer, 2),
        lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
        lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
        lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
        lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
        torch.optim.swa_utils.SWALR(optimizer, 0.05),
    ]


@pytest.mark.filterwarnings("ignore")  # of the order of steps, which is of no interest here
def test_every_scheduler_of_torch_comes_back_the_same() -> None:
    for index in range(10):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = schedulers(optimizer)[index]
        steps = [0.5] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
        for _ in range(3):
            scheduler.step(*steps)
        expected = copy.deepcopy(scheduler.state_dict())
        flat = flatten({"scheduler": scheduler, "optimizer": optimizer}, rng=False)
        tree = json.loads(json.dumps(flat.shared, allow_nan=False))
        assert same(unflatten(tree["scheduler"], flat.shared_tensors), expected)


def test_as_bytes_shares_memory_where_it_can() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    as_bytes(tensor)[0] = 7
    assert tensor[0, 0] == 7
    turned = tensor.t()
    assert as_bytes(turned).tobytes() == turned.contiguous().numpy().tobytes()
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert as_bytes(image).tobytes() == image.contiguous().numpy().tobytes()
    assert as_bytes(torch.tensor(True)).tolist() == [1]
    assert not as_bytes(torch.empty(0, 3, dtype=torch.bfloat16)).size


def test_random_number_generators_go_on_where_they_were() -> None:
    def draw() -> Any:
        numbers = np.random.standard_normal(3).tolist()  # noqa: NPY002
        return [random.gauss(0, 1), numbers, torch.rand(2).tolist()]

    before = random_states()
    try:
        draw()  # so that both have half of a pair of normal numbers left over
        flat = flatten({})
        expected = draw()
        tree = json.loads(json.dumps(flat.own["rng"], allow_nan=False))
        set_random_states(unflatten(tree, flat.own_tensors))
        assert draw() == expected
    finally:
        set_random_states(before)


class Unknown:
    pass


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [Unknown()]}, "x/a/0 is a tests.unit.test_checkpoint_state.Unknown, .*state_dict"),
        (OnlySaves(), "x is a .*OnlySaves, .*load_state_dict"),
        (random.seed, "x is a builtins.method"),
        (collections.defaultdict(int), "x is a collections.defaultdict"),
        ({torch.ones(1): 1}, "x has a torch.Tensor as a key"),
        (ITSELF, "contains itself"),
        (torch.ones(2, 2).to_sparse(), "x is a tensor of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "x is a tensor on the meta device"),
        (nn.LazyLinear(2), "x/weight is a lazy parameter"),
        (np.array([None]), "x is an array of object"),
        (np.zeros(1, [("a", int)]), "x is an array of"),
        (np.zeros(1, [("a", int)])[0], "x is a numpy value of"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_path(value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        flatten({"x": value}, rng=False)


@pytest.mark.filterwarnings("ignore")  # both kinds are warned of
def test_tensors_of_odd_kinds_are_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="x/0 is a quantized tensor"):
        flatten({"x": [quantized]}, rng=False)
    with pytest.raises(CheckpointError, match=r"x is a tensor of torch\.complex32"):
        flatten({"x": torch.empty(2, dtype=torch.complex32)}, rng=False)


@pytest.mark.parametrize("name", ["ranks", "_trees", "rng", "a/b", "", 3])
def test_names_that_are_taken_or_can_not_be_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="can't be named"):
        flatten({name: 1})


def test_a_tag_of_a_later_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'matrix'.*version"):
        unflatten({"a": {"#": "matrix", "v": 1}}, {})
