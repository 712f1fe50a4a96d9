"""One rank of ``mpift bench checkpoint``: saves and restores by everybody in turn.

First comes the memory, with nothing else in the way; then rounds of saving, then rounds of reading
what the last saves have left. A *round* is one turn of each contender, in an order that rotates;
before each turn all ranks wait for each other. Round -1 warms up. What is read is compared with
what was saved, mpift's and the others': equal work, or no figures.

A change writes a number that was never there before into every 64 KiB of a tensor: that alters all
blocks at little cost. 10 % are every tenth MiB, so that each rank's share has its part of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import mpift.torch as hvd
from mpift.bench.checkpoint import Plan
from mpift.checkpoint import CheckpointManager
from mpift.errors import MpiftError

# Of the model's layers: for a state of some hundred MiB, and for less.
_WIDTH, _NARROW_WIDTH, _WIDE_PARAMETERS = 1024, 256, 20_000_000
_MIB = 1 << 20
_CHANGED_EVERY = 16384  # elements in 64 KiB
_SLICE = _MIB // 4  # elements
_TENTHS = 10
_INCREMENTS = 4
# Not more than this of the blocks may have been read where 10 % differ.
_READ_SHARE_MAX = 0.15
# What a save leaves to be cleared away is gone by then.
_SETTLE_SECONDS = 0.2
_SAMPLE_SECONDS = 0.02

Turn = Callable[[], None]


def contend(given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run on every rank: what ``given``, a ``Plan`` as a mapping, asks for, in ``folder``.

    Returns this rank's seconds by name, a number a round; sizes in bytes; what memory grew by; and
    how many bytes each read got from storage, None where the kernel does not tell. Raises
    ``MpiftError`` if what was read is not what was saved.
    """
    plan, place = Plan(**given), Path(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    hvd.init()
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=hvd.rank(), world_size=hvd.size()
    )
    state = State(plan.mib << 20)
    figures = Figures()
    saved = {"whole": place / "whole", "chain": place / "chain"}
    grown = _measure_memory(state, saved["whole"])
    writes = Writes(state, figures, place)
    writes.digests["whole"] = state.digest()
    figures.take_turns(writes.turns(), plan.rounds)
    writes.make_chain()
    reads = Reads(state, figures, writes, saved)
    figures.take_turns(reads.turns(), plan.rounds)
    reads.close()
    distributed.destroy_process_group()
    hvd.shutdown()
    return {
        "seconds": figures.seconds,
        "sizes": figures.sizes,
        "storage_bytes": figures.storage_bytes,
        "first_stall_seconds": writes.first_stall_seconds,
        "grown_bytes": grown,
        "state_bytes": state.size_bytes,
        "tensors": len(state.tensors()),
    }


# -- the state -------------------------------------------------------------------------------------


class State:
    """A stack as of a language model, and its Adam state: about ``size_bytes`` together, alike on
    all ranks."""

    def __init__(self, size_bytes: int) -> None:
        torch.manual_seed(0)
        # Adam holds two more numbers for each parameter.
        parameters = size_bytes // 12
        width = _WIDTH if parameters >= _WIDE_PARAMETERS else _NARROW_WIDTH
        layer = 12 * width * width
        layers = parameters * 9 // 10 // layer
        words = (parameters - layers * layer) // width
        blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width) for _ in range(layers)]
        self.model = nn.Sequential(nn.Embedding(words, width), *blocks)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._changes = 0
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors())

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def dicts(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.objects.items()}

    def load_dicts(self, dicts: Mapping[str, Any]) -> None:
        for name, item in self.objects.items():
            item.load_state_dict(dicts[name])

    def tensors(self) -> list[torch.Tensor]:
        """As they are now: ``load_state_dict`` of an optimizer replaces its."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        states = [s for p in self.model.parameters() for s in self.optimizer.state[p].values()]
        return parameters + states

    def change(self) -> None:
        """Alter every block, on all ranks alike."""
        self._changes += 1
        for tensor in self.tensors():
            tensor.view(-1)[::_CHANGED_EVERY] = float(self._changes)

    def change_tenth(self, which: int = 0) -> None:
        """Alter every tenth MiB, on all ranks alike: one of the ten that there are."""
        self._changes += 1
        before = 0
        for tensor in self.tensors():
            for piece in tensor.view(-1).split(_SLICE):
                if before // _MIB % _TENTHS == which:
                    piece[::_CHANGED_EVERY] = float(self._changes)
                before += piece.nbytes

    def share(self) -> Iterator[np.ndarray]:
        """uint8[n]: this rank's part of all bytes, piece by piece, where they are."""
        first, last = (self.size_bytes * (hvd.rank() + i) // hvd.size() for i in range(2))
        before = 0
        for tensor in self.tensors():
            data = tensor.view(-1).numpy().view(np.uint8)
            piece = data[max(0, first - before) : max(0, last - before)]
            before += data.nbytes
            if piece.nbytes:
                yield piece

    def digest(self) -> str:
        return str(hvd.digest(self.tensors()))


# -- measuring -------------------------------------------------------------------------------------


class Figures:
    """What was measured on this rank, a value a round."""

    def __init__(self) -> None:
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


def _read_from_storage() -> int | None:
    """Bytes that this process has read past the page cache so far."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("read_bytes:")]
    return int(found[0]) if found else None


def _measure_memory(state: State, place: Path) -> int:
    """Bytes that ranks and writer processes grow by at most while a manager is made, saves three
    times and restores; on rank 0. What it has saved last is left for the readers."""
    before = _memory_of(_processes())
    manager = _make_manager(place)
    with _peak(_processes()) as peak:
        for step, change in enumerate((state.change, state.change, state.change_tenth)):
            change()
            manager.save(step + 1, state.objects, wait=True)
        state.change()
        manager.restore(state=state.objects)
    state.change()
    manager.save(4, state.objects, wait=True)
    manager.close()
    return peak[0] - before


def _processes() -> list[int]:
    """All ranks, and what they have started."""
    here = psutil.Process()
    mine = [process.pid for process in (here, *here.children(recursive=True))]
    return [pid for pids in hvd.allgather_object(mine) for pid in pids]


def _memory_of(pids: list[int]) -> int:
    """Bytes that these processes use together; what several share counts once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


@contextlib.contextmanager
def _peak(pids: list[int]) -> Iterator[list[int]]:
    """The most that ``pids`` used meanwhile, as far as samples of rank 0 show."""
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            peak[0] = max(peak[0], _memory_of(pids))

    sampler = threading.Thread(target=look, name="memory-sampler")
    if hvd.rank() == 0:
        sampler.start()
    try:
        yield peak
    finally:
        over.set()
        if hvd.rank() == 0:
            sampler.join()


def _make_manager(place: Path, encode: bool = False) -> CheckpointManager:
    # Everything but the first save is compared with the one before it.
    return CheckpointManager(place, keep=1, encode=encode, full_every=10**9, when_busy="wait")


# -- saving ----------------------------------------------------------------------------------------


class Writes:
    """The contenders that write; each leaves its last file or folder for those that read."""

    def __init__(self, state: State, figures: Figures, place: Path) -> None:
        self._state = state
        self._figures = figures
        self._place = place
        self._plain, self._encoded = place / "chain", place / "encoded"
        self._managers = {
            self._plain: _make_manager(self._plain),
            self._encoded: _make_manager(self._encoded, encode=True),
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

        def save() -> float:
            began = time.perf_counter()
            manager.save(step, self._state.objects)
            stall = time.perf_counter() - began
            manager.wait()
            return stall

        stall = self._figures.time(name, save)
        if manager.committed_step != step:
            manager.close()  # raises what went wrong
            raise MpiftError(f"step {step} was not committed in {place}")
        if name == "full":
            self._figures.note("stall", stall)
            self.first_stall_seconds = self.first_stall_seconds or stall
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

        def save() -> None:
            with path.open("xb") as file:
                torch.save(self._state.dicts(), file)
                file.flush()
                os.fsync(file.fileno())

        self._figures.time("torch_save", save, only_first=True)

    def _dcp_save(self) -> None:
        path = self._new("dcp")
        self._figures.time(
            "dcp_save", lambda: state_dict_saver.save(self._state.dicts(), checkpoint_id=path)
        )

    def _dcp_async(self) -> None:
        path = self._new("dcp_async")
        future = self._figures.time(
            "dcp_async_stall",
            lambda: state_dict_saver.async_save(self._state.dicts(), checkpoint_id=path),
        )
        future.result()


def _write_all(file: Any, data: np.ndarray) -> None:
    done = 0
    while done < data.nbytes:
        done += file.write(data[done:].data)


def _files(place: Path) -> dict[str, int]:
    """Sizes in bytes by name; what is being removed may be missing."""
    sizes = {}
    for path in place.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
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
        self._managers = {name: _make_manager(place) for name, place in saved.items()}
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

        def load() -> None:
            self._state.load_dicts(torch.load(self._last["torch"], weights_only=True))

        self._figures.time("torch_load", load)
        self._check("torch")

    def _dcp_load(self) -> None:
        self._state.change()
        self._figures.time(
            "dcp_load",
            lambda: state_dict_loader.load(self._state.dicts(), checkpoint_id=self._last["dcp"]),
        )
        self._check("dcp")
