"""What the coordinator does for a checkpoint before it is voted on: gather parts, assemble them.

The thin shell around ``core.saving``: it has the clock, keeps the parts, and has the writer put
them together. On the group's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpift.checkpoint.group import Body, Group
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.scribe import Scribe
from mpift.core import saving
from mpift.core.saving import Origin


@dataclass(slots=True)
class _Gathered:
    """What there is of one checkpoint."""

    machine: saving.Gathering
    first: float  # when something came first, and last
    last: float
    parts: dict[tuple[Origin, int], bytes] = field(default_factory=dict)
    half: float | None = None  # when more than half of the shares were there
    problems: list[str] = field(default_factory=list)


class Gatherings:
    """See the module's docstring. ``say(word, body, members)`` sends to members of the view, all of
    them if that is None: "write", "manifest" or "abandon". A checkpoint may stand still for
    ``timeout_seconds``."""

    def __init__(
        self,
        group: Group,
        scribe: Scribe,
        root: Path,
        timeout_seconds: float,
        say: Callable[[str, Body, tuple[int, ...] | None], None],
    ) -> None:
        self._group = group
        self._scribe = scribe
        self._root = root
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._view: tuple[int, ...] = ()
        self._gathered: dict[int, _Gathered] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is being gathered."""
        return not self._gathered

    def take(self, version: int, word: str, sender: int, body: Body, data: bytes) -> None:
        """A rank has a "part", has "refused" to write one, or has "skipped" the snapshot."""
        now = time.monotonic()
        if version not in self._gathered:
            machine = saving.Gathering(frozenset(self._view), self._group.nodes())
            self._gathered[version] = _Gathered(machine, now, now)
        gathered = self._gathered[version]
        gathered.last = now
        self._feed(version, _event(gathered, word, sender, body, data))

    def forget(self, version: int) -> None:
        """It has come to an end."""
        self._gathered.pop(version, None)

    def abandon(self, version: int, reason: str, skipped: bool = False) -> None:
        """Let all know that nothing comes of it."""
        gathered = self._gathered.pop(version, None)
        problems = gathered.problems if gathered is not None else []
        told = "; ".join([reason, *problems])
        self._say("abandon", {"version": version, "reason": told, "skipped": skipped}, None)

    def install(self, members: tuple[int, ...]) -> None:
        """A new view: under a new coordinator ranks offer their parts anew."""
        before, self._view = self._view, members
        if before[:1] != members[:1]:
            self._gathered.clear()
        for version in tuple(self._gathered):
            self._feed(version, saving.Installed(members))

    def turn(self, now: float) -> None:
        """Slow owners get as long as the first half of them took, and ``sync_timeout`` at least."""
        for version, gathered in tuple(self._gathered.items()):
            machine, origin = gathered.machine, gathered.machine.origin
            if origin is not None and 2 * len(machine.missing) < len(origin.owners):
                gathered.half = gathered.half or now
                taken = gathered.half - gathered.first
                patience = max(self._group.config.sync_timeout or 0.0, taken)
                if now > gathered.half + patience and not machine.impatient:
                    self._feed(version, saving.PatienceOver())
            if now > gathered.last + self._timeout_seconds:
                reason = f"nothing came for {self._timeout_seconds:g} s"
                if machine.over:
                    self.abandon(version, f"{reason} of putting the parts together")
                else:
                    self._feed(version, saving.TimeOver(reason))

    def _feed(self, version: int, event: saving.Event) -> None:
        gathered = self._gathered[version]
        gathered.machine, instructions = gathered.machine.handle(event)
        for instruction in instructions:
            match instruction:
                case saving.Assign(member, share, owner):
                    body = {"version": version, "share": share, "owner": owner}
                    self._say("write", body, (member,))
                case saving.Assemble(origin, sources):
                    parts = [gathered.parts[origin, share] for share in range(len(sources))]
                    self._assemble(version, origin, parts)
                case saving.Abandon(reason, skipped):
                    self.abandon(version, reason, skipped)

    def _assemble(self, version: int, origin: Origin, parts: list[bytes]) -> None:
        def assembled(result: Any, error: str) -> None:
            self._group.call(lambda: self._announce(version, origin, result, error))

        self._scribe.request(
            "assemble",
            assembled,
            root=self._root,
            parts=parts,
            job_name=self._group.job,
            unix_time=time.time(),
        )

    def _announce(self, version: int, origin: Origin, result: Any, error: str) -> None:
        if version not in self._gathered:
            return  # a new coordinator sees to it
        if error:
            self.abandon(version, error)
            return
        self.forget(version)
        folder, found = result
        self._group.strike(order_of(version)[1], "announced")
        body = {"version": version, "folder": folder, "digest": found, "history": origin.history}
        self._say("manifest", body, None)


def _origin(body: Body) -> Origin | None:
    if body["origin"] is None:
        return None
    history, layout, owners = body["origin"]
    return Origin(history, layout, tuple(owners))


def _event(gathered: _Gathered, word: str, sender: int, body: Body, data: bytes) -> saving.Event:
    """What a rank says of its share; what comes with it is kept."""
    if word == "skipped":
        return saving.Skipped(sender, body["reason"])
    share = body["share"]
    if word == "refused":
        gathered.problems.append(f"rank {sender}: {body['reason']}")
        return saving.Refused(sender, share, _origin(body))
    origin = _origin(body)
    assert origin is not None
    gathered.parts.setdefault((origin, share), data)
    return saving.Offered(sender, share, origin)
