"""What the rest of mpift reports: faults, views, steps, ends.

Every event is a frozen record with the emitter's member id and its wall clock (Unix seconds).
``encode`` and ``decode`` carry them as one line of JSON, so that the launcher can follow a job
through plain text streams. Subscribers get the records; nothing in core acts on them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

# A write to a pipe stays whole up to PIPE_BUF, 4096 bytes; a mark and a line end go around it.
LINE_BYTES_MAX = 4090
_SHORTEST_CUT_CHARS = 64


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. ``time`` is Unix seconds by the emitter's clock."""

    time: float
    member: int


@dataclass(frozen=True, slots=True)
class RankStarting(Event):
    """A rank is about to start MPI, which waits for all ranks of the launch."""


@dataclass(frozen=True, slots=True)
class RankStarted(Event):
    """A rank is ready: its first view is installed."""

    host: str
    pid: int
    world_size: int


@dataclass(frozen=True, slots=True)
class ReductionChosen(Event):
    """How gradients are summed from now on: ``way`` is "node" (in the shared memory of each node)
    or "mpi"; ``words`` are the extent of it, or why not in memory."""

    way: str
    words: str


@dataclass(frozen=True, slots=True)
class FaultInjected(Event):
    """The fault schedule is about to strike this member; ``fault`` is its text."""

    fault: str
    step: int


@dataclass(frozen=True, slots=True)
class ViewChanged(Event):
    """The coordinator of a new view reports it.

    ``lost`` are member ids; ``rebuild_seconds`` runs from the first error seen to the agreement.
    ``reasons`` has a text for each of the lost: its last words, or why it was killed; may be empty.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    rebuild_seconds: float
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspected(Event):
    """A member has not been heard for longer than the emitter's detector allows."""

    suspect: int
    suspect_host: str
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class HeardAgain(Event):
    """A member that the emitter had suspected is heard again."""

    suspect: int
    suspect_host: str


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The coordinator evicts a live member, because the settings say so."""

    evicted: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankStalled(Event):
    """The emitter is alive and makes no progress, for which others wait.

    ``waits`` if it waits itself, for others that do something else; ``place`` is where in its
    script it is."""

    host: str
    step: int
    seconds: float
    waits: bool
    place: str


@dataclass(frozen=True, slots=True)
class HealthChanged(Event):
    """The emitter's node is in another band of health; ``score`` is None where unknown."""

    host: str
    band: str
    score: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """A gradient round was applied; ``step`` counts from 0. Thinned out, but not after a fault."""

    step: int
    epoch: int
    size: int


@dataclass(frozen=True, slots=True)
class RankRepaired(Event):
    """The emitter's state had parted from what most ranks hold after round ``step``, and it has
    taken that over: ``tensors`` pieces, ``tensor`` the first, ``bytes_differed`` in all."""

    host: str
    step: int
    tensor: str
    tensors: int
    bytes_differed: int


@dataclass(frozen=True, slots=True)
class DeviceFailed(Event):
    """The emitter's ``device`` has failed: what ``words`` say, and what helps (``remedy``)."""

    host: str
    device: str
    remedy: str
    words: str


@dataclass(frozen=True, slots=True)
class KeysLost(Event):
    """Both ranks that held these ``keys`` of a parameter server are gone."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reported(Event):
    """Values that the training script wants shown and kept (loss, accuracy...)."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Event):
    """A checkpoint is committed. Of its blocks some were written anew; bytes of the whole state,
    and as stored of what was written."""

    step: int
    blocks: int
    new_blocks: int
    state_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Event):
    """A save came to nothing; the checkpoints before it are what they were."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointSkipped(Event):
    """A rank was not ready for a snapshot, since the one before was still being written."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRestored(Event):
    """All ranks went back to a checkpoint, read from "memory" or "storage", that ``saved_by`` ranks
    had saved."""

    step: int
    source: str
    saved_by: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class CheckpointQuarantined(Event):
    """A checkpoint is damaged and was moved away to ``place``."""

    name: str
    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankFailed(Event):
    """Last words of a rank that ends by itself with a failure."""

    host: str
    exit_code: int
    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RankLeft(Event):
    """A rank's normal end. Of the ``steps_applied`` it was too late for ``rounds_missed``, and has
    applied what the others made of them. Otherwise ``steps_called`` is less only if work was lost.
    """

    host: str
    steps_called: int
    steps_applied: int
    rounds_missed: int = 0


@dataclass(frozen=True, slots=True)
class ProcessEnded(Event):
    """The guard of a rank saw its process end; exactly one of code and signal tells how."""

    host: str
    pid: int
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class RankStopped(Event):
    """This rank gives up for a named reason (quorum lost, MPI stuck); others may go on."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobStopped(Event):
    """The whole job has to end for a named reason (an exit that no rank can see...)."""

    exit_code: int
    reason: str


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RankStarting,
        RankStarted,
        ReductionChosen,
        FaultInjected,
        ViewChanged,
        Suspected,
        HeardAgain,
        Evicted,
        RankStalled,
        HealthChanged,
        StepFinished,
        KeysLost,
        RankRepaired,
        DeviceFailed,
        CheckpointSaved,
        CheckpointFailed,
        CheckpointSkipped,
        CheckpointRestored,
        CheckpointQuarantined,
        Reported,
        RankFailed,
        RankLeft,
        ProcessEnded,
        RankStopped,
        JobStopped,
    )
}


def encode(event: Event) -> str:
    """One line of JSON without a line end, at most ``LINE_BYTES_MAX`` bytes: the longest texts lose
    their beginnings, since the end of a traceback says what happened. Only a ``Reported`` with huge
    values can be longer."""
    record: dict[str, Any] = {"kind": type(event).__name__}
    record |= {item.name: getattr(event, item.name) for item in dataclasses.fields(event)}
    while True:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str)
        texts = [name for name, value in record.items() if isinstance(value, str)]
        longest = max(texts, key=lambda name: len(record[name]))
        text = record[longest]
        if len(line.encode(errors="replace")) <= LINE_BYTES_MAX or len(text) < _SHORTEST_CUT_CHARS:
            return line.encode(errors="replace").decode()
        record[longest] = "..." + text[len(text) // 4 :]


def decode(line: str) -> Event | None:
    """The event that ``line`` carries, or None if it carries none that this version knows."""
    try:
        record = json.loads(line)
        kind = _KINDS[record.pop("kind")]
        known = {item.name for item in dataclasses.fields(kind)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record.items()
            if name in known
        }
        return kind(**values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
