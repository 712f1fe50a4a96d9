"""How a rank that waits for nothing notices that the others have begun a rebuild.

A receive that nobody sends to, on a communicator that is revoked when a rebuild begins: it fails
then, and that is all it is for. A part of the service's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpift.transport.lane import Started
from mpift.transport.world import World

_TAG = 3


class Alarm:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self._armed: Started
        self._quarantine: list[Started] = []

    def install(self, world: World) -> None:
        buffer = bytearray(1)
        request = world.receive(world.lane_comms[0], buffer, _TAG)
        self._armed = Started(request, (buffer,))
        self.requests = [request]

    def fault(self) -> None:
        self._quarantine.append(self._armed)
        self.requests = []

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def turn(self, now: float) -> None:
        pass
