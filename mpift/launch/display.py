"""What the user sees of a job: the ranks' output, one line of status, notices, a table at the end.

The rules: ranks' output is passed on byte for byte, behind its rank, but for tracebacks that
several ranks end with alike (see ``tracebacks``); files get all of it. The launcher itself speaks
on stderr, so that a pipe from stdout carries the ranks' output alone. Only where stdout is a
terminal a status line stays at its bottom and the table goes there too; elsewhere status is a plain
line now and then. Quiet leaves output, warnings and errors.

The status line is drawn by hand: a console library would have to parse and re-render all that the
ranks print, at a hundred times the cost of passing it on.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from mpift.errors import ConfigError
from mpift.launch.story import Notice, Story
from mpift.launch.streams import Output
from mpift.launch.verdict import Verdict

_PREFIX = "mpift run: "
_REDRAW_SECONDS = 0.1
_STATUS_LINE_SECONDS = 5.0
_CLEAR_LINE = b"\r\x1b[2K"
_NOT_IN_TABLE = ("failed_ranks", "exit_code")
_ROWS = {"steps": "steps of this job"}  # checkpoints count those of the whole run


class Display:
    """Writes to this process's stdout and stderr, and to files of ``folder`` if there is one."""

    def __init__(self, quiet: bool = False, folder: Path | None = None) -> None:
        self._quiet = quiet
        self._files = OutputFiles(folder) if folder is not None else None
        self._streams: dict[str, BinaryIO] = {
            "stdout": sys.stdout.buffer,
            "stderr": sys.stderr.buffer,
        }
        self.live = not quiet and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = False
        self._status_due = time.monotonic() + _STATUS_LINE_SECONDS
        self._status_text = ""

    # -- lines ---------------------------------------------------------------------------------

    def output(self, item: Output) -> None:
        """Show a rank's line."""
        self._write(item.stream, b"[%d] %s\n" % (item.member, item.text))

    def keep(self, item: Output) -> None:
        """Write a rank's line to its file, if there are files; shown or not, each has its own."""
        if self._files is not None:
            self._files.write(item)

    def words(self, text: bytes, stream: str) -> None:
        """A line of mpirun's own."""
        self._write(stream, text + b"\n")

    def notice(self, notice: Notice) -> None:
        """A line of the launcher."""
        if notice.warning or not self._quiet:
            self._say(notice.text)

    def _say(self, text: str) -> None:
        self._write("stderr", (_PREFIX + text + "\n").encode("utf-8", "replace"))

    def _write(self, stream: str, data: bytes) -> None:
        self._erase()
        self._streams[stream].write(data)

    def flush(self) -> None:
        """Let everything written so far be seen; ``BrokenPipeError`` if nobody can see it."""
        for stream in self._streams.values():
            stream.flush()

    # -- status --------------------------------------------------------------------------------

    def status(self, story: Story) -> None:
        """Show how far the job is, if that is due."""
        now = time.monotonic()
        due = now >= self._status_due or (self.live and not self._drawn)
        if self._quiet or not story.started or not due:
            return
        text = status_text(story)
        if self.live and not (self._drawn and text == self._status_text):
            self._erase()
            width = shutil.get_terminal_size().columns - 1
            self._streams["stdout"].write(text[:width].encode("utf-8", "replace"))
            self._drawn = True
            self._status_due = now + _REDRAW_SECONDS
        elif not self.live and text != self._status_text and story.under_way:
            self._say(text)
            self._status_due = now + _STATUS_LINE_SECONDS
        self._status_text = text
        self.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._streams["stdout"].write(_CLEAR_LINE)
            self._streams["stdout"].flush()  # before anything that goes to stderr
            self._drawn = False

    # -- the end -------------------------------------------------------------------------------

    def finish(self, verdict: Verdict, with_table: bool) -> None:
        """The verdict, and the table unless quiet; closes the files."""
        self._erase()
        for line in verdict.lines:
            is_traceback = line.startswith(" ")
            text = f"{line}\n" if is_traceback else f"{_PREFIX}{line}\n"
            self._streams["stderr"].write(text.encode("utf-8", "replace"))
        self.flush()
        if with_table and not self._quiet:
            _print_table(verdict, sys.stdout if self.live else sys.stderr)
        if self._files is not None:
            self._files.close()


def status_text(story: Story) -> str:
    """Step, values and ranks in one line. What happens is not in it: each notice has its own."""
    parts = [_step(story)] if "step" in story.values or story.step != -1 else []
    parts.append(f"{story.size} of {story.ranks} ranks")
    parts += [f"{name} {_plain(value)}" for name, value in story.values.items() if name != "step"]
    return " | ".join(parts)


def _step(story: Story) -> str:
    """The script's own word for it, if it has one, else the count of this job: after a restore that
    is not the step of the checkpoints, which count the whole run."""
    if "step" in story.values or story.restored_step is None:
        return f"step {story.values.get('step', story.step)}"
    return f"step {story.step} of this job, which restored step {story.restored_step}"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else str(value)


# Rows that are left out while they have nothing to say.
_LABELS = {
    "recovery_seconds": "seconds from each injected death to the next finished step",
    "hang_recovery_seconds": "seconds from each injected hang to the next finished step",
    "rebuild_seconds": "seconds to rebuild the world after each loss",
    "keys_lost": "keys lost in a parameter server",
    "ranks_repaired": "states repaired that had parted from the others'",
    "rounds_missed": "rounds missed (rank: rounds)",
    "checkpoints_saved": "checkpoints saved",
    "checkpoints_failed": "checkpoints that failed",
    "restored_step": "step of the checkpoint restored last",
}


def _print_table(verdict: Verdict, file: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = dict(verdict.summary)
    world = f"{summary.pop('world_start')} -> {summary.pop('world_end')}"
    survived = f"{summary.pop('faults_survived')} of {summary.pop('faults_injected')}"
    rows: dict[str, Any] = {
        **{_ROWS.get(name, name): summary[name] for name in summary if name not in _NOT_IN_TABLE},
        "ranks, start -> end": world,
    }
    if verdict.summary["faults_injected"]:
        rows["injected faults survived"] = survived
    table = Table(show_header=False)
    for name, value in rows.items():
        if name in _LABELS and not value:
            continue  # nothing of the kind has happened
        table.add_row(_LABELS.get(name, name.replace("_", " ")), _plain(value) or "-")
    Console(file=file, highlight=False).print(table)


class OutputFiles:
    """``FOLDER/rank.N/stdout`` and ``stderr``: each rank's output without labels."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[int, str], BinaryIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output-filename {folder}: {error.strerror}") from None

    def write(self, item: Output) -> None:
        """Append a line to its file, which is made anew at a rank's first line."""
        key = (item.member, item.stream)
        if key not in self._files:
            path = self._folder / f"rank.{item.member}" / item.stream
            path.parent.mkdir(exist_ok=True)
            self._files[key] = path.open("wb")
        self._files[key].write(item.text + b"\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
