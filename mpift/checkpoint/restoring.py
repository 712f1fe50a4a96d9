"""Restoring together: all ranks go back to the same checkpoint, or none does.

The first rank proposes the newest one, from the nodes' memory where all of them have it, else from
storage. Every rank reads the manifest itself and restores; if one finds damage, the checkpoint is
put into quarantine, and the one before it is taken by all. Ranks of a node begin with different
blocks and so find the rest in its page cache: storage is read once a node.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpift.checkpoint.adopt import Adopted, adopt, load
from mpift.checkpoint.directory import Committed, Directory
from mpift.checkpoint.group import Group, Seat
from mpift.checkpoint.manifest import Manifest, version_of
from mpift.checkpoint.occupancy import names_in
from mpift.checkpoint.ram import RamTier
from mpift.checkpoint.reading import Reader
from mpift.core import events
from mpift.errors import CheckpointDamagedError, CheckpointError

_GOOD, _DAMAGED, _FAILED = "good", "damaged", "failed"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be restored: ``step``, or the newest; into ``state``, or as plain values; see
    ``adopt`` for the rest."""

    step: int | None
    state: Mapping[str, Any] | None
    only: Callable[[str], bool] | None
    strict: bool
    rng: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was restored.

    ``values``: without a state all of it, as nested dictionaries with CPU tensors; with one, those
    of its entries that are plain values, for the caller to take over. ``source``: "memory" or
    "storage". ``blocks_matched`` were in place already. ``world_size``: ranks that had saved it.
    """

    step: int
    version: int
    values: dict[str, Any]
    source: str
    world_size: int
    blocks_read: int = 0
    blocks_matched: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a checkpoint is read from: manifest and blocks lie below ``root``."""

    root: Path
    manifest: Manifest
    kind: str


class Restoring:
    """Restores for one manager."""

    def __init__(self, group: Group, directory: Directory, ram: RamTier | None) -> None:
        self._group = group
        self._directory = directory
        self._ram = ram

    def restore(self, wish: Wish, seat: Seat) -> Restored | None:
        """Restore what is wished for; None if there is no checkpoint at all. All ranks call it.

        Raises ``CheckpointError`` on all ranks if one of them can't, or if the step that was asked
        for is not there; ``CheckpointDamagedError`` if that very step is damaged.
        """
        with self._directory.reading():
            while True:
                proposal = self._propose(wish.step)
                if proposal is None:
                    return None
                source, result, word, reason = self._try(proposal, wish, seat)
                answers = self._group.gather([word, reason])
                bad = [row for row in answers if row[0] != _GOOD]
                if not bad and result is not None and source is not None:
                    return self._done(source, result)
                failed = next((row[1] for row in bad if row[0] == _FAILED), None)
                if failed is not None:
                    raise CheckpointError(failed)
                self._give_up(proposal, bad[0][1], wish)

    # -- which one ---------------------------------------------------------------------------------

    def _propose(self, step: int | None) -> dict[str, Any] | None:
        """The checkpoint that all try next."""
        version, slot, digest = self._in_memory() if step is None else (0, 0, "")
        member = self._group.member
        mine: dict[str, Any] = {"version": version, "digest": digest, "member": member}
        if self._group.leads:
            mine |= self._on_storage(step)
        rows = self._group.gather(mine)
        first = rows[0]
        if "stored" not in first:  # the first rank is lost: ask the next one
            return self._propose(step)
        if first.get("error"):
            raise CheckpointError(first["error"])
        stored = first["stored"]
        best = max(rows, key=lambda row: int(row["version"]))
        if best["version"] <= (stored["version"] if stored else 0):
            if stored is None and first["lost"]:
                raise CheckpointError(first["lost"])
            return {"memory": False, **stored} if stored else None
        if all((row["version"], row["digest"]) == (version, digest) for row in rows):
            return {"memory": True, "version": version}
        self._bring_to_storage(best, slot)
        return self._propose(step)

    def _bring_to_storage(self, best: dict[str, Any], slot: int) -> None:
        """Only some nodes hold the newest snapshot in memory: one of their ranks writes it."""
        problem = ""
        if best["member"] == self._group.member:
            assert self._ram is not None
            # Here alone a training process needs HDF5.
            from mpift.checkpoint.flat_copy import copy_whole

            try:
                found = self._ram.manifest(slot)
                copy_whole(self._ram.slot(slot), found, self._directory, os.getpid())
            except (CheckpointError, OSError) as error:
                problem = str(error)
            if problem:  # or it would be proposed again
                self._ram.discard(best["version"])
        for told in filter(None, self._group.gather(problem)):
            warnings.warn(f"the newest snapshot in memory is lost: {told}", stacklevel=5)

    def _in_memory(self) -> tuple[int, int, str]:
        """(version, slot, what it must have in common) of this node's newest snapshot."""
        if self._ram is None:
            return 0, 0, ""
        version, slot = self._ram.newest()
        if not version:
            return 0, 0, ""
        try:
            found = self._ram.manifest(slot)
        except (CheckpointDamagedError, OSError):
            return 0, 0, ""
        return version, slot, f"{found.history} {found.extra['layout']}"

    def _on_storage(self, step: int | None) -> dict[str, Any]:
        """What the first rank finds."""
        try:
            if step is not None:
                return {"stored": _described(self._directory.find(step))}
            best, problems = self._directory.newest_good()
            for folder, reason in problems:
                self._quarantine(folder, reason)
            if best is None:
                return {"stored": None, "lost": self._all_damaged()}
            return {"stored": _described(best[0])}
        except (CheckpointError, OSError) as error:
            return {"stored": None, "error": str(error)}

    def _all_damaged(self) -> str:
        """To begin anew where there were checkpoints is for a person to decide."""
        shelf = self._directory.root / "quarantine"
        names = ", ".join(names_in(shelf))
        return names and (
            f"no checkpoint in {self._directory.root} is whole; {shelf} has {names}: put back what"
            " is missing, or remove that folder to begin anew"
        )

    # -- trying ------------------------------------------------------------------------------------

    def _try(
        self, proposal: dict[str, Any], wish: Wish, seat: Seat
    ) -> tuple[_Source | None, Adopted | dict[str, Any] | None, str, str]:
        """The source, what came of it, and this rank's answer: a word and a reason."""
        try:
            source = self._open(proposal)
            with Reader(source.root) as reader:
                return source, _read(source, reader, wish, seat), _GOOD, ""
        except CheckpointDamagedError as error:
            return None, None, _DAMAGED, str(error)
        except (CheckpointError, OSError) as error:
            owner = seat.owners[seat.share]
            return None, None, _FAILED, f"rank {owner} can't restore: {error}"

    def _open(self, proposal: dict[str, Any]) -> _Source:
        if proposal["memory"]:
            assert self._ram is not None
            _, slot = self._ram.newest()
            return _Source(self._ram.slot(slot), self._ram.manifest(slot), "memory")
        committed = self._directory.find(proposal["step"], proposal["generation"])
        return _Source(self._directory.root, self._directory.manifest(committed), "storage")

    def _give_up(self, proposal: dict[str, Any], reason: str, wish: Wish) -> None:
        """What was proposed is damaged: it must not be proposed again."""
        if proposal["memory"]:
            assert self._ram is not None
            warnings.warn(f"the snapshot in memory is damaged: {reason}", stacklevel=4)
            self._ram.discard(proposal["version"])
            return
        if wish.step is not None:
            raise CheckpointDamagedError(reason)
        answer = ""
        if self._group.leads:
            try:
                committed = self._directory.find(proposal["step"], proposal["generation"])
                self._directory.check(committed, thorough=True)
                answer = (
                    f"one rank reads other bytes than the first one, which finds none: {reason}"
                )
            except CheckpointDamagedError as error:
                self._quarantine(committed.folder, str(error))
            except (CheckpointError, OSError) as error:
                answer = str(error)
        problem = self._group.gather(answer)[0]
        if problem:
            raise CheckpointError(problem)

    def _quarantine(self, folder: Path, reason: str) -> None:
        place = self._directory.quarantine(folder, reason)
        self._group.emit(events.CheckpointQuarantined, folder.name, str(place), reason)

    def _done(self, source: _Source, result: Adopted | dict[str, Any]) -> Restored:
        made = source.manifest
        version = version_of(made.order)
        if not isinstance(result, Adopted):
            return Restored(made.step, version, result, source.kind, made.world_size)
        return Restored(
            made.step,
            version,
            result.values,
            source.kind,
            made.world_size,
            result.blocks_read,
            result.blocks_matched,
            result.bytes_read,
        )


def _described(committed: Committed) -> dict[str, Any]:
    generation, step = committed.order
    return {"step": step, "generation": generation, "version": version_of(committed.order)}


def _read(source: _Source, reader: Reader, wish: Wish, seat: Seat) -> Adopted | dict[str, Any]:
    made = source.manifest
    # In a node's memory there are the own parts of its ranks alone.
    there = [rank for rank, tree in enumerate(made.own) if tree is not None]
    rank = seat.share if seat.share in there else there[seat.share % len(there)]
    neighbours = len(seat.neighbours)
    threads = max(1, (os.cpu_count() or 1) // neighbours)
    if wish.state is None:
        return load(made, reader, rank)
    return adopt(
        wish.state,
        made,
        reader,
        rank,
        wish.only,
        threads,
        (seat.neighbours.index(seat.share), neighbours),
        wish.strict,
        wish.rng,
    )
