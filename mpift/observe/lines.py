"""Events as lines: JSON for the launcher where there is one, plain words on stderr otherwise."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping

from mpift.core import events

EVENT_FD_VARIABLE = "MPIFT_EVENT_FD"
_THOUSAND = 1000


def subscriber(environment: Mapping[str, str] = os.environ) -> Callable[[events.Event], None]:
    """Where this process's events go: the descriptor that a launcher opened, else stderr."""
    text = environment.get(EVENT_FD_VARIABLE, "")
    if not text.isdigit():
        return _print_in_words
    descriptor = int(text)

    def write(event: events.Event) -> None:
        try:
            os.write(descriptor, (events.encode(event) + "\n").encode())
        except OSError:
            _print_in_words(event)  # the launcher is gone

    return write


def warn(text: str) -> None:
    """One line of warning on stderr."""
    _print(f"mpift: warning: {text}")


def _print_in_words(event: events.Event) -> None:
    words = in_words(event)
    if words:
        _print(f"mpift: {words}")


def _print(line: str) -> None:
    # Once the launcher is gone nobody reads it, and nothing may fail for that.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def in_words(  # noqa: C901, one match
    event: events.Event,
) -> str | None:
    """One line for a person, or None for events that only a program wants."""
    match event:
        case events.FaultInjected(fault=fault, member=member):
            return f"fault schedule: {fault} strikes member {member}"
        case events.ViewChanged(lost=()):
            return None
        case events.ViewChanged(
            members=members, lost=lost, rebuild_seconds=seconds, reasons=reasons
        ):
            words = dict.fromkeys(filter(None, reasons))
            gone = ", ".join(map(str, lost)) + (f" ({'; '.join(words)})" if words else "")
            ranks = "rank goes" if len(members) == 1 else "ranks go"
            return f"lost member {gone}; {len(members)} {ranks} on (rebuilt in {seconds:.3f} s)"
        case events.Suspected(suspect=suspect, suspect_host=host, silent_seconds=seconds):
            return f"rank {suspect} on {host} has not been heard for {seconds:.1f} s"
        case events.HeardAgain(suspect=suspect, suspect_host=host):
            return f"rank {suspect} on {host} is heard again"
        case events.Evicted(evicted=evicted, reason=reason):
            return f"rank {evicted} is evicted: it {reason}"
        case (
            events.RankStalled() | events.RankRepaired() | events.DeviceFailed() | events.KeysLost()
        ):
            return _rank_in_words(event)
        case events.ReductionChosen(way=way, words=extent):
            place = "in shared memory" if way == "node" else "through MPI"
            return f"gradients are summed {place}: {extent}"
        case events.HealthChanged(host=host, band=band, reason=reason):
            return f"health of {host}: {band}" + (f" ({reason})" if reason else "")
        case events.RankFailed(member=member, host=host, reason=reason, exit_code=code):
            return f"member {member} ({host}) ends with code {code}: {reason}"
        case events.RankStopped(member=member, reason=reason, exit_code=code):
            return f"member {member} gives up with code {code}: {reason}"
        case events.JobStopped(reason=reason, exit_code=code):
            return f"the job stops with code {code}: {reason}"
        case _:
            return _checkpoint_in_words(event)


def _rank_in_words(
    event: events.RankStalled | events.RankRepaired | events.DeviceFailed | events.KeysLost,
) -> str:
    """Which rank was repaired, and what in it; whose device failed; what was lost with two ranks;
    or who holds all others up, where, for how long."""
    if isinstance(event, events.KeysLost):
        keys = ", ".join(event.keys)
        return f"lost in the parameter server, with both ranks that held them: {keys}"
    if isinstance(event, events.RankRepaired):
        what = event.tensor + (f" and {event.tensors - 1} more" if event.tensors > 1 else "")
        differed = f"{event.bytes_differed} bytes differed"
        return f"rank {event.member} repaired: {what}, {differed} (host {event.host})"
    who = f"rank {event.member} on {event.host}"
    if isinstance(event, events.DeviceFailed):
        return f"{who}: {event.device} has failed ({event.words}); remedy: {event.remedy}"
    if event.waits:
        return (
            f"all ranks have waited for each other for {event.seconds:.0f} s, {who} at step"
            f" {event.step} of this job in {event.place}: some do something else there"
        )
    return (
        f"{who} has made no progress at step {event.step} of this job for {event.seconds:.0f} s,"
        f" and others wait for it; it is in {event.place}"
    )


def _written(new: int, blocks: int) -> str:
    # The first one of a job is not compared with anything.
    return f"all {blocks} blocks written" if new == blocks else f"{new} of {blocks} blocks changed"


def _checkpoint_in_words(event: events.Event) -> str | None:
    match event:
        case events.CheckpointSaved(step=step, blocks=blocks, new_blocks=new, new_bytes=size):
            return f"checkpoint of step {step} saved: {_written(new, blocks)}, {_sized(size)}"
        case events.CheckpointFailed(step=step, reason=reason):
            return f"checkpoint of step {step} failed: {reason}"
        case events.CheckpointSkipped(step=step, reason=reason):
            return f"checkpoint of step {step} skipped: {reason}"
        case events.CheckpointRestored(step=step, source=source, saved_by=ranks, bytes_read=size):
            by = f"{ranks} rank{'s' * (ranks != 1)}"
            return f"restored step {step} from {source}, saved by {by}: {_sized(size)} read a rank"
        case events.CheckpointQuarantined(name=name, place=place, reason=reason):
            return f"checkpoint {name} is damaged and was moved to {place}: {reason}"
        case _:
            return None


def _sized(size_bytes: int) -> str:
    amount = float(size_bytes)
    for unit in ("B", "KB", "MB"):
        if amount < _THOUSAND:
            return f"{amount:.3g} {unit}"
        amount /= _THOUSAND
    return f"{amount:.3g} GB"
