"""``mpift simulate``: failure detection on a made-up network, in seconds instead of months."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from mpift.simulate.scale import Report

app = typer.Typer(no_args_is_help=True, help="Failure detection on a made-up network.")

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures there; - is stdout."),
]
_STDOUT = Path("-")


@app.command()
def detector(
    periods: Annotated[int, typer.Option(min=1000, help="Heartbeats in each trace.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="1 to 5 were used for tuning.")] = 101,
    json_file: JsonFile = None,
) -> None:
    """Compare the static, the adaptive and the phi detector on the same traces."""
    from rich.console import Console

    from mpift.simulate.detectors import report

    _check_writable(json_file)
    with Console(stderr=True).status(f"simulating {periods:,} heartbeats twice"):
        result = report(periods, seed)
    _show(detector_table(result), result, json_file)


@app.command()
def scale(
    nodes: Annotated[int, typer.Option("-n", "--nodes", min=2, help="Nodes.")] = 10_000,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 8,
    observers: Annotated[int, typer.Option(min=1, help="Ring observers of each rank.")] = 3,
    trials: Annotated[int, typer.Option(min=1, help="Hangs simulated for each size.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the simulated network.")] = 1,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the figures there: PNG, PDF or SVG.")
    ] = None,
) -> None:
    """What heartbeats cost and how long a hang lasts, from 10 to 100,000 nodes."""
    from rich.console import Console

    from mpift.simulate.scale import measure

    _check_writable(json_file)
    _check_writable(plot)
    with Console(stderr=True).status("simulating hangs"):
        report = measure(nodes, ranks_per_node, observers, seed, trials)
    if plot is not None:
        draw(report, plot)
    _show(scale_tables(report, nodes), report.as_json(), json_file)


def _check_writable(path: Path | None) -> None:
    """Better told now than after the simulation."""
    if path is not None and path != _STDOUT and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path} cannot be written: there is no folder {path.parent}")


def _show(table: Table | Group, figures: dict[str, Any], json_file: Path | None) -> None:
    from rich.console import Console

    text = json.dumps(figures, indent=2)
    if json_file is not None and json_file != _STDOUT:
        json_file.write_text(text + "\n", encoding="utf-8")
    # Standard output is left to the JSON where that is asked for there.
    Console(stderr=json_file == _STDOUT).print(table)
    if json_file == _STDOUT:
        print(text)


def detector_table(result: dict[str, Any]) -> Table:
    """The comparison for people: times in seconds."""
    from rich.table import Table

    from mpift.core.detector import KINDS
    from mpift.simulate.detectors import SCENARIOS

    periods = result[KINDS[0]][next(iter(SCENARIOS))]["periods"]
    table = Table(
        title=f"failure detectors over {periods:,} heartbeats, seed {result['seed']}",
        caption="false: alarms without a hang, of all alarms and in 10^6 heartbeats; p50, p99:"
        " seconds from the hang to the alarm; mistake: mean seconds from a false alarm to the next"
        " heartbeat",
    )
    for heading in ("trace", "detector"):
        table.add_column(heading)
    headings = "hangs, false, in 10^6, p50, p99, mistake"
    for heading in headings.split(", "):
        table.add_column(heading, justify="right")
    for name in SCENARIOS:
        for kind in KINDS:
            row = result[kind][name]
            table.add_row(
                name,
                kind,
                str(row["hangs"]),
                _number(row["false_alarm_share"], 100, " %", 2),
                _number(row["false_alarms_per_million"]),
                _number(row["detection_seconds_p50"]),
                _number(row["detection_seconds_p99"]),
                _number(row["mistake_seconds_mean"]),
                end_section=kind == KINDS[-1],
            )
    return table


def scale_tables(report: Report, nodes: int) -> Group:
    """Load and times for people, the size that was asked for in bold."""
    from rich.console import Group

    from mpift.simulate.scale import CORE_SHARE_MAX, REBUILD_NOTE

    load = _numbers(
        f"heartbeats: {report.ranks_per_node} ranks a node, each with {report.observers} ring"
        " observers and the coordinator",
        "sends: each rank; both ways: the coordinator; bytes: those of the packets; of a core:"
        f" from costs measured in this run, {1e6 * report.costs.packet_seconds:.1f} µs a packet",
        "nodes, ranks, sends / s, bytes / s, both ways / s, kB / s, of a core, if told per node",
    )
    times = _numbers(
        "after a rank hangs, seconds",
        f"hang to decision: simulated, calm network, {report.trials} hangs; * with one packet a"
        f" node, as the coordinator would need more than {CORE_SHARE_MAX:.0%} of a core; MPI"
        f" rebuild: {REBUILD_NOTE}",
        "nodes, hang to decision p50, p99, MPI rebuild (model)",
    )
    for point in report.points:
        style = "bold" if point.nodes == nodes else None
        mark = " *" if point.told_per_node else ""
        rebuild = point.rebuild_model
        load.add_row(
            f"{point.nodes:,}",
            f"{point.ranks:,}",
            f"{point.messages_per_rank_second:.2f}",
            f"{point.bytes_per_rank_second:.0f}",
            f"{point.coordinator.messages_per_second:,.0f}",
            f"{point.coordinator.bytes_per_second / 1e3:,.0f}",
            _number(point.coordinator.core_share, 100, " %"),
            _number(point.coordinator.per_node_core_share, 100, " %"),
            style=style,
        )
        times.add_row(
            f"{point.nodes:,}",
            _number(point.decision_seconds_p50) + mark,
            _number(point.decision_seconds_p99) + mark,
            f"{rebuild.fastest_seconds:.1f} to {rebuild.slowest_seconds:.1f}",
            style=style,
        )
    return Group(load, times)


def _numbers(title: str, caption: str, headings: str) -> Table:
    from rich.table import Table

    table = Table(title=title, caption=caption)
    for heading in headings.split(", "):
        table.add_column(heading, justify="right")
    return table


def draw(report: Report, file: Path) -> None:
    """Two diagrams over the number of nodes: the coordinator's load, and the time of a hang.

    Raises ``MpiftError`` if matplotlib is missing or cannot write such a file.
    """
    from mpift.errors import MpiftError

    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MpiftError(f"--plot needs matplotlib: {error}; pip install matplotlib") from None

    points = report.points
    nodes = [point.nodes for point in points]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    load, seconds = figure.subplots(1, 2)
    load.loglog(nodes, [p.coordinator.core_share for p in points], "o-", label="each rank tells")
    shares = [p.coordinator.per_node_core_share for p in points]
    load.loglog(nodes, shares, "s--", label="if one packet a node (not built)")
    load.axhline(1.0, color="gray", linewidth=1)
    load.set(xlabel="nodes", ylabel="share of a core", title="coordinator (measured packet cost)")
    load.legend()
    # What could not be simulated is a gap in the line.
    decided = [float("nan") if (d := p.decision_seconds_p50) is None else d for p in points]
    slowest = [float("nan") if (d := p.decision_seconds_p99) is None else d for p in points]
    seconds.semilogx(nodes, decided, "o-", label="hang to decision, median (simulated)")
    seconds.semilogx(nodes, slowest, "^:", label="hang to decision, 99 % (simulated)")
    seconds.fill_between(
        nodes,
        [p.rebuild_model.fastest_seconds for p in points],
        [p.rebuild_model.slowest_seconds for p in points],
        alpha=0.3,
        label="MPI rebuild (model, not measured)",
    )
    seconds.set(xlabel="nodes", ylabel="seconds", title="after a rank hangs", ylim=(0, None))
    seconds.legend(loc="upper left", fontsize="small")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise MpiftError(f"cannot draw to {file}: {error}") from None


def _number(value: float | None, factor: float = 1, unit: str = "", digits: int = 1) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}{unit}"
