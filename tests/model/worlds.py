"""Worlds of models are values: what a move changes is another world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

Item = TypeVar("Item")
World = TypeVar("World")


def put(items: Sequence[Item], index: int, value: Item) -> tuple[Item, ...]:
    """``items`` with ``value`` at ``index``."""
    return (*items[:index], value, *items[index + 1 :])


def with_rank(world: World, number: int, rank: Any) -> World:
    """``world`` with another state of one of its ``ranks``."""
    ranks = put(world.ranks, number, rank)  # type: ignore[attr-defined]
    return replace(world, ranks=ranks)  # type: ignore[type-var]
