"""Ranks that save together without processes, disks and time: the test delivers and answers.

Each rank has real ``Saves``; its group and its writer are made up. Words between ranks wait until
``run``, or are lost with the view; a writer's jobs wait until the test ends them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpift.checkpoint.group import Body, Member, Seat
from mpift.checkpoint.manifest import version_of
from mpift.checkpoint.orders import Summary, Written
from mpift.checkpoint.saves import Capture, Outcome, Rules, Saves
from mpift.config import Config
from mpift.core import events
from mpift.core.ballots import Content
from mpift.core.saving import Origin

ROOT = Path("/checkpoints")
SUMMARY = Summary(None, 4, 4, 400, 400, 400)
HISTORY = "first"


def version(step: int) -> int:
    """Of a step of the first generation."""
    return version_of((1, step))


def written(origin: Origin, share: int, by: int) -> Written:
    """What a writer gives for a share: a part that none but the test reads."""
    return Written(origin, f"share {share} by {by} of {origin.history}".encode())


@dataclass(frozen=True)
class Job:
    name: str
    then: Callable[[Any, str], None]
    arguments: dict[str, Any]

    def end(self, result: Any = None, error: str = "") -> None:
        self.then(result, error)


class FakeScribe:
    """Takes jobs down."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def request(self, job: str, then: Callable[[Any, str], None], **arguments: Any) -> None:
        self.jobs.append(Job(job, then, arguments))

    def names(self) -> list[str]:
        return [job.name for job in self.jobs]

    def take(self, name: str) -> Job:
        """The first job of that name, which the test ends now or later, or never."""
        job = next(job for job in self.jobs if job.name == name)
        self.jobs.remove(job)
        return job


@dataclass(frozen=True)
class Letter:
    sender: int
    receiver: int
    word: str
    body: Body
    data: bytes


class FakeGroup:
    """One rank's side of ``Crew``."""

    config = Config.load(sync_timeout=10.0).for_nodes(1)
    job, region = "job", "region"
    alone = False

    def __init__(self, crew: Crew, member: int) -> None:
        self.crew = crew
        self.member = member

    @property
    def epoch(self) -> int:
        return self.crew.epoch

    @property
    def leads(self) -> bool:
        return self.crew.view[0] == self.member

    def open(self, member: Member) -> int:
        raise NotImplementedError

    def close(self, member: Member) -> None:
        raise NotImplementedError

    def seat(self, whole: bool) -> Seat:
        raise NotImplementedError

    def nodes(self) -> tuple[tuple[int, str], ...]:
        return tuple((member, "node") for member in self.crew.launched)

    def call(self, function: Callable[[], None]) -> None:
        self.crew.calls.append((self.member, function))

    def send(
        self, number: int, word: str, members: tuple[int, ...], body: Body, data: bytes
    ) -> None:
        for member in members:
            letter = Letter(self.member, member, word, body, data)
            if member == self.member:
                self.call(functools.partial(self.crew.deliver, letter))
            elif member in self.crew.view:
                self.crew.letters.append(letter)

    def hold(self, number: int, version: int, content: Content) -> None:
        self.crew.held.setdefault(version, {})[self.member] = content

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collectively(self, function: Callable[[Any], Any]) -> Any:
        raise NotImplementedError

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def emit(self, kind: Callable[..., events.Event], *values: Any) -> None:
        raise NotImplementedError

    def strike(self, step: int, point: str) -> object:
        self.crew.struck.append((self.member, step, point))
        return None

    def fail_at_exit(self) -> None:
        raise NotImplementedError


@dataclass
class Rank:
    saves: Saves
    scribe: FakeScribe
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def committed(self) -> list[int]:
        """Steps that this rank knows to be committed."""
        return [outcome.step for outcome in self.outcomes if outcome.summary is not None]

    @property
    def failed(self) -> list[str]:
        return [outcome.reason for outcome in self.outcomes if outcome.summary is None]


class Crew:
    """All ranks of a job, on one node, and what lies between them."""

    def __init__(self, ranks: int, **rules: Any) -> None:
        self.launched = self.view = tuple(range(ranks))
        self.epoch = 0
        self.calls: list[tuple[int, Callable[[], None]]] = []
        self.letters: list[Letter] = []
        self.held: dict[int, dict[int, Content]] = {}
        self.struck: list[tuple[int, int, str]] = []
        self.ranks: dict[int, Rank] = {}
        for member in self.launched:
            self.ranks[member] = self._rank(member, Rules(**rules))

    def _rank(self, member: int, rules: Rules) -> Rank:
        scribe = FakeScribe()
        outcomes: list[Outcome] = []
        saves = Saves(
            FakeGroup(self, member),
            scribe,  # type: ignore[arg-type]
            ROOT,
            rules,
            lambda of: [Path(__file__).with_name("__init__.py")],  # it has to exist
            outcomes.append,
        )
        saves.installed(self.view)
        return Rank(saves, scribe, outcomes)

    def __getitem__(self, member: int) -> Rank:
        return self.ranks[member]

    def __iter__(self) -> Iterator[Rank]:
        return iter([self.ranks[member] for member in self.view])

    # -- what passes between ranks -----------------------------------------------------------------

    def run(self) -> None:
        """Deliver all that is on its way, until nothing is."""
        while self.calls or self.letters:
            self.run_calls()
            if self.letters:
                self.deliver(self.letters.pop(0))

    def run_calls(self) -> None:
        """What ranks have put off; no letter arrives."""
        while self.calls:
            member, function = self.calls.pop(0)
            if member in self.view:
                function()

    def deliver(self, letter: Letter) -> None:
        saves = self.ranks[letter.receiver].saves
        saves.received(letter.word, letter.sender, letter.body, letter.data)

    def deliver_to(self, *receivers: int) -> None:
        """Only their letters arrive; the others stay on their way."""
        self.run_calls()
        for letter in [each for each in self.letters if each.receiver in receivers]:
            self.letters.remove(letter)
            self.deliver(letter)
        self.run_calls()

    def install(self, *members: int) -> None:
        """A new view of these, in which nothing of the old one arrives."""
        self.view, self.epoch = members, self.epoch + 1
        self.letters.clear()
        for rank in self:
            rank.saves.installed(members)

    def install_quietly(self, *members: int) -> None:
        """The same, where nobody has saves that would have to hear of it."""
        self.view, self.epoch = members, self.epoch + 1

    # -- the steps of a save -----------------------------------------------------------------------

    def capture(self, step: int, *members: int, history: str = HISTORY) -> None:
        """These ranks, or all, take their snapshots in the present view."""
        origin = Origin(history, "layout", self.view)
        for member in members or self.view:
            share = self.view.index(member)
            capture = Capture(version(step), Path(f"/arena-{member}"), origin, share)
            self[member].saves.captured(capture)

    def write(self, *members: int, history: str = HISTORY, owners: tuple[int, ...] = ()) -> None:
        """The writers of these ranks, or all, finish the first thing that they are to write."""
        origin = Origin(history, "layout", owners or self.view)
        for member in members or self.view:
            share = origin.owners.index(member)
            self[member].scribe.take("write").end(written(origin, share, member))
        self.run_calls()

    def assemble(self, member: int, digest: str = "digest") -> list[bytes]:
        """The coordinator's writer puts together what it was given: this."""
        job = self[member].scribe.take("assemble")
        job.end(("0000000001", digest))
        self.run_calls()
        parts: list[bytes] = job.arguments["parts"]
        return parts

    def check(self, *members: int) -> None:
        """The writers of these ranks, or all, find that the manifest is as it should be."""
        for member in members or self.view:
            self[member].scribe.take("check").end()
        self.run_calls()

    def decide(self, step: int, *members: int, digest: str = "digest") -> None:
        """It is agreed on, as far as these ranks, or all, have heard."""
        for member in members or self.view:
            self[member].saves.decided(version(step), Content(HISTORY, digest))

    def publish(self, member: int) -> None:
        """The coordinator's writer has made the COMMIT file."""
        self[member].scribe.take("publish").end(SUMMARY)
        self.run_calls()

    def commit(self, step: int) -> None:
        """A save from beginning to end."""
        self.capture(step)
        self.write()
        self.run()
        self.assemble(self.view[0])
        self.run()
        self.check()
        self.decide(step)
        self.publish(self.view[0])
        self.run()
