"""One rank of ``mpift bench verify``: training with verification and without, turn by turn.

The models are those of the examples, on random data of the same shapes. Both ways train one model
with one optimizer, and nobody is late. A turn's steps begin half-way between two checks, so that
each check is paid for in the turn that it belongs to, also where a helper thread hashes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mpift.torch as hvd
from mpift import runtime
from mpift.bench.verify import MODELS, Plan
from mpift.errors import MpiftError

_DIGITS_BATCH = 16
_GPT_BATCH, _CONTEXT, _WIDTH, _HEADS, _CHARACTERS = 32, 64, 128, 4, 128
# What a message costs the service threads is measured apart: so many at this distance, and as much
# time without any, a few times in turn.
_MESSAGES, _MESSAGE_TURNS, _MESSAGE_SECONDS = 40, 4, 0.005
_NO_LANE = -1

Step = Callable[[], None]


def train(given: Mapping[str, Any]) -> dict[str, Any]:
    """Run on every rank: what ``given``, a ``Plan`` as a mapping, asks for.

    Returns, by model, the mean seconds of a step in each turn, with verification and without, and
    its counters over all timed steps; ``message_cpu_seconds`` are those of one check in this rank's
    service thread. Raises ``MpiftError`` if replicas differ.
    """
    plan = Plan(**given)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    hvd.init()
    models = {name: _train_model(name, plan) for name in MODELS}
    message = _message_cpu_seconds()
    hvd.shutdown()
    return {"models": models, "message_cpu_seconds": message}


def _train_model(name: str, plan: Plan) -> dict[str, Any]:
    torch.manual_seed(0)
    model, optimizer, step = _TRAININGS[name](torch.Generator().manual_seed(hvd.rank()))
    verification = optimizer._mpift_reducer.verification
    names = ("checks", "waited_seconds", "cpu_seconds")
    totals: dict[str, Any] = dict.fromkeys(names, 0)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(-1, plan.rounds):  # turn -1 warms up
        for way in ("on", "off") if turn % 2 else ("off", "on"):
            verification.settle()
            verification.every = plan.every if way == "on" else 0
            hvd.barrier()
            step()
            while optimizer.rounds_applied % plan.every != plan.every // 2:
                step()
            before = [getattr(verification, counter) for counter in names]
            began = time.perf_counter()
            for _ in range(plan.steps_of(name)):
                step()
            took = time.perf_counter() - began
            if turn >= 0:
                seconds[way].append(took / plan.steps_of(name))
                for counter, value in zip(names, before, strict=True):
                    totals[counter] += getattr(verification, counter) - value
    if verification.examinations:
        raise MpiftError(f"replicas of {name} differ: the costs are not those of a healthy run")
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return {
        **totals,
        "on_seconds": seconds["on"],
        "off_seconds": seconds["off"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": sum(t.nbytes for t in [*model.parameters(), *tensors] if torch.is_tensor(t)),
    }


def _message_cpu_seconds() -> float:
    """What one check takes in this rank's service thread: to tell the digest, or to hear those of
    all others."""
    service = next(t for t in threading.enumerate() if t.name == "mpift-service")
    assert service.ident is not None
    clock = time.pthread_getcpuclockid(service.ident)
    tell = runtime.current().examinations.tell
    spent = {True: 0.0, False: 0.0}
    for turn in range(_MESSAGE_TURNS):
        for telling in (True, False):
            hvd.barrier()
            began = time.clock_gettime(clock)
            for number in range(_MESSAGES):
                if telling:
                    tell(_NO_LANE, turn * _MESSAGES + number, 0)
                time.sleep(_MESSAGE_SECONDS)
            spent[telling] += time.clock_gettime(clock) - began
    return max(0.0, spent[True] - spent[False]) / (_MESSAGES * _MESSAGE_TURNS)


# -- the models of the examples ----------------------------------------------------------------


def _digits(generator: torch.Generator) -> tuple[nn.Module, Any, Step]:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    images = torch.rand(_DIGITS_BATCH, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (_DIGITS_BATCH,), generator=generator)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return model, optimizer, step


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.queries_keys_values = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.projection = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.GELU(),
            nn.Linear(4 * _WIDTH, _WIDTH),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        combined = self.queries_keys_values(self.attention_norm(hidden))
        heads = combined.view(batch, length, 3, _HEADS, _WIDTH // _HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))
        return hidden + self.mlp(hidden)


class _CharGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(_CHARACTERS, _WIDTH)
        self.positions = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(_Block(), _Block())
        self.norm = nn.LayerNorm(_WIDTH)
        self.output = nn.Linear(_WIDTH, _CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.output(self.norm(self.blocks(hidden)))


def _chargpt(generator: torch.Generator) -> tuple[nn.Module, Any, Step]:
    model = _CharGpt()
    text = torch.randint(_CHARACTERS, (_GPT_BATCH, _CONTEXT + 1), generator=generator)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        logits = model(text[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, optimizer, step


_TRAININGS: Mapping[str, Callable[[torch.Generator], tuple[nn.Module, Any, Step]]] = {
    "digits": _digits,
    "chargpt": _chargpt,
}
