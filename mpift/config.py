"""One frozen ``Config``: which settings there are, their presets, and what they mean together.

A value comes from an argument, else from ``MPIFT_*``, else from a TOML file (``mpift.toml`` in the
working directory, or the file that ``MPIFT_CONFIG`` names), else from the preset, else it is the
default; each remembers which. The preset "auto" goes by the number of nodes, known only once MPI
has started: a ``Config`` is the small one until ``for_nodes`` says otherwise, and only what came
from the preset changes then. What is read and refused, and how it is said, is in ``settings``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpift import settings
from mpift._version import __version__
from mpift.core import chaos as chaos_grammar
from mpift.core import closing
from mpift.core import patience as waiting
from mpift.errors import ConfigError
from mpift.settings import ARGUMENT, DEFAULT, VERSION_KEY, Origin, Setting

SMALL_NODES_MAX = 8

# Large clusters beat less often, since the coordinator hears everybody; are more patient, since
# with more links some are always slow; and save less often, since a save costs all of them.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "heartbeat_interval": 3.0,
        "heartbeat_timeout": 15.0,
        "checkpoint_every": 100,
        "sync_timeout": 10.0,
        "retries": 3,
    },
    "large": {
        "heartbeat_interval": 5.0,
        "heartbeat_timeout": 30.0,
        "checkpoint_every": 500,
        "sync_timeout": 20.0,
        "retries": 5,
    },
}
# Where one is not set, it follows the other.
FOLLOWS = {"hang_timeout": "heartbeat_timeout"}

_WEEK_SECONDS = 7 * 86400.0  # longer is a slip of the pen; nothing waits for ever


def _setting(default: Any, group: str, **more: Any) -> Any:
    return field(default=default, metadata={"group": group, **more})


def _seconds(
    default: float | None, group: str, low: float = 0.0, high: float = _WEEK_SECONDS
) -> Any:
    return _setting(default, group, unit="s", low=low, high=high)


def _share(default: float, low: float = 0.0) -> Any:
    return _setting(default, "health", low=low, high=1.0)


@dataclass(frozen=True, slots=True)
class _Provenance:
    """Where the values of a ``Config`` come from, and for how many nodes it was resolved."""

    nodes: int | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a job. Times in seconds, sizes in bytes. Raises ``ConfigError`` if one is wrong.

    None for what the preset gives, or for what follows another setting. Two are equal if their
    values are, wherever those come from.
    """

    # "small" is for 8 nodes or fewer, "large" for more. May differ between ranks: what it gives
    # is compared value by value.
    preset: str = _setting("auto", "job", choices=("auto", *PRESETS), per_rank=True)
    # Fewer live ranks than this, and the job stops instead of shrinking further.
    min_size: int = _setting(1, "job", low=1)
    # MPI starts only when all ranks have come; one that died before would be waited for for ever.
    start_timeout: float = _seconds(120.0, "job", low=1.0)
    # How long a finished rank waits for the others to finish too before it leaves.
    leave_timeout: float = _seconds(2.0, "job")
    # While no collective is in flight, MPI is looked at this often.
    idle_poll_seconds: float = _seconds(0.005, "job", low=0.0001, high=1.0)
    # "serialized": only mpift's own thread is in MPI. "multiple" lets the script call MPI itself;
    # over TCP a death can then wedge survivors inside MPI.
    mpi_threads: str = _setting("serialized", "job", choices=("serialized", "multiple"))
    # A fault schedule; the grammar is in core/chaos.py.
    chaos: str = _setting("", "job", parse=chaos_grammar.parse)

    # A gradient bucket is closed once it holds this much. Smaller overlaps better with backward,
    # larger wastes less on latency.
    bucket_bytes: int = _setting(32 << 20, "gradients", unit="bytes", low=1024)
    # The first bucket is small, so that the reduction starts early in backward.
    first_bucket_bytes: int = _setting(1 << 20, "gradients", unit="bytes", low=1024)
    # "node": ranks that share a node sum gradients in its shared memory, and nodes exchange sums;
    # "mpi": all ranks through MPI's own reduction. "auto" is "node" wherever ranks share a node and
    # there is memory for it, since what need not be sent costs least.
    reduction: str = _setting("auto", "gradients", choices=("auto", "node", "mpi"))
    # How many ranks of the view must have arrived in a round before it may do without the others.
    # A majority, so that rounds follow each other: two majorities have a rank in common.
    quorum: str = _setting("majority", "gradients", parse=closing.parse_quorum)
    # How long a round waits for late ranks then: "timeout" is sync_timeout, so that healthy runs
    # are exactly synchronous; "adaptive" goes by how ranks arrive, and cuts stragglers.
    patience: str = _setting("timeout", "gradients", parse=waiting.parse_patience)
    # Past this a majority need not wait for a late rank's gradient; the longest that the adaptive
    # patience waits.
    sync_timeout: float = _seconds(None, "gradients", low=0.001)
    # A gradient that comes too late for its round counts in the next one, or not at all.
    late: str = _setting("carry", "gradients", choices=("carry", "drop"))
    # A rank that is this many rounds behind is waited for. Each costs memory for one result while
    # a rank is behind.
    max_lag: int = _setting(4, "gradients", unit="rounds", low=0, high=1000)

    # Rounds between two comparisons of all replicas. Not never: replays, repairs and checkpoints
    # that all ranks write together take for granted that replicas are equal, so one that has parted
    # unnoticed spoils more than itself. Not often: a check costs some 0.1 ms, and faults of memory
    # are rare.
    verify_every: int = _setting(100, "verification", unit="rounds", low=0)
    # A rank that deviates once more is evicted: memory that flips bits again and again is broken.
    max_repairs: int = _setting(3, "verification", low=0)

    # Deaths that come together (a node, a rack) are gathered before the first rebuild.
    gather_seconds: float = _seconds(0.02, "rebuild", high=10.0)
    # How long a rebuild waits for the operating system to agree that a lost process is gone.
    fence_timeout: float = _seconds(2.0, "rebuild")
    # A rebuild that takes longer is given up: the process ends and says so. Longer than a watchdog
    # bears with a rank that computes while it holds the interpreter's lock, 4 times hang_timeout.
    rebuild_timeout: float = _seconds(180.0, "rebuild", low=1.0)

    # Every beat is a message to each observer and to the coordinator: rarer is cheaper, more
    # often is noticed sooner.
    heartbeat_interval: float = _seconds(None, "detection", low=0.01, high=3600.0)
    # The static detector's limit; the adaptive one starts there and is capped at 4 times it.
    heartbeat_timeout: float = _seconds(None, "detection", low=0.1)
    # Only "adaptive" both tightens in calm and widens in a storm; the others are for comparison.
    detector: str = _setting("adaptive", "detection", choices=("adaptive", "static", "phi"))
    # Ring successors that hear a rank's heartbeats, besides the coordinator: a suspicion needs
    # two that agree, and more survive the loss of some.
    observers: int = _setting(3, "detection", low=1)

    # One process a node that ends hung ranks: a hang becomes a death, which MPI reports.
    watchdog: bool = _setting(True, "watchdog")
    # Other nodes ask this one's watchdog through it; empty takes what MPI's connections use. Nodes
    # may name theirs differently, so ranks may differ.
    network_interface: str = _setting("", "watchdog", per_rank=True)
    # A rank whose service loop stands still this long is killed; follows heartbeat_timeout, since
    # a rank that hangs doesn't beat either.
    hang_timeout: float = _seconds(None, "watchdog", low=0.1)
    # Shorter, since the kernel itself says that a rank is stopped; and only while another rank of
    # the node runs, since a stopped job is no fault.
    stop_timeout: float = _seconds(1.0, "watchdog", low=0.1)
    # Ranks whose launcher is gone end by themselves; what is left after this long is killed.
    orphan_timeout: float = _seconds(30.0, "watchdog")

    # A wait for other ranks that lasts longer is warned about, once.
    stall_warning_seconds: float = _seconds(60.0, "stalls", low=0.1)
    # A rank that is alive but makes no progress this long is evicted; 0 never, since a long
    # validation on one rank looks the same.
    stall_timeout: float = _seconds(0.0, "stalls")

    # A metric past its threshold is abnormal. Weights count relative to each other, and 0 leaves a
    # metric out. The numbers are those of the published health check.
    health_cpu_threshold: float = _share(0.9, low=0.01)
    health_cpu_weight: float = _share(0.4)
    # Lower than the processor's: memory that runs out kills, a busy core only slows.
    health_memory_threshold: float = _share(0.85, low=0.01)
    health_memory_weight: float = _share(0.3)
    # Lower still: the next checkpoint has to fit in.
    health_disk_threshold: float = _share(0.8, low=0.01)
    health_disk_weight: float = _share(0.2)
    # High and light: a full link is what training is for.
    health_network_threshold: float = _share(0.95, low=0.01)
    health_network_weight: float = _share(0.1)
    # The network share is relative to this where the system knows no speed, as for virtual
    # links. Nodes may have different links, so ranks may differ.
    link_bytes_per_second: float = _setting(
        0.0, "health", unit="bytes/s", low=0.0, high=1e12, per_rank=True
    )
    # A rank whose health was critical this long is evicted; 0 never, since busy is not dead.
    evict_critical_after: float = _seconds(0.0, "health")

    # More often loses less work where all is lost, and costs more.
    checkpoint_every: int = _setting(None, "checkpoints", unit="steps", low=1)
    # Its file system's used share is the disk metric. Nodes may have disks of their own, so ranks
    # may differ.
    checkpoint_directory: str = _setting(".", "checkpoints", per_rank=True)
    # Of each phase of a commit, before it is given up.
    retries: int = _setting(None, "checkpoints", low=0, high=100)

    _provenance: _Provenance = field(default_factory=_Provenance, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes = self._provenance.nodes
        given = {name: self._given(setting) for name, setting in SETTINGS.items()}
        origins = _resolve(given, nodes)
        for name, origin in origins.items():
            object.__setattr__(self, name, origin.value)
        object.__setattr__(self, "_provenance", _Provenance(nodes, origins))
        if nodes is None and self.preset == "auto":
            # Whether settings go together can depend on the nodes: refused now if none would do.
            options = [_resolve(given, count) for count in (SMALL_NODES_MAX, SMALL_NODES_MAX + 1)]
        else:
            options = [origins]
        contradictions = [_contradiction(option) for option in options]
        if all(contradictions):
            raise ConfigError(str(contradictions[0]))

    @classmethod
    def load(
        cls,
        environment: Mapping[str, str] | None = None,
        nodes: int | None = None,
        **arguments: Any,
    ) -> Config:
        """The settings in effect here, from ``arguments``, the environment and the TOML file.

        An argument that is None and a variable that is empty are not given. Without ``nodes`` the
        preset "auto" is the small one until ``for_nodes``. Raises ``ConfigError`` if a name is
        unknown, a value not allowed, or two contradict each other.
        """
        origins = settings.gather(
            SETTINGS, os.environ if environment is None else environment, arguments
        )
        values = {name: origin.value for name, origin in origins.items()}
        return cls(**values, _provenance=_Provenance(_checked(nodes), origins))

    def for_nodes(self, nodes: int) -> Config:
        """The same settings on ``nodes`` nodes: what came from the preset is resolved anew.

        Raises ``ConfigError`` if what that gives contradicts what is set.
        """
        known = dataclasses.replace(self._provenance, nodes=_checked(nodes))
        return dataclasses.replace(self, _provenance=known)

    def source(self, name: str) -> str:
        """Where the value of a setting comes from: "argument", "environment variable MPIFT_X", the
        path of a file, "preset small (3 nodes)", "as heartbeat_timeout" or "default".

        Where ``Config`` was called directly, an argument equal to the default counts as that.
        """
        return self._provenance.origins[name].source

    def as_text(self) -> dict[str, tuple[str, str]]:
        """(value, source) of all that must be equal on all ranks, for ``settings.differences``."""
        rows = {VERSION_KEY: (__version__, str(Path(__file__).parent))}
        for name, setting in SETTINGS.items():
            if not setting.per_rank:
                rows[name] = (setting.text(getattr(self, name)), self.source(name))
        return rows

    def digest(self) -> int:
        """63 bits of a hash of what must be equal on all ranks, the same in every process.

        The maximum over the ranks of (digest, -digest) shows in one exchange whether all are equal.
        """
        equal = sorted((key, value) for key, (value, _) in self.as_text().items())
        found = hashlib.blake2b(repr(equal).encode(), digest_size=8).digest()
        return int.from_bytes(found, "little") >> 1

    def _given(self, setting: Setting) -> Origin | None:
        """Where a value comes from that was handed in; None if the preset is to give it."""
        value = getattr(self, setting.name)
        known = self._provenance.origins.get(setting.name)
        if known is not None and known.value == value:
            return None if known.automatic else known
        if value is None and setting.default is None:
            return None
        same = type(value) is type(setting.default) and value == setting.default
        source = DEFAULT if same else ARGUMENT
        return Origin(setting.accept(value, source), source)


SETTINGS: Mapping[str, Setting] = {
    item.name: Setting(
        name=item.name, kind=str(item.type), default=item.default, **dict(item.metadata)
    )
    for item in dataclasses.fields(Config)
    if item.metadata
}


def _checked(nodes: int | None) -> int | None:
    if nodes is not None and nodes < 1:
        raise ConfigError(f"nodes = {nodes} must be at least 1")
    return nodes


def _resolve(given: Mapping[str, Origin | None], nodes: int | None) -> dict[str, Origin]:
    """The origins of all settings; what nobody gave is taken from the preset for ``nodes``."""
    origins = {name: origin for name, origin in given.items() if origin is not None}
    name = origins["preset"].value
    source = f"preset {name}"
    if name == "auto":
        name = "small" if nodes is None or nodes <= SMALL_NODES_MAX else "large"
        known = "nodes unknown"
        if nodes is not None:
            known = f"{nodes} node{'s' * (nodes != 1)}"
        source = f"preset {name} ({known})"
    for key, value in PRESETS[name].items():
        origins.setdefault(key, Origin(value, source, automatic=True))
    for key, leader in FOLLOWS.items():
        origins.setdefault(key, Origin(origins[leader].value, f"as {leader}", automatic=True))
    return origins


# -- settings that contradict each other -----------------------------------------------------------

_WEIGHTS = tuple(name for name in SETTINGS if name.startswith("health_") and "weight" in name)
# (settings, whether their values go together, what is asked for)
_TOGETHER: Sequence[tuple[tuple[str, ...], Callable[..., bool], str]] = (
    (
        ("heartbeat_timeout", "heartbeat_interval"),
        lambda timeout, interval: timeout >= 2 * interval,
        "the timeout must be at least 2 intervals, or one late beat is a suspicion",
    ),
    (
        ("stall_timeout", "stall_warning_seconds"),
        lambda timeout, warning: timeout == 0 or timeout >= warning,
        "the timeout must be 0 (never) or at least as long: nobody is evicted without a warning",
    ),
    (
        ("hang_timeout", "idle_poll_seconds"),
        lambda timeout, poll: timeout >= 5 * poll,
        "the timeout must be at least 5 polls, since a rank without work beats once a poll",
    ),
    (_WEIGHTS, lambda *weights: sum(weights) > 0, "one weight at least must be above 0"),
)


def _contradiction(origins: Mapping[str, Origin]) -> str | None:
    for names, together, asked in _TOGETHER:
        if not together(*(origins[name].value for name in names)):
            shown = (
                f"{name} = {SETTINGS[name].text(origins[name].value)} ({origins[name].source})"
                for name in names
            )
            return f"{' and '.join(shown)} do not go together: {asked}"
    return None


def unknown_variables(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """A warning for each ``MPIFT_*`` variable that mpift does not know: as a rule, a typing error
    that would otherwise pass in silence."""
    prefix = settings.ENVIRONMENT_PREFIX
    known = {setting.variable for setting in SETTINGS.values()} | settings.OTHER_VARIABLES
    words = [name.removeprefix(prefix) for name in sorted(known)]
    return tuple(
        f"environment variable {name} is not known to mpift and has no effect"
        f"{settings.hint(name.removeprefix(prefix), words, prefix)}"
        for name in sorted(environment)
        if name.startswith(prefix) and name not in known
    )
