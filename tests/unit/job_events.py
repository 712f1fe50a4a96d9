"""What ranks and their guards report of a job, and the verdict on it; no test in itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpift.core import events
from mpift.launch.story import Story
from mpift.launch.verdict import Ending, Verdict, judge

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    '    raise ValueError("boom")',
    "ValueError: boom",
]


def ended(member: int, code: int | None = 0, signal: int | None = None, at: float = 9.0) -> Any:
    return events.ProcessEnded(at, member, "vm", 100 + member, code, signal)


def left(member: int, called: int = 10, applied: int = 10) -> Any:
    return events.RankLeft(8.0, member, "vm", called, applied)


def failed(member: int, at: float, reason: str = "ValueError: boom", code: int = 1) -> Any:
    return events.RankFailed(at, member, "vm", code, reason, "\n".join(TRACEBACK))


def kill(member: int, at: float, step: int = 5) -> Any:
    return events.FaultInjected(at, member, f"kill:{member}@{step}", step)


def view(epoch: int, members: Iterable[int], lost: Iterable[int], at: float) -> Any:
    return events.ViewChanged(at, min(members), epoch, tuple(members), tuple(lost), 0.02)


def step(number: int, epoch: int, at: float, member: int = 0, size: int = 4) -> Any:
    return events.StepFinished(at, member, number, epoch, size)


def told(ranks: int, *happened: events.Event) -> Story:
    story = Story(ranks)
    for event in happened:
        story.handle(event)
    return story


def verdict(
    ranks: int,
    *happened: events.Event,
    code: int = 0,
    signal: int | None = None,
    strict: bool = False,
) -> Verdict:
    return judge(told(ranks, *happened), Ending(code, signal), strict)
