"""One job from the user's options to its exit code: the parts of ``launch`` put together."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mpift.core import chaos
from mpift.errors import ConfigError
from mpift.launch import command, machine
from mpift.launch.display import Display
from mpift.launch.story import Notice, Story
from mpift.launch.supervisor import Supervisor
from mpift.launch.verdict import judge


@dataclass(frozen=True, slots=True)
class Reporting:
    """How a job is shown and judged."""

    summary: Path | None = None
    output_folder: Path | None = None
    strict: bool = False
    quiet: bool = False
    verbose: bool = False


def run(options: command.Options, reporting: Reporting) -> int:
    """Run a job; returns the exit code that it deserves.

    Raises ``MpiftError`` if it can't even be started: nothing runs then.
    """
    script = Path(options.command[0])
    if script.suffix == ".py" and not script.is_file():
        raise ConfigError(f"there is no file {script}")
    here = machine.look()
    line = command.build(options, here)
    if reporting.summary is not None:
        _prepare(reporting.summary)
    display = Display(reporting.quiet, reporting.output_folder)
    for note in line.notes:
        display.notice(Notice(note))
    for warning in line.warnings:
        display.notice(Notice(f"warning: {warning}", warning=True))
    if reporting.verbose:
        display.notice(Notice(str(line)))
    display.flush()
    faults = chaos.parse(options.settings.get("MPIFT_CHAOS", os.environ.get("MPIFT_CHAOS", "")))
    story = Story(options.ranks, [str(fault) for fault in faults.faults])
    supervisor = Supervisor(line, story, display, hide_noise=not reporting.verbose)
    ending = supervisor.run()
    verdict = judge(story, ending, reporting.strict)
    display.finish(verdict, with_table=story.started)
    if reporting.summary is not None:
        reporting.summary.write_text(json.dumps(verdict.summary, indent=2) + "\n")
    return verdict.exit_code


def _prepare(path: Path) -> None:
    """Make the file now: better no job than one whose summary can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise ConfigError(f"--summary {path} cannot be written: {error.strerror}") from None
