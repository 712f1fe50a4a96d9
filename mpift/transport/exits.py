"""How a rank ends, so that the others always notice.

A rank that leaves with a non-zero status is invisible to MPI's other ranks: they would wait for it
for ever. So a failing rank of ours says why, and then dies by SIGKILL, which MPI does report. Under
a guard of the launcher it keeps its exit code: the guard turns that into a signal.

Covered: uncaught exceptions, ``sys.exit(n)``, ``exit(n)``, ``os._exit(n)``. A ``raise SystemExit``
of the script's own can't be seen from inside: such a rank leaves politely, when the others have
finished. An exit from C code is found by the other ranks of the node (``monitor``).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

GUARD_VARIABLE = "MPIFT_LAUNCHED"

# (exit code, reason, traceback): say last words; must not raise or block for long. Returns whether
# nobody is left who would have to notice this end.
LastWords = Callable[[int, str, str], bool]


def leave(code: int, unseen: bool = False) -> NoReturn:
    """End this process at once, so that everybody sees it; ``unseen`` if nobody needs to, and the
    exit code may go to the launcher instead."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if GUARD_VARIABLE not in os.environ and not unseen:
        os.kill(os.getpid(), signal.SIGKILL)
    _system_exit(code)


_system_exit = os._exit


def leave_after_exit_handlers(code: int) -> NoReturn:
    """End this process without the interpreter's own end, which would call MPI_Finalize; the exit
    handlers that are registered still run. Nobody has to notice this end."""
    atexit._run_exitfuncs()
    leave(code, unseen=True)


def code_of(argument: object) -> int:
    """The exit status that ``sys.exit(argument)`` stands for."""
    if argument is None:
        return 0
    return argument & 0xFF if isinstance(argument, int) else 1


class Exits:
    """Watches every way out of the interpreter while installed; ``remove`` restores them.
    ``device_fault`` gives words for an uncaught exception that a failed device has raised."""

    def __init__(self, last_words: LastWords, device_fault: Callable[[BaseException], str]) -> None:
        self._last_words = last_words
        self._device_fault = device_fault
        self._pid = os.getpid()  # forked children of the script end as they like
        self._code = 0
        self._text = ""
        self._saved: dict[str, Any] = {}

    def install(self) -> None:
        """Take over ``sys.excepthook``, ``sys.exit``, ``exit``, ``quit`` and ``os._exit``."""
        self._saved = {"excepthook": sys.excepthook, "exit": sys.exit, "_exit": os._exit}
        sys.excepthook = self._uncaught
        sys.exit = self._sys_exit
        os._exit = self._os_exit  # type: ignore[assignment]
        for name in ("exit", "quit"):
            if hasattr(builtins, name):
                self._saved[f"builtins.{name}"] = getattr(builtins, name)
                setattr(builtins, name, self._sys_exit)

    def remove(self) -> None:
        """Give everything back that was not taken over by others since."""
        if not self._saved:
            return
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._saved["excepthook"]
        if sys.exit == self._sys_exit:
            sys.exit = self._saved["exit"]
        if os._exit == self._os_exit:
            os._exit = self._saved["_exit"]
        for name in ("exit", "quit"):
            if getattr(builtins, name, None) == self._sys_exit:
                setattr(builtins, name, self._saved[f"builtins.{name}"])

    @property
    def code(self) -> int:
        """What ``sys.exit`` was called with last."""
        return self._code

    def forget(self) -> None:
        """The script went on after a ``sys.exit`` that it caught."""
        self._code = 0

    def fail(self, code: int, reason: str) -> None:
        """At the interpreter's end: what the script left behind has failed."""
        self._code, self._text = self._code or code, self._text or reason

    def check_at_exit(self) -> None:
        """At interpreter exit: end visibly if ``sys.exit`` was called with a failure."""
        if self._code and os.getpid() == self._pid:
            self._end(self._code, self._text, "")

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._saved["excepthook"](kind, error, trace)
        if os.getpid() == self._pid:
            _let_out_what_is_held_back()
            reason = "".join(traceback.format_exception_only(kind, error)).strip()
            if fault := self._device_fault(error):
                reason = f"a device has failed: {fault} ({reason})"
            code = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
            self._end(code, reason, "".join(traceback.format_exception(kind, error, trace)))

    def _sys_exit(self, argument: Any = None) -> NoReturn:
        # Only noted: the script may still catch the SystemExit, and its handlers must run. In
        # another thread it ends that thread alone.
        if threading.current_thread() is threading.main_thread():
            self._code = code_of(argument)
        self._text = f"sys.exit({argument!r})"
        raise SystemExit(argument)

    def _os_exit(self, code: int) -> NoReturn:
        if code and os.getpid() == self._pid:
            self._end(code, f"os._exit({code})", "")
        self._saved["_exit"](code)
        raise AssertionError("os._exit returned")

    def _end(self, code: int, reason: str, trace: str) -> NoReturn:
        leave(code, unseen=self._last_words(code, reason, trace))


def _let_out_what_is_held_back() -> None:
    """A hook around ours may hold back what is written, to write it in another form once ours
    returns, as torch.distributed's does; but ours does not return."""
    held = sys.stderr
    if isinstance(held, io.StringIO) and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__
        print(held.getvalue(), end="", file=sys.stderr, flush=True)
