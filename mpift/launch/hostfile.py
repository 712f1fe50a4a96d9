"""Which hosts a job may use, and how many ranks each takes: hostfiles and host lists.

One grammar reads what the launchers of this field write:

    node1 slots=4 max_slots=8    # Open MPI; also max-slots
    node2:4                      # MPICH
    node1:4,node2:4              # Horovod's -H; one line or one argument
    node[01-04,07] slots=8       # Slurm's node lists
    ^node03                      # not this one, whatever else the file says

The rules: a host named again adds its slots to the first naming, as in Open MPI. A host without a
number takes one rank in a host list, and as many as it has cores in a hostfile; named twice without
a number, it takes one rank for each naming. Nothing but ``HostfileError`` is raised, and its
message points at the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hostlist

from mpift.errors import HostfileError

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_TOKEN = re.compile(r"[^\s=]+(?:\s*=\s*[^\s=]*)?")
_SETTINGS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}
# Node lists have one or two bracketed parts; the library behind them recurses once for each.
_MAX_BRACKETS = 8


@dataclass(frozen=True, slots=True)
class Host:
    """``slots`` ranks go to this host, or one for each of its cores if None.

    ``max_slots`` is where oversubscription ends; None is no limit.
    """

    name: str
    slots: int | None
    max_slots: int | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in which text: ``column`` counts from 1; ``line`` is 0 in a host list."""

    source: str
    line: int
    column: int
    text: str

    def at(self, offset: int) -> _Place:
        return _Place(self.source, self.line, self.column + offset, self.text)

    def error(self, message: str) -> HostfileError:
        line = f":{self.line}" if self.line else ""
        caret = " " * (self.column - 1) + "^"
        return HostfileError(
            f"{self.source}{line}:{self.column}: {message}\n  {self.text}\n  {caret}"
        )


def read(path: str | Path) -> tuple[Host, ...]:
    """The hosts of the hostfile ``path``, in its order."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise HostfileError(f"{path}: cannot be read as a hostfile: {error}") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """The hosts of a hostfile's ``text``; ``source`` names it in messages."""
    named: list[Host] = []
    excluded: set[str] = set()
    text = text.replace("\r\n", "\n").replace("\t", " ")
    for number, whole in enumerate(text.split("\n"), 1):
        line = whole.partition("#")[0]
        if not line.strip():
            continue
        start = len(line) - len(line.lstrip())
        place = _Place(source, number, 1, whole)
        if line[start] == "^":
            excluded |= _excluded(line, start + 1, place)
        else:
            named.extend(_hosts_of_line(line, place))
    return _merged((host for host in named if host.name not in excluded), source)


def parse_hosts(text: str, source: str = "--hosts") -> tuple[Host, ...]:
    """The hosts of a list such as ``a:2,b:2`` or ``node[01-04]:8``; without a number, one rank."""
    text = text.replace("\t", " ").replace("\n", " ").replace("\r", " ")
    place = _Place(source, 0, 1, text)
    named: list[Host] = []
    for offset, item in _items(text, place):
        start = offset + len(item) - len(item.lstrip())
        if not item.strip():
            raise place.at(offset).error("expected a host, such as node1:4")
        hosts = _named(item.strip(), place.at(start))
        named.extend(Host(host.name, host.slots or 1) for host in hosts)
    return _merged(named, source)


def format_hosts(hosts: Iterable[Host]) -> str:
    """The hosts as mpirun's ``-H`` takes them."""
    return ",".join(f"{host.name}:{host.slots or 'auto'}" for host in hosts)


def format_hostfile(hosts: Iterable[Host]) -> str:
    """The hosts as a hostfile that ``parse_hostfile`` reads back."""
    lines = []
    for host in hosts:
        slots = f" slots={host.slots}" if host.slots is not None else ""
        limit = f" max_slots={host.max_slots}" if host.max_slots is not None else ""
        lines.append(f"{host.name}{slots}{limit}\n")
    return "".join(lines)


# -- lines and items ---------------------------------------------------------------------------


def _hosts_of_line(line: str, place: _Place) -> list[Host]:
    tokens = list(_TOKEN.finditer(line))
    if not tokens or line[: tokens[0].start()].strip() or "=" in tokens[0][0]:
        raise place.at(len(line) - len(line.lstrip())).error("expected a host first")
    settings: dict[str, int] = {}
    for token in tokens[1:]:
        name, value = _setting(token, place)
        if name in settings:
            raise place.at(token.start()).error(f"{name} is given twice")
        settings[name] = value
    hosts = []
    first = tokens[0]
    for offset, item in _items(first[0], place.at(first.start())):
        for host in _named(item, place.at(first.start() + offset)):
            if host.slots is not None and "slots" in settings:
                raise place.error(f"{host.name} has its slots given twice, as :N and as slots=N")
            slots, limit = settings.get("slots", host.slots), settings.get("max_slots")
            if limit is not None and slots is not None and limit < slots:
                raise place.error(f"max_slots={limit} is less than the {slots} slots")
            hosts.append(Host(host.name, slots, limit))
    return hosts


def _setting(token: re.Match[str], place: _Place) -> tuple[str, int]:
    name, equals, value = (part.strip() for part in token[0].partition("="))
    if name not in _SETTINGS or not equals:
        known = "slots=N or max_slots=N"
        raise place.at(token.start()).error(f"{token[0]!r} is not known here, expected {known}")
    return _SETTINGS[name], _number(value, place.at(token.end() - len(value)), name)


def _excluded(line: str, start: int, place: _Place) -> set[str]:
    text = line[start:].rstrip()
    found: set[str] = set()
    for offset, item in _items(text, place.at(start)):
        for host in _named(item, place.at(start + offset)):
            if host.slots is not None:
                raise place.error("an excluded host has no slots: expected ^HOST")
            found.add(host.name)
    return found


def _items(text: str, place: _Place) -> Iterator[tuple[int, str]]:
    """(offset, item) of what commas separate, those inside brackets aside."""
    begin = depth = 0
    for offset, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise place.at(offset).error("this bracket has no counterpart")
        if character == "," and depth == 0:
            yield begin, text[begin:offset]
            begin = offset + 1
    if depth:
        raise place.at(text.rindex("[")).error("this bracket is not closed")
    yield begin, text[begin:]


def _named(item: str, place: _Place) -> list[Host]:
    """The hosts that ``NAMES`` or ``NAMES:N`` stands for."""
    if item.startswith("[") or item.count(":") > 1:
        raise place.error(
            "expected a host name; mpirun takes no IPv6 address here: give the host a name"
        )
    names, colon, count = item.partition(":")
    slots = _number(count, place.at(len(names) + 1), "slots") if colon else None
    if names.count("[") > _MAX_BRACKETS:
        raise place.error(f"more than {_MAX_BRACKETS} bracketed parts")
    try:
        expanded = hostlist.expand_hostlist(names) if "[" in names else [names]
    except (hostlist.BadHostlist, ValueError, MemoryError) as error:
        raise place.error(f"{names!r} is not a node list such as node[01-04,07]: {error}") from None
    for name in expanded:
        if not _NAME.fullmatch(name):
            raise place.error(f"{name!r} is not a host name or IPv4 address")
    return [Host(name, slots) for name in expanded]


def _number(text: str, place: _Place, what: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise place.error(f"{what}: expected a number from 1 to 999999, found {text!r}")
    return int(text)


def _added(before: Host, again: Host) -> Host:
    limits = (before.max_slots, again.max_slots)
    limit = None if None in limits else sum(n for n in limits if n is not None)
    return Host(before.name, (before.slots or 1) + (again.slots or 1), limit)


def _merged(hosts: Iterable[Host], source: str) -> tuple[Host, ...]:
    """Each host once, at its first place, with the slots of all its namings."""
    merged: dict[str, Host] = {}
    for host in hosts:
        before = merged.get(host.name)
        merged[host.name] = host if before is None else _added(before, host)
    if not merged:
        raise HostfileError(f"{source}: there is no host in it")
    return tuple(merged.values())
