"""What the service needs of its surroundings: communicators, their rebuild after a fault, and what
ranks tell each other in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpift.core.membership import View
from mpift.transport.processes import ProcessIdentity

# A report has a fixed length, so lanes are bounded; one lane is one optimizer's gradients.
MAX_LANES = 64


@dataclass(frozen=True, slots=True)
class LaneReport:
    """Where one rank stands in one lane, and what it could hand over."""

    completed: int = 0
    reduced_in: int = 0  # epoch that reduced the last completed round
    finished: int = 0  # 1: it was the lane's last, nobody took part
    result_bytes: int = 0
    status: int = 0  # the workload's own word on its last result
    participants: int = 0  # where the result itself does not tell


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others in a rebuild."""

    member: int
    epoch: int
    lanes: tuple[LaneReport, ...]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild agreed on; ``reports`` is in the new view's rank order."""

    view: View
    lost: tuple[int, ...]
    confirmed: frozenset[int]
    reports: tuple[Report, ...]
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SendRequest:
    """The request of a message to another rank. Where that fails, Open MPI may not be through with
    the request: it aborts this rank ("Send error after request freed") if it was freed meanwhile.
    So a failed one is never freed; the death that it tells of is noticed elsewhere."""

    request: Any


@dataclass(frozen=True, slots=True, eq=False)
class LetterRequest:
    """The request of a receive from any rank, of something that tells by itself whether it has come
    whole, in a buffer that was empty before."""

    request: Any


class Witness(Protocol):
    """Who can say that processes are gone, and see to it."""

    def gone(self, candidates: Sequence[ProcessIdentity], kill: bool) -> frozenset[int]:
        """Member ids of those that are gone for certain, looked at until all are, or until
        ``fence_timeout``; with ``kill`` those that can be are killed first."""


class World(Protocol):
    """What the service needs of its surroundings; ``MpiWorld`` and ``SoloWorld`` provide it."""

    member: int
    view: View
    launch_size: int  # ranks at launch; member ids are below it
    identities: dict[int, ProcessIdentity]
    gone: frozenset[int]  # members whose end is confirmed; the same on all ranks of a view
    warnings: list[str]
    # Set by ``finalize`` where mpi4py will call MPI_Finalize at the interpreter's end all the same,
    # and that would wait for the dead.
    finalize_would_hang: bool
    control: Any
    heartbeat: Any
    lane_comms: list[Any]  # one a lane; may be ahead of the lanes that are in use

    def test_some(self, requests: Sequence[Any]) -> list[int]:
        """Indices of the requests that completed; raises one of ``errors`` on a fault, but not
        before the letters that were found with it are told."""

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """What a call into this world raises at a fault."""

    def all_through(self) -> bool:
        """Ask to leave, and look, without waiting, whether all have asked, none of whom has died
        before: the same is found by all. Raises one of ``errors`` if it can't be had any more."""

    def rebuild(
        self,
        report: Report,
        gone: frozenset[int],
        witness: Witness,
        at: Callable[[str], object],
    ) -> Rebuilt | None:
        """Make communicators of the survivors; ``at`` is called at the named points inside.

        None if all had asked to leave: some may have left, and none needs a rebuild.
        """

    def receive(self, comm: Any, buffer: bytearray, tag: int) -> Any:
        """The request of a receive on ``comm`` from any rank."""

    def operator(self, name: str) -> Any:
        """The reduction operator for "sum", "min", "max" or "product"."""

    def finalize(self) -> None:
        """End MPI where a normal exit needs it."""

    def abort(self, code: int) -> None:
        """End all processes of the job."""
