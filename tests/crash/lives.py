"""Jobs that save, are killed at any moment, and are followed by others; and what must hold then.

Two ranks and their writers in one process, without messages between them: ``Job`` calls a
``Workshop`` as ``Saves`` does. The ``Oracle`` knows what was to be saved, and what was told to be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpift.checkpoint.adopt import load
from mpift.checkpoint.arena import Arena
from mpift.checkpoint.directory import Committed, Directory, block_name
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.group import Seat
from mpift.checkpoint.manifest import Manifest, version_of
from mpift.checkpoint.part import Part
from mpift.checkpoint.reading import Reader
from mpift.checkpoint.snapshot import Snapshots
from mpift.checkpoint.writing import Order, Workshop

MEMBERS = (0, 1)
ROWS, WIDTH = 512, 128  # four blocks of 64 KiB, as of an embedding
ROWS_OF_BLOCK = ROWS // 4
Generation = tuple[int, int]  # with the step: the order of a checkpoint


class Model(torch.nn.Module):
    """What all ranks hold alike, and a buffer, which is each one's own."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH, _weight=torch.zeros(ROWS, WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(7))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


@dataclass
class Oracle:
    """Of each checkpoint that was begun: its history, and both ranks' states; and which of them
    were told to be saved."""

    begun: dict[Generation, tuple[str, list[dict[str, Any]]]] = field(default_factory=dict)
    acknowledged: list[Generation] = field(default_factory=list)


class Job:
    """One life of a training job. ``arenas`` is a folder for its memory."""

    def __init__(self, root: Path, disk: Disk, arenas: Path, oracle: Oracle, keep: int = 2) -> None:
        self._root = root
        self._oracle = oracle
        self._keep = keep
        self._directory = Directory(root, disk)
        self._directory.prepare()
        self._generation = self._directory.claim(f"job of {id(self)}")
        self._snapshots = [Snapshots(_names(arenas, id(self), m), 2) for m in MEMBERS]
        self._workshops = [Workshop(disk, 1) for _ in MEMBERS]
        self._models = [Model() for _ in MEMBERS]
        self._history = "the beginning"
        self._base: int | None = None
        self._restored: Generation | None = None
        self._arenas: dict[tuple[int, int], Arena] = {}
        self.step = 0

    def restore(self) -> None:
        """Go on from what there is, if that is anything."""
        best = newest(self._root)
        if best is None:
            return
        made = best[1]
        for member, model in enumerate(self._models):
            model.load_state_dict(_loaded(self._root, made, member)["model"])
        self._history, self.step = made.history, made.step
        self._base, self._restored = version_of(made.order), made.order

    def close(self) -> None:
        """Give the memory back; of the directory nothing: it may not even be there any more."""
        for snapshots in self._snapshots:
            snapshots.close(keep=False)

    # -- what a save consists of -------------------------------------------------------------------

    def train(self) -> None:
        """One step: a quarter of the table changes, and what is each rank's own."""
        self.step += 1
        self._history = f"{self._history}, {self._generation}:{self.step}"[-200:]
        first = self.step % 4 * ROWS_OF_BLOCK
        value = self._generation * 1000.0 + self.step
        for member, model in enumerate(self._models):
            with torch.no_grad():
                model.table.weight[first : first + ROWS_OF_BLOCK] = value
                model.bias.add_(value)
            model.seen.copy_(torch.tensor([self._generation, self.step, member]))

    def snapshot(self) -> None:
        """Both ranks copy their shares."""
        order = (self._generation, self.step)
        states = [self._state(member) for member in MEMBERS]
        copies = [{"model": _copy(s["model"].state_dict()), "step": s["step"]} for s in states]
        self._oracle.begun[order] = self._history, copies
        for member, state in enumerate(states):
            seat = Seat(member, MEMBERS, MEMBERS, self._history)
            slot = self.step % 2
            taken = self._snapshots[member].take(state, version_of(order), seat, slot)
            self._arenas[self.step, member] = taken.arena

    def _state(self, member: int) -> dict[str, Any]:
        return {"model": self._models[member], "step": self.step}

    def write(self, step: int, member: int) -> Part:
        order = Order(
            self._root,
            (self._arenas[step, member].path,),
            version_of((self._generation, step)),
            block_name(step, member, 0, 0, self._generation),
            self._base,
            encode=False,
        )
        written = self._workshops[member].write(order)
        self._snapshots[member].learn(order.version, written.digests)
        return Part.decode(written.part)

    def publish(self, step: int, parts: list[Part]) -> None:
        """Assemble them, let both ranks check, commit."""
        version = version_of((self._generation, step))
        encoded = [part.encode() for part in parts]
        folder, found = self._workshops[0].assemble(self._root, encoded, "job", 0.0)
        for member, part in enumerate(encoded):
            self._workshops[member].check(self._root, folder, found, version, part)
        self._workshops[0].publish(self._root, folder, found, version)
        self._oracle.acknowledged.append((self._generation, step))
        self._workshops[0].index(self._root)
        self._base = version

    def sweep(self, step: int) -> None:
        order = (self._generation, step)
        self._workshops[0].sweep(
            self._root,
            generation=self._generation,
            last=order,
            keep=self._keep,
            keep_every=None,
            verified=self._restored or order,
        )

    # -- saves -------------------------------------------------------------------------------------

    def save(self) -> None:
        """A step, and its checkpoint."""
        self.train()
        self.snapshot()
        self.publish(self.step, [self.write(self.step, member) for member in MEMBERS])
        self.sweep(self.step)

    def save_overlapping(self, count: int) -> None:
        """The same several times, but what is written for a checkpoint is begun before the one
        before it is committed, and ended before the sweep that follows that."""
        self.train()
        self.snapshot()
        parts = [self.write(self.step, member) for member in MEMBERS]
        for _ in range(count - 1):
            before = self.step
            self.train()
            self.snapshot()
            second = self.write(self.step, 1)
            self.publish(before, parts)
            parts = [self.write(self.step, 0), second]
            self.sweep(before)
        self.publish(self.step, parts)
        self.sweep(self.step)


def _names(folder: Path, job: int, member: int) -> Any:
    return lambda slot: folder / f"{job}-{member}-{slot}"


def _copy(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _loaded(root: Path, made: Manifest, rank: int) -> dict[str, Any]:
    with Reader(root) as reader:
        return load(made, reader, rank, threads=1)


# -- what must hold ------------------------------------------------------------------------------


def newest(root: Path) -> tuple[Committed, Manifest] | None:
    """What a job finds; a crash makes no damage that one would have to get round."""
    best, problems = Directory(root).newest_good()
    assert problems == []
    return best


def check(root: Path, oracle: Oracle) -> Generation | None:
    """What is in a directory after a crash: nothing damaged, nothing that was not to be saved, and
    not less than what was told to be. Returns the newest checkpoint."""
    directory = Directory(root)
    for committed in directory.committed():
        assert list(directory.damage(committed)) == []
        made = directory.manifest(committed)
        history, states = oracle.begun[committed.order]
        assert (made.step, made.history) == (committed.order[1], history)
        for member in MEMBERS:
            found = _loaded(root, made, member)
            assert found.keys() == states[member].keys()
            assert found["step"] == states[member]["step"]
            _require_same(found["model"], states[member]["model"])
    best = newest(root)
    if oracle.acknowledged:
        assert best is not None, f"{oracle.acknowledged[-1]} was saved, and nothing is left"
        assert best[0].order >= oracle.acknowledged[-1]
    return best[0].order if best is not None else None


def _require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def reboot(root: Path) -> None:
    """Processes that had claimed the directory, or read in it, are gone."""
    for path in [*root.glob("live/*.json"), *root.glob("readers/*.json")]:
        record = json.loads(path.read_bytes())
        path.write_text(json.dumps({**record, "start_time": 1}))


def leftovers(root: Path) -> list[str]:
    """Files and folders that belong to no checkpoint."""
    directory = Directory(root)
    used = {name for committed in directory.committed() for name in directory.files(committed)}
    found = [path for path in root.glob("blocks/*") if f"blocks/{path.name}" not in used]
    kept = {committed.folder for committed in directory.committed()}
    found += [path for path in root.glob("steps/*") if path not in kept]
    found += root.glob("steps/*/*.new")
    return sorted({str(path.relative_to(root)) for path in found})
