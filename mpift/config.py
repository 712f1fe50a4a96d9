"""One frozen ``Config``; each value comes from an argument, else ``MPIFT_*``, else its default.

A wrong value is refused with its key, what was found, what is allowed, and where it came from.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpift.core import chaos as chaos_grammar
from mpift.errors import ChaosError, ConfigError

ENVIRONMENT_PREFIX = "MPIFT_"


def _setting(default: Any, low: float | None = None, high: float | None = None, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"low": low, "high": high, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a job; the same on all ranks. Times in seconds, sizes in bytes."""

    # Fewer live ranks than this, and the job stops instead of shrinking further.
    min_size: int = _setting(1, low=1)
    # A gradient bucket is closed once it holds this much. Smaller overlaps better with backward,
    # larger wastes less on latency.
    bucket_bytes: int = _setting(8 << 20, low=1024)
    # The first bucket is small, so that the reduction starts early in backward.
    first_bucket_bytes: int = _setting(1 << 20, low=1024)
    # Deaths that come together (a node, a rack) are gathered before the first rebuild.
    gather_seconds: float = _setting(0.02, low=0.0, high=10.0)
    # How long a rebuild waits for the operating system to agree that a lost process is gone.
    fence_timeout: float = _setting(2.0, low=0.0)
    # A rebuild that takes longer is given up: the process ends and says so.
    rebuild_timeout: float = _setting(30.0, low=1.0)
    # MPI starts only when all ranks have come; one that died before would be waited for for ever.
    start_timeout: float = _setting(120.0, low=1.0)
    # How long a finished rank waits for the others to finish too before it leaves.
    leave_timeout: float = _setting(2.0, low=0.0)
    # A wait for other ranks that lasts longer is warned about, once.
    stall_warning_seconds: float = _setting(60.0, low=0.1)
    # While no collective is in flight, MPI is looked at this often.
    idle_poll_seconds: float = _setting(0.005, low=0.0001, high=1.0)
    # "serialized": only mpift's own thread is in MPI. "multiple" lets the script call MPI itself;
    # over TCP a death can then wedge survivors inside MPI.
    mpi_threads: str = _setting("serialized", choices=("serialized", "multiple"))
    # A fault schedule; the grammar is in core/chaos.py.
    chaos: str = _setting("")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check(item, getattr(self, item.name), f"argument {item.name}")

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """Arguments that are not None win over ``MPIFT_*`` of the environment, then defaults."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + item.name.upper()
            if arguments.get(item.name) is not None:
                values[item.name] = arguments[item.name]
            elif environment.get(variable, "") != "":
                value = _convert(item, environment[variable], variable)
                _check(item, value, f"environment variable {variable}")
                values[item.name] = value
        unknown = set(arguments) - {item.name for item in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"unknown setting {min(unknown)!r}")
        return cls(**values)


def _convert(item: dataclasses.Field[Any], text: str, source: str) -> Any:
    kind = {"int": int, "float": float, "str": str}[str(item.type)]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{source}: {text!r} is not a {kind.__name__}") from None


def _check(item: dataclasses.Field[Any], value: Any, source: str) -> None:
    low, high = item.metadata["low"], item.metadata["high"]
    choices = item.metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(choices)}")
    wanted: tuple[type, ...] = {"int": (int,), "float": (int, float), "str": (str,)}[str(item.type)]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ConfigError(f"{source}: {value!r} is not of type {item.type}")
    if low is not None and not value >= low:  # the form that refuses NaN too
        raise ConfigError(f"{source}: {value!r} is below the smallest allowed value, {low}")
    if high is not None and not value <= high:
        raise ConfigError(f"{source}: {value!r} is above the largest allowed value, {high}")
    if item.name == "chaos":
        try:
            chaos_grammar.parse(str(value))
        except ChaosError as error:
            raise ConfigError(f"{source}: {error}") from None
