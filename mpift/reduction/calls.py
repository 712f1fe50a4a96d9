"""The script's side of operations: one call after the other, each with all ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from mpift.core import lockstep
from mpift.reduction.operations import Operation, Operations
from mpift.transport.closings import OPERATIONS
from mpift.transport.service import Service

# A rank that waits longer in an operation counts as away: others need not wait for its gradients.
_AWAY_SECONDS = 0.02
_IDLE_SECONDS = 0.1


class Calls:
    """Carries operations out, for the main thread; calls ``idle`` now and then in a long one."""

    def __init__(self, service: Service, member: int, idle: Callable[[], None]) -> None:
        self._service = service
        self._idle = idle
        self._operations = Operations(member, lambda: service.set_away(False))
        self._operating = threading.Lock()
        self._unfinished: Operation | None = None
        service.call(self._open)

    def _open(self) -> None:
        self._service.add_lane(self._operations)

    def carry_out(self, operation: Operation) -> None:
        """Returns once ``operation`` is done on this rank."""

        def begin() -> None:
            self._operations.begin(operation)
            self._service.lanes[OPERATIONS].feed(self._service.world, lockstep.Contributed(0))

        with self._operating:
            if self._unfinished is not None:
                # The script caught an interrupt in the middle of it; it still has its turn.
                self._unfinished.done.wait()
            self._unfinished = operation
            self._service.call(begin)
            with self.waiting():
                self._wait(operation.done)
            self._unfinished = None

    def _wait(self, done: threading.Event) -> None:
        if done.wait(_AWAY_SECONDS):
            return
        self._service.call(lambda: self._service.set_away(not done.is_set()))
        while not done.wait(_IDLE_SECONDS):
            self._idle()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait of the script for other ranks: whoever doesn't wait then is stalled. One
        wait may lead to another."""
        before, self._service.waited = self._service.waited, True
        try:
            yield
        finally:
            self._service.waited = before


def result_of(operation: Operation) -> np.ndarray:
    """What a finished operation came to; raises its error."""
    if operation.error is not None:
        raise operation.error
    assert operation.result is not None
    return operation.result
