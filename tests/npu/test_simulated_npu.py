"""The simulated NPU behaves to the host as an NPU does, and catches what breaks on one."""

from __future__ import annotations

import copy
import io
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpift.devices import backend
from tests.npu.simulated import (
    FOREVER_SECONDS,
    SHORT_SECONDS,
    gate_of_streams,  # noqa: F401  a fixture
    later,
    run,
    simulated_npu,  # noqa: F401  a fixture
)

# The first test on a machine builds it.
pytestmark = pytest.mark.timeout(900)


def test_every_name_that_mpift_calls_is_there(npu: Any) -> None:
    assert npu.SIMULATED
    assert [name for name in backend.NPU_NAMES if not hasattr(torch.npu, name)] == []
    assert torch.npu.get_device_name() == "Simulated NPU"
    assert torch.accelerator.current_accelerator() == torch.device("npu")


def test_mpift_chooses_it_only_where_it_is_told_to(
    npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(backend.NPU_BACKEND_VARIABLE, raising=False)
    assert backend.available() == "cpu"
    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "mpift.testing.npu")
    assert backend.select(None, 3) == torch.device("npu", 1)
    torch.npu.set_device(0)


# ---- Training ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        parts = self.mix(self.norm(x)).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        with sdpa_kernel(SDPBackend.MATH):  # the CPU would take a fused kernel
            y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2)).transpose(1, 2)


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 1, 12, 12, generator=generator), labels(generator, 8)


def labels(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(10, shape, generator=generator)


def tokens(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return labels(generator, 4, 6), labels(generator, 4, 6)


def convolutional() -> nn.Module:
    head = [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 10)]
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), *head)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 20), nn.GELU(), nn.Linear(20, 10))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("build", "batch"), [(convolutional, images), (perceptron, images), (Block, tokens)]
)
def test_training_is_equal_to_that_on_the_cpu_to_the_last_bit(
    npu: Any, build: Callable[[], nn.Module], batch: Callable, optimizer: str
) -> None:
    def train(device: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = build().to(device)
        steps = OPTIMIZERS[optimizer](model.parameters())
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            inputs, targets = batch(generator)
            steps.zero_grad()
            nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            steps.step()
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    expected, found = train("cpu"), train("npu")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_state_is_saved_loaded_copied_and_sent_between_devices(npu: Any) -> None:
    model = perceptron().to("npu")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for place in ("cpu", "npu:1", "npu:0"):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert {str(tensor.device) for tensor in loaded.values()} == {place}
        assert all(torch.equal(loaded[name].cpu(), expected[name]) for name in expected)
    twin = copy.deepcopy(model)
    assert all(
        torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True)
    )
    assert twin[1].weight.data_ptr() != model[1].weight.data_ptr()


def test_views_share_memory_and_lists_are_worked_on(npu: Any) -> None:
    ones = torch.ones(4, device="npu")
    bits = ones.view(torch.int32)
    bits[0] = 0
    assert ones.tolist() == [0, 1, 1, 1]
    torch._foreach_add_([ones, ones[2:]], 1.0)
    both = torch.cat([ones, torch.tensor([float("nan")], device="npu")])
    assert both[:4].tolist() == [1, 2, 3, 3]
    assert both.isfinite().tolist() == [True] * 4 + [False]


def test_mixed_precision_lowers_scales_and_skips_a_step_that_overflows(npu: Any) -> None:
    model = nn.Linear(3, 2).to("npu")
    steps = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**4)
    before = model.weight.detach().clone()
    for loss_times in (float("inf"), 1.0):
        with torch.autocast("npu", dtype=torch.bfloat16):
            output = model(torch.ones(1, 3, device="npu"))
            assert output.dtype == torch.bfloat16
            assert output.softmax(-1).dtype == torch.float32
        scaler.scale(output.float().sum() * loss_times).backward()
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
        assert torch.equal(model.weight, before) == (loss_times == float("inf"))
    assert scaler.get_scale() == 2.0**3


# ---- Streams -------------------------------------------------------------------------------------


def test_a_copy_of_pinned_memory_runs_beside_the_host(npu: Any) -> None:
    source, target = torch.ones(4).pin_memory(), torch.zeros(4, device="npu")
    back = torch.zeros(4, pin_memory=True)
    event = torch.npu.Event()
    npu.set_copy_seconds(SHORT_SECONDS)
    target.copy_(source, non_blocking=True)
    back.copy_(target, non_blocking=True)
    event.record()
    event.synchronize()
    assert event.query()
    assert back.tolist() == [1, 1, 1, 1]
    npu.set_copy_seconds(FOREVER_SECONDS)
    back.copy_(target.mul_(2), non_blocking=True)
    event.record()
    assert not event.query()
    assert not torch.npu.current_stream().query()
    assert back.tolist() == [1, 1, 1, 1]


def test_a_copy_of_pageable_memory_waits_whatever_it_is_told(npu: Any) -> None:
    target, back = torch.zeros(4, device="npu"), torch.zeros(4)
    npu.set_copy_seconds(SHORT_SECONDS)
    target.copy_(torch.ones(4), non_blocking=True)
    assert torch.npu.current_stream().query()
    back.copy_(target, non_blocking=True)
    assert back.tolist() == [1, 1, 1, 1]


def test_a_stream_goes_on_while_another_one_is_busy(npu: Any) -> None:
    side = torch.npu.Stream()
    source, target = torch.ones(4).pin_memory(), torch.zeros(4, device="npu")
    npu.set_kernel_seconds(FOREVER_SECONDS)
    torch.zeros(1, device="npu")
    with torch.npu.stream(side):
        target.copy_(source, non_blocking=True)
    side.synchronize()
    assert not torch.npu.default_stream().query()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_copy_that_does_not_wait_for_its_sources_kernel_reads_old_numbers(
    npu: Any, ordered: bool
) -> None:
    side = torch.npu.Stream()
    numbers, copied = torch.zeros(4, device="npu"), torch.zeros(4, pin_memory=True)
    npu.set_kernel_seconds(SHORT_SECONDS if ordered else FOREVER_SECONDS)
    numbers.fill_(1)
    if ordered:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        copied.copy_(numbers, non_blocking=True)
    side.synchronize()
    assert copied.tolist() == [float(ordered)] * 4


@pytest.mark.parametrize("ordered", [False, True])
def test_a_kernel_that_does_not_wait_for_a_copy_overwrites_its_source(
    npu: Any, gate: SimpleNamespace, ordered: bool
) -> None:
    side = torch.npu.Stream()
    numbers, copied = torch.ones(4, device="npu"), torch.zeros(4, pin_memory=True)
    with torch.npu.stream(side):
        side.wait_event(gate.event)
        copied.copy_(numbers, non_blocking=True)
    if ordered:
        torch.npu.current_stream().wait_event(side.record_event())
        opened = later(gate.open)
    numbers.fill_(2)
    if ordered:
        opened.join()
    else:
        gate.open()
    side.synchronize()
    assert copied.tolist() == [1.0 if ordered else 2.0] * 4


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_under_a_copy_is_spoilt_unless_the_stream_was_recorded(
    npu: Any, gate: SimpleNamespace, recorded: bool
) -> None:
    side = torch.npu.Stream()
    numbers, copied = torch.ones(4, device="npu"), torch.zeros(4, pin_memory=True)
    with torch.npu.stream(side):
        side.wait_event(gate.event)
        copied.copy_(numbers, non_blocking=True)
    if recorded:
        numbers.record_stream(side)
    used = torch.npu.memory_allocated()
    del numbers
    assert torch.npu.memory_allocated() == used - 512
    torch.npu.current_stream().synchronize()
    gate.open()
    side.synchronize()
    assert copied.isnan().all() != recorded
    assert copied.tolist() == [1] * 4 or not recorded


def test_an_events_wait_lets_other_python_threads_run(npu: Any, gate: SimpleNamespace) -> None:
    opened = later(gate.open)
    torch.npu.current_stream().wait_event(gate.event)
    torch.npu.current_stream().record_event().synchronize()
    opened.join()


def test_events_tell_the_time_between_them_once_they_are_done(npu: Any) -> None:
    first, last = (torch.npu.Event(enable_timing=True) for _ in range(2))
    npu.set_copy_seconds(latency=SHORT_SECONDS, per_byte=SHORT_SECONDS / 16)
    first.record()
    torch.zeros(4, pin_memory=True).to("npu", non_blocking=True)
    last.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) >= 2000 * SHORT_SECONDS
    untimed = torch.npu.Event()
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        untimed.elapsed_time(last)


# ---- Memory --------------------------------------------------------------------------------------


def test_the_host_cannot_touch_the_memory_of_a_device(npu: Any) -> None:
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(1, device="npu").numpy()
    touch = (
        "import ctypes, torch, mpift.testing.npu\n"
        "ctypes.string_at(torch.ones(1, device='npu').data_ptr(), 4)"
    )
    assert run(touch).returncode == -signal.SIGSEGV


def test_memory_is_counted_and_runs_out(npu: Any) -> None:
    used = torch.npu.memory_allocated(1)
    npu.set_capacity(used + 4096, device=1)
    held = torch.empty(1024, device="npu:1")
    assert torch.npu.memory_allocated(1) == used + 4096
    assert torch.npu.mem_get_info(1) == (0, used + 4096)
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate 512 "):
        torch.empty(1, device="npu:1")
    del held
    assert torch.npu.memory_allocated(1) == used
    assert torch.npu.max_memory_allocated(1) >= used + 4096
    torch.empty(1, device="npu:1")


# ---- Random numbers ------------------------------------------------------------------------------


def test_each_device_draws_from_a_generator_that_can_be_seeded_and_set_back(npu: Any) -> None:
    torch.manual_seed(7)
    state = torch.npu.get_rng_state(0)
    drawn = torch.randn(5, device="npu:0")
    dropped = nn.functional.dropout(torch.ones(50, device="npu:0"))
    assert torch.equal(torch.randn(5, device="npu:1").cpu(), drawn.cpu())
    torch.npu.set_rng_state(state, 0)
    assert torch.equal(torch.randn(5, device="npu:0"), drawn)
    assert torch.equal(nn.functional.dropout(torch.ones(50, device="npu:0")), dropped)
    own = torch.Generator("npu:1").manual_seed(7)
    states = torch.npu.get_rng_state_all()
    assert torch.equal(torch.randn(5, device="npu:1", generator=own).cpu(), drawn.cpu())
    assert all(map(torch.equal, torch.npu.get_rng_state_all(), states))
    with pytest.raises(RuntimeError, match="RNG state"):
        torch.npu.set_rng_state(state[:-8], 0)
