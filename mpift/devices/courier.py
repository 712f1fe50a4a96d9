"""A thread that waits for devices, so that the training thread does not.

What is given to it is done in order, one after the other. Its errors are raised where somebody
waits for it: on the training thread. After one, what was given to it is given up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Courier:
    """See the module's docstring. The thread begins with the first delivery."""

    def __init__(self) -> None:
        self._deliveries: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._under_way = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def take(self, delivery: Callable[[], None]) -> None:
        """Call ``delivery``, which may wait for a device, once those before it are through; not at
        all if one of them fails."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpift-courier", daemon=True)
            self._thread.start()
        with self._news:
            self._under_way += 1
        self._deliveries.put(delivery)

    def drain(self) -> None:
        """Return once all that was taken is through; an error is raised, once."""
        with self._news:
            self._news.wait_for(lambda: not self._under_way)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        while True:
            delivery = self._deliveries.get()
            try:
                if self._error is None:
                    delivery()
            except Exception as error:  # noqa: BLE001, it is raised by ``drain``
                self._error = error
            del delivery  # with the gradients that it holds
            with self._news:
                self._under_way -= 1
                self._news.notify_all()
