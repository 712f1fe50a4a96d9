"""How each kind of object takes its part of a checkpoint: which tensors it wants, and the rest.

Optimizers are set in place, plain values and all: torch's ``load_state_dict`` casts their state to
the dtype of its parameter, which costs float32 state of bfloat16 parameters its bits. A live tensor
that shares memory with a module's, or with another value's, is not written to: the value gets a new
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpift.checkpoint import trees
from mpift.checkpoint.placing import Placing
from mpift.checkpoint.scalars import TAG
from mpift.checkpoint.state import has_state
from mpift.errors import CheckpointError

_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)


def tag_of(tree: Any) -> Any:
    """None for what is no tagged object."""
    return tree.get(TAG) if isinstance(tree, dict) else None


def content_of(tree: Any) -> Any:
    """An object's ``state_dict``, whether it is tagged as one or was saved as a plain value."""
    return tree["v"] if tag_of(tree) in {"module", "state", "OrderedDict"} else tree


def is_plain_dict(tree: Any) -> bool:
    """Whether it is a dictionary with strings as keys."""
    return isinstance(tree, dict) and TAG not in tree


def part_of(name: str, value: Any, chosen: Callable[[str], bool]) -> Part:
    """What restores ``value``; for ``chosen`` see ``adopt``."""
    if isinstance(value, torch.nn.Module):
        return ModulePart(name, value, chosen)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerPart(name, value, chosen)
    if has_state(value):
        return ObjectPart(name, value, chosen)
    return Part(name, value, chosen)


class Part:
    """A plain value: its tensors are restored in place where they fit. Elsewhere they are new, on
    the device of those that have no room for them."""

    def __init__(self, name: str, value: Any, chosen: Callable[[str], bool]) -> None:
        self.name = name
        self.value = value
        self.chosen = chosen
        self._devices: dict[str, torch.device] = {}  # of new tensors

    def is_chosen(self, saved: Any) -> bool:
        """Whether any of what was saved is to be restored."""
        return self.chosen(self.name)

    def claim(self, placing: Placing) -> None:
        """Keep others from writing to this object's memory, chosen or not."""

    def plan(
        self, placing: Placing, saved: Any, live: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Say which tensors are wanted; ``tensors`` are the live ones. Nothing is changed yet."""
        for name, mine in trees.pairs(content_of(saved), content_of(live)):
            self._want(placing, name, None if mine is None else tensors[mine])

    def _want(self, placing: Placing, name: str, live: torch.Tensor | None) -> None:
        # Even two tensors of one value may be views of the same memory, and not have been then.
        if not placing.want(name, live, owner=id(live)) and live is not None:
            self._devices[name] = live.device

    def put_back(self, placing: Placing, saved: Any, values: dict[str, Any]) -> None:
        """Once the tensors are there: the rest."""
        made: dict[str, torch.Tensor] = {}  # one that is in two places stays one

        def tensor(name: str) -> torch.Tensor:
            if name not in made:
                found = placing.tensor(name)
                made[name] = found.to(self._devices[name]) if name in self._devices else found
            return made[name]

        values[self.name] = trees.decode(saved, tensor)

    def _load(self, load: Callable[..., Any], content: Any, **options: Any) -> None:
        try:
            load(content, **options)
        except _REFUSALS as error:
            raise CheckpointError(
                f"{self.name}: {type(self.value).__qualname__}.load_state_dict does not take what"
                f" was saved of it: {type(error).__name__}: {error}"
            ) from error


class ObjectPart(Part):
    """Something with a ``load_state_dict``: what that does with the values is its own affair."""

    def put_back(self, placing: Placing, saved: Any, values: dict[str, Any]) -> None:
        self._load(self.value.load_state_dict, trees.decode(saved, placing.tensor))


class ModulePart(Part):
    """A module: all of its tensors must fit, each alone can be chosen."""

    def __init__(self, name: str, value: Any, chosen: Callable[[str], bool]) -> None:
        super().__init__(name, value, chosen)
        # What a module's own code makes for its state_dict, or keeps besides tensors.
        self._others: list[str] = []

    def claim(self, placing: Placing) -> None:
        for tensor in itertools.chain(self.value.parameters(), self.value.buffers()):
            placing.claim(tensor, ModulePart)

    def _entries(self, saved: Any) -> dict[str, Any]:
        content = content_of(saved)
        if not is_plain_dict(content):
            raise CheckpointError(
                f"{self.name} is a module here, and not in the checkpoint: give it the name that it"
                " was saved under"
            )
        return {key: tree for key, tree in content.items() if self.chosen(f"{self.name}/{key}")}

    def is_chosen(self, saved: Any) -> bool:
        return bool(self._entries(saved))

    def plan(
        self, placing: Placing, saved: Any, live: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        mine = content_of(live)
        parts = {id(t) for t in itertools.chain(self.value.parameters(), self.value.buffers())}
        for key, tree in self._entries(saved).items():
            if key not in mine:
                continue
            if tag_of(tree) != "tensor" or tag_of(mine[key]) != "tensor":
                super().plan(placing, tree, mine[key], tensors)
                self._others.append(key)
                continue
            live_tensor = tensors[mine[key]["name"]]
            if not placing.want(tree["name"], live_tensor, ModulePart):
                self._refuse(placing, key, tree["name"], live_tensor)
            if id(live_tensor) not in parts:
                self._others.append(key)

    def _refuse(self, placing: Placing, key: str, name: str, live: torch.Tensor) -> None:
        spec = placing.spec(name)
        dtype = str(live.dtype).removeprefix("torch.")
        if (dtype, tuple(live.shape)) == (spec.dtype, spec.shape):
            raise CheckpointError(
                f"{self.name}/{key} is the same tensor as another here, and in the checkpoint they"
                " are two: tie them as they were when it was saved"
            )
        raise CheckpointError(
            f"{self.name}/{key} is {spec.dtype} of shape {list(spec.shape)} in the checkpoint, and"
            f" {dtype} of shape {list(live.shape)} here: build the model as it was when it was"
            " saved, or choose other tensors with only="
        )

    def put_back(self, placing: Placing, saved: Any, values: dict[str, Any]) -> None:
        if self._others:
            entries = self._entries(saved)
            content = {key: trees.decode(entries[key], placing.tensor) for key in self._others}
            self._load(self.value.load_state_dict, content, strict=False)


class OptimizerPart(Part):
    """An optimizer: groups and state are set as ``load_state_dict`` would, but not copied and not
    cast. One with a ``load_state_dict`` of its own, or hooks, is left to it, and what that casts
    is put right."""

    def plan(
        self, placing: Placing, saved: Any, live: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        content = content_of(saved)
        if not is_plain_dict(content) or not {"state", "param_groups"} <= content.keys():
            raise CheckpointError(
                f"{self.name} is an optimizer here, and not in the checkpoint: give it the name"
                " that it was saved under"
            )
        there = [_length(placing, group["params"]) for group in content["param_groups"]]
        here = [len(group["params"]) for group in self.value.param_groups]
        if there != here:
            raise CheckpointError(
                f"{self.name} has {there} parameters in its groups in the checkpoint, and {here}"
                " here: make the same groups, in the same order, as when it was saved"
            )
        super().plan(placing, content, live, tensors)

    def _want(self, placing: Placing, name: str, live: torch.Tensor | None) -> None:
        if placing.want(name, live, OptimizerPart) or live is None:
            return
        shape = placing.spec(name).shape
        if live.dim() and shape != tuple(live.shape):
            raise CheckpointError(
                f"{name} has shape {list(shape)} in the checkpoint, and {list(live.shape)} here:"
                " build model and optimizer as they were when it was saved"
            )

    def put_back(self, placing: Placing, saved: Any, values: dict[str, Any]) -> None:
        optimizer = self.value
        fresh: set[int] = set()

        def tensor(name: str) -> torch.Tensor:
            found = placing.tensor(name)
            if placing.is_new(name):
                fresh.add(id(found))
            return found

        content = trees.decode(content_of(saved), tensor)
        groups = content["param_groups"]
        indices = itertools.chain.from_iterable(group["params"] for group in groups)
        parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
        owners = dict(zip(indices, parameters, strict=True))
        group_of = {key: group for group in groups for key in group["params"]}
        for key, entries in content["state"].items():
            if key in owners:
                content["state"][key] = _on_device(entries, owners[key], group_of[key], fresh)
        if _is_ordinary(optimizer) and content.keys() == {"state", "param_groups"}:
            _set_optimizer(optimizer, content, owners)
        else:
            self._load(optimizer.load_state_dict, content)
            _undo_casts(optimizer, content["state"], owners)


def _length(placing: Placing, tree: Any) -> int:
    return placing.spec(tree["name"]).shape[0] if isinstance(tree, dict) else len(tree)


def _is_ordinary(optimizer: Any) -> bool:
    own = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return not own and not any(getattr(optimizer, name, None) for name in hooks)


def _set_optimizer(
    optimizer: torch.optim.Optimizer, content: dict[str, Any], owners: Mapping[Any, torch.Tensor]
) -> None:
    for group, saved in zip(optimizer.param_groups, content["param_groups"], strict=True):
        kept = {"params": group["params"]}
        if "param_names" in group:
            kept["param_names"] = saved.get("param_names", group["param_names"])
        group.clear()
        group.update({**saved, **kept})
    optimizer.state.clear()
    for key, entries in content["state"].items():
        optimizer.state[owners.get(key, key)] = entries
    # As after torch's load_state_dict: an optimizer adds what older versions did not have.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _on_device(
    value: Any, parameter: torch.Tensor, group: Mapping[str, Any], fresh: set[int], key: Any = None
) -> Any:
    """New tensors of a parameter's state to where torch would load them: beside the parameter, but
    counts of steps on the host, unless the device counts."""
    if isinstance(value, torch.Tensor):
        counted_here = key == "step" and not (group.get("capturable") or group.get("fused"))
        return value if counted_here or id(value) not in fresh else value.to(parameter.device)
    if isinstance(value, dict):
        return {k: _on_device(v, parameter, group, fresh, k) for k, v in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_on_device(item, parameter, group, fresh) for item in value)
    return value


def _undo_casts(
    optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any], owners: Mapping[Any, torch.Tensor]
) -> None:
    """Torch's own loading casts floating-point state to the dtype of its parameter."""
    for key, entries in saved.items():
        state = optimizer.state.get(owners.get(key, key))
        if not isinstance(state, dict) or not isinstance(entries, dict):
            continue
        for name, value in entries.items():
            loaded = state.get(name)
            if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                continue
            if loaded.dtype != value.dtype:
                state[name] = value.to(loaded.device)
