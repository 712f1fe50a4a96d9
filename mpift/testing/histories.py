"""Recorded histories of versioned keys, and whether they are linearizable (Herlihy and Wing 1990).

Clients write down each operation before they begin it and once it is answered, with times of one
clock (CLOCK_MONOTONIC, so of one node). Since every answer names a version, the order of a key's
operations is known, and the search that makes such checks hard in general falls away: it remains to
be seen that the order agrees with real time, that a version has one value everywhere, and that each
value follows from the one before it. An operation without an answer may have happened at any time
after its beginning, once, or never; a push that was refused never.

Values are whatever is hashable and survives JSON: a number that identifies an array, or its digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Value = int | float | str
Follows = Callable[[Value, Value], Value]  # (value, update that is pushed to it) -> next value


@dataclass(frozen=True, slots=True)
class Operation:
    """One push or pull. ``value`` is what was pushed, or what a pull found. Times are monotonic
    nanoseconds; ``answered`` and ``version`` are None if there was no answer."""

    client: int
    kind: str  # "push", "pull" or "refused" (a push that was answered with a refusal)
    key: str
    version: int | None
    value: Value | None
    invoked: int
    answered: int | None

    def __str__(self) -> str:
        end = "no answer" if self.answered is None else f"{self.answered}"
        return (
            f"{self.kind} by {self.client}: version {self.version}, value {self.value},"
            f" from {self.invoked} to {end}"
        )


class Recorder:
    """Writes one client's operations to a file of its own; what was written outlives the client,
    however it dies."""

    def __init__(self, folder: Path, client: int) -> None:
        self._client = client
        self._number = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"history-{client}.jsonl", flags, 0o600)

    @contextlib.contextmanager
    def record(self, kind: str, key: str, value: Value | None = None) -> Iterator[dict[str, Any]]:
        """Around an operation, which puts ``version``, ``value`` or another ``kind`` into the
        dictionary. An exception means that there was no answer."""
        self._number += 1
        number = self._number
        operation = Operation(self._client, kind, key, None, value, time.monotonic_ns(), None)
        self._write(number, asdict(operation))
        answer: dict[str, Any] = {}
        yield answer
        self._write(number, {**answer, "answered": time.monotonic_ns()})

    def _write(self, number: int, fields: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps({"number": number, **fields}) + "\n").encode())


def load(folder: Path) -> list[Operation]:
    """All that recorders have written there."""
    operations = []
    for path in sorted(folder.glob("history-*.jsonl")):
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            found[fields.pop("number")] |= fields
        operations += [Operation(**fields) for fields in found.values()]
    return operations


def violations(
    history: Iterable[Operation],
    first: Callable[[str], Value],
    follows: Follows = lambda _, update: update,
) -> list[str]:
    """What is wrong with the history, in words; empty if it is linearizable.

    ``first`` gives a key's value in version 0, ``follows`` what a push makes of a value; without
    it a push is the new value.
    """
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        by_key[operation.key].append(operation)
    found = []
    for key, operations in sorted(by_key.items()):
        answered = [o for o in operations if o.answered is not None and o.kind != "refused"]
        open_ = [o for o in operations if o.answered is None and o.kind == "push"]
        problems = [
            *_out_of_time(answered),
            *_made_twice(answered),
            *_two_values(answered, first(key)),
        ]
        # Only an order that exists can be followed.
        problems = problems or _does_not_follow(answered, open_, first(key), follows)
        found += [f"{key}: {problem}" for problem in problems]
    return found


def _version(operation: Operation) -> int:
    assert operation.version is not None
    return operation.version


def _out_of_time(answered: list[Operation]) -> Iterator[str]:
    """Whoever begins after another's answer must not be before it in the order of versions."""
    ended = sorted(answered, key=lambda o: o.answered or 0)
    position, newest = 0, None
    for operation in sorted(answered, key=lambda o: o.invoked):
        while (ended[position].answered or 0) < operation.invoked:
            if newest is None or _version(ended[position]) > _version(newest):
                newest = ended[position]
            position += 1
        if newest is None:
            continue
        behind = _version(operation) < _version(newest)
        same = _version(operation) == _version(newest)
        if behind or (same and operation.kind == "push"):
            word = "stale" if operation.kind == "pull" else "out of order"
            yield f"{word}: {operation}; before it began there was {newest}"


def _made_twice(answered: list[Operation]) -> Iterator[str]:
    """Each version is made by one push."""
    made: dict[int, Operation] = {}
    for operation in answered:
        if operation.kind == "push":
            other = made.setdefault(_version(operation), operation)
            if other is not operation:
                yield f"two pushes made one version: {other}; {operation}"


def _two_values(answered: list[Operation], first: Value) -> Iterator[str]:
    """Whoever pulls a version sees the same value."""
    seen: dict[int, Value | None] = {0: first}
    for operation in answered:
        if operation.kind == "pull":
            value = seen.setdefault(_version(operation), operation.value)
            if value != operation.value:
                yield f"two values of one version: {value}; {operation}"


def _does_not_follow(
    answered: list[Operation], open_: list[Operation], first: Value, follows: Follows
) -> list[str]:
    """Every version's value must come of the one before it, by the push that made it. A version
    that no answered push made is that of an open one, each of which can explain one at most."""
    pushes = {_version(o): o for o in answered if o.kind == "push"}
    pulled = {_version(o): o.value for o in answered if o.kind == "pull"}
    # By when a version must have been made: when somebody has been told of it, or of a later one.
    told: dict[int, int] = {}
    for operation in answered:
        at = operation.answered or 0
        told[_version(operation)] = min(at, told.get(_version(operation), at))
    last = max([0, *pushes, *pulled])
    known_by = [0] * (last + 2)
    known_by[last + 1] = 1 << 62
    for version in range(last, -1, -1):
        known_by[version] = min(known_by[version + 1], told.get(version, 1 << 62))
    return _search(last, pushes, pulled, open_, known_by, first, follows)


def _search(
    last: int,
    pushes: dict[int, Operation],
    pulled: dict[int, Value | None],
    open_: list[Operation],
    known_by: list[int],
    first: Value,
    follows: Follows,
) -> list[str]:
    """Depth first over which open push made which version that nobody owns up to."""
    furthest, complaint = 0, ""
    stack: list[tuple[int, Value, frozenset[int]]] = [(1, first, frozenset())]
    seen = set(stack)
    while stack:
        version, before, used = stack.pop()
        if version > last:
            return []
        own = pushes.get(version)
        makers = (
            [(None, own)]
            if own is not None
            else [
                (index, push)
                for index, push in enumerate(open_)
                if index not in used and push.invoked <= known_by[version]
            ]
        )
        for index, push in makers:
            assert push.value is not None
            value = follows(before, push.value)
            if version in pulled and pulled[version] != value:
                continue
            after = (version + 1, value, used if index is None else used | {index})
            if after not in seen:
                seen.add(after)
                stack.append(after)
        if version >= furthest:
            furthest = version
            found = f"is {pulled[version]}" if version in pulled else "is not known"
            made = f"made by {own}" if own else f"and {len(open_) - len(used)} pushes are open"
            complaint = f"version {version} does not follow from {before}: it {found}, {made}"
    return [complaint]
