"""A disk for crash tests: stops where it is told to, and forgets what was not synced.

``CrashingDisk`` stands in for ``mpift.checkpoint.durable.Disk``. It works on real files, and keeps
account of what a crash of the whole machine would leave of them. Contents last as they were when
the file was last synced. A name lasts once the folder that it is in was synced after the change;
until then each change of a name may have happened or not, in whatever order: weaker than most file
systems, stronger than none that matters. A change that concerns two names or folders (a rename)
happens whole or not at all.

Files may be written behind the disk's back, as HDF5 does: nothing of that counts before a sync.
Nothing is really synced here, so tests are quick.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from mpift.checkpoint.durable import Disk

# What may be found in a file that was never synced: nothing, a beginning, zeros, or all of it.
TORN = ("empty", "cut", "zeros", "whole")


class Stopped(BaseException):
    """The process ends here. No ``Exception``, so that no code under test takes it for one."""


@dataclass(slots=True, eq=False)
class _File:
    durable: bytes | None = None  # as of the last sync


@dataclass(slots=True, eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)  # as they are now


_Node: TypeAlias = "_File | _Folder"
_Names: TypeAlias = "dict[_Folder, dict[str, _Node]]"


@dataclass(slots=True)
class _Change:
    """Names that change together: (folder, name, what it stands for from now on or None), and the
    folders that have yet to be synced."""

    edits: tuple[tuple[_Folder, str, _Node | None], ...]
    waits_for: set[_Folder]


class CrashingDisk(Disk):
    """The files below ``root``, all of which last that are there already.

    Raises ``Stopped`` instead of the ``stop_at``-th operation (a sync is one), or at the named
    point ``stop_point``, and instead of everything after it; 0 and "" never stop. ``operations``
    were done so far. A subclass may look at each ``moment`` instead. Not for several threads.
    """

    def __init__(self, root: Path, stop_at: int = 0, stop_point: str = "") -> None:
        self.root = root
        self.operations = 0
        self._stop_at = stop_at
        self._stop_point = stop_point
        self._stopped = False
        self._top = _Folder()
        self._changes: list[_Change] = []
        if root.is_dir():
            for file, path in self._notice(self._top, root):
                file.durable = path.read_bytes()
            for change in self._changes:
                change.waits_for.clear()

    def go_on(self, stop_at: int = 0, stop_point: str = "") -> None:
        """The process is gone, but not the machine: another one uses the disk from here on, which
        stops at the ``stop_at``-th of its own operations."""
        self._stopped = False
        self._stop_at, self._stop_point = (self.operations + stop_at) if stop_at else 0, stop_point

    def moment(self, what: str) -> None:
        """Called before each operation and at each named point, which is ``what``: between two of
        them a crash finds the same. ``lost`` may be called here."""

    # -- operations --------------------------------------------------------------------------------

    def create(self, path: Path, data: bytes) -> None:
        self._step(f"create {path.name}")
        super().create(path, data)

    def rename(self, old: Path, new: Path) -> None:
        self._step(f"rename {new.name}")
        node = self._find(old) if os.path.lexists(old) else None
        super().rename(old, new)
        if node is not None:
            source, goal = self._folder(old.parent), self._folder(new.parent)
            self._change((source, old.name, None), (goal, new.name, node))

    def link(self, old: Path, new: Path) -> None:
        self._step(f"link {new.name}")
        node = self._find(old)
        super().link(old, new)
        self._change((self._folder(new.parent), new.name, node))

    def unlink(self, path: Path) -> None:
        self._step(f"unlink {path.name}")
        if os.path.lexists(path):
            self._find(path)  # it may be news
            super().unlink(path)
            self._change((self._folder(path.parent), path.name, None))

    def reached(self, point: str) -> None:
        self._stop_if(point == self._stop_point, point)
        self.moment(point)

    def _fsync(self, descriptor: int, path: Path) -> None:
        self._step(f"sync {path.name}")
        if not path.is_relative_to(self.root):
            return
        node = self._find(path)
        if isinstance(node, _File):
            node.durable = path.read_bytes()
            return
        for _ in self._notice_names(node, path):
            pass
        for change in self._changes:
            change.waits_for.discard(node)

    def _step(self, what: str) -> None:
        self._stop_if(self.operations + 1 == self._stop_at, what)
        self.moment(what)
        self.operations += 1

    def _stop_if(self, here: bool, what: str) -> None:
        self._stopped = self._stopped or here
        if self._stopped:
            raise Stopped(what)

    # -- names -------------------------------------------------------------------------------------

    def _find(self, path: Path) -> _Node:
        """What a path stands for; it is there."""
        if path == self.root:
            return self._top
        folder = self._folder(path.parent)
        if path.name not in folder.names:
            node: _Node = _Folder() if path.is_dir() else _File()
            self._change((folder, path.name, node))
        return folder.names[path.name]

    def _folder(self, path: Path) -> _Folder:
        node = self._find(path)
        assert isinstance(node, _Folder), path
        return node

    def _change(self, *edits: tuple[_Folder, str, _Node | None]) -> None:
        self._changes.append(_Change(edits, {folder for folder, _, _ in edits}))
        for folder, name, node in edits:
            _apply(folder.names, name, node)

    def _notice_names(self, folder: _Folder, path: Path) -> Iterator[tuple[_Node, Path]]:
        """What is in a folder, and what has changed there behind the disk's back."""
        there = sorted(place.name for place in path.iterdir())
        for name in sorted(folder.names.keys() - set(there)):
            self._change((folder, name, None))
        for name in there:
            yield self._find(path / name), path / name

    def _notice(self, folder: _Folder, path: Path) -> Iterator[tuple[_File, Path]]:
        """The same, with all that is below; gives the files."""
        for node, place in self._notice_names(folder, path):
            if isinstance(node, _File):
                yield node, place
            else:
                yield from self._notice(node, place)

    # -- the crash ---------------------------------------------------------------------------------

    def lost(self, into: Path, choice: random.Random, torn: str = "empty") -> None:
        """Make ``into`` what is found below the root after a crash of the machine now: ``choice``
        decides what became of names that were not synced, ``torn`` (one of ``TORN``) what is in
        files that never were."""
        places = dict(self._notice(self._top, self.root))
        names: _Names = {}
        for change in self._changes:
            if not change.waits_for or choice.random() < 0.5:
                for folder, name, node in change.edits:
                    _apply(names.setdefault(folder, {}), name, node)
        contents: dict[_File, bytes] = {}
        into.mkdir()
        for path, node in _paths(names, self._top, into):
            if isinstance(node, _Folder):
                path.mkdir()
                continue
            if node not in contents:
                contents[node] = _left(node, places.get(node), choice, torn)
            path.write_bytes(contents[node])


def _apply(names: dict[str, _Node], name: str, node: _Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _paths(names: _Names, folder: _Folder, path: Path) -> Iterator[tuple[Path, _Node]]:
    """Everything below a folder, folders before what is in them."""
    for name, node in names.get(folder, {}).items():
        yield path / name, node
        if isinstance(node, _Folder):
            yield from _paths(names, node, path / name)


def _left(file: _File, place: Path | None, choice: random.Random, torn: str) -> bytes:
    if file.durable is not None:
        return file.durable
    found = place.read_bytes() if place is not None else b""
    match torn:
        case "empty":
            return b""
        case "cut":
            return found[: choice.randrange(len(found) + 1)]
        case "zeros":
            return bytes(len(found))
        case "whole":
            return found
    raise ValueError(f"torn must be one of {', '.join(TORN)}, not {torn!r}")
