"""Calls of torch_npu that mpift makes, on the genuine torch_npu over the fake CANN.

A program: ``test_contract`` runs it with the libraries and the wheel on its paths. Its last line is
a JSON object with the result of each check. Each is run in a fork of its own, made before anything
has touched the device: so no check is hurt by the faults that another injects, and a crash or a
hang names its check.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys

import numpy as np
import torch

from mpift.devices import backend
from mpift.devices.carriers import Load, carrier_for
from mpift.devices.courier import Courier
from mpift.devices.staging import WINDOW_BYTES, Piece, Reader, Staging
from mpift.errors import DeviceError
from tests.npu import contract_faults  # noqa: F401, it adds its checks
from tests.npu.contract_kit import CHECKS, LIMIT_SECONDS, Cann, check, error_of, in_a_fork
from tests.npu.fake_cann.compute import ComputeOnCpu

__all__ = ["CHECKS", "main"]

# -- mpift.devices.backend -------------------------------------------------------------------------


@check
def names_are_there() -> list[str]:
    module = backend.module("npu")
    missing = [name for name in backend.NPU_NAMES if not hasattr(module, name)]
    assert not missing, missing
    return sorted(dir(module))


@check
def npu_is_the_best_device_there_is() -> None:
    assert backend.available() == "npu"


@check
def ranks_are_spread_over_the_devices() -> None:
    module = backend.module("npu")
    assert module.device_count() == 2
    device = backend.select("npu", 3)
    assert device == torch.device("npu", 1)
    assert module.current_device() == 1
    assert torch.empty(2, device="npu").device == device
    assert module.is_initialized()
    assert isinstance(module.get_device_name(1), str)
    with module.device(torch.device("npu", 0)):
        assert module.current_device() == 0
    assert module.current_device() == 1


@check
def no_device_is_a_device_error() -> str:
    os.environ["FAKE_CANN_DEVICES"] = "0"
    error = error_of(lambda: backend.module("npu"))
    assert isinstance(error, DeviceError), repr(error)
    return str(error)


@check
def loading_leaves_the_device_alone() -> None:
    module = backend.module("npu")
    assert not module.is_initialized()


@check
def a_forked_worker_of_a_process_that_computes_cannot_use_the_device() -> str:
    module = backend.module("npu")
    backend.select("npu", 0)
    torch.ones(2).to("npu")
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    worker = context.Process(target=lambda: sending.send(str(error_of(module.synchronize))))
    worker.start()
    assert receiving.poll(LIMIT_SECONDS)
    worker.join()
    return receiving.recv()


# -- memory, streams, copies -----------------------------------------------------------------------


@check
def pinned_memory_stays_pinned_in_views() -> None:
    backend.select("npu", 0)
    whole = backend.pinned(1024, torch.uint8)
    assert whole.is_pinned()
    assert not whole.any()
    assert whole[64:128].view(torch.float32).is_pinned()
    assert torch.from_numpy(whole.numpy()).is_pinned()


@check
def copies_from_and_to_pinned_memory_do_not_hold_up_the_host() -> None:
    cann, module = Cann(), backend.module("npu")
    backend.select("npu", 0)
    source = torch.arange(8.0).to("npu")
    there, back = backend.pinned(8, torch.float32), torch.empty(8, device="npu")
    side, done = module.Stream(), module.Event()
    waits = cann.waits()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        assert module.current_stream() == side
        there.copy_(source, non_blocking=True)
        back.copy_(there, non_blocking=True)
        done.record(side)
    module.current_stream().wait_event(done)
    assert cann.waits() == waits, "the host has waited for the device"
    done.synchronize()
    assert done.query()
    assert cann.calls("SynchronizeEvent") > 0
    module.synchronize()  # torch_npu hands what was asked of a stream to CANN on another thread
    assert cann.calls("StreamWaitEvent") >= 2
    assert torch.equal(there, torch.arange(8.0))
    assert torch.equal(back.cpu(), there)


@check
def a_copy_to_memory_that_is_not_pinned_waits() -> None:
    cann = Cann()
    backend.select("npu", 0)
    source, waits = torch.arange(8.0).to("npu"), cann.waits()
    torch.empty(8).copy_(source, non_blocking=True)
    assert cann.waits() > waits


@check
def numpy_needs_a_copy_in_host_memory() -> str:
    backend.select("npu", 0)
    return str(error_of(torch.empty(2, device="npu").numpy))


@check
def snapshots_are_copied_beside_the_device() -> None:
    cann = Cann()
    backend.select("npu", 0)
    wholes = [torch.arange(1001.0), torch.arange(77).bfloat16(), torch.arange(5)]
    tensors = [whole.to("npu") for whole in wholes]
    pieces = [
        Piece(tensor, 0, tensor.nbytes, np.zeros(tensor.nbytes, np.uint8)) for tensor in tensors
    ]
    staging, waits = Staging(), cann.waits()
    cann.keep_events_pending()
    finish = staging.begin(pieces)
    staging.fence()
    assert cann.waits() == waits, "the host has waited for the device"
    cann.keep_events_pending(False)
    finish()
    # The copies wait for what computes, and what computes next for the copies.
    assert cann.calls("StreamWaitEvent") == 2
    for piece, whole in zip(pieces, wholes, strict=True):
        assert np.array_equal(piece.target, whole.view(torch.uint8).numpy())
    staging.close()


@check
def devices_are_read_in_windows_of_pinned_memory() -> None:
    backend.select("npu", 0)
    # Larger than a window of the reader, so that both of its halves are used.
    wholes = [torch.arange(3.0), torch.arange((WINDOW_BYTES // 8) * 2 + 5)]
    read = Reader().begin([whole.to("npu") for whole in wholes])
    found = b"".join(window.tobytes() for window in read())
    assert found == b"".join(whole.numpy().tobytes() for whole in wholes)


@check
def gradients_are_carried_to_the_host_and_back() -> None:
    cann, courier = Cann(), Courier()
    device = backend.select("npu", 0)
    gradients = [torch.arange(6.0).reshape(2, 3), torch.ones(5)]
    load = Load(device, torch.float32, [(0, 6), (6, 11)], 2.0, [None, torch.bfloat16])
    with ComputeOnCpu():
        carrier = carrier_for(load, courier)
        host = backend.pinned(11, torch.float32)
        results = [gradient.to(device) for gradient in gradients]
        waits = cann.waits()
        for position, gradient in enumerate(results):
            carrier.place(position, gradient, host, add=False)
        arrived: list[bool] = []
        carrier.send(lambda: arrived.append(True))
        courier.drain()
        assert arrived
        assert cann.waits() > waits, "nobody has waited for the device"
        assert host.tolist() == [0, 2, 4, 6, 8, 10, 2, 2, 2, 2, 2]
        carrier.fetch(host, 4.0, results)
        carrier.settle()
        for gradient, result in zip(gradients, results, strict=True):
            assert torch.equal(result.cpu(), gradient / 2)


@check
def random_states_are_given_back() -> None:
    module = backend.module("npu")
    backend.select("npu", 1)
    state = module.get_rng_state()
    states = module.get_rng_state_all()
    assert len(states) == 2
    assert torch.equal(states[1], state)
    torch.manual_seed(7)
    assert not torch.equal(module.get_rng_state(), state)
    module.set_rng_state(state)
    assert torch.equal(module.get_rng_state(), state)
    module.set_rng_state(module.get_rng_state(0), 0)


@check
def unused_memory_is_given_back() -> None:
    module = backend.module("npu")
    backend.select("npu", 0)
    torch.empty(1 << 24, device="npu")
    assert module.memory_reserved() > 0
    module.synchronize()
    module.empty_cache()
    assert module.memory_reserved() == 0


@check
def training_gives_what_it_gives_on_the_cpu() -> None:
    def train(device: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        inputs = torch.linspace(-1, 1, 64).reshape(8, 8).to(device)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with ComputeOnCpu():
        on_device = train(backend.select("npu", 0))
    on_cpu = train(torch.device("cpu"))
    assert all(map(torch.equal, on_device, on_cpu))
    assert on_cpu[0].abs().sum() > 0


def main() -> None:
    """Run all checks."""
    importlib.import_module(backend.TORCH_NPU)
    results = {name: in_a_fork(function) for name, function in CHECKS.items()}
    sys.stdout.write(f"\n{json.dumps(results)}\n")  # torch_npu has written to it, too


if __name__ == "__main__":
    main()
