"""Start, stop, and who is where: Horovod's basic calls."""

from __future__ import annotations

from typing import Any

from mpift import runtime
from mpift.config import Config


def init(comm: Any = None, config: Config | None = None) -> None:
    """Start mpift in this process; a second call does nothing.

    ``comm`` is an mpi4py communicator, or None for all processes of the launch. Without ``mpirun``
    the size is 1.
    """
    runtime.start(comm, config)


def shutdown() -> None:
    """Leave the job and wait until all others have left too. A normal exit does it by itself."""
    runtime.shutdown()


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` wasn't since."""
    return runtime.is_running()


def rank() -> int:
    """Position of this process in the view; changes only inside ``step`` and collectives."""
    return runtime.current().rank


def size() -> int:
    """Live processes; changes only inside ``step`` and collectives."""
    return runtime.current().view.size


def epoch() -> int:
    """Number of the present view: 0 at the start, greater after each fault."""
    return runtime.current().view.epoch


def local_rank() -> int:
    """Position of this process among the live ones of its node."""
    current = runtime.current()
    return current.neighbours.index(current.member)


def local_size() -> int:
    """Live processes of this node."""
    return len(runtime.current().neighbours)


def cross_rank() -> int:
    """Position of this node among the nodes with live processes."""
    current = runtime.current()
    return current.nodes.index(current.identities[current.member].node)


def cross_size() -> int:
    """Nodes with live processes."""
    return len(runtime.current().nodes)


def is_homogeneous() -> bool:
    """Whether every node has the same number of live processes."""
    current = runtime.current()
    nodes = [current.identities[member].node for member in current.view.members]
    return len({nodes.count(node) for node in nodes}) == 1


def report(**values: Any) -> None:
    """Show values in the launcher's status line and summary; only rank 0's count."""
    runtime.current().report_values(values)


def mpi_enabled() -> bool:
    """Whether communication goes over MPI: always."""
    return True


def mpi_built() -> bool:
    """Whether MPI support is there: always."""
    return True


def mpi_threads_supported() -> bool:
    """Whether the script may call MPI itself from any thread: ``mpi_threads="multiple"`` is set."""
    return runtime.current().config.mpi_threads == "multiple"


def gloo_enabled() -> bool:
    """Never: mpift needs no Gloo."""
    return False


def gloo_built() -> bool:
    """Never: mpift needs no Gloo."""
    return False


def nccl_built() -> int:
    """0: device collectives are not used."""
    return 0


def cuda_built() -> bool:
    """Whether collectives run on CUDA devices themselves: they go through host memory."""
    return False


def rocm_built() -> bool:
    """Whether collectives run on ROCm devices themselves: they go through host memory."""
    return False


def ddl_built() -> bool:
    """Never: a library that Horovod could use."""
    return False


def ccl_built() -> bool:
    """Never: a library that Horovod could use."""
    return False
