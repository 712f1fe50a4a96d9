"""``ParameterServer``: versioned arrays that all ranks of a view hold together.

This is the face in numpy, over what ``runtime`` hands down; ``mpift.torch`` has the one for
scripts. All ranks make it alike, with the same table and the same first values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from mpift.core.membership import View
from mpift.parameter_server.client import Client, Pushed, Versioned
from mpift.parameter_server.hub import Hub
from mpift.parameter_server.letters import Letter
from mpift.parameter_server.shards import Links, Shards
from mpift.parameter_server.tables import Key, Table, Verb

_ANSWERS = (Verb.PUSHED, Verb.PULLED)
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a parameter server needs of its process."""

    hub: Hub
    member: int
    lost: Callable[[tuple[str, ...]], None]  # report these keys as lost; on the service thread
    waiting: Callable[[], contextlib.AbstractContextManager[None]]  # around waits for other ranks


class ParameterServer:
    """``first`` has version 0 of each key of ``table``; ``founding`` is the view in which all ranks
    knew it."""

    def __init__(
        self,
        table: Table,
        first: Iterable[np.ndarray],
        founding: View,
        surroundings: Surroundings,
    ) -> None:
        hub, member = surroundings.hub, surroundings.member
        self.table = table
        self._indices = {key.name: index for index, key in enumerate(table.keys)}
        self._hub = hub
        self._defaults = np.array(table.optimizer.settings, np.float64)
        shards = Shards(
            table, member, first, founding, Links(hub.send, hub.work, surroundings.lost)
        )
        self._client = Client(table, member, hub.send, hub.post.call, surroundings.waiting)
        sides = _Sides(shards, self._client)
        # Not waited for: whatever this rank asks comes after it in the loop's queue.
        hub.post.call(lambda: hub.open(table.number, sides))

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all keys, in the order in which they were given."""
        return tuple(self._indices)

    def push(
        self, key: str, value: ArrayLike, version: int, settings: Sequence[float] | None = None
    ) -> int:
        """``push_many`` of one key; returns the version that the update made. Raises
        ``StalePushError`` if it was refused."""
        pushed = self.push_many({key: (value, version)}, {key: settings} if settings else None)
        if pushed.stale:
            raise pushed.stale[key]
        return pushed.versions[key]

    def push_many(
        self,
        updates: Mapping[str, tuple[ArrayLike, int]],
        settings: Mapping[str, Sequence[float]] | None = None,
    ) -> Pushed:
        """Push (update, version that it was computed at) to each key, and wait until each is
        committed or refused. ``settings`` are the optimizer's for this push, by key.

        Raises ``KeyError`` for an unknown key, ``ValueError`` for an update of another shape, and
        ``KeyLostError`` if keys are lost; the others have been dealt with then.
        """
        items = {}
        for name, (update, version) in updates.items():
            index = self._index(name)
            row = self._defaults
            if settings is not None and name in settings:
                row = np.array(settings[name], np.float64)
            if row.shape != self._defaults.shape:
                raise ValueError(f"{row.size} settings for {name!r}, not {self._defaults.size}")
            items[index] = (int(version), row, _flat(self.table.keys[index], update))
        return self._client.push(items)

    def pull(
        self, key: str, min_version: int | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> Versioned:
        """``pull_many`` of one key."""
        return self.pull_many([key], {key: min_version or 0}, timeout)[key]

    def pull_many(
        self,
        keys: Iterable[str],
        min_versions: Mapping[str, int] | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> dict[str, Versioned]:
        """The newest committed version of each key, read-only.

        Answered at once, whatever is pushed meanwhile. Waits for the least version of keys that
        ``min_versions`` gives one for, at most ``timeout`` seconds. Raises ``KeyError`` for an
        unknown key, ``VersionTimeoutError``, and ``KeyLostError`` if any of the keys is lost.
        """
        wanted, versions = list(keys), min_versions or {}
        least = {self._index(name): int(versions.get(name, 0)) for name in wanted}
        found = self._client.pull(least, timeout)
        return {name: Versioned(*found[self._indices[name]]) for name in wanted}

    def close(self) -> None:
        """This rank serves these keys no more: only when no rank asks any more."""
        self._hub.post.call(lambda: self._hub.close(self.table.number))

    def _index(self, name: str) -> int:
        if name not in self._indices:
            raise KeyError(f"no key {name!r} in this parameter server; it has {_some(self.keys)}")
        return self._indices[name]


class _Sides:
    """Both sides of a server, as the hub sees them."""

    def __init__(self, shards: Shards, client: Client) -> None:
        self._shards = shards
        self._client = client

    @property
    def busy(self) -> bool:
        return self._shards.busy or self._client.busy

    def change(self, view: View) -> None:
        self._shards.change(view)
        self._client.change(view)

    def handle(self, letter: Letter) -> None:
        if letter.verb in _ANSWERS:
            self._client.handle(letter)
        else:
            self._shards.handle(letter)

    def turn(self, now: float) -> None:
        self._client.turn(now)


def _flat(key: Key, update: ArrayLike) -> np.ndarray:
    """A copy of its own, since it may be sent again; dtype[n]."""
    array = np.array(update, dtype=key.dtype, order="C")
    if array.shape != key.shape:
        raise ValueError(
            f"the push to {key.name!r} has shape {array.shape}, but the key has {key.shape}"
        )
    return array.reshape(-1)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:10]))
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")
