"""A world of one: the same face as MPI for a script that was started without ``mpirun``.

Loads no MPI. Collectives of one rank are copies that complete at once, so everything above runs
the same code with one rank as with many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpift.config import Config
from mpift.core.membership import initial_view
from mpift.errors import TransportError
from mpift.transport import processes, startup
from mpift.transport.mpi_world import MpiWorld
from mpift.transport.processes import ProcessIdentity
from mpift.transport.world import Rebuilt, Report, Witness


class _Done:
    """A request that completed when it was made."""


class _Never:
    """A request that nothing completes: nobody else could send."""


class SoloComm:
    """The non-blocking collectives of a communicator of size 1, on numpy arrays."""

    rank = 0
    size = 1

    def Iallreduce(self, send: np.ndarray, receive: np.ndarray, _operator: Any) -> _Done:
        np.copyto(receive, send)
        return _Done()

    def Iallgather(self, send: np.ndarray, receive: np.ndarray) -> _Done:
        np.copyto(receive.reshape(send.shape), send)
        return _Done()

    def Iallgatherv(self, send: np.ndarray, receive: Sequence[Any]) -> _Done:
        np.copyto(receive[0].reshape(send.shape), send)
        return _Done()

    def Ibcast(self, _buffer: np.ndarray, root: int) -> _Done:
        return _Done()


class SoloWorld:
    """See ``transport.world.World``."""

    def __init__(self, lanes: int = 0) -> None:
        self.warnings: list[str] = []
        self.finalize_would_hang = False
        self.member = 0
        self.view = initial_view(1)
        self.launch_size = 1
        self.identities: dict[int, ProcessIdentity] = {0: processes.identify(0)}
        self.gone: frozenset[int] = frozenset()
        self.control: Any = SoloComm()
        self.heartbeat: Any = SoloComm()
        self.lane_comms: list[Any] = [SoloComm() for _ in range(lanes)]

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        return ()

    def test_some(self, requests: Sequence[Any]) -> list[int]:
        return [i for i, request in enumerate(requests) if isinstance(request, _Done)]

    def receive(self, comm: Any, buffer: bytearray, tag: int) -> _Never:
        return _Never()

    def operator(self, name: str) -> str:
        return name

    def all_through(self) -> bool:
        return True

    def rebuild(
        self,
        report: Report,
        gone: frozenset[int],
        witness: Witness,
        at: Callable[[str], object],
    ) -> Rebuilt:
        """Only to open more lanes: a world of one has no faults that it outlives."""
        count = max(len(self.lane_comms), len(report.lanes))
        self.lane_comms = [SoloComm() for _ in range(count)]
        self.view = self.view.successor(report.epoch + 1, self.view.members)
        return Rebuilt(self.view, (), frozenset(), (report,), 0.0)

    def finalize(self) -> None:
        pass

    def abort(self, code: int) -> None:
        raise TransportError(f"a single process cannot abort a job (code {code})")


def make_world(comm: Any, config: Config, lanes: int) -> MpiWorld | SoloWorld:
    """The world of this process: MPI's, or one of its own where nobody has launched it with MPI."""
    alone = comm is None and not startup.under_launcher() and not startup.loaded()
    return SoloWorld(lanes) if alone else MpiWorld(comm, config, lanes)
