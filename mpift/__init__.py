"""mpift: fault-tolerant data-parallel training over MPI.

The framework-neutral face. ``import mpift.torch as hvd`` is the one for PyTorch. Importing this
package loads neither MPI nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpift._version import __version__
from mpift.config import Config
from mpift.errors import (
    ConfigError,
    ExitCode,
    GradientError,
    MismatchError,
    MpiftError,
    NotInitializedError,
    RootLostError,
    TransportError,
)

if TYPE_CHECKING:
    from mpift.communicator import Communicator, Compressor

__all__ = [
    "Communicator",
    "Compressor",
    "Config",
    "ConfigError",
    "ExitCode",
    "GradientError",
    "MismatchError",
    "MpiftError",
    "NotInitializedError",
    "RootLostError",
    "TransportError",
    "__version__",
    "init",
    "is_initialized",
    "rank",
    "report",
    "shutdown",
    "size",
]


def init(comm: Any = None, config: Config | None = None) -> None:
    """Start mpift in this process; a second call does nothing.

    ``comm`` is an mpi4py communicator, or None for all processes of the launch. Without ``mpirun``
    the size is 1.
    """
    from mpift import runtime

    runtime.start(comm, config)


def shutdown() -> None:
    """Leave the job; waits until all others have left too. Done by itself at a normal exit."""
    from mpift import runtime

    runtime.shutdown()


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` wasn't since."""
    from mpift import runtime

    return runtime.is_running()


def rank() -> int:
    """This process's position in the present view; changes only inside ``step`` and collectives."""
    from mpift import runtime

    return runtime.current().rank


def size() -> int:
    """Live processes; changes only inside ``step`` and collectives."""
    from mpift import runtime

    return runtime.current().view.size


def report(**values: Any) -> None:
    """Show values (loss, accuracy...) in the launcher's status line and keep them in its summary.

    Only rank 0's count. Values must be plain: numbers, strings, booleans, lists of these.
    """
    from mpift import runtime

    runtime.current().report_values(values)


def __getattr__(name: str) -> Any:
    # Lazy: they need numpy, which the command line's --help does not.
    if name == "Communicator":
        from mpift.communicator import Communicator

        return Communicator
    if name == "Compressor":
        from mpift.communicator import Compressor

        return Compressor
    raise AttributeError(f"module 'mpift' has no attribute {name!r}")
