"""Putting a checkpoint back into live objects, and reading one without any.

Tensors are restored where they are (``placing``), by what their object is (``objects``).
What is restored is bit for bit what was saved. Names, shapes and kinds are checked before anything
is changed; after a damaged block the state is partly restored, and another checkpoint must follow.
Any number of ranks may have saved: the own part of rank R is that of R modulo their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpift.checkpoint import trees
from mpift.checkpoint.manifest import Manifest
from mpift.checkpoint.objects import ModulePart, content_of, is_plain_dict, part_of, tag_of
from mpift.checkpoint.placing import BlockReader, Placing
from mpift.checkpoint.scalars import tagged
from mpift.checkpoint.state import RNG, flatten, own_prefix, set_random_states
from mpift.errors import CheckpointError

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Adopted:
    """``values`` are the restored plain values by name, which the caller has to put in place.
    Blocks matched were there already. ``rng``: generators go on from where they were."""

    values: dict[str, Any]
    blocks_read: int
    blocks_matched: int
    bytes_read: int
    rng: bool


def adopt(
    state: Mapping[str, Any],
    manifest: Manifest,
    reader: BlockReader,
    rank: int,
    only: Callable[[str], bool] | None = None,
    threads: int = 2,
    rotate: tuple[int, int] = (0, 1),
    strict: bool = True,
    rng: bool = True,
) -> Adopted:
    """Restore ``state``, named as when it was saved, as ``rank`` of this job.

    ``only`` is asked for each entry of a module ("model/fc.weight"), and by its name for everything
    else ("optimizer", "rng"); what it does not choose stays as it is. With ``strict`` what is here
    and what is in the checkpoint must be the same names. ``rng``: restore random number generators
    too, if they were saved. ``rotate``: see ``Placing.read``.

    Raises ``CheckpointError`` naming what does not fit, ``CheckpointDamagedError`` for blocks that
    are not what was saved.
    """
    chosen = only or _everything
    saved = _saved(manifest, rank)
    flat = flatten(state, rng=False)
    live = _merged(flat.shared, flat.own)
    tensors = {**flat.shared_tensors, **flat.own_tensors}
    parts = [part_of(name, value, chosen) for name, value in state.items()]
    # Modules first: memory of theirs that is also seen from somewhere else is theirs.
    parts.sort(key=lambda part: not isinstance(part, ModulePart))
    if strict:
        _compare_names(saved, live, state, chosen)
    placing = Placing(manifest.named())
    for part in parts:
        part.claim(placing)
    parts = [part for part in parts if part.name in saved and part.is_chosen(saved[part.name])]
    if state and not parts and not (rng and chosen(RNG)):
        raise CheckpointError(
            f"nothing of {', '.join(map(repr, state))} is to be restored: the checkpoint has"
            f" {', '.join(map(repr, saved))}, and the filter is asked for names such as"
            " 'model/fc.weight'"
        )
    for part in parts:
        part.plan(placing, saved[part.name], live.get(part.name), tensors)
    with_rng = rng and RNG in saved and chosen(RNG)
    if with_rng:
        _want_all(placing, saved[RNG])
    placing.read(reader, threads, rotate)
    values: dict[str, Any] = {}
    for part in parts:
        part.put_back(placing, saved[part.name], values)
    if with_rng:
        set_random_states(trees.decode(saved[RNG], placing.tensor))
    counts = placing.blocks_read, placing.blocks_matched, placing.bytes_read
    return Adopted(values, *counts, with_rng)


def load(
    manifest: Manifest,
    reader: BlockReader,
    rank: int = 0,
    device: str | torch.device = "cpu",
    threads: int = 2,
) -> dict[str, Any]:
    """The whole checkpoint as plain values, tensors on ``device``: each object's ``state_dict``,
    with the own part of one rank. States of random number generators are left out.

    Raises ``CheckpointDamagedError`` for blocks that are not what was saved.
    """
    saved = _saved(manifest, rank)
    saved.pop(RNG, None)
    placing = Placing(manifest.named())
    _want_all(placing, saved)
    placing.read(reader, threads)
    moved: dict[str, torch.Tensor] = {}  # a tensor in two places stays one

    def tensor(name: str) -> torch.Tensor:
        if name not in moved:
            moved[name] = placing.tensor(name).to(device)
        return moved[name]

    return {name: trees.decode(tree, tensor) for name, tree in saved.items()}


def _saved(manifest: Manifest, rank: int) -> dict[str, Any]:
    """Trees by name, of what is shared and the own part for ``rank``, named as in the manifest."""
    if not manifest.own:
        return dict(manifest.shared)
    place = rank % len(manifest.own)
    return _merged(manifest.shared, trees.renamed(manifest.own[place], own_prefix(place)))


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A module's parameters and what else it has stand in different parts: here they are one."""
    both = {**shared, **own}
    for name in shared.keys() & own.keys():
        both[name] = tagged("module", {**shared[name]["v"], **own[name]["v"]})
    return both


def _want_all(placing: Placing, tree: Any) -> None:
    for leaf in trees.leaves(tree):
        placing.want(leaf["name"])


def _everything(_: str) -> bool:
    return True


# -- names -------------------------------------------------------------------------------------


def _compare_names(
    saved: Mapping[str, Any],
    live: Mapping[str, Any],
    state: Mapping[str, Any],
    chosen: Callable[[str], bool],
) -> None:
    modules = {name for name, value in state.items() if isinstance(value, torch.nn.Module)}
    here = set(_names(live, modules, chosen))
    there = set(_names(saved, modules, chosen)) - {RNG}
    missing, unexpected = sorted(here - there), sorted(there - here)
    if missing or unexpected:
        raise CheckpointError(
            "the checkpoint is of another state:"
            f" not in it: {_some(missing)}; only in it: {_some(unexpected)}."
            " Give the state that was saved, choose with only=, or leave these out by strict=False"
        )


def _names(
    parts: Mapping[str, Any], modules: set[str], chosen: Callable[[str], bool]
) -> Iterator[str]:
    """As ``only`` is asked for them."""
    for name, tree in parts.items():
        content = content_of(tree)
        is_module = name in modules or tag_of(tree) == "module"
        if is_module and is_plain_dict(content):
            yield from (path for key in content if chosen(path := f"{name}/{key}"))
        elif chosen(name):
            yield name


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
