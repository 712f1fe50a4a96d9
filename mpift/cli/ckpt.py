"""``mpift ckpt``: look into a directory of checkpoints, check it, copy out of it, clean it up.

Everything but ``gc``, ``import`` and ``index`` leaves the directory as it is. Damage ends a command
with exit code 5, whatever else it found.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpift.checkpoint.directory import Committed, Directory
    from mpift.checkpoint.manifest import Manifest

app = typer.Typer(no_args_is_help=True, help="Look into checkpoints, verify and export them.")

_STDOUT = Path("-")
_FILE_COLUMNS = 200  # of a pipe or a log


class Format(str, Enum):
    """What ``export`` writes."""

    PT = "pt"
    SAFETENSORS = "safetensors"


Dir = Annotated[
    Path,
    typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Checkpoint directory."),
]
Step = Annotated[
    str | None,
    typer.Argument(metavar="STEP", help="Step, or STEP.gGENERATION [default: the newest]."),
]
OneStep = Annotated[str, typer.Argument(metavar="STEP", help="Step, or STEP.gGENERATION.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write it there for machines; - is stdout."),
]


@app.command()
def ls(directory: Dir, json_file: JsonFile = None) -> None:
    """List the checkpoints, oldest first."""
    from mpift.checkpoint.directory import Directory
    from mpift.checkpoint.overview import listing
    from mpift.cli.ckpt_tables import damage_list, listing_table

    _check_writable(json_file)
    with _told():
        rows, problems = listing(Directory(directory))
    damaged = [{"folder": str(folder), "reason": reason} for folder, reason in problems]
    figures = {"checkpoints": [asdict(row) for row in rows], "damaged": damaged}
    table = listing_table(rows) if rows else f"{directory} has no committed checkpoint"
    _show([table, *damage_list(reason for _, reason in problems)], figures, json_file)
    _leave_if_damaged(bool(problems))


@app.command()
def show(
    directory: Dir,
    step: Step = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="The N largest tensors.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="All tensors.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show what is in a checkpoint, what was new in it, and the files that it needs."""
    from mpift.checkpoint.overview import details
    from mpift.cli.ckpt_tables import details_tables

    _check_writable(json_file)
    with _told(), _opened(directory, step) as (_, committed, manifest):
        facts = details(committed, manifest)
    shown = len(facts.tensors) if everything else top
    _show(details_tables(facts, shown), asdict(facts), json_file)


@app.command()
def verify(
    directory: Dir,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Read a checkpoint, compare every digest, and list all that is damaged.

    Exits with 5 if anything is.
    """
    from mpift.checkpoint.directory import INDEX, Directory
    from mpift.cli.ckpt_tables import verdicts

    _check_writable(json_file)
    if everything and step is not None:
        raise typer.BadParameter("name a step or give --all, not both")
    found = Directory(directory)
    with _told(), found.reading():
        unknown = [] if step else found.damaged()
        committed = found.committed()
        # Where only damaged ones are left, these are the answer.
        only_damaged = bool(unknown) and not committed
        newest = [] if only_damaged else [_found(found, step)]
        chosen = committed if everything else newest
        results = [
            {
                "step": item.step,
                "generation": item.order[0],
                "folder": str(item.folder),
                "index": (item.folder / INDEX).is_file(),
                "damage": _damage(found, item),
            }
            for item in chosen
        ]
    results += [
        {"step": None, "generation": None, "folder": str(folder), "index": None, "damage": [reason]}
        for folder, reason in unknown
    ]
    _show(verdicts(results), {"checkpoints": results}, json_file)
    _leave_if_damaged(any(result["damage"] for result in results))


def _damage(directory: Directory, item: Committed) -> list[str]:
    from mpift.checkpoint.damage import work_bytes
    from mpift.errors import CheckpointDamagedError

    try:
        total = work_bytes(directory.manifest(item))
    except CheckpointDamagedError:
        total = 0
    with _progress(f"step {item.step}", total) as advance:
        return list(directory.damage(item, advance))


@app.command()
def diff(directory: Dir, older: OneStep, newer: OneStep, json_file: JsonFile = None) -> None:
    """Compare two checkpoints tensor by tensor, by the digests of their blocks."""
    from mpift.checkpoint.overview import difference
    from mpift.cli.ckpt_tables import difference_tables

    _check_writable(json_file)
    with (
        _told(),
        _opened(directory, older) as (_, _, first),
        _opened(directory, newer) as (_, _, second),
    ):
        facts = difference(first, second)
    figures = {"older": first.step, "newer": second.step, **asdict(facts)}
    _show(difference_tables(facts, first.step, second.step), figures, json_file)


@app.command()
def flatten(
    directory: Dir,
    step: OneStep,
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="New directory.")],
    json_file: JsonFile = None,
) -> None:
    """Copy a checkpoint as a full one into a new directory that needs no other."""
    from mpift.checkpoint.directory import Directory
    from mpift.checkpoint.flat_copy import flat_copy
    from mpift.cli.ckpt_tables import size

    _check_writable(json_file)
    with _told():
        target = Directory(out)
        with (
            _opened(directory, step) as (found, committed, manifest),
            _progress("copying", manifest.state_bytes) as advance,
        ):
            copy = flat_copy(found, committed, target, advance=advance)
        files = target.manifest(copy).files
    written = sum(file.size_bytes for file in files)
    figures = {"step": copy.step, "folder": str(copy.folder), "bytes": written, "files": len(files)}
    _show([f"step {copy.step} is in {out}: {size(written)}"], figures, json_file)


@app.command("export")
def export_command(
    directory: Dir,
    step: OneStep,
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="File to write.")],
    form: Annotated[
        Format | None, typer.Option("--format", help="Of the file [default: as its name ends, pt].")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Write a checkpoint as one file for torch.load, or its tensors as safetensors."""
    from mpift.checkpoint import exchange
    from mpift.checkpoint.progress import CountingReader
    from mpift.cli.ckpt_tables import size

    _check_writable(json_file)
    _check_writable(file)
    if form is None:
        form = Format.SAFETENSORS if file.suffix == ".safetensors" else Format.PT
    write = exchange.export_pt if form is Format.PT else exchange.export_safetensors
    with _told():
        with (
            _opened(directory, step) as (_, _, manifest),
            _progress("exporting", manifest.state_bytes) as advance,
            CountingReader(directory, advance) as reader,
        ):
            write(manifest, reader, file)
        written = file.stat().st_size
    figures = {"step": manifest.step, "file": str(file), "format": form.value, "bytes": written}
    _show([f"step {manifest.step} is in {file}: {size(written)}"], figures, json_file)


@app.command("import")
def import_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="By torch.save.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.")],
    step: Annotated[int, typer.Option(min=0, metavar="N", help="Step to save it as.")],
    json_file: JsonFile = None,
) -> None:
    """Save a file of torch.save as a checkpoint. Only plain data is loaded from it, no code."""
    from mpift.checkpoint import CheckpointManager
    from mpift.checkpoint.exchange import import_pt

    _check_writable(json_file)
    with _told():
        # What is there already stays.
        with CheckpointManager(directory, keep=sys.maxsize) as manager:
            manager.save(step, import_pt(file), wait=True)
        with _opened(directory, str(step)) as (_, committed, _):
            figures = {"step": step, "folder": str(committed.folder)}
    _show([f"{file} is step {step} of {directory}"], figures, json_file)


@app.command()
def gc(
    directory: Dir,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Newest checkpoints [default: all].")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="And those of every N-th step.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Remove what no checkpoint needs, and checkpoints beyond those to keep.

    Refuses while a job writes there.
    """
    from mpift.checkpoint.directory import Directory
    from mpift.checkpoint.retention import collect
    from mpift.cli.ckpt_tables import sweep_lines

    _check_writable(json_file)
    if keep_every is not None and keep is None:
        raise typer.BadParameter("--keep-every needs --keep: without it, all checkpoints stay")
    with _told():
        swept = collect(Directory(directory), keep, keep_every, dry_run)
    _show(sweep_lines(swept, dry_run), {**asdict(swept), "dry_run": dry_run}, json_file)


@app.command()
def index(directory: Dir, json_file: JsonFile = None) -> None:
    """Write index.h5 where it is missing, for programs that read HDF5 without mpift.

    A job writes it right after COMMIT, and the next job does if that one ended in between.
    """
    from mpift.checkpoint.directory import Directory
    from mpift.checkpoint.index import write_missing

    _check_writable(json_file)
    found = Directory(directory)
    with _told(), found.reading():
        _found(found, None)  # or there is none at all
        paths, damage = write_missing(found)
    written = [str(path) for path in paths]
    lines = [*(f"wrote {path}" for path in written), *damage] or ["no index is missing"]
    _show(lines, {"written": written, "damage": damage}, json_file)
    _leave_if_damaged(bool(damage))


# -- what the commands share -----------------------------------------------------------------------


@contextlib.contextmanager
def _opened(directory: Path, step: str | None) -> Iterator[tuple[Directory, Committed, Manifest]]:
    """A checkpoint that nobody removes meanwhile."""
    from mpift.checkpoint.directory import Directory

    found = Directory(directory)
    with found.reading():
        committed = _found(found, step)
        yield found, committed, found.manifest(committed)


def _found(directory: Directory, step: str | None) -> Committed:
    """The checkpoint that is named, or the newest."""
    from mpift.errors import CheckpointError

    if step is None:
        everything = directory.committed()
        if not everything:
            raise CheckpointError(f"{directory.root} has no committed checkpoint")
        return everything[-1]
    number, _, generation = step.partition(".g")
    try:
        return directory.find(int(number), int(generation) if generation else None)
    except ValueError:
        raise typer.BadParameter(
            f"{step!r} is no step: give a number such as 150, or 150.g4 for that of generation 4"
        ) from None


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the file system refuses is said in one line."""
    from mpift.errors import CheckpointError

    try:
        yield
    except OSError as error:
        raise CheckpointError(str(error)) from None


@contextlib.contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda size: bar.advance(task, size)


def _check_writable(path: Path | None) -> None:
    """Better told now than after minutes of reading."""
    if path is not None and path != _STDOUT and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path} cannot be written: there is no folder {path.parent}")


def _show(shown: Sequence[RenderableType], figures: dict[str, Any], json_file: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    text = json.dumps(figures, indent=2)
    if json_file is not None and json_file != _STDOUT:
        json_file.write_text(text + "\n", encoding="utf-8")
    # Standard output is left to the JSON where that is asked for there.
    console = Console(stderr=json_file == _STDOUT, markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS  # nothing is wider there that could be read
    for item in shown:
        # Lines are for grep as well: only tables are fitted to the terminal.
        console.print(item, soft_wrap=not isinstance(item, Table))
    if json_file == _STDOUT:
        print(text)


def _leave_if_damaged(damaged: bool) -> None:
    from mpift.errors import ExitCode

    if damaged:
        raise typer.Exit(ExitCode.CHECKPOINT_DAMAGED)
