"""This rank's part in its node: a slot in the liveness file, and care for the node's watchdog.

Other threads than the service's may call ``care`` and ``verdict``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mpift.config import Config
from mpift.core.hangs import Limits
from mpift.transport import interface, segments
from mpift.transport.liveness import Liveness
from mpift.transport.processes import ProcessIdentity
from mpift.transport.watchdog import Keeper, Settings

# A Python that starts on a loaded machine; without an address other ranks are asked by message.
_ADDRESS_SECONDS = 5.0
_LOOK_SECONDS = 0.02


class Node:
    """The node of ``here`` in the job with this token; ``members`` are the ranks on it.

    ``alone`` says that the job has no other node. Raises ``MpiftError`` where the liveness file
    can't be made.
    """

    def __init__(
        self,
        config: Config,
        token: str,
        here: ProcessIdentity,
        members: tuple[int, ...],
        alone: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._member = here.member
        self._warn = warn
        self.liveness = Liveness.create(token, here.node, members)
        self.slot = self.liveness.slots[here.member]
        self.slot.register(here)
        self._segments = segments.of_process()
        self._keeper: Keeper | None = None
        self.address = ("", 0)  # of this node's watchdog, as far as this rank starts it
        if config.watchdog:
            turn = members.index(here.member)
            address = (
                interface.LOOPBACK if alone else interface.job_address(config.network_interface)
            )
            # Nobody elsewhere asks about the dead of a job's only node.
            settings = _settings(config, address, linger_seconds=0.0 if alone else 5.0)
            self._keeper = Keeper(self.liveness, token, settings, turn)
            self.care()
            if turn == 0:
                self.liveness.sweep()
                self.address = (address, self._port())

    def _port(self) -> int:
        """The watchdog's port once it is up; 0 if that takes too long."""
        deadline = time.monotonic() + _ADDRESS_SECONDS
        while not self.liveness.watchdog.port and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return self.liveness.watchdog.port

    def all_have_met(self) -> None:
        """All ranks of the node have mapped the file: without a watchdog nobody else will."""
        if self._keeper is None:
            self.liveness.unlink()

    def care(self) -> None:
        """To be called twice a second: keep the watchdog running."""
        if self._keeper is None:
            return
        try:
            self._keeper.ensure(time.monotonic())
        except OSError as error:
            self._warn(f"the watchdog of this node can't be started: {error}; hangs stay unnoticed")
            self._keeper = None

    def verdict(self, member: int) -> str:
        """Why the watchdog killed this member of the node; empty if it did not."""
        slot = self.liveness.slots.get(member)
        return slot.verdict if slot is not None else ""

    def leave(self) -> None:
        """This rank has left the job."""
        self._keeper = None
        if self.liveness.unlink_if_last(self._member):
            segments.remove(self._segments)
        self.liveness.close()


def _settings(config: Config, address: str, linger_seconds: float) -> Settings:
    assert config.hang_timeout is not None
    limits = Limits(
        hang_timeout_seconds=config.hang_timeout,
        stop_timeout_seconds=config.stop_timeout,
        orphan_timeout_seconds=config.orphan_timeout,
    )
    return Settings(limits, address, config.fence_timeout, linger_seconds=linger_seconds)
