"""What the service's loop keeps going besides the lanes: control messages, heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mpift.transport.world import World


class Part(Protocol):
    """Called on the service thread only."""

    @property
    def requests(self) -> Sequence[Any]:
        """The MPI requests that it waits for."""

    def complete(self, positions: Sequence[int]) -> None:
        """The requests at these positions have completed."""

    def turn(self, now: float) -> None:
        """The loop comes round; ``now`` is monotonic."""

    def fault(self) -> None:
        """Whatever is under way is lost."""

    def install(self, world: World) -> None:
        """A new view is in force."""
