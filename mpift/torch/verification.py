"""Verification of one optimizer's replicas: a cheap check now and then, an examination if it fails.

Every ``verify_every`` rounds the state is hashed, in place, after the round was applied; large
states on a helper thread, since nothing changes them before the next step. The digest goes to the
coordinator, and nobody waits for an answer. If two differ, a round soon after has all ranks examine
their states: they stand still, the majority's state wins, and whoever deviates fetches what differs
from those that hold it. The ranks go on when all are alike.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from mpift.core import events
from mpift.core.verification import Judgement, judge
from mpift.errors import InconsistentError, TransferError
from mpift.reduction.examinations import Place
from mpift.reduction.gradients import GradientRounds
from mpift.torch.state import OptimizerState, bytes_of, flip_bit, hash_of, write_bytes

if TYPE_CHECKING:
    from mpift.runtime import Runtime

# Below this, 1 ms of hashing, a thread saves little, and waits for a core where all are busy.
_INLINE_BYTES_MAX = 16 << 20
# Meetings in a row that somebody could not come to, before it is left to the next check.
_FRUITLESS_MEETINGS_MAX = 3
_DIGEST_BYTES = 16
# The first pieces of a row: what tensors there are, and the plain values. Tensors follow.
_STRUCTURE, _PLAIN, _TENSORS = 0, 1, 2
_NAMES_SHOWN = 5


class Verification:
    """See the module's docstring. ``every`` is in rounds, 0 for no checks of its own.

    ``checks`` counts what was hashed, ``waited_seconds`` is how long the training thread waited for
    it, ``cpu_seconds`` what all of it took of a processor here, but for the message.
    ``examinations`` counts those that all ranks came to, ``false_alarms`` those of them in which
    all were alike, and ``repairs`` how often this rank was repaired."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        workload: GradientRounds,
        name_of: Callable[[torch.Tensor], str],
        every: int,
    ) -> None:
        self.lane = -1
        self.checks = self.examinations = self.false_alarms = self.repairs = 0
        self.waited_seconds = self.cpu_seconds = 0.0
        self._state = OptimizerState(optimizer, name_of)
        self._runtime = runtime
        self._workload = workload
        self.every = every
        self._attempts = 0  # at repairing this rank, those that came to nothing included
        self._declined: set[int] = set()  # rounds
        self._fruitless = 0
        self._helper: concurrent.futures.ThreadPoolExecutor | None = None
        self._hashing: concurrent.futures.Future[float] | None = None

    def request_examination(self) -> None:
        """Let all ranks examine their states after one of the next rounds."""
        self._workload.request_examination()

    # -- checks ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before anything changes the state: wait until it is hashed."""
        if self._hashing is not None:
            began = time.perf_counter()
            self.cpu_seconds += self._hashing.result()
            self.waited_seconds += time.perf_counter() - began
            self._hashing = None

    def round_applied(self, round_: int, alarm: bool) -> None:
        """``round_`` was applied: the state has the same bits on all ranks, or should have."""
        if alarm:
            self._examine_once(round_)
        if self.every and (round_ + 1) % self.every == 0 and self._runtime.view.size > 1:
            self._check(round_)

    def _check(self, round_: int) -> None:
        self.settle()
        began, cpu = time.perf_counter(), time.thread_time()
        arrays, text = self._state.arrays(), self._state.plain()
        self.checks += 1
        if sum(array.nbytes for array in arrays) <= _INLINE_BYTES_MAX:
            self._hash_and_tell(round_, arrays, text)
        else:
            if self._helper is None:
                self._helper = concurrent.futures.ThreadPoolExecutor(1, "mpift-verification")
            self._hashing = self._helper.submit(self._on_helper, round_, arrays, text)
        self.waited_seconds += time.perf_counter() - began
        self.cpu_seconds += time.thread_time() - cpu

    def _on_helper(self, round_: int, arrays: list[np.ndarray], text: str) -> float:
        began = time.thread_time()
        self._hash_and_tell(round_, arrays, text)
        return time.thread_time() - began

    def _hash_and_tell(self, round_: int, arrays: list[np.ndarray], text: str) -> None:
        self._runtime.examinations.tell(self.lane, round_, hash_of(arrays, text))

    # -- coming to an examination ------------------------------------------------------------------

    @property
    def awaited(self) -> int:
        """A round that is complete here, after which others wait for this rank; -1 for none."""
        round_ = self._runtime.examinations.awaited(self.lane)
        waiting = round_ < self._workload.completed and round_ not in self._declined
        return round_ if waiting else -1

    def decline(self, round_: int) -> None:
        """This rank can't apply ``round_`` yet, and those who wait after it might wait for ever."""
        self._declined.add(round_)
        self._runtime.examinations.decline(self.lane, round_)
        self._again()

    def _again(self) -> None:
        """Somebody could not come: after a later round, but not again and again."""
        self._fruitless += 1
        if self._fruitless % _FRUITLESS_MEETINGS_MAX:
            self.request_examination()

    def _examine_once(self, round_: int) -> None:
        if self._runtime.examinations.joined:
            return  # the others do without this rank
        if round_ in self._declined:
            self._declined.discard(round_)
            return
        self._examine(round_)

    # -- the examination ---------------------------------------------------------------------------

    def _examine(self, round_: int) -> None:
        """Returns when all ranks hold the same. Raises ``InconsistentError`` on all of them if no
        state has a majority. A rank that deviates for too long leaves, so this ends."""
        key = f"lane {self.lane} round {round_}"
        transfer, member = self._runtime.transfer, self._runtime.member
        repaired: dict[str, int] = {}  # bytes that differed, by piece
        phase = 0
        try:
            while True:
                tensors = self._state.pieces()
                arrays = {name: bytes_of(tensor) for name, tensor in tensors.items()}
                transfer.offer(key, arrays)
                rows = self._meet(Place(self.lane, round_, phase), tensors, arrays)
                if rows is None:
                    self._again()
                    return
                judgement = judge({who: row.pieces for who, row in rows.items()})
                if judgement.content is None:
                    raise InconsistentError(_no_majority(round_, judgement, list(tensors)))
                if not judgement.deviating:
                    break
                if member in judgement.deviating:
                    donors = [who for who in rows if who not in judgement.deviating]
                    self._may_be_repaired(judgement)
                    found = self._repair(key, judgement, tensors, arrays, rows[donors[0]], donors)
                    for name, count in found.items():
                        repaired[name] = repaired.get(name, 0) + count
                phase += 1
        finally:
            transfer.withdraw(key)
        self._fruitless = 0
        self.examinations += 1
        self.false_alarms += phase == 0
        if repaired:
            self.repairs += 1
            first, total = next(iter(repaired)), sum(repaired.values())
            event = events.RankRepaired
            self._runtime.emit(event, self._runtime.host, round_, first, len(repaired), total)

    def _meet(
        self, place: Place, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]
    ) -> Mapping[int, _Row] | None:
        what = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors.items()]
        structure = xxhash.xxh3_128_digest("\n".join(what).encode())
        digests = [xxhash.xxh3_128_digest(array.data) for array in arrays.values()]
        row = _Row(structure, self._state.plain().encode(), digests)
        rows = self._runtime.examinations.meet(place, row.encode())
        if rows is None:
            return None
        return {member: _Row.decode(data) for member, data in rows.items()}

    def _may_be_repaired(self, judgement: Judgement) -> None:
        """Leave if this rank was repaired too often, or can't be."""
        limit = self._runtime.config.max_repairs
        mine = judgement.deviating[self._runtime.member]
        if _STRUCTURE in mine:
            self._runtime.leave_evicted(
                "has other tensors in its optimizer's state than a majority of the ranks, which"
                " can't be repaired piece by piece"
            )
        if self._attempts >= limit:
            self._runtime.leave_evicted(
                f"deviates from the other ranks after it was repaired {self._attempts} times"
                f" (max_repairs = {limit}): look at the memory of host {self._runtime.host}"
            )
        self._attempts += 1

    def _repair(
        self,
        key: str,
        judgement: Judgement,
        tensors: Mapping[str, torch.Tensor],
        arrays: Mapping[str, np.ndarray],
        example: _Row,
        donors: Sequence[int],
    ) -> dict[str, int]:
        """Take over what differs from the majority; returns how many bytes did, by piece. Nothing,
        if all who hold it are gone meanwhile: then the next meeting finds who holds what."""
        names = list(tensors)
        wrong = judgement.deviating[self._runtime.member]
        wanted = [names[piece - _TENSORS] for piece in wrong if piece >= _TENSORS]
        fetched = {name: np.empty(arrays[name].size, np.uint8) for name in wanted}
        assert judgement.content is not None
        expected = dict(zip(names, judgement.content[_TENSORS:], strict=True))
        try:
            self._runtime.transfer.fetch(key, fetched, expected, donors)
        except TransferError:
            return {}
        found = {}
        for name in wanted:
            found[name] = int(np.count_nonzero(fetched[name] != arrays[name]))
            write_bytes(fetched[name], tensors[name])
        if _PLAIN in wrong:
            found["settings"] = _bytes_differing(self._state.plain().encode(), example.plain)
            self._state.take_plain(example.plain.decode())
        return found

    # -- faults on purpose -------------------------------------------------------------------------

    def flip(self, member: int, step: int) -> None:
        """Flip a bit of a parameter, and tell nobody."""
        self.settle()
        flip_bit(self._state.parameters(), member, step)


class _Row:
    """What one rank holds: digests of its pieces, and the plain values themselves."""

    def __init__(self, structure: bytes, plain: bytes, digests: Sequence[bytes]) -> None:
        self.structure, self.plain, self.digests = structure, plain, digests

    @property
    def pieces(self) -> tuple[bytes, ...]:
        return (self.structure, xxhash.xxh3_128_digest(self.plain), *self.digests)

    def encode(self) -> np.ndarray:
        """uint8[n]."""
        head = len(self.digests).to_bytes(8, "little")
        return np.frombuffer(b"".join([head, self.structure, *self.digests, self.plain]), np.uint8)

    @classmethod
    def decode(cls, data: np.ndarray) -> _Row:
        raw = data.tobytes()
        count, start = int.from_bytes(raw[:8], "little"), 8 + _DIGEST_BYTES
        stop = start + count * _DIGEST_BYTES
        digests = [raw[i : i + _DIGEST_BYTES] for i in range(start, stop, _DIGEST_BYTES)]
        return cls(raw[8:start], raw[stop:], digests)


def _bytes_differing(old: bytes, new: bytes) -> int:
    return sum(a != b for a, b in zip(old, new, strict=False)) + abs(len(old) - len(new))


def _no_majority(round_: int, judgement: Judgement, names: Sequence[str]) -> str:
    known = {_STRUCTURE: "what tensors there are", _PLAIN: "settings"}
    pieces = [
        known.get(piece) or (names[piece - _TENSORS] if piece - _TENSORS < len(names) else "more")
        for piece in judgement.pieces
    ]
    shown = ", ".join(pieces[:_NAMES_SHOWN])
    more = f" and {len(pieces) - _NAMES_SHOWN} more" if len(pieces) > _NAMES_SHOWN else ""
    groups = " | ".join(", ".join(map(str, group)) for group in judgement.groups)
    return (
        f"the replicas differ after round {round_}, and no state is held by more than half of the"
        f" members: {groups} differ in {shown}{more}. Go on from a checkpoint; if they differ from"
        " the start on, call broadcast_parameters and broadcast_optimizer_state first."
        " verify_every=0 lets them differ"
    )
