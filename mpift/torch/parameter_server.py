"""``hvd.ParameterServer``: tensors that all ranks hold together, to be pulled and pushed by any.

The face over ``mpift.parameter_server``: checks that all ranks build the same, gives everybody rank
0's values to begin with, and takes and returns tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from mpift import runtime
from mpift.core import events
from mpift.errors import MismatchError, NotInitializedError
from mpift.parameter_server import ParameterServer as Server
from mpift.parameter_server import Pushed, ServerOptimizer, Versioned
from mpift.parameter_server.optimizers import Assign
from mpift.parameter_server.server import TIMEOUT_SECONDS, Surroundings
from mpift.parameter_server.tables import Key, Table
from mpift.reduction.operations import Kind, Operation
from mpift.torch.functions import _from_any_root, allgather_object

_EVENT_CHARS = 2000  # of names in one event, which has to fit into a pipe's line

Value = torch.Tensor | np.ndarray | float | int


class ParameterServer:
    """Named tensors, spread over all ranks, each with a backup on another rank.

    All ranks make it alike, in the same order as other operations; ``values`` of rank 0 count, and
    become version 0. With an ``optimizer`` (``hvd.SGD(lr=...)`` or ``hvd.Adagrad(...)``) a push is
    a gradient; without one it is the new value. A push that was computed at a version more than
    ``staleness`` behind the newest is refused; None: never. No rank waits for another's script.

    Raises ``MismatchError`` on all ranks if they differ, and ``ValueError`` for values without a
    numpy dtype (bfloat16) or a negative ``staleness``.
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        optimizer: ServerOptimizer | None = None,
        staleness: int | None = None,
    ) -> None:
        if staleness is not None and (
            isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0
        ):
            raise ValueError(f"staleness must be a whole number or None, not {staleness!r}")
        self._runtime = current = runtime.current()
        arrays = {name: as_array(name, value) for name, value in values.items()}
        keys = tuple(Key(name, a.shape, a.dtype) for name, a in arrays.items())
        table = Table(current.hub.new_number(), keys, optimizer or Assign(), staleness)
        _check_alike(table)
        flat = [np.frombuffer(array.tobytes(), np.uint8) for array in arrays.values()]
        everything = _from_any_root(np.concatenate(flat) if flat else np.empty(0, np.uint8), 0)
        first, start = [], 0
        for key in keys:
            stop = start + key.size * key.dtype.itemsize
            first.append(everything[start:stop].copy().view(key.dtype))
            start = stop
        surroundings = Surroundings(current.hub, current.member, self._report_lost, current.waiting)
        # All ranks see the same view here, that of the last operation.
        self.server = Server(table, first, current.view, surroundings)
        self._closed = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all keys."""
        return self.server.keys

    def push(self, key: str, value: Value, version: int) -> int:
        """Apply ``value`` (a gradient, or the new value) that was computed at ``version``; returns
        the number of the version that it made, once that is on two ranks.

        Raises ``StalePushError`` if it was refused (nothing has changed then), ``KeyLostError``,
        ``KeyError`` for an unknown key, ``ValueError`` for another shape.
        """
        self.check()
        return self.server.push(key, as_array(key, value), version)

    def push_many(
        self,
        updates: Mapping[str, tuple[Value, int]],
        settings: Mapping[str, Sequence[float]] | None = None,
    ) -> Pushed:
        """Push (value, version) to each key, in one letter a server. Refusals are in ``stale`` of
        the result, new version numbers in ``versions``. ``settings`` are those of the optimizer for
        this push, by key, in the order of its fields. Keys stand for themselves: some may be
        refused or lost, others not."""
        self.check()
        arrays = {key: (as_array(key, value), at) for key, (value, at) in updates.items()}
        return self.server.push_many(arrays, settings)

    def pull(
        self, key: str, min_version: int | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> Versioned:
        """The newest committed (value, version); the value is a tensor of this rank's own.

        Never waits for a push. With ``min_version`` it waits until that is committed, at most
        ``timeout`` seconds, and raises ``VersionTimeoutError`` then. Raises ``KeyLostError`` and
        ``KeyError``.
        """
        return self.pull_many([key], {key: min_version or 0}, timeout)[key]

    def pull_many(
        self,
        keys: Iterable[str],
        min_versions: Mapping[str, int] | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> dict[str, Versioned]:
        """``pull`` of several keys, one letter a server; they may be of different moments."""
        self.check()
        found = self.server.pull_many(keys, min_versions, timeout)
        return {key: Versioned(torch.tensor(array), at) for key, (array, at) in found.items()}

    def close(self) -> None:
        """Give up the tensors, when all ranks have called this: it waits for them. Not needed at
        the end of a script: until all have left, a rank serves the others."""
        if not self._closed:
            self.check()
            self._closed = True
            self._runtime.operate(Operation(Kind.BARRIER))
            self.server.close()

    def check(self) -> None:
        """Raises ``NotInitializedError`` once this was closed or mpift was shut down."""
        if self._closed or not runtime.is_running() or runtime.current() is not self._runtime:
            raise NotInitializedError("this parameter server is closed, or mpift was shut down")

    def _report_lost(self, keys: tuple[str, ...]) -> None:
        while keys:
            count, chars = 0, 0
            while count < len(keys) and (not count or chars + len(keys[count]) < _EVENT_CHARS):
                chars += len(keys[count]) + 4
                count += 1
            self._runtime.emit(events.KeysLost, keys[:count])
            keys = keys[count:]


def as_array(key: str, value: Value) -> np.ndarray:
    """``value`` in host memory; ``ValueError`` for what numpy has no dtype for."""
    try:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu").numpy()
        array = np.asarray(value)
    except TypeError as error:
        raise ValueError(f"{key!r} cannot be kept in a parameter server: {error}") from None
    if array.dtype.hasobject:
        raise ValueError(f"{key!r} cannot be kept in a parameter server: it is no array of numbers")
    return array


def _check_alike(table: Table) -> None:
    """All ranks must hold the same keys by the same rules; else ``MismatchError`` on all ranks."""
    lines = [f"{key.name!r} of {key.dtype}{list(key.shape)}" for key in table.keys]
    rules = f"server {table.number}, {table.optimizer}, staleness={table.staleness}"
    mine = xxhash.xxh3_128_hexdigest("\n".join([rules, *lines]).encode())
    if len(set(allgather_object(mine))) == 1:
        return
    everybody: list[list[Any]] = allgather_object([rules, *lines])
    for rank, theirs in enumerate(everybody):
        differ = [pair for pair in zip(everybody[0], theirs, strict=False) if pair[0] != pair[1]]
        if differ or len(theirs) != len(everybody[0]):
            first, other = differ[0] if differ else (len(everybody[0]) - 1, len(theirs) - 1)
            what = "" if differ else " keys"
            raise MismatchError(
                f"ranks build different parameter servers: rank 0 has {first}{what}, rank {rank}"
                f" has {other}{what}; give the same values, optimizer and staleness on every rank"
            )
    # Whoever differed has died since.
