"""The contenders of ``mpift bench checkpoint``, and the turns that they take on each rank.

A *round* is one turn of each contender, in an order that rotates; before each turn all ranks wait
for each other. One round before the first warms up. What is read is compared with what was saved,
mpift's and the others': equal work, or no figures.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import mpift.torch as hvd
from mpift.bench.checkpoint_state import State
from mpift.checkpoint import CheckpointManager
from mpift.checkpoint.directory import Directory
from mpift.errors import MpiftError

_INCREMENTS = 4
# Not more than this of the blocks may have been read where 10 % differ.
_READ_SHARE_MAX = 0.15
# Before each turn: what a file system does behind the back of the one before.
_SETTLE_SECONDS = 0.1
# Memory for the next turn is touched before it, unless that is more than this part of what is free.
_WARM_PART, _PAGE_BYTES = 8, 4096
# Old files are removed once a save is committed; that must not be another's time.
_SWEEP_SECONDS_MAX, _LOOK_SECONDS = 10.0, 0.01

Turn = Callable[[], None]


def make_manager(place: Path, encode: bool = False) -> CheckpointManager:
    """In ``place``, which it has for itself."""
    # Everything but the first save is compared with the one before it.
    return CheckpointManager(place, keep=1, encode=encode, full_every=10**9, when_busy="wait")


class Figures:
    """What was measured on this rank, a value a round. A turn may take ``turn_bytes`` of memory, of
    its own or for the page cache."""

    def __init__(self, turn_bytes: int) -> None:
        self._turn_bytes = turn_bytes
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.sizes: dict[str, list[int]] = defaultdict(list)
        self.storage_bytes: dict[str, int | None] = defaultdict(int)
        self._warm_up = True

    def take_turns(self, turns: Mapping[str, Turn], rounds: int) -> None:
        """``rounds`` times each, and once before."""
        names = list(turns)
        for number in range(-1, rounds):
            self._warm_up = number < 0
            turn = max(0, number) % len(names)
            for name in names[turn:] + names[:turn]:
                turns[name]()

    def time(self, name: str, function: Callable[[], Any], only_first: bool = False) -> Any:
        """Call ``function`` on all ranks at the same moment, or on the first alone."""
        time.sleep(_SETTLE_SECONDS)
        _warm_memory(self._turn_bytes)
        before = _read_from_storage()
        hvd.barrier()
        began = time.perf_counter()
        result = function() if not only_first or hvd.rank() == 0 else None
        self.note(name, time.perf_counter() - began)
        after, known = _read_from_storage(), self.storage_bytes[name]
        if before is None or after is None or known is None:
            self.storage_bytes[name] = None
        elif not self._warm_up:
            self.storage_bytes[name] = known + after - before
        return result

    def note(self, name: str, seconds: float) -> None:
        if not self._warm_up:
            self.seconds[name].append(seconds)

    def note_size(self, name: str, size_bytes: int) -> None:
        if not self._warm_up:
            self.sizes[name].append(size_bytes)


def _warm_memory(size_bytes: int) -> None:
    """Touch memory and give it back: a virtual machine may have to fetch from its host what it has
    not used for a while, which takes longer than a write, and is no contender's time."""
    if size_bytes < psutil.virtual_memory().available // _WARM_PART:
        np.empty(size_bytes, np.uint8)[::_PAGE_BYTES] = 1


def _read_from_storage() -> int | None:
    """Bytes that this process has read past the page cache so far."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("read_bytes:")]
    return int(found[0]) if found else None


# -- saving ----------------------------------------------------------------------------------------


class Writes:
    """The contenders that write; each leaves its last file or folder for those that read."""

    def __init__(self, state: State, figures: Figures, place: Path) -> None:
        self._state = state
        self._figures = figures
        self._place = place
        self._plain, self._encoded = place / "chain", place / "encoded"
        self._managers = {
            self._plain: make_manager(self._plain),
            self._encoded: make_manager(self._encoded, encode=True),
        }
        self._copy = np.full(sum(piece.nbytes for piece in state.share()), 1, np.uint8)
        self._step = 0
        self.first_stall_seconds = 0.0
        self.last: dict[str, Path] = {}
        self.digests: dict[str, str] = {}

    def turns(self) -> dict[str, Turn]:
        return {
            "memcpy": self._memcpy,
            "mpift": self._save,
            "raw_write": self._raw_write,
            "encoded": self._save_encoded,
            "torch_save": self._torch_save,
            "dcp_save": self._dcp_save,
            "dcp_async": self._dcp_async,
        }

    def make_chain(self) -> None:
        """Save all, and then some increments, each of other blocks; then give the memory back."""
        self._state.change()
        self._managers[self._plain].save(self._next(), self._state.objects, wait=True)
        for which in range(_INCREMENTS):
            self._state.change_tenth(which)
            self._managers[self._plain].save(self._next(), self._state.objects, wait=True)
        self.digests["chain"] = self._state.digest()
        for manager in self._managers.values():
            manager.close()
        del self._copy

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _memcpy(self) -> None:
        self._state.change()
        pieces = list(self._state.share())

        def copy() -> None:
            start = 0
            for piece in pieces:
                np.copyto(self._copy[start : start + piece.nbytes], piece)
                start += piece.nbytes

        self._figures.time("memcpy", copy)

    def _save(self) -> None:
        self._state.change()
        self._timed_save("full", self._plain)
        self._state.change_tenth()
        self._timed_save("incremental", self._plain)

    def _save_encoded(self) -> None:
        self._state.change()
        self._timed_save("encoded_full", self._encoded)

    def _timed_save(self, name: str, place: Path) -> None:
        """Save and wait, as ``wait=True`` does, but with the stall in between known."""
        manager, step = self._managers[place], self._next()
        before = _files(place)

        def save_and_wait() -> float:
            began = time.perf_counter()
            manager.save(step, self._state.objects)
            stall = time.perf_counter() - began
            manager.wait(index=False)
            return stall

        stall = self._figures.time(name, save_and_wait)
        began = time.perf_counter()
        manager.wait()
        index = time.perf_counter() - began
        if manager.committed_step != step:
            manager.close()  # raises what went wrong
            raise MpiftError(f"step {step} was not committed in {place}")
        if name == "full":
            self._figures.note("index", index)
            self._figures.note("stall", stall)
            self.first_stall_seconds = self.first_stall_seconds or stall
        if hvd.rank() == 0:
            _wait_until_swept(place)
        sizes = _files(place)
        size_name = "encoded_bytes" if name == "encoded_full" else f"{name}_bytes"
        self._figures.note_size(size_name, sum(sizes[new] for new in sizes.keys() - before.keys()))

    def _new(self, name: str) -> Path:
        """Where to write next; what was there from the last time is removed."""
        old = self.last.pop(name, None)
        mine = name == "raw" or hvd.rank() == 0
        if old is not None and mine:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        of = f"-{hvd.rank()}" if name == "raw" else ""
        self.last[name] = self._place / f"{name}{of}-{self._next()}"
        self.digests[name] = self._state.digest()
        return self.last[name]

    def _raw_write(self) -> None:
        path = self._new("raw")
        pieces = list(self._state.share())

        def write() -> None:
            with path.open("xb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file, piece)
                os.fsync(file.fileno())

        self._figures.time("raw_write", write)

    def _torch_save(self) -> None:
        path = self._new("torch")

        def save_one() -> None:
            with path.open("xb") as file:
                torch.save(self._state.dicts(), file)
                file.flush()
                os.fsync(file.fileno())

        self._figures.time("torch_save", save_one, only_first=True)

    def _dcp_save(self) -> None:
        path = self._new("dcp")
        self._figures.time("dcp_save", lambda: save(self._state.dicts(), checkpoint_id=path))

    def _dcp_async(self) -> None:
        path = self._new("dcp_async")
        future = self._figures.time(
            "dcp_async_stall",
            lambda: async_save(self._state.dicts(), checkpoint_id=path),
        )
        future.result()


def _write_all(file: Any, data: np.ndarray) -> None:
    done = 0
    while done < data.nbytes:
        done += file.write(data[done:].data)


def _wait_until_swept(place: Path) -> None:
    """Until only the newest checkpoint is left, and only its block files; or for a while."""
    directory = Directory(place)
    deadline = time.monotonic() + _SWEEP_SECONDS_MAX
    while time.monotonic() < deadline:
        if len(list((place / "steps").iterdir())) == 1:
            needed = {file.name for file in directory.manifest(directory.committed()[0]).files}
            if needed.issuperset(name for name in _files(place) if name.startswith("blocks/")):
                return
        time.sleep(_LOOK_SECONDS)


def _files(place: Path) -> dict[str, int]:
    """Sizes in bytes by name; what is being removed may be missing."""
    sizes = {}
    for folder, _, names in os.walk(place):  # unlike rglob it bears folders that disappear
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                sizes[str(path.relative_to(place))] = path.stat().st_size
    return sizes


# -- reading ---------------------------------------------------------------------------------------


class Reads:
    """The contenders that read what ``writes`` has left, and what is ``saved``."""

    def __init__(
        self, state: State, figures: Figures, writes: Writes, saved: Mapping[str, Path]
    ) -> None:
        self._state = state
        self._figures = figures
        self._last, self._digests = writes.last, dict(writes.digests)
        # New ones, as after a start: these have saved nothing.
        self._managers = {name: make_manager(place) for name, place in saved.items()}
        self._raw: list[Path] = hvd.allgather_object(self._last["raw"])
        self._memory = np.full(state.size_bytes, 1, np.uint8)

    def turns(self) -> dict[str, Turn]:
        return {
            "raw_read": self._raw_read,
            "mpift": self._restore,
            "chain": self._restore_chain,
            "torch_load": self._torch_load,
            "dcp_load": self._dcp_load,
        }

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()

    def _check(self, what: str) -> None:
        """The state is what was saved as ``what``."""
        found = self._state.digest()
        if found != self._digests[what]:
            raise MpiftError(f"rank {hvd.rank()} read a state that is not the one saved: {what}")

    def _raw_read(self) -> None:
        def read() -> None:
            start = 0
            for path in self._raw:
                with path.open("rb", buffering=0) as file:
                    while got := file.readinto(self._memory[start:].data):
                        start += got

        self._figures.time("raw_read", read)

    def _restore(self) -> None:
        self._state.change()
        self._timed_restore("restore", "whole", 1.0, 1.0)
        self._state.change_tenth()
        self._timed_restore("restore_incremental", "whole", 0.0, _READ_SHARE_MAX)

    def _restore_chain(self) -> None:
        self._state.change()
        self._timed_restore("restore_chain", "chain", 1.0, 1.0)

    def _timed_restore(self, name: str, which: str, least: float, most: float) -> None:
        restored = self._figures.time(
            name, lambda: self._managers[which].restore(state=self._state.objects)
        )
        blocks = restored.blocks_read + restored.blocks_matched
        share = restored.blocks_read / blocks
        if not least <= share <= most:
            raise MpiftError(
                f"{name} has read {restored.blocks_read} of {blocks} blocks, which is not what it"
                " was to measure"
            )
        self._check(which)

    def _torch_load(self) -> None:
        self._state.change()

        def load_all() -> None:
            self._state.load_dicts(torch.load(self._last["torch"], weights_only=True))

        self._figures.time("torch_load", load_all)
        self._check("torch")

    def _dcp_load(self) -> None:
        self._state.change()
        self._figures.time(
            "dcp_load",
            lambda: load(self._state.dicts(), checkpoint_id=self._last["dcp"]),
        )
        self._check("dcp")
