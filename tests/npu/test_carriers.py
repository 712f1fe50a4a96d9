"""Gradients between an accelerator and the host: on the simulated NPU, and on CUDA where it is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpift.devices import backend
from mpift.devices.carriers import Load, carrier_for, memory_for
from mpift.devices.courier import Courier
from mpift.devices.cpu import CpuCarrier

SLOTS = [(0, 6), (6, 7), (7, 19)]
SHAPES = [(2, 3), (1,), (3, 4)]
LENGTH = 19


@pytest.fixture(params=["npu", "cuda"])
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "mpift.testing.npu")
    yield backend.select(request.param, 0)
    if request.param == "npu":
        simulated().reset()


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """For what can only be seen on a device that does as it is told."""
    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "mpift.testing.npu")
    yield backend.select("npu", 0)
    simulated().reset()


def simulated() -> Any:
    import mpift.testing.npu

    return mpift.testing.npu


def gradients_of(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def host_for(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    array = memory_for(device, LENGTH, numpy_dtype)
    return array.base if device.type != "cpu" else torch.from_numpy(array)


def carry_in(
    carrier: Any, courier: Courier, gradients: list[Any], host: torch.Tensor, add: bool = False
) -> None:
    done = threading.Event()
    for position, gradient in enumerate(gradients):
        carrier.place(position, gradient, host, add)
    carrier.send(done.set)
    courier.drain()
    assert done.is_set()


def wait_for(event: threading.Event) -> None:
    event.wait()


def load(device: torch.device, dtype: torch.dtype, factor: float = 1.0, narrow: Any = None) -> Load:
    return Load(device, dtype, SLOTS, factor, [narrow, None, narrow])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_arrives_is_what_the_cpu_would_have_put_there(
    device: torch.device, dtype: torch.dtype, factor: float, add: bool
) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    courier = Courier()
    gradients: list[Any] = gradients_of(dtype)
    gradients[1] = None  # nobody has used that one
    here, there = host_for(torch.device("cpu"), wide), host_for(device, wide)
    for host in (here, there):
        host.fill_(0.5)
    carry_in(CpuCarrier(SLOTS, factor), courier, gradients, here, add)
    moved = [g if g is None else g.to(device) for g in gradients]
    carry_in(carrier_for(load(device, dtype, factor), courier), courier, moved, there, add)
    assert torch.equal(here, there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_results_come_back_divided_and_where_nobody_used_a_parameter_nothing_comes(
    device: torch.device, dtype: torch.dtype, divisor: float
) -> None:
    carrier = carrier_for(load(device, dtype), Courier())
    host = host_for(device)
    host.copy_(torch.randn(LENGTH, generator=torch.Generator().manual_seed(1)))
    gradients = [g.to(device) for g in gradients_of(dtype)]
    carrier.fetch(host, divisor, [gradients[0], None, gradients[2]])
    for position in (0, 2):
        start, stop = SLOTS[position]
        expected = (host[start:stop] / divisor).to(dtype).view(SHAPES[position])
        torch.testing.assert_close(gradients[position].cpu(), expected, rtol=1e-6, atol=0)
    carrier.settle()


def test_what_is_narrowed_travels_in_sixteen_bits_and_its_loss_is_paid_back(
    device: torch.device,
) -> None:
    courier = Courier()
    carrier = carrier_for(load(device, torch.float32, narrow=torch.float16), courier)
    gradients = [g.to(device) for g in gradients_of(torch.float32)]
    host, total = host_for(device), torch.zeros(LENGTH)
    rounds = 50
    for _ in range(rounds):
        carry_in(carrier, courier, list(gradients), host)
        assert torch.equal(host[:6], host[:6].half().float())
        assert torch.equal(host[6:7], gradients[1].cpu())
        total += host
    exact = rounds * torch.cat([g.cpu().flatten() for g in gradients])
    # One rounding in all, not one a round.
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=2e-3)


def test_an_overflow_is_seen_once_and_not_for_ever(device: torch.device) -> None:
    courier = Courier()
    carrier = carrier_for(load(device, torch.float32, narrow=torch.float16), courier)
    host = host_for(device)
    large = [torch.full(shape, 1e6, device=device) for shape in SHAPES]
    carry_in(carrier, courier, large, host)
    assert torch.isinf(host[0])
    carry_in(carrier, courier, [g.to(device) for g in gradients_of(torch.float32)], host)
    assert torch.isfinite(host).all()


def test_sums_in_sixteen_bits_come_back_exactly(device: torch.device) -> None:
    carrier = carrier_for(load(device, torch.float32, narrow=torch.bfloat16), Courier())
    host = host_for(device)
    host.copy_(torch.randn(LENGTH).bfloat16())
    gradients = [torch.zeros(shape, device=device) for shape in SHAPES]
    carrier.fetch(host, 1.0, gradients)
    assert torch.equal(torch.cat([g.cpu().flatten() for g in gradients]), host)


def test_a_copy_waits_for_the_kernels_that_make_its_gradient(npu: torch.device) -> None:
    """And a gradient that is written to by the next kernels has been read by then."""
    simulated().set_copy_seconds(0.02)
    courier = Courier()
    carrier = carrier_for(load(npu, torch.float32), courier)
    host = host_for(npu)
    for value in range(3):
        gradients = [torch.zeros(shape, device=npu) for shape in SHAPES]
        simulated().set_kernel_seconds(0.005)
        for gradient in gradients:
            gradient.fill_(float(value + 1))
        simulated().set_kernel_seconds(0.0)
        carry_in(carrier, courier, gradients, host)
        assert torch.equal(host, torch.full((LENGTH,), float(value + 1)))


def test_a_result_is_there_for_the_next_kernel_though_its_copy_is_slow(npu: torch.device) -> None:
    carrier = carrier_for(load(npu, torch.float32), Courier())
    gradients = [torch.zeros(shape, device=npu) for shape in SHAPES]
    for value in (1.0, 2.0):
        host = host_for(npu)
        host.fill_(value)
        simulated().set_copy_seconds(0.03)
        carrier.fetch(host, 1.0, gradients)
        doubled = [gradient * 2 for gradient in gradients]
        carrier.settle()
        host.fill_(-1.0)  # others may have it again
        simulated().set_copy_seconds(0.0)
        assert all(torch.equal(d.cpu(), torch.full(d.shape, 2 * value)) for d in doubled)


def test_device_and_host_copies_are_busy_at_once(npu: torch.device) -> None:
    """Backward makes the gradients of six buckets one after the other. By events of the device, the
    whole takes little longer than the longer of computing and copying, not their sum."""
    courier = Courier()
    carriers = [carrier_for(load(npu, torch.float32), courier) for _ in range(6)]
    hosts = [host_for(npu) for _ in carriers]
    buckets = [[g.to(npu) for g in gradients_of(torch.float32, seed)] for seed in range(6)]
    kernel = copying = 0.03
    torch.npu.synchronize()

    def backward(copies: bool) -> float:
        began, ended = (torch.npu.Event(enable_timing=True) for _ in range(2))
        began.record()
        for carrier, host, gradients in zip(carriers, hosts, buckets, strict=True):
            gradients[0].mul_(1.5)
            if copies:
                for position, gradient in enumerate(gradients):
                    carrier.place(position, gradient, host, False)
                carrier.send(lambda: None)
        courier.drain()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    simulated().set_kernel_seconds(kernel)
    computing = backward(copies=False)
    # Packing is a kernel too, on the side stream; the copy after it is what is made slow.
    simulated().set_copy_seconds(copying)
    together = backward(copies=True)
    serial = computing + len(carriers) * (kernel + copying)
    assert together / serial < 0.85, (together, computing, serial)


def test_after_a_fault_what_has_not_arrived_is_placed_again(npu: torch.device) -> None:
    courier = Courier()
    carrier = carrier_for(load(npu, torch.float32), courier)
    gradients = [g.to(npu) for g in gradients_of(torch.float32)]
    host, done = host_for(npu), threading.Event()
    for position in (0, 2):
        carrier.place(position, gradients[position], host, False)
    assert carrier.rewind() == [0, 2]
    for position, gradient in enumerate(gradients):
        carrier.place(position, gradient, host, False)
    before = threading.Event()
    courier.take(functools.partial(wait_for, before))
    carrier.send(done.set)
    simulated().inject(507053)
    before.set()
    with pytest.raises(RuntimeError, match="507053"):
        courier.drain()
    assert not done.is_set()
    simulated().clear_faults()
    simulated().inject(507053)
    for position, gradient in enumerate(gradients):
        carrier.place(position, gradient, host, False)
    with pytest.raises(RuntimeError, match="507053"):
        carrier.send(done.set)
    simulated().clear_faults()
    assert carrier.rewind() == [0, 1, 2]
    carry_in(carrier, courier, list(gradients), host)
    assert torch.equal(host, torch.cat([g.cpu().flatten() for g in gradients]))


def test_after_an_error_a_courier_gives_up_what_it_has_until_somebody_has_seen_the_error() -> None:
    courier, held, seen = Courier(), threading.Event(), []

    def fail() -> None:
        held.wait()
        raise RuntimeError("broken")

    courier.take(lambda: seen.append(1))
    courier.take(fail)
    courier.take(lambda: seen.append(2))
    held.set()
    with pytest.raises(RuntimeError, match="broken"):
        courier.drain()
    courier.take(lambda: seen.append(3))
    courier.drain()
    assert seen == [1, 3]
