"""``mpift bench``: measure on this machine, peers in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from mpift.bench.step import StepReport

app = typer.Typer(no_args_is_help=True, help="Measure on this machine, peers in the same run.")


@app.callback()
def _bench() -> None:
    """Keep ``step`` a sub-command although it is the only one."""


@app.command()
def step(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Ranks to start.")] = 2,
    model: Annotated[str, typer.Option(help="Model to train.")] = "mlp12m",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in one turn.")] = 15,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures there; - is stdout."),
    ] = None,
) -> None:
    """Time a training step with mpift, with torch DDP over gloo, without communication, and raw
    MPI, in alternation on the same ranks."""
    from rich.console import Console

    from mpift.bench.step import measure
    from mpift.errors import ConfigError, ExitCode, MpiftError

    console = Console(stderr=True)
    try:
        with console.status(f"measuring {model} on {ranks} ranks"):
            report = measure(ranks, model, rounds, steps)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    except MpiftError as error:
        console.print(f"mpift bench: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(ExitCode.SCRIPT_FAILED) from None
    text = json.dumps(report.as_json(), indent=2)
    to_stdout = json_file == Path("-")
    if json_file is not None and not to_stdout:
        json_file.write_text(text + "\n")
    # Standard output is left to the JSON where that is asked for there.
    (console if to_stdout else Console()).print(table(report))
    if to_stdout:
        print(text)


def table(report: StepReport) -> Table:
    """The report for people: milliseconds, with the quartiles beside the median."""
    from rich.table import Table

    from mpift.bench.step import CONTENDERS

    model = report.model
    result = Table(
        title=f"one step of {model.name}: {model.parameters / 1e6:.1f} million parameters,"
        f" {report.ranks} ranks of {report.threads} thread(s)",
        caption=f"medians of {report.rounds} rounds in alternation, {report.steps} steps each;"
        f" mpift / DDP: {report.ratio_to_ddp:.2f},"
        f" round by round {report.round_ratios.lower:.2f} to {report.round_ratios.upper:.2f};"
        f" others used {100 * report.others_share:.0f} % of this machine meanwhile",
    )
    result.add_column("contender")
    for heading in ("median ms", "quartiles ms"):
        result.add_column(heading, justify="right")
    for name, words in CONTENDERS.items():
        spread = report.seconds[name]
        quartiles = f"{1e3 * spread.lower:.1f} to {1e3 * spread.upper:.1f}"
        result.add_row(words, f"{1e3 * spread.median:.1f}", quartiles)
    return result
