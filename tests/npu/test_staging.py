"""Copies of device tensors beside what the device does next: on the simulated NPU, and on CUDA
where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mpift.devices import backend, staging
from mpift.devices.staging import Piece, Reader, Staging
from mpift.torch.state import Look, OptimizerState, hash_of


def simulated() -> Any:
    import mpift.testing.npu

    return mpift.testing.npu


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


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def whole(tensor: torch.Tensor) -> Piece:
    return Piece(tensor, 0, tensor.nbytes, np.zeros(tensor.nbytes, np.uint8))


def trained(device: torch.device | str, steps: int = 2) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 3).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        model(torch.ones(2, 40, device=device)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(optimizer: torch.optim.Optimizer) -> OptimizerState:
    return OptimizerState(optimizer, lambda _: "name")


# -- what outlives a step ----------------------------------------------------------------------


def test_a_copy_holds_what_the_tensor_was_before_the_optimizer_changed_it(
    device: torch.device,
) -> None:
    size = 1 << (24 if device.type == "cuda" else 10)
    weight = torch.nn.Parameter(torch.arange(size, dtype=torch.float32, device=device))
    before = bytes_of(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    copies = Staging()
    piece = whole(weight)
    if device.type == "npu":
        simulated().set_copy_seconds(0.02)
    finish = copies.begin([piece])
    optimizer.step()
    finish()
    assert np.array_equal(piece.target, before)
    assert not np.array_equal(bytes_of(weight), before)
    copies.close()


def test_pieces_of_several_tensors_and_dtypes_arrive_where_they_belong(
    device: torch.device,
) -> None:
    tensors = [
        torch.randn(1001, device=device),
        torch.randn(77, 3, device=device).bfloat16().t(),
        torch.arange(5, device=device),
    ]
    wholes = [bytes_of(tensor) for tensor in tensors]
    pieces = [
        Piece(tensor, 0, 8 * (len(whole) // 16), np.zeros(8 * (len(whole) // 16), np.uint8))
        for tensor, whole in zip(tensors, wholes, strict=True)
    ]
    copies = Staging()
    copies.begin(pieces)()
    for piece, expected in zip(pieces, wholes, strict=True):
        assert np.array_equal(piece.target, expected[: piece.stop])
    copies.close()


def test_every_stream_that_writes_has_to_wait_and_not_only_the_first(npu: torch.device) -> None:
    weights = [torch.nn.Parameter(torch.ones(8, device=npu)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    pieces = [whole(weight) for weight in weights]
    expected = [bytes_of(weight) for weight in weights]
    copies = Staging()
    simulated().set_copy_seconds(0.02)
    finish = copies.begin(pieces)
    for weight in weights:
        with torch.npu.stream(torch.npu.Stream()):
            torch.optim.SGD([weight], lr=1.0, foreach=False).step()
    finish()
    for piece, before in zip(pieces, expected, strict=True):
        assert np.array_equal(piece.target, before)
    copies.close()


def test_copies_that_begin_before_others_have_ended_leave_those_alone(npu: torch.device) -> None:
    """As where another rank has given up a checkpoint that this one still copies."""
    first, second = torch.full((9,), 1.0, device=npu), torch.full((9,), 2.0, device=npu)
    copies = Staging()
    simulated().set_copy_seconds(0.01)
    pieces = [whole(first), whole(second)]
    finishes = [copies.begin([piece]) for piece in pieces]
    torch.npu.synchronize()
    for finish in finishes:
        finish()
    assert [piece.target.view(np.float32)[0] for piece in pieces] == [1.0, 2.0]
    copies.close()


def test_after_a_device_has_failed_the_next_copies_arrive(npu: torch.device) -> None:
    other = torch.full((9,), 3.0, device="npu:1")
    tensor = torch.full((9,), 1.0, device=npu)
    weight = torch.nn.Parameter(torch.ones(2, device=npu))
    copies = Staging()
    simulated().set_copy_seconds(0.02)
    finish = copies.begin([whole(other), whole(tensor)])
    torch.npu.stop_device(0)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        finish()
    torch.npu.restart_device(0)
    simulated().reset()
    simulated().inject(507046, sticky=False)
    with pytest.raises(RuntimeError, match="507046"):
        copies.begin([whole(other), whole(tensor)])
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()  # has nothing to wait for
    pieces = [whole(other), whole(tensor)]
    copies.begin(pieces)()
    assert [piece.target.view(np.float32)[0] for piece in pieces] == [3.0, 1.0]
    assert not copies._under_way  # nobody waits for what is over, or has failed
    copies.close()


# -- what is read once -------------------------------------------------------------------------


@pytest.mark.parametrize("window", [64, 192, 1 << 20])
def test_a_reader_gives_all_bytes_in_order_whatever_fits_into_its_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(staging, "WINDOW_BYTES", window)
    tensors = [
        torch.randn(101, device=device),
        torch.randn(17, 3, device=device).bfloat16().t(),
        torch.empty(0, device=device),
        torch.tensor(True, device=device),
        torch.randn(20, dtype=torch.float64, device=device)[::3],
    ]
    reader = Reader()
    for _ in range(2):
        found = b"".join(array.tobytes() for array in reader.begin(tensors)())
        assert found == b"".join(bytes_of(tensor).tobytes() for tensor in tensors)
    assert all(room._memory.numel() <= window for room in reader._rooms.values())


def test_a_reader_waits_for_what_was_asked_of_the_device_before(npu: torch.device) -> None:
    tensor = torch.zeros(4, device=npu)
    simulated().set_kernel_seconds(0.05)
    tensor.fill_(1.0)
    (array,) = Reader().begin([tensor])()
    assert array.view(np.float32).tolist() == [1.0] * 4


def test_a_reader_does_not_wait_for_what_is_asked_of_the_device_later(npu: torch.device) -> None:
    tensor = torch.ones(4, device=npu)
    later = torch.npu.Event()
    read = Reader().begin([tensor])
    simulated().set_kernel_seconds(2.0)
    torch.zeros(1, device=npu).add_(1.0)
    later.record()
    simulated().set_kernel_seconds(0.0)
    (array,) = read()
    assert array.view(np.float32).tolist() == [1.0] * 4
    assert not later.query()
    torch.npu.stop_device(0)  # nobody has to wait for it
    torch.npu.restart_device(0)


def test_the_hash_of_a_state_does_not_depend_on_where_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam counts its steps on the host, so both kinds of memory alternate."""
    monkeypatch.setattr(staging, "WINDOW_BYTES", 256)
    _, optimizer = trained("cpu")
    expected = hash_of(state_of(optimizer).arrays(), "")
    model, _ = trained(device, steps=0)
    there = torch.optim.Adam(model.parameters(), lr=0.1)
    for mine, its in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True):
        mine.data.copy_(its.data)
    there.load_state_dict(optimizer.state_dict())
    state = state_of(there)
    for _ in range(2):
        look = state.arrays()
        assert look.on_device
        assert hash_of(look, "") == expected
    model.weight.data[0, 0] += 1
    assert hash_of(state.arrays(), "") != expected


def test_an_error_of_a_device_is_raised_to_who_reads(npu: torch.device) -> None:
    tensor = torch.ones(5, device=npu)
    reader = Reader()
    look = Look([tensor], reader)
    simulated().inject(507046, sticky=False)
    with pytest.raises(RuntimeError, match="507046"):
        hash_of(look, "")
    found = list(Look([tensor], reader))
    assert found[0].view(np.float32).tolist() == [1.0] * 5
