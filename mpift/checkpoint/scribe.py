"""A rank's handle on its writer process: jobs go in, answers come back in order.

If the process dies, all that it was to do fails, with the way it ended in words, and the next job
starts another one. Nothing here waits for an answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# (result, error in words or ""): called on the scribe's thread
Then = Callable[[Any, str], None]

_END_SECONDS = 30.0  # many files to remove may be under way


class Scribe:
    """Its methods may be called from any thread. ``threads`` may encode at a time; if this process
    is killed its arenas go with it, where they are ``orphans`` then."""

    def __init__(self, threads: int, orphans: bool = False) -> None:
        self._threads = threads
        self._orphans = orphans
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._waiting: deque[Then] = deque()
        self._orders: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()

    @property
    def pid(self) -> int:
        """Of the process; 0 if none runs."""
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        """Start the process now rather than with the first job."""
        with self._lock:
            self._ensure()

    def request(self, job: str, then: Then, **arguments: Any) -> None:
        """Have a job of ``writing.Workshop`` done."""
        with self._lock:
            try:
                self._ensure()
                self._waiting.append(then)
                self._orders.put((job, arguments))
                return
            except OSError as error:
                problem = f"the writer process can't be started: {error}"
        then(None, problem)

    def close(self) -> None:
        """Let it finish what it was given, and end."""
        with self._lock:
            process, self._process, self._connection = self._process, None, None
            self._orders.put(None)
        if process is None:
            return
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # -- the process -------------------------------------------------------------------------------

    def _ensure(self) -> None:
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "mpift.checkpoint.writer",
                str(theirs.fileno()),
                str(self._threads),
                str(os.getpid()),
                str(int(self._orphans)),
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._connection = connection = Connection(ours.detach())
        self._waiting, self._orders = deque(), queue.SimpleQueue()
        speaker = threading.Thread(
            target=_speak, args=(connection, self._orders), name="mpift-scribe", daemon=True
        )
        speaker.start()
        threading.Thread(
            target=self._listen,
            args=(self._process, connection, speaker, self._waiting, self._orders),
            name="mpift-scribe",
            daemon=True,
        ).start()

    def _listen(
        self,
        process: subprocess.Popen[bytes],
        connection: Connection,
        speaker: threading.Thread,
        waiting: deque[Then],
        orders: queue.SimpleQueue[Any],
    ) -> None:
        while True:
            try:
                result, error = connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                then = waiting.popleft()
            then(result, error)
        code = process.wait()
        with self._lock:
            if self._process is process:
                self._process = self._connection = None
        orders.put(None)
        speaker.join()
        left = tuple(waiting)  # nothing is added any more
        connection.close()
        for then in left:
            then(None, f"the writer process {process.pid} ended ({_in_words(code)})")


def _speak(connection: Connection, orders: queue.SimpleQueue[Any]) -> None:
    """On a thread of its own: a writer that is busy, or stopped, does not read for a while."""
    with contextlib.suppress(OSError):  # its end is told by who listens
        while (order := orders.get()) is not None:
            connection.send(order)
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_WR)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
