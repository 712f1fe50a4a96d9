"""Tracebacks among the ranks' output: what several ranks end with alike is shown once. Pure.

A mistake in a script strikes all ranks alike, and each prints it in full, line by line between
those of the others. So a traceback on stderr waits, with what its rank writes there after it, until
the rank has ended or ``HOLD_SECONDS`` have passed. It is shown then, unless another rank ended with
the very same lines, every character of them: that is told in one line for all such ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpift.launch.last_words import TRACEBACK
from mpift.launch.streams import Output

# For the rest of a traceback and the report of the rank's end; without one the rank goes on.
HOLD_SECONDS = 2.0
# Ranks that end alike do so at about the same time: for so long others may join the first.
GATHER_SECONDS = 0.5
_LINES_HELD_MAX = 1000
_BEGIN = TRACEBACK.encode()

Text = tuple[bytes, ...]


@dataclass(slots=True)
class _Held:
    since: float
    lines: list[Output] = field(default_factory=list)


class Tracebacks:
    """Takes output in and gives out what is to be shown; ``now`` never goes back."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._first: dict[Text, int] = {}  # the rank whose traceback was shown
        self._alike: dict[int, list[int]] = {}  # to be told: those that ended like that rank
        self._tell_at = float("inf")
        self._repeated: set[int] = set()
        self._latest: list[str] = []

    @property
    def latest(self) -> tuple[str, ...]:
        """Tracebacks that were shown at a rank's end, with no other output after them."""
        return tuple(self._latest)

    def repeats(self, member: int) -> bool:
        """Whether this rank ended with another one's traceback, and ``news`` tells so."""
        return member in self._repeated

    def take(self, line: Output, now: float) -> Sequence[Output]:
        """What is to be shown now that ``line`` has come."""
        held = self._held.get(line.member) if line.stream == "stderr" else None
        if held is None and (line.stream != "stderr" or line.text != _BEGIN):
            self._latest.clear()
            return (line,)
        held = self._held.setdefault(line.member, held or _Held(now))
        held.lines.append(line)
        return self._release(line.member) if len(held.lines) > _LINES_HELD_MAX else ()

    def due(self, now: float) -> Sequence[Output]:
        """What has waited for long enough."""
        late = [n for n, held in self._held.items() if now >= held.since + HOLD_SECONDS]
        return [line for member in late for line in self._release(member)]

    def ended(self, member: int, now: float) -> Sequence[Output]:
        """The rank has ended, or said that it does: what it leaves behind, if that is new."""
        if member not in self._held:
            return ()
        lines = self._held.pop(member).lines
        text = tuple(line.text for line in lines)
        first = self._first.setdefault(text, member)
        if first == member:
            self._latest.append(b"\n".join(text).decode("utf-8", "replace").rstrip())
            return lines
        self._alike.setdefault(first, []).append(member)
        self._repeated.add(member)
        self._tell_at = min(self._tell_at, now + GATHER_SECONDS)
        return ()

    def finish(self, now: float) -> Sequence[Output]:
        """The job is over: what still waits."""
        return [line for member in list(self._held) for line in self.ended(member, now)]

    def news(self, now: float) -> list[str]:
        """Which ranks ended like another, if it is time to say so."""
        if now < self._tell_at:
            return []
        told = [_alike(first, others) for first, others in self._alike.items()]
        self._alike.clear()
        self._tell_at = float("inf")
        return told

    def _release(self, member: int) -> list[Output]:
        self._latest.clear()
        return self._held.pop(member).lines


def _alike(first: int, others: list[int]) -> str:
    ranks = ("ranks " if len(others) > 1 else "rank ") + ", ".join(map(str, sorted(others)))
    return f"{ranks} ended with the same traceback as rank {first}"
