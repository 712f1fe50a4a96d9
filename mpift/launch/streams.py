"""What mpirun prints, taken apart: ranks' output, the events among it, its own words. Pure.

mpirun labels each line by rank and stream; the guards mark event records (``EVENT_MARK``), which
may stand behind a piece of a line that the rank had not finished. Bytes stay bytes: a rank's
output is passed on as it was.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpift.core import events

EVENT_MARK = b"\x1e"  # ASCII's record separator, which no text has
# A "line" without an end is passed on in pieces of this size.
_LINE_BYTES_MAX = 1 << 20
# Open MPI 5: "[1]<stderr>: text"; 4: "[1,0]<stderr>:text", with the job before the rank.
_LABEL = re.compile(rb"\[(?:\d+,)?(\d+)\]<(stdout|stderr)>: ?")
# Open MPI says this once for each collective that a death interrupts, and recovers.
# What MPI_Abort says, called by the script or by MPI itself. Behind a guard it ends its own rank
# only: mpirun ends a whole job for it when the process that it started leaves with a code.
_ABORT = re.compile(
    rb"MPI_ABORT was invoked on rank \d+ in communicator"
    rb"|\[.*\] \*\*\* MPI_ERRORS_ARE_FATAL \(processes in this communicator will now abort"
)
_NOISE = re.compile(rb"NBC_Progress: an error \d+ was found during schedule")


@dataclass(frozen=True, slots=True)
class Output:
    """A line of a rank, without its end."""

    member: int
    stream: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """A line of mpirun itself, without its end."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Aborted:
    """A rank has called MPI_Abort, so the whole job is to end."""

    member: int


Item = Output | Words | Aborted | events.Event


class Splitter:
    """Takes one of mpirun's streams apart; ``hide_noise`` drops what a survived death causes."""

    def __init__(self, hide_noise: bool = True) -> None:
        self._hide_noise = hide_noise
        self._pending = b""
        # Ranks whose last line was noise: it comes with an empty line after it.
        self._after_noise: set[int] = set()

    def feed(self, data: bytes) -> Iterator[Item]:
        """The items that ``data`` completes."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield from self._line(line)
        if len(self._pending) > _LINE_BYTES_MAX:
            yield from self.finish()

    def finish(self) -> Iterator[Item]:
        """What is left of a last line without an end."""
        line, self._pending = self._pending, b""
        if line:
            yield from self._line(line)

    def _line(self, line: bytes) -> Iterator[Item]:
        # A last line that has no end is followed by the next rank's label on the same line.
        labels = list(_LABEL.finditer(line))
        begin = labels[0].start() if labels else len(line)
        if begin or not labels:
            yield from _split_event(line[:begin], None)
        for label, following in itertools.zip_longest(labels, labels[1:]):
            end = following.start() if following else len(line)
            yield from self._labelled(label, line[label.end() : end])

    def _labelled(self, label: re.Match[bytes], text: bytes) -> Iterator[Item]:
        member = int(label[1])
        if _ABORT.match(text):
            yield Aborted(member)
        if not self._is_noise(member, text):
            yield from _split_event(text, (member, label[2].decode()))

    def _is_noise(self, member: int, text: bytes) -> bool:
        if not self._hide_noise:
            return False
        if _NOISE.match(text):
            self._after_noise.add(member)
            return True
        if member in self._after_noise:
            self._after_noise.discard(member)
            return text == b""
        return False


def _split_event(text: bytes, origin: tuple[int, str] | None) -> Iterator[Item]:
    before, mark, record = text.partition(EVENT_MARK)
    event = events.decode(record.decode("utf-8", "replace")) if mark else None
    rest = text if event is None else before
    if rest or event is None:
        yield Output(*origin, rest) if origin else Words(rest)
    if event is not None:
        yield event
