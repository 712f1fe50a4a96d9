"""What a process that ended has left behind: its last lines, and how it was ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

TRACEBACK = "Traceback (most recent call last):"
# What Python prints between the tracebacks of one chain.
_CHAINED = ("During handling of the above", "The above exception was the direct cause")
_LAST_LINES_SHOWN = 5


def signal_name(number: int) -> str:
    """``SIGKILL`` and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exception_of(lines: Iterable[str]) -> str:
    """The exception that the last traceback among ``lines`` ends with; empty if there is none."""
    kept = list(lines)
    if TRACEBACK not in kept:
        return ""
    last = len(kept) - 1 - kept[::-1].index(TRACEBACK)
    after = (line for line in kept[last + 1 :] if line and not line[0].isspace())
    return next((line for line in after if re.match(r"[A-Za-z_][\w.]*(:|$)", line)), "")


def last_words(lines: Iterable[str]) -> str:
    """The last traceback among ``lines``, with those that it is chained to; else the last lines."""
    kept = list(lines)
    if TRACEBACK not in kept:
        return "\n".join(kept[-_LAST_LINES_SHOWN:])
    begin = len(kept) - 1 - kept[::-1].index(TRACEBACK)
    while begin >= 2 and kept[begin - 2].startswith(_CHAINED):
        earlier = kept[: begin - 2]
        if TRACEBACK not in earlier:
            break
        begin = len(earlier) - 1 - earlier[::-1].index(TRACEBACK)
    return "\n".join(kept[begin:])
