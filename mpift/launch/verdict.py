"""The launcher's own verdict on a job: exit code, root cause, summary. Pure.

mpirun's exit code says little: it is 0 after ranks died and even after a node was lost. So the
ranks' own ends decide:

===========================================  =============================================
what happened                                exit code
===========================================  =============================================
the user or the system ended the launcher    128 + signal
a rank stopped the job for a named reason    the code that it named
a rank called MPI_Abort, or mpirun gave up   1
MPI's start waited for ranks that had ended  1
nobody ended with 0                          1, or 3 if the quorum was lost
somebody did, all others too                 0
somebody did, others failed                  0, with a warning for each; 1 if ``strict``
===========================================  =============================================

Ranks that the fault schedule struck are rehearsals: no warning, and no matter for ``strict``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpift.errors import ExitCode
from mpift.launch.last_words import signal_name
from mpift.launch.story import Failure, Recovery, Story, stop_code

_DIGITS = 4  # of seconds in the summary


@dataclass(frozen=True, slots=True)
class Ending:
    """How it came to an end: mpirun's code, the signal that the launcher got, if any, and the
    tracebacks that the user saw last, just above the verdict."""

    mpirun_code: int
    signal: int | None = None
    tracebacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """``lines`` are for the user, the root cause first; ``summary`` can be written as JSON."""

    exit_code: int
    lines: tuple[str, ...]
    failures: tuple[Failure, ...]
    summary: dict[str, Any]


def judge(story: Story, ending: Ending, strict: bool = False) -> Verdict:
    """The verdict on a job that is over."""
    failures = () if ending.signal else _failures(story)
    code, lines = _judge(story, ending, strict, failures)
    lines += [f"warning: scheduled fault {fault} never struck" for fault in story.never_struck]
    return Verdict(int(code), tuple(lines), failures, _summary(story, failures, int(code)))


def _failures(story: Story) -> tuple[Failure, ...]:
    """Bad ends, the first one first."""
    return _in_order(story.failure(n) for n, m in story.members.items() if not m.ended_well)


def _in_order(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    return tuple(sorted(failures, key=lambda failure: (failure.time, failure.rank)))


def _seen(failures: Sequence[Failure]) -> list[Failure]:
    """Without those whose end nobody saw, as when the whole job was ended."""
    return [failure for failure in failures if failure.time != float("inf")]


def _judge(
    story: Story, ending: Ending, strict: bool, failures: tuple[Failure, ...]
) -> tuple[int, list[str]]:
    if ending.signal:
        return 128 + ending.signal, [f"ended by {signal_name(ending.signal)}"]
    if story.stop is not None:
        stop = story.stop
        code = stop_code(stop)
        first = f"the job stopped with code {code}: {stop.reason} (rank {stop.member})"
        return code, [first, *_causes(_seen(failures), ending)]
    if story.start_given_up:
        code, missing = ExitCode.SCRIPT_FAILED, map(story.failure, story.waited_for_in_vain)
        first = f"the job stopped with code {code}: MPI cannot start without all ranks:"
        return code, [first, *_causes(_in_order(missing), ending)]
    if story.aborted is not None:
        first = f"rank {story.aborted} aborted the job (MPI_Abort)"
        return ExitCode.SCRIPT_FAILED, [first, *_causes(_seen(failures), ending)]
    real = [failure for failure in failures if not failure.injected]
    if len(failures) == len(story.members):
        stops = [member.stopped for member in story.members.values() if member.stopped]
        quorum_lost = any(stop.exit_code == ExitCode.QUORUM_LOST for stop in stops)
        code = ExitCode.QUORUM_LOST if quorum_lost else ExitCode.SCRIPT_FAILED
        return code, _all_failed(failures, ending)
    if ending.mpirun_code:
        first = f"mpirun ended the job with code {ending.mpirun_code}"
        return ExitCode.SCRIPT_FAILED, [first, *_causes(_seen(real), ending)]
    code = ExitCode.SCRIPT_FAILED if strict and real else ExitCode.OK
    return code, _warnings(real, strict)


# -- words -------------------------------------------------------------------------------------


def _all_failed(failures: Sequence[Failure], ending: Ending) -> list[str]:
    if not _seen(failures):
        code = ending.mpirun_code
        return [
            f"no rank ended normally, and mpirun ended with code {code}"
            + (": what it said is above" if code else "; were they on a node that was lost?")
        ]
    many = f"all {len(failures)} ranks failed" if len(failures) > 1 else "the only rank failed"
    return [f"{many}:", *_causes(failures, ending)]


def _causes(failures: Sequence[Failure], ending: Ending) -> list[str]:
    """The first with its traceback, unless that is just above, and then the others in groups."""
    if not failures:
        return []
    first, *others = failures
    lines = [f"first, {first.where}: {first.reason}"]
    # Where an event had no room for all of it, dots stand for its beginning.
    end = first.traceback.removeprefix("...")
    if end and any(shown.endswith(end) for shown in ending.tracebacks):
        lines.append("  (its traceback is above)")
    elif end:
        lines.append(textwrap.indent(first.traceback, "  "))
    groups: dict[str, list[int]] = {}
    for failure in others:
        groups.setdefault(failure.reason, []).append(failure.rank)
    for reason, ranks in groups.items():
        why = "" if reason == first.reason else f": {reason}"
        lines.append(f"also on {_ranks(ranks)}{why}")
    return lines


def _warnings(failures: Sequence[Failure], strict: bool) -> list[str]:
    kind = "failed, and --strict forbids that" if strict else "warning"
    lines = []
    told: dict[str, int] = {}
    for failure in failures:
        lines.append(f"{kind}: {failure.where} failed: {failure.reason}")
        first = told.setdefault(failure.traceback, failure.rank)
        if failure.traceback and first == failure.rank:
            lines.append(textwrap.indent(failure.traceback, "  "))
        elif failure.traceback:
            lines.append(f"  (with the same last words as rank {first})")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, sorted(ranks)))


# -- the summary -------------------------------------------------------------------------------


def _summary(story: Story, failures: Sequence[Failure], exit_code: int) -> dict[str, Any]:
    recoveries = story.recoveries()
    stopped = story.stop is not None or story.start_given_up
    went_on = any(member.ended_well for member in story.members.values()) and not stopped
    return {
        **story.values,
        "world_start": story.ranks,
        "world_end": sum(member.ended_well for member in story.members.values()),
        "faults_injected": len(recoveries),
        "faults_survived": sum(r.seconds is not None or went_on for r in recoveries),
        "recovery_seconds": _seconds(recoveries, deaths=True),
        "hang_recovery_seconds": _seconds(recoveries, deaths=False),
        "ranks_lost": len(failures),
        "keys_lost": sorted(story.keys_lost),
        "ranks_repaired": story.repairs,
        "device_faults": story.device_faults,
        "checkpoints_saved": story.checkpoints_saved,
        "checkpoints_failed": story.checkpoints_failed,
        "restored_step": story.restored_step,
        "rebuild_seconds": [round(seconds, _DIGITS) for seconds in story.rebuild_seconds],
        "steps": story.steps,
        "steps_lost": story.steps_lost,
        # By rank, of those that were late at all.
        "rounds_missed": {
            str(number): member.left.rounds_missed
            for number, member in sorted(story.members.items())
            if member.left and member.left.rounds_missed
        },
        "failed_ranks": [
            {
                "rank": failure.rank,
                "host": failure.host,
                "reason": failure.reason,
                "exit_code": failure.exit_code,
                "signal": failure.signal,
            }
            for failure in failures
        ],
        "exit_code": exit_code,
    }


def _seconds(recoveries: Sequence[Recovery], deaths: bool) -> list[float]:
    """Of faults that cost the job a rank: by deaths, or by whatever is no death by itself. A rank
    whose device is lost leaves as soon as it knows, so that counts as a death."""
    return [
        round(r.seconds, _DIGITS)
        for r in recoveries
        if r.seconds is not None and r.fault.fault.startswith(("kill", "device")) == deaths
    ]
