"""Start, stop, and who is where: Horovod's basic calls."""

from __future__ import annotations

import sys
import warnings

import torch

from mpift import runtime
from mpift.devices import backend, simulated


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


def device(kind: str | None = None) -> torch.device:
    """The device that this process is to compute on, made the current one of its kind: "npu",
    "cuda" or "cpu", None for the best there is.

    Each process of a node has the one of its ``local_rank`` at launch, and keeps it whoever dies;
    ``ASCEND_RT_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES`` are minded. Raises ``DeviceError``
    that says what is missing.
    """
    seat, seats = runtime.current().launch_seat
    found = backend.select(kind, seat)
    if simulated.is_simulated(found) and runtime.current().rank == 0:
        print(f"mpift: {found} is simulated on the CPU ({backend.npu_backend()})", file=sys.stderr)
    if (
        found.type != "cpu"
        and seat == 0
        and 1 < (count := backend.of(found).device_count()) < seats
    ):
        warnings.warn(
            f"{seats} processes of this node share {count} {found.type} devices: start fewer"
            " processes, or let each see devices of its own",
            stacklevel=2,
        )
    return found


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
