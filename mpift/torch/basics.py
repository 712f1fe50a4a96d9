"""Start, stop, and who is where: Horovod's basic calls."""

from __future__ import annotations

from mpift import runtime


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
