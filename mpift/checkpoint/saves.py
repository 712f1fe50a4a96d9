"""Saving together: parts are gathered by the coordinator, agreed on by all, and published.

For each checkpoint a rank's writer stores its share of the snapshot and offers the part to the
coordinator of the view. That one has what is missing written by others (``core.saving``), puts
the manifest together and announces it; every rank reads it back, looks for its own blocks in it,
and votes for its digest in the three-phase commit. Once that is decided, the coordinator, whoever
that is by then, makes the COMMIT file; only then it is a checkpoint, and told to be one. In a new
view parts are offered anew, and what was decided is published.

All of this happens on the group's thread, which never waits for a disk: that is the writer's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpift.checkpoint.directory import block_name
from mpift.checkpoint.gathering import Gatherings
from mpift.checkpoint.group import Body, Group
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.orders import Order, Summary, Written
from mpift.checkpoint.scribe import Scribe
from mpift.checkpoint.upkeep import Upkeep
from mpift.core.ballots import Content, majority
from mpift.core.saving import Origin

_FINISHED_KEPT = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """What a script may choose of how checkpoints are written. ``keep`` and ``keep_every`` say
    which stay; every ``full_every``-th is written whole; files of which less than
    ``compact_below`` is used are given up by writing their blocks anew. ``timeout_seconds`` is how
    long a checkpoint may stand still."""

    encode: bool | str = "auto"
    keep: int = 2
    keep_every: int | None = None
    full_every: int = 50
    compact_below: float = 0.5
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every", "full_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.encode not in (True, False, "auto"):
            raise ValueError(f'encode must be True, False or "auto", not {self.encode!r}')


@dataclass(frozen=True, slots=True)
class Capture:
    """A whole snapshot of this rank, in an arena."""

    version: int
    arena: Path
    origin: Origin
    share: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a checkpoint: committed, with ``summary``, or not, for a ``reason``; or it was
    ``skipped``, which is no failure. Version 0: a failure that concerns none of them alone."""

    version: int
    summary: Summary | None
    reason: str = ""
    skipped: bool = False

    @property
    def step(self) -> int:
        return order_of(self.version)[1]


@dataclass(slots=True)
class _Mine:
    """What this rank has of a checkpoint that is under way."""

    # None: it took no snapshot, for a ``reason``, or not yet
    capture: Capture | None
    reason: str = ""
    part: bytes | None = None
    refused: str = ""  # why it can't be written here


class Saves:
    """See the module's docstring. ``arena_paths(member)`` are where a rank's arenas would lie;
    ``told`` hears of each outcome, ``stored`` of what is written here; on the group's thread."""

    def __init__(
        self,
        group: Group,
        scribe: Scribe,
        root: Path,
        rules: Rules,
        arena_paths: Callable[[int], list[Path]],
        told: Callable[[Outcome], None],
        stored: Callable[[int, Written], None] = lambda *_: None,
    ) -> None:
        self._group = group
        self._scribe = scribe
        self._root = root
        self._rules = rules
        self._arena_paths = arena_paths
        self._told, self._stored = told, stored
        self.number = 0  # among the group's managers, once it is open
        self._view: tuple[int, ...] = ()
        self._mine: dict[int, _Mine] = {}
        self._gatherings = Gatherings(group, scribe, root, rules.timeout_seconds, self._tell)
        self._announced: dict[int, Body] = {}  # as the coordinator's word "manifest" has it
        self._decided: dict[int, str] = {}  # digests, not published yet as far as is known
        self._unable: dict[int, str] = {}  # why this rank can't vote for a manifest
        self._objections: dict[int, set[int]] = {}  # as coordinator: who can't
        self._finished: dict[int, Outcome] = {}
        self._attempts = 0
        self._since_full = 0
        self.base: int | None = None  # the newest committed version that is known
        keep = rules.keep, rules.keep_every
        self.upkeep = Upkeep(group, scribe, root, keep, lambda why: told(Outcome(0, None, why)))

    # -- for the manager ---------------------------------------------------------------------------

    def captured(self, capture: Capture, written: Written | None = None, problem: str = "") -> None:
        """This rank has taken its snapshot: write it, unless it has been ``written``, or could not
        be, for a ``problem``."""
        version = capture.version
        if version in self._finished:  # it came to an end without this rank's
            self._told(Outcome(version, None, skipped=True))
            return
        self._mine[version] = _Mine(capture)
        if written is not None or problem:
            self._written(version, capture.share, written, problem)
            return
        full = self._since_full % self._rules.full_every == 0
        self._since_full += 1
        self._write(version, (capture.arena,), capture.share, None if full else self.base)

    def skipped(self, version: int, reason: str) -> None:
        """This rank takes no snapshot."""
        if version not in self._finished:
            self._mine[version] = _Mine(None, reason)
            self._offer(version)

    def restored(self, version: int) -> None:
        """All ranks hold this checkpoint now, read from storage: what follows is compared to it."""
        self.base = self.upkeep.verified = version

    # -- writing -----------------------------------------------------------------------------------

    @property
    def _coordinator(self) -> int:
        return self._view[0]

    @property
    def _leads(self) -> bool:
        return self._view[0] == self._group.member

    def _write(self, version: int, arenas: tuple[Path, ...], share: int, base: int | None) -> None:
        self._attempts += 1
        generation, step = order_of(version)
        order = Order(
            self._root,
            arenas,
            version,
            block_name(step, self._group.member, self._group.epoch, self._attempts, generation),
            base,
            self._rules.encode,
            self._rules.compact_below,
        )

        def written(result: Any, error: str) -> None:
            self._group.call(lambda: self._written(version, share, result, error))

        self._scribe.request("write", written, order=order)

    def _written(self, version: int, share: int, written: Written | None, error: str) -> None:
        mine = self._mine.get(version)
        if version in self._finished or mine is None:
            return
        own = mine.capture is not None and mine.capture.share == share
        if own:
            mine.refused = error
            if written is not None:
                mine.part = written.part
                self._stored(version, written)
            self._offer(version)
        elif written is not None:
            self._send_part(version, written.origin, share, written.part)
        else:
            self._refuse(version, share, error)

    def _offer(self, version: int) -> None:
        """Let the coordinator know what there is of this rank."""
        if version in self._announced:
            self._say("announced", self._announced[version])
            return
        mine = self._mine[version]
        if mine.capture is None and mine.reason:
            self._say("skipped", {"version": version, "reason": mine.reason})
        elif mine.capture is not None and mine.part is not None:
            self._send_part(version, mine.capture.origin, mine.capture.share, mine.part)
        elif mine.capture is not None and mine.refused:
            self._refuse(version, mine.capture.share, mine.refused, mine.capture.origin)

    def _send_part(self, version: int, origin: Origin, share: int, part: bytes) -> None:
        body = {"version": version, "share": share, "origin": list(origin)}
        self._say("part", body, part)

    def _refuse(self, version: int, share: int, reason: str, origin: Origin | None = None) -> None:
        of = None if origin is None else list(origin)
        body = {"version": version, "share": share, "reason": reason, "origin": of}
        self._say("refused", body)

    def _say(self, word: str, body: Body, data: bytes = b"") -> None:
        self._group.send(self.number, word, (self._coordinator,), body, data)

    def _tell(self, word: str, body: Body, members: tuple[int, ...] | None) -> None:
        self._group.send(self.number, word, self._view if members is None else members, body, b"")

    # -- voting and publishing ---------------------------------------------------------------------

    def _check(self, version: int, folder: str, found: str, history: str) -> None:
        """Read what was announced, then vote."""
        mine = self._mine.get(version)

        def checked(_: Any, error: str) -> None:
            self._group.call(lambda: self._vote(version, found, history, error))

        self._scribe.request(
            "check",
            checked,
            root=self._root,
            folder=folder,
            found=found,
            version=version,
            part=mine.part if mine is not None else None,
        )

    def _vote(self, version: int, found: str, history: str, error: str) -> None:
        if version in self._finished:
            return
        if error:
            self._unable[version] = error
            self._say("problem", {"version": version, "reason": error})
        else:
            self._group.strike(order_of(version)[1], "voting")
            self._group.hold(self.number, version, Content(history, found))

    def _object(self, version: int, member: int, reason: str) -> None:
        """A rank can't vote. Nobody would propose what too few are left to vote for."""
        if version in self._finished:
            return
        self._told(Outcome(0, None, f"rank {member}: {reason}"))
        against = self._objections.setdefault(version, set())
        against.add(member)
        if self._leads and len(self._view) - len(against) < majority(len(self._view)):
            self._gatherings.abandon(version, f"too few ranks can read it back: {reason}")

    def _publish(self, version: int) -> None:
        def published(summary: Any, error: str) -> None:
            self._group.call(lambda: self._published(version, summary, error))

        folder = self._announced.get(version, {}).get("folder", "")
        self._scribe.request(
            "publish",
            published,
            root=self._root,
            folder=folder,
            found=self._decided[version],
            version=version,
        )

    def _published(self, version: int, summary: Summary | None, error: str) -> None:
        if summary is None:
            self._gatherings.abandon(version, f"agreed on, but it can't be committed: {error}")
            return
        self._group.strike(order_of(version)[1], "published")
        self.upkeep.after(version, sweep=self._gatherings.idle)
        self._tell_outcome(Outcome(version, summary), None)

    def _tell_outcome(self, outcome: Outcome, members: tuple[int, ...] | None) -> None:
        version, summary = outcome.version, outcome.summary
        if summary is not None:
            values = [getattr(summary, name) for name in summary.__slots__]
            self._tell("published", {"version": version, "summary": values}, members)
        else:
            body = {"version": version, "reason": outcome.reason, "skipped": outcome.skipped}
            self._tell("abandon", body, members)

    def _finish(self, outcome: Outcome) -> None:
        version, committed = outcome.version, outcome.summary is not None
        if version in self._finished:
            return
        self._finished[version] = outcome
        for old in sorted(self._finished)[:-_FINISHED_KEPT]:
            del self._finished[old]
        self._mine.pop(version, None)
        self._gatherings.forget(version)
        self._announced.pop(version, None)
        self._decided.pop(version, None)
        self._unable.pop(version, None)
        self._objections.pop(version, None)
        if committed:
            self.base = max(version, self.base or 0)
        self._told(outcome)

    # -- as a member of the group ------------------------------------------------------------------

    def received(self, word: str, sender: int, body: Body, data: bytes) -> None:
        version = body["version"]
        match word:
            case "part" | "refused" | "skipped" | "announced":
                if self._leads:
                    self._take(version, word, sender, body, data)
            case "write":
                self._take_over(version, body["share"], body["owner"])
            case "manifest":
                if version not in self._finished and self._announced.get(version) != body:
                    self._announced[version] = body
                    self._check(version, body["folder"], body["digest"], body["history"])
            case "problem":
                self._object(version, sender, body["reason"])
            case "published":
                self._finish(Outcome(version, Summary(*body["summary"])))
            case "abandon":
                self._finish(Outcome(version, None, body["reason"], body["skipped"]))

    def _take(self, version: int, word: str, sender: int, body: Body, data: bytes) -> None:
        """What a rank has of a version. If the coordinator is further than that, the rank has lost
        the word of it with a view, and is told again."""
        if version in self._finished:
            self._tell_outcome(self._finished[version], (sender,))
        elif version in self._announced:
            all_of_them = sender == self._group.member
            self._tell("manifest", self._announced[version], None if all_of_them else (sender,))
        elif word == "announced":  # by the coordinator before
            self._gatherings.forget(version)
            self._tell("manifest", body, None)
        else:
            self._gatherings.take(version, word, sender, body, data)

    def _take_over(self, version: int, share: int, owner: int) -> None:
        """Write another rank's share from its arena, if it is on this node and holds it whole."""
        if version in self._finished:
            return
        self._mine.setdefault(version, _Mine(None))
        arenas = tuple(path for path in self._arena_paths(owner) if path.exists())
        self._write(version, arenas, share, self.base)

    def decided(self, version: int, content: Content | None) -> None:
        if version in self._finished:
            return
        if content is None:
            self._finish(Outcome(version, None, "too few of the ranks could read it back"))
            return
        self._decided[version] = content.digest
        if self._leads:
            self._publish(version)

    def passed(self, version: int) -> bool:
        return version in self._finished or version in self._unable

    def installed(self, members: tuple[int, ...]) -> None:
        self._view = members
        self._gatherings.install(members)
        self._objections.clear()
        for version in sorted(self._mine.keys() | self._announced.keys()):
            self._offer(version)  # what was on its way is lost
        for version, reason in self._unable.items():
            self._say("problem", {"version": version, "reason": reason})
        if self._leads:
            for version in tuple(self._decided):
                self._publish(version)

    def turn(self, now: float) -> None:
        self._gatherings.turn(now)
