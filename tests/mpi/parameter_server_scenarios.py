"""What ranks do in the tests of the parameter server."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mpift.torch as hvd
from mpift import runtime
from mpift.parameter_server.placement import holders
from mpift.testing.histories import Recorder

WAIT_SECONDS = 20.0
BIG = 1 << 20  # elements: an array that travels on its own


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def members() -> tuple[int, ...]:
    return runtime.current().view.members


def refusal_of(call: Any) -> str:
    """The error that it raises: its class and text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001, whatever it is
        return f"{type(error).__name__}: {error}"
    return ""


def keys_held_by(primary: int, backup: int | None = None) -> list[str]:
    """Some names whose holders these are."""
    found = [(name, holders(name, members())) for name in map("key{}".format, range(1000))]
    return [n for n, held in found if held[0] == primary and backup in (None, held[1])][:3]


# -- histories under fire --------------------------------------------------------------------------


def recorded(folder: str, seed: int, deaths: list[tuple[int, int]], pushes: int) -> dict[str, Any]:
    """Push numbers and pull sums at random; ``deaths`` says which member dies after how many
    milliseconds, in the middle of whatever it does then."""
    hvd.init()
    here = runtime.current().member
    keys = [f"key{number}" for number in range(6)]
    sizes = dict.fromkeys(keys, 2) | {"key0": BIG}
    server = hvd.ParameterServer(
        {key: torch.zeros(size, dtype=torch.float64) for key, size in sizes.items()},
        hvd.SGD(lr=1.0),
        staleness=20,
    )
    recorder, chance = Recorder(Path(folder), here), random.Random(f"{seed} {here}")
    seen = dict.fromkeys(keys, 0)
    lost: set[str] = set()
    mine = dict(deaths).get(here)
    if mine is not None:
        timer = threading.Timer(mine / 1000, die)
        timer.daemon = True
        timer.start()
    done = 0
    while done < pushes or mine is not None:
        key = chance.choice(keys)
        pushes_now = chance.random() < 0.5
        done += pushes_now
        update = float(here * 100_000 + done)
        gradient = torch.full((sizes[key],), -update, dtype=torch.float64)
        with contextlib.suppress(hvd.KeyLostError):
            if pushes_now:
                with recorder.record("push", key, update) as answer:
                    answer.update(attempt(server, key, gradient, seen))
                if "kind" not in answer:
                    continue
            with recorder.record("pull", key) as answer:
                value, seen[key] = server.pull(key)
                answer |= {"version": seen[key], "value": value[0].item()}
            assert value[0] == value[-1]
    hvd.barrier()
    final = {}
    for key in keys:
        try:
            final[key] = server.pull(key).version
        except hvd.KeyLostError:
            lost.add(key)
    hvd.shutdown()
    return {"final": final, "lost": sorted(lost)}


def attempt(
    server: hvd.ParameterServer, key: str, gradient: torch.Tensor, seen: dict[str, int]
) -> dict[str, Any]:
    """A push, and what to write down of its answer."""
    try:
        return {"version": server.push(key, gradient, seen[key])}
    except hvd.StalePushError:
        return {"kind": "refused", "version": -1}


# -- without faults, on one start ------------------------------------------------------------------


def basics() -> dict[str, Any]:
    """Versions, shapes, dtypes; what rank 0 had counts; a server can be closed and made anew."""
    hvd.init()
    rank = hvd.rank()
    values = {
        "matrix": torch.full((2, 3), float(rank)),
        "scalar": torch.tensor(7 + rank),
        "empty": torch.zeros(0),
        "flags": torch.tensor([True, False]),
    }
    server = hvd.ParameterServer(values)
    first = {
        key: (at, value.tolist()) for key, (value, at) in server.pull_many(server.keys).items()
    }
    hvd.barrier()
    if rank == 1:
        server.push("matrix", torch.full((2, 3), 5.0), 0)
    newer = server.pull("matrix", min_version=1)
    again = server.pull_many(["matrix", "flags"], {"matrix": 1})
    refusals = {
        "shape": refusal_of(lambda: server.push("matrix", torch.zeros(3), 1)),
        "key": refusal_of(lambda: server.pull("nothing")),
        "time": refusal_of(lambda: server.pull("matrix", min_version=2, timeout=0.1)),
        "future": refusal_of(lambda: server.push("matrix", torch.zeros(2, 3), 9)),
        "alike": refusal_of(lambda: hvd.ParameterServer({f"a{min(rank, 1)}": torch.zeros(1)})),
        "bfloat16": refusal_of(lambda: hvd.ParameterServer({"a": torch.zeros(1).bfloat16()})),
    }
    server.close()
    refusals["closed"] = refusal_of(lambda: server.pull("matrix"))
    second = hvd.ParameterServer({"matrix": torch.zeros(1)})
    kept = second.pull("matrix")
    second.close()
    return {
        "first": first,
        "newer": [newer.value.tolist(), newer.version],
        "again": [again["matrix"].version, again["flags"].version],
        "refusals": refusals,
        "kept": [kept.value.tolist(), kept.version],
    }


def stale() -> dict[str, Any]:
    """Rank 0 pushes at version 0 after the others have made versions."""
    hvd.init()
    server = hvd.ParameterServer({"w": torch.zeros(2)}, hvd.SGD(lr=1.0), staleness=2)
    refused = ""
    if hvd.rank() == 1:
        for version in range(3):
            server.push("w", torch.ones(2), version)
    hvd.barrier()
    if hvd.rank() == 0:
        refused = refusal_of(lambda: server.push("w", torch.ones(2), 0))
        accepted = server.push("w", torch.ones(2), 1)
        assert accepted == 4
    hvd.barrier()
    value, version = server.pull("w")
    server.close()
    return {"refused": refused, "value": value.tolist(), "version": version}


def hammered() -> dict[str, Any]:
    """Rank 0 reads while all others push to the same large key without a pause."""
    hvd.init()
    server = hvd.ParameterServer({"w": torch.zeros(BIG), "stop": 0.0}, hvd.SGD(lr=1.0))
    pushed, longest, versions = 0, 0.0, []
    hvd.barrier()
    if hvd.rank() == 0:
        while len(versions) < 30 or versions[-1] < 12:
            began = time.monotonic()
            value, version = server.pull("w")
            longest = max(longest, time.monotonic() - began)
            versions.append(version)
            assert value[0] == value[-1] == -version
        server.push("stop", 1.0, 0)
    else:
        version = 0
        while server.pull("stop").version == 0:
            version = server.push("w", torch.ones(BIG), version)
            pushed += 1
    hvd.barrier()
    final = server.pull("w").version
    server.close()
    return {"pushed": pushed, "longest": longest, "versions": versions, "final": final}


def left_early() -> dict[str, Any]:
    """All but the last rank leave at once, and it goes on with what they hold."""
    hvd.init()
    keys = [f"key{number}" for number in range(12)]
    server = hvd.ParameterServer({key: torch.zeros(1) for key in keys}, hvd.SGD(lr=1.0))
    hvd.barrier()
    last = hvd.rank() == hvd.size() - 1
    found: dict[str, int] = {}
    if last:
        time.sleep(0.5)  # the others are in shutdown by then; if not, the test shows less
        for _ in range(10):
            for key in keys:
                server.push(key, torch.ones(1), server.pull(key).version)
        found = {key: at for key, (_, at) in server.pull_many(keys).items()}
    hvd.shutdown()
    return {"found": found}


# -- deaths ----------------------------------------------------------------------------------------


def one_holder_dies(which: str) -> dict[str, Any]:
    """A primary or a backup dies between two pushes of the others; nothing is lost."""
    hvd.init()
    here = runtime.current().member
    keys = keys_held_by(1, 2) if which == "primary" else keys_held_by(2, 1)
    server = hvd.ParameterServer({key: torch.zeros(BIG) for key in keys}, hvd.SGD(lr=1.0))
    seen = []
    for turn in range(8):
        if here == 1 and turn == 4:
            die()
        pushed = server.push_many({key: (torch.ones(BIG), turn) for key in keys})
        seen.append(max(pushed.versions.values()))
    hvd.barrier()
    found = server.pull_many(keys)
    hvd.shutdown()
    return {
        "versions": sorted(at for _, at in found.values()),
        "values": sorted(value[0].item() for value, _ in found.values()),
        "rising": seen == sorted(seen),
    }


def both_holders_die() -> dict[str, Any]:
    """Members 1 and 2 die at once, and with them what they held for each other."""
    hvd.init()
    here = runtime.current().member
    lost, kept = keys_held_by(1, 2), keys_held_by(0, 3)
    server = hvd.ParameterServer({key: torch.zeros(2) for key in [*lost, *kept]}, hvd.SGD(lr=1.0))
    for key in server.keys:
        server.push(key, torch.ones(2), 0)
    processes = hvd.allgather_object(os.getpid())
    if here == 0:
        for member in (1, 2):
            os.kill(processes[member], signal.SIGKILL)
    if here in (1, 2):
        time.sleep(WAIT_SECONDS)
    hvd.barrier()
    refused = {
        "pull": refusal_of(lambda: server.pull(lost[0])),
        "push": refusal_of(lambda: server.push(lost[0], torch.ones(2), 1)),
        "many": refusal_of(lambda: server.pull_many(server.keys)),
    }
    for key in kept:
        server.push(key, torch.ones(2), server.pull(key).version)
    hvd.barrier()
    versions = [server.pull(key).version for key in kept]
    hvd.shutdown()
    return {"lost": lost, "refused": refused, "kept": versions}


# -- training --------------------------------------------------------------------------------------


def like_torch() -> dict[str, Any]:
    """Train on one rank with each optimizer that the server has a formula for."""
    hvd.init()
    return {kind: trained(kind, through_server=True) for kind in ("plain", "sgd", "adagrad")}


def trained(kind: str, through_server: bool) -> list[Any]:
    """The parameters after training with a schedule, weight decay, and a layer that is used now and
    then."""
    torch.manual_seed(5)
    model = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        "plain": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.01),
    }
    optimizer: Any = make[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    if through_server:
        optimizer = hvd.AsyncDistributedOptimizer(optimizer, model.named_parameters())
    for step in range(20):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        layers = [model["a"], *([model["b"]] if step % 3 == 0 else [])]
        loss = sum(functional.cross_entropy(layer(x), torch.arange(8) % 4) for layer in layers)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return [p.tolist() for p in model.parameters()]


def refused_optimizers() -> dict[str, str]:
    hvd.init()
    model = nn.Linear(2, 2)
    stepped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    asynchronous = hvd.AsyncDistributedOptimizer(plain)
    found = {
        "adam": refusal_of(
            lambda: hvd.AsyncDistributedOptimizer(torch.optim.Adam(model.parameters()))
        ),
        "stepped": refusal_of(lambda: hvd.AsyncDistributedOptimizer(stepped)),
        "twice": refusal_of(lambda: hvd.AsyncDistributedOptimizer(asynchronous)),
        "group": refusal_of(
            lambda: asynchronous.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        ),
    }
    asynchronous.close()
    return found


def stale_gradients() -> dict[str, Any]:
    """Rank 0 is far behind with its second step: its gradients are refused, and it goes on."""
    hvd.init()
    model = nn.Linear(2, 1)
    optimizer = hvd.AsyncDistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), staleness=1
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    hvd.barrier()
    if hvd.rank() == 1:
        for _ in range(4):
            step()
    hvd.barrier()
    if hvd.rank() == 0:
        step()
        refused = optimizer.stale_gradients
        step()
        assert optimizer.stale_gradients == refused
    hvd.barrier()
    optimizer.pull()
    found = {"stale": optimizer.stale_gradients, "versions": optimizer.versions}
    digest = hvd.digest(model.state_dict())
    optimizer.close()
    return found | {"digest": digest}
