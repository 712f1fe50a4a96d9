"""``mpift bench``: measure on this machine, peers in the same run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from mpift.bench.checkpoint import CheckpointReport
    from mpift.bench.step import StepReport
    from mpift.bench.straggler import StragglerReport
    from mpift.bench.verify import VerifyReport

app = typer.Typer(no_args_is_help=True, help="Measure on this machine, peers in the same run.")

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures there; - is stdout."),
]


@app.command()
def step(
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Ranks to start.")] = 2,
    model: Annotated[str, typer.Option(help="Model to train.")] = "mlp12m",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in one turn.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Time a training step with mpift, with torch DDP over gloo, without communication, and raw
    MPI, in alternation on the same ranks."""
    from rich.console import Console

    from mpift.bench.step import measure

    _check_writable(json_file)
    console = Console(stderr=True)
    with _told(console), console.status(f"measuring {model} on {ranks} ranks"):
        report = measure(ranks, model, rounds, steps)
    _show(console, table(report), report.as_json(), json_file)


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
    with _told(console):
        plan = make_plan(ranks, _numbers(delays), quick)
        about = f"measuring {ranks} ranks for about {max(1, round(plan.seconds / 60))} min"
        with console.status(about):
            report = measure(plan)
    _show(console, straggler_table(report), report.as_json(), json_file)
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
    _show(console, verify_table(report), report.as_json(), json_file)


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
    _show(console, checkpoint_tables(report), report.as_json(), json_file)
    if keep_directory:
        console.print(f"kept: {report.folder}", markup=False, highlight=False)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    """The numbers of a list with commas; None if there is no list."""
    if text is None:
        return None
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--delays takes numbers of step times with commas between, such as 1,1.5, not {text!r}"
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


def straggler_table(report: StragglerReport) -> Table:
    """The report for people: steps per second, waiting for all and by majority, and the
    ratios with their bounds in brackets."""
    from rich.table import Table

    plan = report.plan
    result = Table(
        title=f"one of {plan.ranks} ranks late in each round: steps of"
        f" {1e3 * plan.step_seconds:.0f} ms and gradients of {report.bytes / 2**20:.0f} MiB",
        caption=straggler_caption(report),
    )
    for heading in ("late by", "all /s", "majority /s", "speed-up", "of even", "took part"):
        result.add_column(heading, justify="right")
    for row in report.rows:
        result.add_row(
            f"{row.delay_steps:g} steps",
            f"{row.synchronous:.2f}",
            f"{row.majority:.2f}",
            f"{row.speedup:.2f} ({row.bound_speedup:.2f})",
            f"{row.fraction_of_even:.2f} ({row.bound_fraction:.2f})",
            f"{100 * row.participation:.0f} %",
        )
    return result


def straggler_caption(report: StragglerReport) -> str:
    """What the rows do not say, a sentence a line."""
    ratios, plan = report.even_ratios, report.plan
    if report.named is None:
        named = "nobody was late"
    else:
        named = f"late most often: rank {report.named}, {report.late_rounds[report.named]} rounds"
    bounds = (
        "in brackets the bound, which knows nothing of communication, here"
        f" {100 * report.communication_share:.0f} % of a step"
    )
    even = (
        f"nobody late: {report.even.median:.2f} /s by majority, over all {ratios.median:.2f}"
        f" ({ratios.lower:.2f} to {ratios.upper:.2f} in {ratios.runs} turns)"
    )
    persistent = (
        f"rank {report.slow_member} always {plan.slowdown:g} times as slow: the others keep"
        f" {100 * report.others_fraction:.0f} % of their pace; {named}"
    )
    identical = f"parameters and optimizer state identical on all ranks: {report.identical}"
    return f"{bounds}\n{even}\n{persistent}\n{identical}"


def verify_table(report: VerifyReport) -> Table:
    """The report for people: means of the rank for which verification is dearest."""
    from rich.table import Table

    plan = report.plan
    on_to_off = [f"{row.model} {row.on_to_off.median:.3f}" for row in report.rows]
    result = Table(
        title=f"verification every {plan.every} steps on {plan.ranks} ranks of"
        f" {report.threads} thread(s): {report.ratio:.4f} times the step without",
        caption="models of the examples of these names; ratio: 1 + (wait + processor) / step;"
        f" timed in turn, with / without: {', '.join(on_to_off)}",
    )
    result.add_column("model")
    for heading in ("state MiB", "step ms", "waits us", "processor us", "of it messages", "ratio"):
        result.add_column(heading, justify="right")
    for row in report.rows:
        cost = row.cost
        result.add_row(
            row.model,
            f"{row.state_bytes / 2**20:.1f}",
            f"{1e3 * cost.step:.1f}",
            f"{1e6 * cost.waited:.1f}",
            f"{1e6 * cost.cpu:.1f}",
            f"{1e6 * cost.message:.1f}",
            f"{cost.ratio:.4f}",
        )
    return result


def checkpoint_tables(report: CheckpointReport) -> Group:
    """The report for people: what everybody took, and how far the targets were met."""
    from rich.console import Group
    from rich.table import Table

    from mpift.bench.checkpoint import READS, WRITES

    plan, mib = report.plan, 1 << 20
    times = Table(
        title=f"{report.state_bytes / mib:.0f} MiB of state in {report.tensors} tensors on each of"
        f" {plan.ranks} ranks of {report.threads} thread(s)",
        caption=f"medians of {plan.rounds} rounds in alternation, of the slowest rank;"
        f" load average at the start: {report.load_average:.1f}",
    )
    times.add_column("what was done")
    for heading in ("median ms", "quartiles ms", "page cache"):
        times.add_column(heading, justify="right")
    for name, words in {**WRITES, **READS}.items():
        spread = report.seconds[name]
        quartiles = f"{1e3 * spread.lower:.0f} to {1e3 * spread.upper:.0f}"
        cache = report.page_cache.get(name, "")
        times.add_row(words, f"{1e3 * spread.median:.0f}", quartiles, cache)
    sizes = ", ".join(
        f"{name.removesuffix('_bytes')} {size / mib:.1f}" for name, size in report.sizes.items()
    )
    peak, limit = report.peak_bytes / mib, report.memory_limit_bytes / mib
    targets = Table(
        title="targets",
        caption="training is held by the first save of a manager, which makes the arena:"
        f" {1e3 * report.first_stall_seconds:.0f} ms\nMiB written: {sizes}"
        f"\nMiB of memory: at most {peak:.0f}; state and arenas are {limit:.0f}",
    )
    targets.add_column("ratio")
    for heading in ("measured", "wanted", ""):
        targets.add_column(heading, justify="right")
    for target in report.targets():
        wanted = f"{'at most' if target.inclusive else 'below'} {target.bound:g}"
        met = "met" if target.met else "missed"
        words = f"{target.above} / {target.below}"
        targets.add_row(words, f"{target.measured:.2f}", wanted, met)
    return Group(times, targets)
