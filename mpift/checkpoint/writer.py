"""The writer process: does a ``Workshop``'s jobs.

    python -m mpift.checkpoint.writer FD THREADS PARENT ORPHANS

One a rank, spawned once. It is apart from the training process because HDF5 holds one lock for a
whole interpreter, and Python another; and it loads neither torch nor MPI. It ends with its parent,
in the middle of whatever it does: nothing that a dead rank's writer finishes would count. (The pipe
alone does not tell: children that the parent forked keep it open. The kernel's signal would come at
the end of the thread that started this process.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from mpift.checkpoint.durable import Disk
from mpift.checkpoint.writing import Workshop
from mpift.errors import MpiftError

_LOOK_SECONDS = 0.1
_NICENESS = 5  # training comes first


def main() -> None:
    """Serve until the parent closes the pipe, or ends."""
    descriptor, threads, parent, orphans = map(int, sys.argv[1:])
    workshop = Workshop(Disk(), threads)
    watch = threading.Thread(target=_end_with, args=(parent, workshop if orphans else None))
    watch.daemon = True
    watch.start()
    # What ends the job ends the parent; a writer in the middle of a file is ended by that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    connection = Connection(descriptor)
    try:
        while True:
            name, arguments = connection.recv()
            connection.send(_answer(workshop, name, arguments))
    except (EOFError, OSError):
        if orphans:  # the parent is gone, or closes: then it removes them, too
            workshop.remove_arenas()


def _answer(workshop: Workshop, name: str, arguments: dict[str, Any]) -> tuple[Any, str]:
    """The result and no error, or the other way round."""
    try:
        return getattr(workshop, name)(**arguments), ""
    except (MpiftError, OSError, MemoryError) as error:
        return None, str(error) or repr(error)
    except Exception as error:  # noqa: BLE001, a fault of ours must not look like silence
        return None, f"{name} failed: {error!r}"


def _end_with(parent: int, workshop: Workshop | None) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    if workshop is not None:
        workshop.remove_arenas()
    os._exit(1)


if __name__ == "__main__":
    main()
