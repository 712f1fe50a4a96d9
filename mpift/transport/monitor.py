"""A thread that looks twice a second at what MPI cannot see or may not come back from.

It makes no MPI call. It ends this process, with a named reason, when a start or a rebuild takes too
long, when a rank of this node left in a way that MPI does not report, and when the launcher is
gone. And it takes care of the node's watchdog.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from mpift.config import Config
from mpift.errors import ExitCode
from mpift.transport import processes
from mpift.transport.service import REBUILDING, Service

_PERIOD_SECONDS = 0.5
# MPI reports a death within some milliseconds; this much later it never will.
_UNREPORTED_SECONDS = 2.0


class Monitor:
    """Watches ``service`` and its surroundings until ``stop``."""

    def __init__(
        self,
        service: Service,
        config: Config,
        give_up: Callable[[int, str], NoReturn],
        end_job: Callable[[int, str], NoReturn],
    ) -> None:
        self._service = service
        self._config = config
        self._give_up = give_up
        self._end_job = end_job
        # Called in every round; set once there is something to take care of.
        self.care: Callable[[], None] = lambda: None
        # Called in a rebuild that lasts, with its seconds so far: ends what it may wait for.
        self.unblock: Callable[[float], None] = lambda _seconds: None
        self._introduced_since: float | None = None
        self._stopped = threading.Event()
        self._parent = os.getppid()
        self._gone_since: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="mpift-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextlib.contextmanager
    def introduction(self) -> Iterator[None]:
        """Around what the ranks tell each other before anybody watches over them."""
        self._introduced_since = time.monotonic()
        try:
            yield
        finally:
            self._introduced_since = None

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(_PERIOD_SECONDS):
                self._look(time.monotonic())
        except Exception:  # noqa: BLE001, no thread of ours may fail in silence
            trace = traceback.format_exc()
            self._give_up(ExitCode.SCRIPT_FAILED, f"the monitor thread failed:\n{trace}")

    def _look(self, now: float) -> None:
        self._check_blocking(now)
        self._check_introduction(now)
        self._check_launcher()
        if self._service.running:
            self._check_neighbours(now)
        self.care()

    def _check_blocking(self, now: float) -> None:
        """Calls that MPI may not come back from have a time limit each."""
        blocked = self._service.blocked
        if blocked is None:
            return
        limit: float = getattr(self._config, blocked.limit)
        if blocked.what == REBUILDING:
            self.unblock(now - blocked.since)
        if now - blocked.since > limit:
            hint = (
                ": did a rank end before it came here?" if blocked.limit == "start_timeout" else ""
            )
            self._give_up(
                ExitCode.SCRIPT_FAILED,
                f"{blocked.what} took longer than {blocked.limit}={limit:g} s{hint}",
            )

    def _check_introduction(self, now: float) -> None:
        """One that stands still before anybody watches over it keeps all others from starting."""
        since, limit = self._introduced_since, self._config.start_timeout
        if since is not None and now - since > limit:
            self._end_job(
                ExitCode.SCRIPT_FAILED,
                f"the ranks did not get to know each other within start_timeout={limit:g} s:"
                " does one of them stand still?",
            )

    def _check_launcher(self) -> None:
        if os.getppid() != self._parent:
            self._give_up(ExitCode.SCRIPT_FAILED, "the launcher of this rank is gone")

    def _check_neighbours(self, now: float) -> None:
        """Ranks of this node that are gone although MPI has not said so."""
        world = self._service.world
        here = world.identities[world.member]
        neighbours = [world.identities[m] for m in world.view.members if m != world.member]
        gone = processes.confirmed_gone(neighbours, here)
        self._gone_since = {m: self._gone_since.get(m, now) for m in gone}
        for member, since in self._gone_since.items():
            if now - since > _UNREPORTED_SECONDS and self._service.blocked is None:
                self._end_job(
                    ExitCode.SCRIPT_FAILED,
                    f"member {member} on {world.identities[member].host} left with a failure that"
                    " MPI does not report (an exit from C code?); start with mpift run to survive"
                    " this",
                )
