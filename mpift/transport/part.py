"""What the service's loop keeps going besides the lanes: control messages, heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpift.transport.mailbox import Mailbox
from mpift.transport.parcels import Parcels
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


@dataclass(frozen=True, slots=True)
class Post:
    """What a part of another room needs to talk to other ranks. ``mailbox``, ``parcels`` and
    ``hurry`` (come round soon: others may wait) are used on the service thread; ``call`` runs a
    function there, soon, and may be called from any."""

    mailbox: Mailbox
    parcels: Parcels
    call: Callable[[Callable[[], None]], None]
    hurry: Callable[[], None]
