"""What one setting may be, and how the values of settings are read from where users give them.

A value is read from an argument, an ``MPIFT_*`` variable or a line of a TOML file, is checked where
it is read, and remembers that place: every refusal names the setting, what was found, where, and
what is allowed. A wrong value is refused even where a stronger source overrides it, so that none
lies in wait. Ranks compare theirs here too. Which settings there are, and what they mean together,
is said by ``config`` alone.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpift.errors import ConfigError, MpiftError

ENVIRONMENT_PREFIX = "MPIFT_"
FILE_VARIABLE = "MPIFT_CONFIG"
DEFAULT_FILE = "mpift.toml"
# Variables of this prefix that are no settings: the file's name, and what a launcher or a test
# hands to its ranks.
OTHER_VARIABLES = frozenset({
    FILE_VARIABLE, "MPIFT_EVENT_FD", "MPIFT_JOB_TOKEN", "MPIFT_LAUNCHED", "MPIFT_TEST_TOKEN",
    "MPIFT_NPU_BACKEND", "MPIFT_SIMULATED_NPUS", "MPIFT_CACHE",
})  # fmt: skip
ARGUMENT, DEFAULT = "argument", "default"
VERSION_KEY = "mpift version"  # compared between ranks like a setting

_BOOLS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
_KINDS = {
    "bool": "true or false (1 or 0, yes or no, on or off)",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """A value and where it comes from, in words.

    ``automatic``: nobody gave it, the preset did; another number of nodes may give another one.
    """

    value: Any
    source: str
    automatic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a setting may be. ``default`` is None where the preset or another setting gives it.

    ``per_rank``: may differ between the ranks of a job. ``parse`` raises ``MpiftError`` for a text
    that is malformed.
    """

    name: str
    kind: str  # "bool", "int", "float" or "str"
    default: Any
    group: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    per_rank: bool = False
    parse: Callable[[str], object] | None = None

    @property
    def variable(self) -> str:
        """The environment variable that gives it."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """In words, what it may be."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = ""
        if self.low is not None:
            bounds = f" from {self.low:g}" if self.high is not None else f", at least {self.low:g}"
        if self.high is not None:
            bounds += f" to {self.high:g}"
        return _KINDS[self.kind] + bounds

    def accept(self, value: Any, source: str) -> Any:
        """``value`` as this setting holds it; raises ``ConfigError`` if that is not allowed."""
        found = self._of_kind(value)
        wrong = (
            found is None
            or (self.choices and found not in self.choices)
            or (self.low is not None and not found >= self.low)  # the form that refuses NaN too
            or (self.high is not None and not found <= self.high)
        )
        if wrong:
            raise ConfigError(f"{self.name} = {value!r} ({source}) must be {self.allowed}")
        if self.parse is not None:
            try:
                self.parse(found)
            except MpiftError as error:
                raise ConfigError(f"{self.name} = {value!r} ({source}): {error}") from None
        return found

    def read(self, text: str, source: str) -> Any:
        """As ``accept``, from the text of an environment variable."""
        value: Any = text
        if self.kind in {"int", "float"}:
            try:
                value = int(text) if self.kind == "int" else float(text)
            except ValueError:
                value = text  # refused by ``accept``, in its words
        return self.accept(value, source)

    def text(self, value: Any) -> str:
        """An accepted value for people, and for the comparison of ranks: nothing is rounded."""
        if self.kind == "bool":
            return "true" if value else "false"
        if self.kind == "float":
            return repr(value).removesuffix(".0")
        return str(value) or "none"

    def _of_kind(self, value: Any) -> Any:
        """``value`` in this setting's type; None if it has another."""
        if self.kind == "bool":
            return _BOOLS.get(str(value).strip().lower())
        if self.kind == "str":
            return value if isinstance(value, str) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.kind == "int":
            return value if isinstance(value, int) else None
        try:
            return float(value)
        except OverflowError:
            return None


def gather(
    settings: Mapping[str, Setting], environment: Mapping[str, str], arguments: Mapping[str, Any]
) -> dict[str, Origin]:
    """All values that somebody gave: arguments that are not None, over ``MPIFT_*`` variables that
    are not empty, over the lines of the TOML file.

    Raises ``ConfigError`` for an unknown name or a wrong value, whether it is overridden or not.
    """
    found = _from_file(settings, environment)
    for name, setting in settings.items():
        text = environment.get(setting.variable, "")
        if text != "":
            source = f"environment variable {setting.variable}"
            found[name] = Origin(setting.read(text, source), source)
    for name, value in arguments.items():
        if name not in settings:
            raise ConfigError(f"unknown setting {name!r} ({ARGUMENT}){hint(name, settings)}")
        if value is not None:
            found[name] = Origin(settings[name].accept(value, ARGUMENT), ARGUMENT)
    return found


def file_named(environment: Mapping[str, str]) -> Path | None:
    """The TOML file that counts: that of ``MPIFT_CONFIG``, else ``mpift.toml`` in the working
    directory if there is one."""
    named = environment.get(FILE_VARIABLE, "")
    path = Path(named or DEFAULT_FILE)
    return path.absolute() if named or path.exists() else None


def _from_file(
    settings: Mapping[str, Setting], environment: Mapping[str, str]
) -> dict[str, Origin]:
    path = file_named(environment)
    found: dict[str, Origin] = {}
    for name, value in _read_toml(path).items() if path is not None else ():
        if name not in settings:
            ending = _file_hint(name, value, settings)
            raise ConfigError(f"unknown setting {name!r} ({path}){ending}")
        found[name] = Origin(settings[name].accept(value, str(path)), str(path))
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    # In the standard library from Python 3.11 on; before, a package of the same functions.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with open(path, "rb") as file:
            content: dict[str, Any] = toml.load(file)
    except OSError as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error.strerror};"
            f" {FILE_VARIABLE} names it, or else it is {DEFAULT_FILE} in the working directory"
        ) from None
    except ValueError as error:  # malformed TOML, or bytes that are no UTF-8
        raise ConfigError(f"the settings file {path} is not valid TOML: {error}") from None
    return content


def _file_hint(name: str, value: Any, settings: Mapping[str, Setting]) -> str:
    if isinstance(value, dict):
        return ": settings stand at the top level of the file, in no table"
    return hint(name, settings)


def hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the nearest known one, or where all are told.

    ``prefix`` is what all have in common, and so says nothing about what is near.
    """
    nearest = difflib.get_close_matches(name, known, n=1)
    if nearest:
        return f"; did you mean {prefix}{nearest[0]}?"
    return "; `mpift doctor --config` shows all settings"


# -- ranks that were started with different settings -----------------------------------------------

_KEYS_TOLD = 4
_RANGES_TOLD = 4
_SOURCES_TOLD = 2


def differences(rows: Sequence[Mapping[str, tuple[str, str]]]) -> str | None:
    """What is not equal among the ranks, as the text of an error; None if all is.

    ``rows`` holds each rank's ``Config.as_text()``, in rank order. Named are the key, and each of
    its values with the ranks that have it and where they have it from.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    unequal = [key for key in keys if len({row.get(key, ("",))[0] for row in rows}) > 1]
    if not unequal:
        return None
    told = "; ".join(_difference(key, rows) for key in unequal[:_KEYS_TOLD])
    more = f"; and {len(unequal) - _KEYS_TOLD} more" if len(unequal) > _KEYS_TOLD else ""
    asked = "one version" if VERSION_KEY in unequal else "the same settings"
    return f"ranks differ in what must be equal: {told}{more}. Start all ranks with {asked}"


def _difference(key: str, rows: Sequence[Mapping[str, tuple[str, str]]]) -> str:
    ranks: dict[str, list[int]] = {}
    sources: dict[str, dict[str, None]] = {}
    for rank, row in enumerate(rows):
        value, source = row.get(key, ("not known", "another version"))
        ranks.setdefault(value, []).append(rank)
        sources.setdefault(value, {})[source] = None
    parts = []
    for value, having in ranks.items():
        told = [*sources[value]][:_SOURCES_TOLD]
        parts.append(f"{value} on {_ranges(having)} ({' or '.join(told)})")
    return f"{key} is {', '.join(parts)}"


def _ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks in few words: "ranks 0-2, 5"."""
    runs = []
    for _, group in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        runs.append((f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]), len(run)))
    told = ", ".join(text for text, _ in runs[:_RANGES_TOLD])
    left = sum(count for _, count in runs[_RANGES_TOLD:])
    return f"rank{'s' * (len(ranks) > 1)} {told}" + (f" and {left} more" if left else "")
