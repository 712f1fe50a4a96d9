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

# A line on a pipe stays whole up to PIPE_BUF (4096); long texts are cut to fit.
MAX_TEXT_CHARS = 2500


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. ``time`` is Unix seconds by the emitter's clock."""

    time: float
    member: int


@dataclass(frozen=True, slots=True)
class RankStarted(Event):
    """A rank is ready: its first view is installed."""

    host: str
    pid: int
    world_size: int


@dataclass(frozen=True, slots=True)
class FaultInjected(Event):
    """The fault schedule is about to strike this member; ``fault`` is its text."""

    fault: str
    step: int


@dataclass(frozen=True, slots=True)
class ViewChanged(Event):
    """The coordinator of a new view reports it.

    ``lost`` are member ids; ``rebuild_seconds`` runs from the first error seen to the agreement.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    rebuild_seconds: float


@dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """A gradient round was applied; ``step`` counts from 0. Thinned out, but not after a fault."""

    step: int
    epoch: int
    size: int


@dataclass(frozen=True, slots=True)
class Reported(Event):
    """Values that the training script wants shown and kept (loss, accuracy...)."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankFailed(Event):
    """Last words of a rank that ends by itself with a failure."""

    host: str
    exit_code: int
    reason: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RankLeft(Event):
    """A rank's normal end. ``steps_called`` and ``steps_applied`` differ only if work was lost."""

    host: str
    steps_called: int
    steps_applied: int


@dataclass(frozen=True, slots=True)
class ProcessEnded(Event):
    """The guard of a rank saw its process end; exactly one of code and signal tells how."""

    host: str
    pid: int
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class JobStopped(Event):
    """The whole job ends for a named reason (quorum lost, an exit that nobody could see...)."""

    exit_code: int
    reason: str


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RankStarted,
        FaultInjected,
        ViewChanged,
        StepFinished,
        Reported,
        RankFailed,
        RankLeft,
        ProcessEnded,
        JobStopped,
    )
}


def encode(event: Event) -> str:
    """One line of JSON without a line end, at most PIPE_BUF bytes unless ``Reported`` is huge."""
    record: dict[str, Any] = {"kind": type(event).__name__}
    for item in dataclasses.fields(event):
        value = getattr(event, item.name)
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
            value = "..." + value[-MAX_TEXT_CHARS:]  # the end of a traceback says what happened
        record[item.name] = value
    return json.dumps(record, separators=(",", ":"), default=str)


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
