"""A state as tensors by name and two plain trees: what all ranks hold alike, and a rank's own.

*Shared* are parameters, and the state of optimizers and learning rate schedulers: one rank's is as
good as another's. A rank's *own* are buffers, samplers and what else has a ``state_dict``, plain
values, and the states of random number generators. ``trees`` says how the trees look; a top-level
node is tagged "module" or "state" where it is an object's ``state_dict``. Tensors are referred to,
never copied here. In a manifest the tensors of the own part of rank R have "ranks/R/" before their
names; in the trees, and here, they have not.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpift.checkpoint.blocks import TensorSpec
from mpift.checkpoint.scalars import tagged
from mpift.checkpoint.trees import Encoder, component, decode

RNG = "rng"
# Names at the top of a checkpoint that are not for states.
RESERVED = frozenset({"ranks", "_trees", RNG})
# Modules of torch that may have devices with generators of their own.
_ACCELERATORS = ("cuda", "npu", "xpu", "mps")
# Beside their states: which device was the process's own, by kind.
_CURRENT = "current"


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state. No name is in both ``shared_tensors`` and ``own_tensors``; ``specs`` has
    those of both, in the same order."""

    shared: dict[str, Any]
    own: dict[str, Any]
    shared_tensors: dict[str, torch.Tensor]
    own_tensors: dict[str, torch.Tensor]
    specs: dict[str, TensorSpec]


def current(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` as it is now: entries that are functions are called for their values."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return {name: value() if isinstance(value, kinds) else value for name, value in state.items()}


def flatten(state: Mapping[str, Any], rng: bool = True) -> Flat:
    """Take ``state`` apart: modules, optimizers, schedulers, objects with ``state_dict`` and
    ``load_state_dict``, and plain values, by name.

    With ``rng`` the states of Python's, numpy's and torch's generators are in it too. Raises
    ``ValueError`` for a name that can't be, ``CheckpointError`` for what a checkpoint can't hold.
    """
    sparse = _sparse(state.values())
    shared = Encoder(sparse)
    own = Encoder(sparse, compact=True)
    shared_tree: dict[str, Any] = {}
    own_tree: dict[str, Any] = {}
    for name, value in state.items():
        _check_name(name)
        path = component(name)
        if isinstance(value, torch.nn.Module):
            parameters, others = _module(value, path, shared, own)
            shared_tree[name] = tagged("module", parameters)
            if others:
                own_tree[name] = tagged("module", others)
        elif is_shared(value):
            shared_tree[name] = tagged("state", shared.encode(value.state_dict(), path))
        elif has_state(value):
            own_tree[name] = tagged("state", own.encode(value.state_dict(), path))
        else:
            own_tree[name] = own.encode(value, path)
    if rng:
        own_tree[RNG] = own.encode(random_states(), RNG)
    specs = {**shared.specs, **own.specs}
    return Flat(shared_tree, own_tree, shared.tensors, own.tensors, specs)


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What ``flatten`` made a tree of; objects come back as their ``state_dict``. Whether a tensor
    was a ``Parameter``, and its memory format, are not kept.

    Raises ``CheckpointError`` for a tree of a later version, ``KeyError`` for a missing tensor.
    """
    return decode(tree, tensors.__getitem__)


def own_prefix(rank: int) -> str:
    """What stands in a manifest before the names of tensors of a rank's own part."""
    return f"ranks/{rank}/"


def is_shared(value: Any) -> bool:
    """Whether all that an object holds is the same on every rank."""
    return isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))


def has_state(value: Any) -> bool:
    """Whether an object has a state that can be taken and put back."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8[n]: the bytes of a dense tensor in C order. They share its memory where it is on the
    CPU and contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or "/" in name or name in RESERVED:
        raise ValueError(
            f"a state can't be named {name!r}: names are strings, not empty, without '/', and not"
            f" one of {', '.join(sorted(RESERVED))}"
        )


def _module(
    module: torch.nn.Module, path: str, shared: Encoder, own: Encoder
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trees of its parameters, and of what else is in its ``state_dict``."""
    parameters = {id(parameter) for parameter in module.parameters()}
    trees: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    # With keep_vars a tensor that has two names is the same object under both.
    for key, value in module.state_dict(keep_vars=True).items():
        part, encoder = (0, shared) if id(value) in parameters else (1, own)
        trees[part][key] = encoder.encode(value, f"{path}/{component(key)}")
    return trees


def _sparse(values: Collection[Any]) -> set[int]:
    """The ids of tensors of which a step may change few rows: embeddings, and their state."""
    embeddings = {
        id(parameter)
        for value in values
        if isinstance(value, torch.nn.Module)
        for part in value.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for parameter in part.parameters(recurse=False)
    }
    states = {
        id(item)
        for value in values
        if embeddings and isinstance(value, torch.optim.Optimizer)
        for parameter, state in value.state.items()
        if id(parameter) in embeddings and isinstance(state, dict)
        for item in state.values()
        if isinstance(item, torch.Tensor)
    }
    return embeddings | states


# -- random number generators ------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """The states of all generators that a script may draw from without naming one."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, np.array(words, np.uint32), gauss),
        "torch": torch.get_rng_state(),
    }
    if "numpy.random" in sys.modules:
        states["numpy"] = np.random.get_state()  # noqa: NPY002, the global one is what scripts use
    for name in _ACCELERATORS:
        module = _initialized(name)
        if module is not None:
            states[name] = _device_states(module)
            if hasattr(module, "current_device"):
                states.setdefault(_CURRENT, {})[name] = int(module.current_device())
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Let the generators go on from what ``random_states`` gave; of devices those there are. The
    process's own device goes on from its own then, which may have had another number."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])  # noqa: NPY002, see random_states
    for name in _ACCELERATORS:
        module = _initialized(name)
        if module is None or name not in states:
            continue
        if not hasattr(module, "get_rng_state_all"):
            module.set_rng_state(states[name][0])
            continue
        here = int(module.current_device())
        there = states.get(_CURRENT, {}).get(name, here)
        for index, state in enumerate(states[name]):
            device = {there: here, here: there}.get(index, index)
            if device < module.device_count():
                module.set_rng_state(state, device)


def _initialized(name: str) -> Any:
    """The module of torch for a kind of device, if this process uses it: asking would set it up."""
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        return None
    started = getattr(module, "is_initialized", None)
    return module if started is None or started() else None


def _device_states(module: Any) -> list[torch.Tensor]:
    if not hasattr(module, "get_rng_state_all"):
        return [module.get_rng_state()]
    return list(module.get_rng_state_all())
