"""The ranks of a job as a group that saves together: a part of the service's loop.

Words travel as parcels, a piece of JSON and bytes; versions are decided by the three-phase commit.
What arrives for a manager that this rank has yet to make is kept until it has, or until the view
ends.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mpift.checkpoint.group import Body, Member, Seat
from mpift.config import Config
from mpift.core.ballots import Content
from mpift.core.commit_events import Decided, Entry
from mpift.core.membership import View
from mpift.errors import CheckpointError, ExitCode
from mpift.transport.agreements import Agreements
from mpift.transport.exits import Exits
from mpift.transport.messages import Kind
from mpift.transport.parcels import Parcel
from mpift.transport.part import Post
from mpift.transport.processes import ProcessIdentity
from mpift.transport.world import World

_EARLY = 256


class Rounds(Protocol):
    """The gradient rounds of this process."""

    def history(self) -> str:
        """Of the rounds applied."""

    def settle(self) -> None:
        """Complete and apply all rounds that any rank has something in; all ranks call this."""


class Host(Protocol):
    """What the runtime lends. ``view`` is that which the script sees, ``round_view`` the one that
    reduced the last round."""

    post: Post
    agreements: Agreements
    config: Config
    identities: dict[int, ProcessIdentity]
    view: View
    round_view: View
    steps_applied: int
    exits: Exits
    emit: Callable[..., None]

    def block_in_mpi(self, function: Callable[[Any], object], what: str) -> None:
        """Call ``function`` on the thread that owns MPI, which waits for it."""

    @property
    def gradients(self) -> Rounds:
        """This process's rounds."""

    @property
    def waiting(self) -> Callable[[], AbstractContextManager[None]]:
        """Around a wait of the script's."""

    @property
    def strike(self) -> Callable[[int, str], object]:
        """Here the fault schedule may strike: step, point."""


class JobGroup:
    """A ``Group``; see the module's docstring. ``names`` are those of the job, and of its files in
    the memory of this node. ``gather`` tells all ranks a value and returns everybody's."""

    requests: Sequence[Any] = ()

    def __init__(
        self, host: Host, names: tuple[str, str], gather: Callable[[Any], list[Any]]
    ) -> None:
        self._host = host
        self._world: World
        self._members: list[Member] = []
        self._subjects: list[int] = []
        self._closed: set[int] = set()
        self._early: deque[Parcel] = deque(maxlen=_EARLY)
        self.config = host.config
        self.job, self.region = names
        self.gather = gather
        self.waiting = host.waiting
        self.emit = host.emit
        self.strike = host.strike
        self._post = host.post
        self.call = host.post.call
        host.post.parcels.register(Kind.CHECKPOINT, self._take)

    def settle(self) -> None:
        self._host.gradients.settle()

    def fail_at_exit(self) -> None:
        self._host.exits.fail(ExitCode.CHECKPOINT_DAMAGED, "the last checkpoint was not saved")

    # -- for managers ------------------------------------------------------------------------------

    @property
    def member(self) -> int:
        return self._world.member

    @property
    def epoch(self) -> int:
        return self._world.view.epoch

    @property
    def leads(self) -> bool:
        return self._world.view.coordinator == self._world.member

    @property
    def alone(self) -> bool:
        return len(self._neighbours(self._world.view)) == 1

    def _neighbours(self, view: View) -> tuple[int, ...]:
        """Positions in ``view`` of the ranks of this node."""
        nodes = dict(self.nodes())
        here = nodes[self.member]
        return tuple(rank for rank, member in enumerate(view.members) if nodes[member] == here)

    def seat(self, whole: bool) -> Seat:
        host = self._host
        view = host.round_view if host.steps_applied else host.view
        share = view.rank_of(self.member)
        history = host.gradients.history()
        return Seat(share, view.members, self._neighbours(view), history, whole)

    def nodes(self) -> tuple[tuple[int, str], ...]:
        return tuple((m, identity.node) for m, identity in sorted(self._host.identities.items()))

    def open(self, member: Member) -> int:
        number = len(self._members)
        self._members.append(member)
        self._subjects.append(self._host.agreements.open(_Subject(member)))
        member.installed(self._world.view.members)
        early = tuple(self._early)
        self._early.clear()
        for parcel in early:
            self._take(parcel)
        return number

    def close(self, member: Member) -> None:
        self._closed.add(self._members.index(member))

    def send(
        self, number: int, word: str, members: tuple[int, ...], body: Body, data: bytes
    ) -> None:
        head = json.dumps([number, word, body]).encode()
        packed = np.frombuffer(len(head).to_bytes(4, "little") + head + data, np.uint8)
        here = self.member
        for member in members:
            if member == here:
                # Later, as from another rank: not in the middle of what says it.
                self._post.call(lambda: self._members[number].received(word, here, body, data))
            elif member in self._world.view.members:
                self._post.hurry()
                self._post.parcels.send(Kind.CHECKPOINT, member, "", packed)

    def hold(self, number: int, version: int, content: Content) -> None:
        self._host.agreements.hold(self._subjects[number], version, content)

    def collectively(self, function: Callable[[Any], Any]) -> Any:
        results: list[Any] = []
        self._host.block_in_mpi(
            lambda comm: results.append(function(comm)), "writing a shared file"
        )
        if not results:  # MPI has failed, and the loop sees to that
            raise CheckpointError("a rank was lost while a shared file was written")
        return results[0]

    # -- a part of the loop ------------------------------------------------------------------------

    def _take(self, parcel: Parcel) -> None:
        self._post.hurry()  # what is said is answered
        data = parcel.data.tobytes()
        length = int.from_bytes(data[:4], "little")
        number, word, body = json.loads(data[4 : 4 + length])
        if number >= len(self._members):
            self._early.append(parcel)
            return
        self._members[number].received(word, parcel.sender, body, data[4 + length :])

    def turn(self, now: float) -> None:
        for number, member in enumerate(self._members):
            if number not in self._closed:
                member.turn(now)

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def fault(self) -> None:
        pass

    def install(self, world: World) -> None:
        self._world = world
        self._early.clear()
        for member in self._members:
            member.installed(world.view.members)


class _Subject:
    """A manager's checkpoints, as the three-phase commit sees them. What it promises lasts as long
    as its process: what lasts longer is the COMMIT file."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def remember(self, entry: Entry) -> None:
        pass

    def decided(self, decided: Decided) -> None:
        content = decided.content if decided.committed else None
        self._member.decided(decided.proposal.version, content)

    def stale(self, version: int, newest: int) -> None:
        self._member.decided(version, None)

    def passed(self, version: int) -> bool:
        return self._member.passed(version)
