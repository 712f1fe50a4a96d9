"""Those that save checkpoints together, as the checkpoints see them.

In a job that is the runtime's doing (``crew``): it says here how one is made, since this room must
not know it. A process that has not called ``init`` is a group of one: what would be sent comes
back, and what would be agreed on is decided.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpift import memory
from mpift.config import Config
from mpift.core import events, history
from mpift.core.ballots import Content
from mpift.errors import CheckpointError, ExitCode, MpiftError
from mpift.transport import exits

# A piece of JSON that goes with a message's bytes.
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place among those that take a snapshot together: its ``share`` of all
    ``owners``, and those of its node, itself included. ``whole``: the arenas of a node hold all of
    the state, not only what its ranks will write."""

    share: int
    owners: tuple[int, ...]
    neighbours: tuple[int, ...]  # shares
    history: str
    whole: bool = False


class Member(Protocol):
    """One manager's side of the group. Called on the group's thread."""

    def received(self, word: str, sender: int, body: Body, data: bytes) -> None:
        """Another member of the view, or this one, has sent this."""

    def decided(self, version: int, content: Content | None) -> None:
        """A version is agreed on; None: it is aborted, or others are past it."""

    def passed(self, version: int) -> bool:
        """Whether this rank will never hold ``version``, if it does not yet."""

    def installed(self, members: tuple[int, ...]) -> None:
        """A new view is in force; also called once at the beginning."""

    def turn(self, now: float) -> None:
        """Some time has passed; ``now`` is monotonic."""


class Group(Protocol):
    """See the module's docstring. ``call`` may be used from any thread; ``gather``, ``waiting`` and
    ``seat`` by the script's; the others on the group's thread."""

    config: Config
    job: str  # a public name of the job
    region: str  # of its files in this node's memory (``memory.region_path``)

    @property
    def member(self) -> int:
        """This rank's member id."""

    @property
    def epoch(self) -> int:
        """Of the view."""

    @property
    def leads(self) -> bool:
        """Whether this rank is the view's coordinator. From any thread."""

    @property
    def alone(self) -> bool:
        """Whether no other rank is on this node: nobody needs to find this one's arenas."""

    def open(self, member: Member) -> int:
        """All ranks open theirs in the same order: returns its number in that."""

    def close(self, member: Member) -> None:
        """It takes no more part."""

    def seat(self, whole: bool) -> Seat:
        """This rank's place, as the script sees the ranks now."""

    def nodes(self) -> tuple[tuple[int, str], ...]:
        """(member, its node) of all members of the launch."""

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the group's thread, soon."""

    def send(
        self, number: int, word: str, members: tuple[int, ...], body: Body, data: bytes
    ) -> None:
        """To members of the view, itself included; lost if the view ends before it arrives."""

    def hold(self, number: int, version: int, content: Content) -> None:
        """Vote for ``content`` as ``version``."""

    def settle(self) -> None:
        """Bring all ranks to the same round; all call it."""

    def gather(self, value: Any) -> list[Any]:
        """What all ranks say (plain values), in rank order; all ranks call it. Ranks that die
        meanwhile are left out."""

    def collectively(self, function: Callable[[Any], Any]) -> Any:
        """Call ``function`` with an mpi4py communicator of all ranks, which call this together, and
        return what it returns. Nothing survives a death in it. Raises ``CheckpointError`` where
        there is no MPI."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait of the script's, in which others may do without its gradients."""

    def emit(self, kind: Callable[..., events.Event], *values: Any) -> None:
        """Report an event. From any thread."""

    def strike(self, step: int, point: str) -> object:
        """The fault schedule may strike here. From any thread."""

    def fail_at_exit(self) -> None:
        """Let this process end with a failure, when it comes to its end."""


class SoloGroup:
    """A process of its own. Its thread is whichever comes first: the others leave it their work."""

    member = epoch = 0
    leads = alone = True

    def __init__(self) -> None:
        self.config = Config.load().for_nodes(1)
        token = secrets.token_hex(8)
        self.job = f"{socket.gethostname()}-{os.getpid()}-{token[:6]}"
        self.region = memory.job_name(token, socket.gethostname())
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._members: list[Member] = []

    def open(self, member: Member) -> int:
        self._members.append(member)
        member.installed((0,))
        return len(self._members) - 1

    def close(self, member: Member) -> None:
        pass

    def seat(self, whole: bool) -> Seat:
        return Seat(0, (0,), (0,), history.NO_HISTORY, whole)

    def nodes(self) -> tuple[tuple[int, str], ...]:
        return ((0, socket.gethostname()),)

    def call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        while self._calls and self._lock.acquire(blocking=False):
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._lock.release()

    def send(
        self, number: int, word: str, members: tuple[int, ...], body: Body, data: bytes
    ) -> None:
        self.call(lambda: self._members[number].received(word, 0, body, data))

    def hold(self, number: int, version: int, content: Content) -> None:
        self.call(lambda: self._members[number].decided(version, content))

    def settle(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collectively(self, function: Callable[[Any], Any]) -> Any:
        raise CheckpointError("a shared file is written by the ranks of an MPI job: start one")

    def waiting(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def emit(self, kind: Callable[..., events.Event], *values: Any) -> None:
        """Nobody listens, but what the user must hear."""
        event = kind(time.time(), 0, *values)
        if isinstance(event, events.CheckpointSkipped):
            warnings.warn(f"checkpoint of step {event.step} skipped: {event.reason}", stacklevel=2)
        if isinstance(event, events.CheckpointQuarantined):
            words = f"checkpoint {event.name} is damaged and was moved to {event.place}"
            warnings.warn(f"{words}: {event.reason}", stacklevel=2)

    def strike(self, step: int, point: str) -> object:
        return None

    def fail_at_exit(self) -> None:
        exits.leave_after_exit_handlers(ExitCode.CHECKPOINT_DAMAGED)


_make: Callable[[], Group] | None = None
_solo: SoloGroup | None = None


class Manager(Protocol):
    """What is to be closed before the job ends."""

    directory: Path
    closed: bool

    def close(self) -> None:
        """Wait for what is under way; raises ``CheckpointError`` if the last save failed."""


_managers: weakref.WeakSet[Manager] = weakref.WeakSet()


def require_unused(directory: Path) -> None:
    """Raises ``CheckpointError`` if a manager of this process writes there already: each would
    remove what the other is about to commit."""
    place = directory.resolve()
    if any(not other.closed and other.directory.resolve() == place for other in _managers):
        raise CheckpointError(
            f"{directory} has an open CheckpointManager in this process already: close that first,"
            " use it for both, or give this one another directory"
        )


def opened(manager: Manager) -> None:
    """``manager`` saves for this process."""
    _managers.add(manager)


def close_managers() -> None:
    """Close them all; those that are closed stay so. The first error is raised when all are."""
    errors: list[Exception] = []
    for manager in tuple(_managers):
        try:
            manager.close()
        except MpiftError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def provide(make: Callable[[], Group] | None) -> None:
    """The runtime says how its group is made, or that it is gone."""
    global _make
    _make = make


def current() -> Group:
    """The job's group; that of this process alone if it is in no job."""
    global _solo
    if _make is not None:
        return _make()
    if _solo is None:
        _solo = SoloGroup()
    return _solo
