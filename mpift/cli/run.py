"""``mpift run``: start a job under mpirun, follow it, and judge it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpift.launch.hostfile import Host


# The options, as a table: type, names, help.
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND [ARGS]...",
        help="What each rank runs; a .py file is run with this Python.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option("-np", "--num-proc", min=1, help="Ranks; as a rule, all slots of the hosts."),
]
Hosts = Annotated[
    str | None, typer.Option("-H", "--hosts", metavar="A:2,B:2", help="Hosts and their slots.")
]
Hostfile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="Hosts, one a line.")
]
Chaos = Annotated[
    str | None,
    typer.Option(metavar="FAULTS", help="Rehearse faults: kill:2@50 kills rank 2 at step 50."),
]
MinRanks = Annotated[
    int | None, typer.Option("--min-np", min=1, help="Stop when fewer ranks are left.")
]
Variables = Annotated[
    list[str] | None,
    typer.Option("-x", "--env", metavar="NAME[=VALUE]", help="A variable that ranks get too."),
]
MpiWords = Annotated[
    str, typer.Option("--mpi-args", metavar="WORDS", help="More words for mpirun.")
]
Summary = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what came of it there, as JSON.")
]
OutputFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Also write each rank's output to DIR/rank.N/.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if any rank failed by itself.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only output, warnings and errors.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show the mpirun line and all that MPI says.")
]


def command(
    words: Words,
    num_proc: Ranks = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    chaos: Chaos = None,
    min_np: MinRanks = None,
    env: Variables = None,
    mpi_args: MpiWords = "",
    summary: Summary = None,
    output_filename: OutputFolder = None,
    strict: Strict = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Start COMMAND on N ranks. It goes on when ranks die."""
    from mpift.launch import command as launch_command
    from mpift.launch import job

    places = _hosts(hosts, hostfile)
    ranks = num_proc if num_proc is not None else _all_slots(places)
    settings, forward = _variables(env or [])
    settings |= _checked_settings(ranks, len(places) or None, chaos, min_np)
    options = launch_command.Options(
        command=tuple(words),
        ranks=ranks,
        hosts=places,
        settings=settings,
        forward=forward,
        mpi_arguments=mpi_args,
    )
    reporting = job.Reporting(summary, output_filename, strict, quiet, verbose)
    return job.run(options, reporting)


def _hosts(hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    from mpift.launch.hostfile import parse_hosts, read

    if hosts is not None and hostfile is not None:
        raise typer.BadParameter("give hosts as --hosts or as --hostfile, not both")
    if hostfile is not None:
        return read(hostfile)
    return parse_hosts(hosts) if hosts is not None else ()


def _all_slots(hosts: tuple[Host, ...]) -> int:
    slots = [host.slots for host in hosts]
    if not slots or None in slots:
        raise typer.BadParameter("say how many ranks to start: -np N")
    return sum(number for number in slots if number is not None)


def _variables(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Those with a value, and the names of those that are taken from this environment."""
    settings: dict[str, str] = {}
    forward = []
    for word in words:
        name, equals, value = word.partition("=")
        if not name.isidentifier():
            raise typer.BadParameter(f"--env {word!r} is neither NAME nor NAME=VALUE")
        if equals:
            settings[name] = value
        else:
            forward.append(name)
    return settings, tuple(forward)


def _checked_settings(
    ranks: int, nodes: int | None, chaos: str | None, min_np: int | None
) -> Mapping[str, str]:
    """What goes to the ranks as ``MPIFT_`` variables, refused here rather than by each rank."""
    import os

    from mpift.config import Config
    from mpift.core import chaos as grammar

    settings = {}
    schedule = chaos if chaos is not None else os.environ.get("MPIFT_CHAOS", "")
    parsed = grammar.parse(schedule, ranks)
    if chaos is not None:
        settings["MPIFT_CHAOS"] = str(parsed)
    if min_np is not None:
        if min_np > ranks:
            raise typer.BadParameter(f"--min-np {min_np} is more than the {ranks} ranks to start")
        settings["MPIFT_MIN_SIZE"] = str(min_np)
    # What is wrong with the others is better said now, on the nodes that are known so far.
    Config.load({**os.environ, **settings}, nodes=nodes or 1)
    return settings
