"""Whether a process is gone for certain, and seeing to it that it is, whatever MPI says.

On this node the kernel is asked, and kills by pidfd. On another one its watchdog is, over TCP, once
its address is known. Any thread may call; nothing here takes longer than ``timeout_seconds``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpift.core.hangs import Phase
from mpift.core.suspicion import Finding
from mpift.transport import inquiries, processes
from mpift.transport.inquiries import Fence, Inquire, State
from mpift.transport.liveness import Liveness
from mpift.transport.processes import ProcessIdentity

_LOOK_SECONDS = 0.001
# A loop that turns bumps its counter every few milliseconds; a loaded machine gets some time.
_STANDS_STILL_SECONDS = 1.0
_ASKED_AT_ONCE = 16


class Fencing:
    """What the rank ``here`` can find out and do: with this node's kernel alone, until ``arm``."""

    def __init__(self, here: ProcessIdentity, timeout_seconds: float) -> None:
        self._here = here
        self._timeout_seconds = timeout_seconds
        self._token = ""
        self._addresses: dict[str, tuple[str, int]] = {}
        self._liveness: Liveness | None = None
        self.epoch = 0  # in which others are asked to kill
        self.details: dict[int, str] = {}  # what other nodes' watchdogs said of their dead

    def arm(self, token: str, liveness: Liveness, addresses: Mapping[str, tuple[str, int]]) -> None:
        """From now on use this node's liveness file, and ask the watchdogs at these addresses, by
        node, with the job's token."""
        self._token, self._liveness, self._addresses = token, liveness, dict(addresses)

    # -- all at once, in a rebuild -----------------------------------------------------------------

    def gone(self, candidates: Sequence[ProcessIdentity], kill: bool) -> frozenset[int]:
        """Member ids of those that are gone for certain; see ``transport.world.Witness``."""
        if not candidates:
            return frozenset()
        local = [c for c in candidates if c.node == self._here.node]
        remote = [c for c in candidates if c.node != self._here.node]
        if kill:
            for candidate in local:
                processes.kill(candidate.pid, candidate.start_time)
        found: set[int] = set()
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            answers = pool.map(lambda c: self._gone_elsewhere(c, kill), remote)
            found |= self._ended_here(local)
            found |= {c.member for c, gone in zip(remote, answers, strict=True) if gone}
        return frozenset(found)

    def _ended_here(self, candidates: Sequence[ProcessIdentity]) -> frozenset[int]:
        deadline = time.monotonic() + self._timeout_seconds
        known = processes.confirmed_gone(candidates, self._here)
        while len(known) < len(candidates) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            known = processes.confirmed_gone(candidates, self._here)
        return frozenset(m for m in known if not self._stood_down(m))

    def _stood_down(self, member: int) -> bool:
        """Whether a member of this node has ended because its part of the job had to: those that it
        has given up may not go on as if it had died."""
        slots = self._liveness.slots if self._liveness is not None else {}
        return member in slots and slots[member].phase is Phase.STOOD_DOWN

    def _gone_elsewhere(self, candidate: ProcessIdentity, kill: bool) -> bool:
        """Asked until it is gone or the time is over: a death takes its node some moments."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            finding = self._ask(candidate, kill, deadline - time.monotonic())
            if finding not in (Finding.ALIVE, Finding.STANDS_STILL) or time.monotonic() > deadline:
                return finding is Finding.GONE
            time.sleep(10 * _LOOK_SECONDS)

    # -- one suspect -------------------------------------------------------------------------------

    def examine(self, suspect: ProcessIdentity, kill: bool) -> Finding | None:
        """What can be found out about a suspect from here; None if nobody on its node answers."""
        if suspect.node == self._here.node:
            return self.examine_here(suspect, kill)
        return self._ask(suspect, kill, self._timeout_seconds)

    def examine_here(self, suspect: ProcessIdentity, kill: bool) -> Finding:
        """The same for a process of this node."""
        if kill:
            processes.kill(suspect.pid, suspect.start_time)
            return Finding.GONE if self._ended_here([suspect]) else Finding.UNREACHABLE
        if processes.is_gone(suspect, self._here):
            stood_down = self._stood_down(suspect.member)
            return Finding.UNREACHABLE if stood_down else Finding.GONE
        if self._liveness is None:
            return Finding.UNWATCHED
        if self._liveness.watchdog.alive:
            return Finding.ALIVE
        return self._look(suspect, self._liveness)

    def _look(self, suspect: ProcessIdentity, liveness: Liveness) -> Finding:
        """Without a watchdog: whether the suspect's loop turns, or waits in MPI as it may."""
        slot = liveness.slots[suspect.member]
        before, deadline = slot.beats, time.monotonic() + _STANDS_STILL_SECONDS
        while time.monotonic() < deadline:
            if slot.beats != before:
                return Finding.ALIVE
            time.sleep(10 * _LOOK_SECONDS)
        stat = processes.read_stat(suspect.pid)
        stopped = stat is not None and stat.state == "T"
        may_wait = slot.blocked_since_seconds and not stopped
        may_wait = may_wait or any(processes.exemptions(suspect.pid))
        return Finding.ALIVE if may_wait else Finding.STANDS_STILL

    def _ask(self, suspect: ProcessIdentity, kill: bool, seconds: float) -> Finding | None:
        address = self._addresses.get(suspect.node, ("", 0))
        if not address[1] or seconds <= 0:
            return None
        request = (
            Fence(suspect.member, self.epoch, f"left out in epoch {self.epoch}")
            if kill
            else Inquire(suspect.member)
        )
        answer = inquiries.ask(address, self._token, request, seconds)
        if answer is None or answer.state is State.UNKNOWN:
            return None
        if answer.state is State.STOOD_DOWN:
            return Finding.UNREACHABLE
        if answer.state is State.GONE:
            self.details[suspect.member] = answer.detail
            return Finding.GONE
        if kill:  # nobody can say that one which outlived a fence will not come back
            return Finding.UNREACHABLE
        return Finding.STANDS_STILL if answer.state is State.STOPPED else Finding.ALIVE
