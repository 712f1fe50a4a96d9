"""Compressed sums of several ranks in one process, and how they go on; no test in itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpift.reduction.compressed import CompressedSum
from mpift.reduction.compressed_arrays import CompressedArray
from mpift.transport.lane import Started
from tests.unit.any_order import Comm, Network


@dataclass
class Running:
    """One rank's sum of one bucket, or of one array, under way."""

    comm: Comm
    sum: CompressedSum | CompressedArray
    started: Sequence[Started]

    def ready(self) -> bool:
        return bool(self.started) and all(each.request.done for each in self.started)

    def proceed(self) -> None:
        self.started = self.sum.proceed(self.comm)


def run(network: Network, running: Sequence[Running], until: Callable[[], bool]) -> None:
    """Let messages arrive and ranks go on, in random order."""
    while not until():
        ready = [each for each in running if each.ready()]
        if ready and network.chance.random() < 0.5:
            network.chance.choice(ready).proceed()
        elif not network.deliver_one():
            assert ready, "nothing moves any more"
            network.chance.choice(ready).proceed()


def start_all(
    comms: Sequence[Comm],
    sums: Sequence[CompressedSum],
    contributions: Sequence[np.ndarray | None],
    tag: int = 0,
) -> list[Running]:
    return [
        Running(comm, sum_, sum_.start(comm, tag, contribution))
        for comm, sum_, contribution in zip(comms, sums, contributions, strict=True)
    ]


def complete(network: Network, running: Sequence[Running]) -> None:
    run(network, running, lambda: not any(each.started for each in running))


def complete_one(network: Network, running: Sequence[Running]) -> Running:
    """Go on until the first rank is through."""
    run(network, running, lambda: not all(each.started for each in running))
    return next(each for each in running if not each.started)


def results(sums: Sequence[CompressedSum], length: int) -> list[np.ndarray]:
    """All ranks' results, which have to have the same bits."""
    found = [np.full(length, 666, np.float32) for _ in sums]
    for sum_, out in zip(sums, found, strict=True):
        sum_.result(out)
    assert len({out.tobytes() for out in found}) == 1, "ranks hold different bits"
    return found
