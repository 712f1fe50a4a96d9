"""``mpift bench``: measure on this machine, peers in the same run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mpift.cli import bench_tables

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

app = typer.Typer(no_args_is_help=True, help="Measure on this machine, peers in the same run.")

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures there; - is stdout."),
]


@app.command()
def step(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Ranks to start.")] = 2,
    model: Annotated[str, typer.Option(help="Model to train.")] = "mlp12m",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns that each contender takes [default: 7; quick: 2]."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Timed steps in one turn [default: 15; quick: 5].")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer and shorter turns.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time a training step with mpift, with torch DDP over gloo, without communication, and raw
    MPI, in alternation on the same ranks."""
    from rich.console import Console

    from mpift.bench.step import measure

    _check_writable(json_file)
    console = Console(stderr=True)
    with _told(console), console.status(f"measuring {model} on {ranks} ranks"):
        report = measure(ranks, model, rounds or (2 if quick else 7), steps or (5 if quick else 15))
    _show(console, bench_tables.step_table(report), report.as_json(), json_file)


@app.command()
def allreduce(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=2, help="Ranks to start.")] = 2,
    mib: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Sizes in MiB [default: 1,16,100; quick: 1,16]."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns that each contender takes [default: 7; quick: 2]."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small arrays, fewer and shorter turns.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time sums of float32 arrays with mpift's gradient rounds, raw MPI and torch.distributed over
    gloo, in alternation on the same ranks."""
    from rich.console import Console

    from mpift.bench.allreduce import make_plan, measure

    _check_writable(json_file)
    console = Console(stderr=True)
    with _told(console):
        plan = make_plan(ranks, _numbers(mib, int, "--mib", "MiB, such as 1,16"), rounds, quick)
        with console.status(f"measuring {ranks} ranks"):
            report = measure(plan)
    _show(console, bench_tables.allreduce_tables(report), report.as_json(), json_file)


@app.command()
def straggler(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=2, help="Ranks to start.")] = 4,
    delays: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", help="Delays in step times [default: 1,1.5,2,3,5,10]."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer rounds, and only the delay 1.5.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure what one late rank a round costs, synchronously and by majority, beside the bound of
    the rule; computation is a timed wait."""
    from rich.console import Console

    from mpift.bench.straggler import make_plan, measure
    from mpift.errors import ExitCode

    _check_writable(json_file)
    console = Console(stderr=True)
    words = "step times, such as 1,1.5"
    with _told(console):
        plan = make_plan(ranks, _numbers(delays, float, "--delays", words), quick)
        about = f"measuring {ranks} ranks for about {max(1, round(plan.seconds / 60))} min"
        with console.status(about):
            report = measure(plan)
    _show(console, bench_tables.straggler_table(report), report.as_json(), json_file)
    if not report.identical:
        _complain(console, "ranks ended with different parameters or optimizer state")
        raise typer.Exit(ExitCode.SCRIPT_FAILED)


@app.command()
def verify(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=2, help="Ranks to start.")] = 4,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checks.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Turns with verification and without.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in one turn.")] = 40,
    json_file: JsonFile = None,
) -> None:
    """Measure what it costs a training step to verify that all replicas are equal."""
    from rich.console import Console

    from mpift.bench.verify import make_plan, measure

    _check_writable(json_file)
    console = Console(stderr=True)
    with _told(console):
        plan = make_plan(ranks, every, rounds, steps)
        with console.status(f"measuring {ranks} ranks"):
            report = measure(plan)
    _show(console, bench_tables.verify_table(report), report.as_json(), json_file)


@app.command()
def checkpoint(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Ranks to start.")] = 2,
    mib: Annotated[
        int | None,
        typer.Option(metavar="N", help="MiB of state on each rank [default: 500; quick: 64]."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where to write, in a new folder [default: the working directory]."),
    ] = None,
    keep_directory: Annotated[
        bool, typer.Option("--keep-directory", help="Do not remove that folder afterwards.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Less state and fewer rounds.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Time saving and restoring with mpift, torch.save, torch.distributed.checkpoint and plain
    files, in alternation on the same ranks, and measure the memory that mpift needs."""
    from rich.console import Console

    from mpift.bench.checkpoint import make_plan, measure

    _check_writable(json_file)
    console = Console(stderr=True)
    with _told(console):
        plan = make_plan(ranks, mib, directory, keep_directory, quick)
        about = f"saving and restoring {plan.mib} MiB on each of {ranks} ranks"
        with console.status(about):
            report = measure(plan)
    _show(console, bench_tables.checkpoint_tables(report), report.as_json(), json_file)
    if keep_directory:
        console.print(f"kept: {report.folder}", markup=False, highlight=False)


_Number = TypeVar("_Number", int, float)


def _numbers(
    text: str | None, kind: Callable[[str], _Number], option: str, words: str
) -> tuple[_Number, ...] | None:
    """The numbers of a list with commas; None if there is no list."""
    if text is None:
        return None
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{option} takes numbers of {words}, with commas between, not {text!r}"
        ) from None


@contextlib.contextmanager
def _told(console: Console) -> Iterator[None]:
    """Errors of ours inside are told to the user, and end the command."""
    from mpift.errors import ConfigError, ExitCode, MpiftError

    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    except MpiftError as error:
        _complain(console, str(error))
        raise typer.Exit(ExitCode.SCRIPT_FAILED) from None


def _check_writable(path: Path | None) -> None:
    """Better told now than after minutes of measuring."""
    if path is not None and path != Path("-") and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path} cannot be written: there is no folder {path.parent}")


def _complain(console: Console, text: str) -> None:
    console.print(f"mpift bench: {text}", style="red", markup=False, highlight=False)


def _show(
    console: Console, shown: RenderableType, figures: dict[str, Any], json_file: Path | None
) -> None:
    """Print the table, and the figures where they are asked for."""
    from rich.console import Console

    text = json.dumps(figures, indent=2)
    to_stdout = json_file == Path("-")
    if json_file is not None and not to_stdout:
        json_file.write_text(text + "\n")
    # Standard output is left to the JSON where that is asked for there.
    (console if to_stdout else Console()).print(shown)
    if to_stdout:
        print(text)
