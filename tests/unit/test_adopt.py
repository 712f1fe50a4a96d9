"""Checkpoints put back into live objects, bit for bit, and as little read as needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpift.checkpoint import placing
from mpift.checkpoint.adopt import adopt, load
from mpift.checkpoint.blocks import BLOCK_BYTES
from mpift.checkpoint.state import as_bytes
from mpift.errors import CheckpointDamagedError, CheckpointError
from tests.unit.saved_states import CountingReader, contents, put_back, saved
from tests.unit.test_checkpoint_state import WithExtra, same
from tests.unit.trainings import OPTIMIZERS, Make, begun, one_thread, train

__all__ = ["one_thread"]  # a fixture for these tests too


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("steps_before", [0, 2])
def test_resumed_training_is_uninterrupted_training_bit_for_bit(
    make: Make, steps_before: int, tmp_path: Path
) -> None:
    first = begun(make, seed=1)
    train(first, 3)
    manifest = saved(tmp_path, first, rng=True)
    expected = contents(first)
    train(first, 3)
    second = begun(make, seed=2)
    train(second, steps_before)
    result = put_back(tmp_path, manifest, second)
    second.update(result.values)
    assert result.rng
    assert same(contents(second), expected)
    train(second, 3)
    assert same(contents(second), contents(first))
    assert second["model"].out.weight is second["model"].table.weight


def test_float32_state_of_bfloat16_parameters_is_neither_cast_nor_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.optim.Optimizer, "_process_value_according_to_param_policy")

    def half(value: float) -> dict[str, Any]:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], 0.1)
        optimizer.state[parameter]["master"] = torch.full((4,), value)
        return {"optimizer": optimizer}

    first, second, empty = half(1 / 3), half(2.0), half(2.0)
    manifest = saved(tmp_path, first)
    master = next(iter(second["optimizer"].state.values()))["master"]
    empty["optimizer"].state.clear()
    for state in (second, empty):
        put_back(tmp_path, manifest, state)
        assert same(contents(state), contents(first))
    assert next(iter(second["optimizer"].state.values()))["master"] is master


def test_an_optimizer_that_loads_in_its_own_way_is_asked_to_and_not_cast(tmp_path: Path) -> None:
    loaded = []

    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            loaded.append(state_dict)
            super().load_state_dict(state_dict)

    def half(value: float) -> dict[str, Any]:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = Own([parameter], 0.1)
        optimizer.state[parameter]["master"] = torch.full((4,), value)
        return {"optimizer": optimizer}

    first, second = half(1 / 3), half(2.0)
    put_back(tmp_path, saved(tmp_path, first), second)
    assert len(loaded) == 1
    assert same(contents(second), contents(first))


def test_more_optimizer_state_than_was_saved_goes(tmp_path: Path) -> None:
    first = begun(OPTIMIZERS["momentum"], 1)
    manifest = saved(tmp_path, first)
    second = begun(OPTIMIZERS["momentum"], 2)
    train(second, 1)
    second["losses"] = []
    put_back(tmp_path, manifest, second)
    assert same(contents(second), contents(first))
    assert not second["optimizer"].state


def large(value: float) -> nn.Linear:
    model = nn.Linear(1024, 1024)  # four blocks and one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def test_only_blocks_that_differ_are_read(tmp_path: Path) -> None:
    first, second = large(1), large(1)
    manifest = saved(tmp_path, {"model": first})
    with torch.no_grad():
        second.weight[300] = 2  # in the second block
        second.bias[0] = 3
    place = second.weight.data_ptr()
    with CountingReader(tmp_path) as reader:
        result = adopt({"model": second}, manifest, reader, 0)
        assert sorted(reader.names) == [("model/bias", 0), ("model/weight", 1)]
    assert (result.blocks_read, result.blocks_matched) == (2, 3)
    assert result.bytes_read == BLOCK_BYTES + 4096
    assert second.weight.data_ptr() == place
    assert same(contents({"model": second}), contents({"model": first}))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [1, 2 * BLOCK_BYTES, placing.WINDOW_BYTES])
def test_each_rank_of_a_node_begins_with_another_portion(
    threads: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "WINDOW_BYTES", window)
    manifest = saved(tmp_path, {"model": large(1)})
    starts = []
    for rank in range(2):
        second = large(rank + 5)
        with CountingReader(tmp_path) as reader:
            adopt({"model": second}, manifest, reader, 0, threads=threads, rotate=(rank, 2))
            starts.append(reader.names[0])
            assert len(set(reader.names)) == len(reader.names) == 5
        assert same(contents({"model": second}), contents({"model": large(1)}))
    assert starts == [("model/weight", 0), ("model/weight", 2)]


def test_tensors_of_another_memory_format_are_restored_where_they_are(tmp_path: Path) -> None:
    def image(value: float) -> nn.Conv2d:
        model: nn.Conv2d = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.register_buffer("wide", torch.tensor([value]).expand(3, 5))
        return model

    first, second = image(1), image(2)
    weight = second.weight
    strides = weight.stride()
    put_back(tmp_path, saved(tmp_path, {"model": first}), {"model": second})
    assert second.weight is weight
    assert weight.stride() == strides
    assert same(contents({"model": second}), contents({"model": first}))


def test_nan_bits_and_all_dtypes_are_restored(tmp_path: Path) -> None:
    bits = torch.arange(-8, 8, dtype=torch.int32) * 0x0F0F0F0F
    kinds = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.complex64]
    kinds += [torch.uint16]

    class Plain(nn.Module):
        def __init__(self, bits: torch.Tensor) -> None:
            super().__init__()
            for index, dtype in enumerate(kinds):
                self.register_buffer(f"b{index}", bits.clone().view(dtype))
            self.register_buffer("flag", bits > 0)
            self.register_buffer("scalar", bits[3].clone())
            self.register_buffer("empty", bits[:0].clone())

    first, second = Plain(bits), Plain(torch.zeros_like(bits))
    put_back(tmp_path, saved(tmp_path, {"model": first}), {"model": second})
    for one, other in zip(first.buffers(), second.buffers(), strict=True):
        assert as_bytes(one).tobytes() == as_bytes(other).tobytes()


def test_each_rank_gets_its_own_part_whatever_their_number(tmp_path: Path) -> None:
    states = [{"model": nn.BatchNorm1d(2), "rank": rank} for rank in range(3)]
    for rank, state in enumerate(states):
        state["model"].running_mean.fill_(rank)  # type: ignore[attr-defined]
    manifest = saved(tmp_path, *states)
    for rank in range(5):
        model = nn.BatchNorm1d(2)
        result = put_back(tmp_path, manifest, {"model": model, "rank": None}, rank)
        assert result.values == {"rank": rank % 3}
        assert model.running_mean is not None
        assert model.running_mean.tolist() == [rank % 3] * 2


def test_plain_values_are_given_back_and_their_tensors_kept_where_they_fit(tmp_path: Path) -> None:
    value = {"best": torch.arange(4.0), "curve": np.arange(3), "more": [torch.ones(2)], "n": (1,)}
    manifest = saved(tmp_path, {"notes": value})
    live = {"best": torch.zeros(4), "curve": np.zeros(5, int), "n": (0,)}
    restored = put_back(tmp_path, manifest, {"notes": live}).values["notes"]
    assert same(restored, value)
    assert restored["best"] is live["best"]


def test_values_that_share_a_models_memory_get_their_own(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    best = {name: value.clone() + 1 for name, value in first.state_dict().items()}
    manifest = saved(tmp_path, {"best": best, "model": first})
    live = {"best": second.state_dict(), "model": second}  # aliases, not copies
    restored = put_back(tmp_path, manifest, live).values["best"]
    assert same(contents({"model": second}), contents({"model": first}))
    assert same(dict(restored), best)
    before = contents({"model": second})
    put_back(tmp_path, manifest, live, only=lambda name: name == "best")
    assert same(contents({"model": second}), before)


def test_extra_state_is_given_to_its_module(tmp_path: Path) -> None:
    first, second = WithExtra(), WithExtra()
    first.extra = {"scale": (2.5, torch.zeros(2))}
    manifest = saved(tmp_path, {"model": nn.Sequential(first)})
    put_back(tmp_path, manifest, {"model": nn.Sequential(second)})
    assert same(second.extra, first.extra)


def test_objects_with_a_state_load_it_themselves(tmp_path: Path) -> None:
    class Sampler:
        def __init__(self, left: list[int]) -> None:
            self.left = left

        def state_dict(self) -> dict[str, Any]:
            return {"left": list(self.left)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if len(state["left"]) < 2:
                raise ValueError("too few")
            self.left = state["left"]

    second = Sampler([])
    put_back(tmp_path, saved(tmp_path, {"s": Sampler(list(range(900)))}), {"s": second})
    assert second.left == list(range(900))
    with pytest.raises(CheckpointError, match=r"s: .*Sampler\.load_state_dict .* too few"):
        put_back(tmp_path, saved(tmp_path, {"s": Sampler([1])}), {"s": second})


def test_generators_are_left_alone_unless_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(3)
    manifest = saved(tmp_path, {"n": 1}, rng=True)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert not put_back(tmp_path, manifest, {"n": 0}, rng=False).rng
    assert not put_back(tmp_path, manifest, {"n": 0}, only=lambda name: name == "n").rng
    assert same(torch.get_rng_state(), before)
    assert put_back(tmp_path, manifest, {"n": 0}).rng
    assert same(torch.get_rng_state(), torch.manual_seed(3).get_state())


def test_what_is_not_chosen_stays_as_it_is(tmp_path: Path) -> None:
    first, second = begun(OPTIMIZERS["Adam"], 1), begun(OPTIMIZERS["Adam"], 2)
    train(first, 2)
    before, expected = contents(second), contents(first)
    result = put_back(
        tmp_path, saved(tmp_path, first), second, only=lambda name: name.startswith("model/middle.")
    )
    after = contents(second)
    assert not result.values
    for key, value in after["model"].items():
        source = expected if key.startswith("middle.") else before
        assert same(value, source["model"][key])
    assert same(after["optimizer"], before["optimizer"])
    assert same(after["scheduler"], before["scheduler"])


def test_a_damaged_block_is_not_taken_for_good(tmp_path: Path) -> None:
    manifest = saved(tmp_path, {"model": large(1)})
    stored = manifest.named()["model/weight"].blocks[2]
    file = tmp_path / stored.file
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(stored.offset + 77)
        opened.write(b"?")
    with pytest.raises(CheckpointDamagedError, match="model/weight, block 2 of 4"):
        put_back(tmp_path, manifest, {"model": large(2)})
    # What is there already need not be read.
    assert put_back(tmp_path, manifest, {"model": large(1)}).blocks_read == 0


def test_a_checkpoint_is_loaded_without_live_objects(tmp_path: Path) -> None:
    first = begun(OPTIMIZERS["Adam"], 1)
    train(first, 1)
    manifest = saved(tmp_path, first, {**first, "losses": [5]}, rng=True)
    with CountingReader(tmp_path) as reader:
        found = load(manifest, reader, rank=1)
    expected = contents({**first, "losses": [5]})
    expected["model"] = dict(expected["model"])
    found["model"] = {key: found["model"][key] for key in expected["model"]}
    assert same({name: found[name] for name in expected}, expected)
    assert found.keys() == expected.keys()
    assert found["model"]["out.weight"] is found["model"]["table.weight"]
