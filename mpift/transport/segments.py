"""Open MPI's own shared-memory files, which it removes in MPI_Finalize alone.

Under ULFM that is never called, since it would wait for the dead; so who leaves last removes them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MARK = "/sm_segment."  # FOLDER/sm_segment.HOST.USER.JOB.RANK, of the transport between neighbours


def of_process(pid: int | str = "self") -> str:
    """What the paths of all such files of this process's job begin with; empty if it has none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if _MARK in line:
                return line.split(maxsplit=5)[-1].removesuffix(" (deleted)").rpartition(".")[0]
    return ""


def of_group(group: int) -> str:
    """The same for whichever process of a process group has some."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group and (found := of_process(folder.name)):
                return found
    return ""


def remove(beginning: str) -> None:
    """Remove all files of a job, given what ``of_process`` said of one of its ranks."""
    if _MARK not in beginning:
        return
    path = Path(beginning)
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if file.name.startswith(path.name + "."):
                file.unlink(missing_ok=True)
