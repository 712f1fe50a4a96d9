"""Verification of one optimizer's replicas: a cheap check now and then, an examination if it fails.

Every ``verify_every`` rounds the state is hashed, in place, after the round was applied; large
states, and those of devices, on a helper thread, since nothing changes them before the next step.
The digest goes to the coordinator, and nobody waits for an answer. If two differ, a round soon
after has all ranks examine their states: they stand still, the majority's state wins, and whoever
deviates fetches what differs from those that hold it. The ranks go on when all are alike.

Settings, the learning rate above all, differ if a script changes them on one rank alone, or steps a
scheduler that doesn't follow the rounds. That is no fault of a machine: they are repaired each
time, with a warning, and nobody is evicted for them or for what they have led to.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from mpift.core import events
from mpift.core.verification import Judgement, judge
from mpift.errors import InconsistentError, MpiftError, TransferError
from mpift.reduction.examinations import Place
from mpift.reduction.gradients import GradientRounds
from mpift.torch.rows import (
    PLAIN,
    SCHEDULERS,
    STRUCTURE,
    TENSORS,
    TRAIL_BYTES,
    Row,
    beyond_repair,
    bytes_differing,
    no_majority,
    shown,
)
from mpift.torch.state import (
    Look,
    OptimizerState,
    bytes_of,
    differences,
    flip_bit,
    hash_of,
    write_bytes,
)

if TYPE_CHECKING:
    from mpift.runtime import Runtime

# Below this, 1 ms of hashing, a thread saves little, and waits for a core where all are busy.
_INLINE_BYTES_MAX = 16 << 20
# Meetings in a row that somebody could not come to, before it is left to the next check.
_FRUITLESS_MEETINGS_MAX = 3


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
        self.damaged = False  # this rank knows that its state is of no use
        self.checks = self.examinations = self.false_alarms = self.repairs = 0
        self.waited_seconds = self.cpu_seconds = 0.0
        self._state = OptimizerState(optimizer, name_of)
        self._runtime = runtime
        self._workload = workload
        self.every = every
        # At repairing this rank, those that came to nothing included, those of settings not.
        self._attempts = 0
        self._trail = bytes(TRAIL_BYTES)  # of the settings of each round since an examination
        self._settings: list[dict[str, Any]] | None = None  # of the last round of that
        self._warned: set[str] = set()
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
        hashing, self._hashing = self._hashing, None  # an error of a device is raised once
        if hashing is not None:
            began = time.perf_counter()
            self.cpu_seconds += hashing.result()
            self.waited_seconds += time.perf_counter() - began

    def round_applied(self, round_: int, alarm: bool) -> None:
        """``round_`` was applied: the state has the same bits on all ranks, or should have."""
        self._follow_settings(round_)
        if alarm:
            self._examine_once(round_)
        due = self.every and (round_ + 1) % self.every == 0 and self._runtime.view.size > 1
        if due and not self.damaged:
            self._check(round_)

    def _follow_settings(self, round_: int) -> None:
        """Ranks whose settings were the same in each round have the same trail."""
        settings = self._state.settings()
        if settings != self._settings:
            text = f"{round_} {json.dumps(settings, sort_keys=True)}"
            self._trail = xxhash.xxh3_64_digest(self._trail + text.encode())
            self._settings = settings

    def _check(self, round_: int) -> None:
        self.settle()
        began, cpu = time.perf_counter(), time.thread_time()
        arrays, text = self._state.arrays(), self._state.plain()
        self.checks += 1
        # A device has work to do yet before it can be read: never wait for it here.
        if arrays.size_bytes <= _INLINE_BYTES_MAX and not arrays.on_device:
            self._hash_and_tell(round_, arrays, text)
        else:
            if self._helper is None:
                self._helper = concurrent.futures.ThreadPoolExecutor(1, "mpift-verification")
            self._hashing = self._helper.submit(self._on_helper, round_, arrays, text)
        self.waited_seconds += time.perf_counter() - began
        self.cpu_seconds += time.thread_time() - cpu

    def _on_helper(self, round_: int, arrays: Look, text: str) -> float:
        began = time.thread_time()
        self._hash_and_tell(round_, arrays, text)
        return time.thread_time() - began

    def _hash_and_tell(self, round_: int, arrays: Look, text: str) -> None:
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
        try:
            self._examine(round_)
        except MpiftError:
            raise
        except RuntimeError:  # this rank's device has failed: the others must not wait for it
            self._runtime.examinations.decline(self.lane, round_)
            raise

    # -- the examination ---------------------------------------------------------------------------

    def _examine(self, round_: int) -> None:
        """Returns when all ranks hold the same. Raises ``InconsistentError`` on all of them if no
        state has a majority. A rank that deviates for too long leaves, so this ends."""
        key = f"lane {self.lane} round {round_}"
        transfer, member = self._runtime.transfer, self._runtime.member
        repaired: dict[str, int] = {}  # bytes that differed, by piece
        before: Mapping[int, Row] = {}  # what was met with last
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
                judgement = judge(
                    {who: row.pieces for who, row in rows.items()},
                    frozenset(who for who, row in rows.items() if row.damaged),
                )
                if judgement.content is None:
                    raise InconsistentError(no_majority(round_, judgement, list(tensors), rows))
                if not judgement.deviating:
                    break
                donors = [
                    who
                    for who, row in rows.items()
                    if who not in judgement.deviating and not row.damaged
                ]
                example, wrong = rows[donors[0]], judgement.deviating.get(member)
                if beyond_repair(judgement, rows, before):
                    if wrong is not None:
                        self._warn_of_settings(round_, rows[member], example, "beyond repair")
                    break
                if wrong is not None:
                    parted = PLAIN in wrong or rows[member].trail != example.trail
                    self._may_be_repaired(wrong, caused=phase == 0 and parted)
                    found = self._repair(key, judgement, tensors, arrays, example, donors)
                    for name, count in found.items():
                        repaired[name] = repaired.get(name, 0) + count
                    if parted and self._state.plain().encode() == example.plain:
                        self._warn_of_settings(round_, rows[member], example, "repaired")
                before = rows
                phase += 1
        finally:
            transfer.withdraw(key)
        self._fruitless, self.damaged = 0, False
        self._trail, self._settings = bytes(TRAIL_BYTES), None
        self.examinations += 1
        self.false_alarms += phase == 0
        if repaired:
            self.repairs += 1
            first, total = next(iter(repaired)), sum(repaired.values())
            event = events.RankRepaired
            self._runtime.emit(event, self._runtime.host, round_, first, len(repaired), total)

    def _meet(
        self, place: Place, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]
    ) -> Mapping[int, Row] | None:
        what = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors.items()]
        structure = xxhash.xxh3_128_digest("\n".join(what).encode())
        digests = [xxhash.xxh3_128_digest(array.data) for array in arrays.values()]
        plain = self._state.plain().encode()
        row = Row(structure, self._trail, plain, digests, self.damaged)
        rows = self._runtime.examinations.meet(place, row.encode())
        if rows is None:
            return None
        return {member: Row.decode(data) for member, data in rows.items()}

    def _warn_of_settings(self, round_: int, mine: Row, example: Row, kind: str) -> None:
        """Say once which settings were not the majority's, and what to do; and once if they can't
        be made so."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        found = differences(mine.plain.decode(), example.plain.decode())
        what = shown([f"{name}: {values}" for name, values in found.items()], "; ")
        if kind == "beyond repair":
            text = (
                f"settings differ from those of most ranks and can't be made the same ({what}): all"
                " go on as they are; make the same optimizer on every rank"
            )
        elif found:
            text = f"settings differed from those of most ranks ({what}): repaired; {SCHEDULERS}"
        else:
            text = (
                "settings differed from those of most ranks in an earlier round, and what came of"
                f" that was repaired; {SCHEDULERS}"
            )
        where = f"rank {self._runtime.rank}, after round {round_}"
        warnings.warn(f"{where}: {text}. This is said once", stacklevel=2)

    def _may_be_repaired(self, wrong: Sequence[int], caused: bool) -> None:
        """Leave if this rank was repaired too often, or can't be. Not counted is what its settings
        ``caused``, which no machine's memory is to blame for, and settings alone."""
        limit = self._runtime.config.max_repairs
        if STRUCTURE in wrong:
            self._runtime.leave_evicted(
                "has other tensors in its optimizer's state than a majority of the ranks, which"
                " can't be repaired piece by piece"
            )
        if caused or tuple(wrong) == (PLAIN,):
            return
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
        example: Row,
        donors: Sequence[int],
    ) -> dict[str, int]:
        """Take over what differs from the majority; returns how many bytes did, by piece. No
        tensors, if all who hold them are gone meanwhile: the next meeting finds who holds what."""
        names = list(tensors)
        wrong = judgement.deviating[self._runtime.member]
        found = {}
        if PLAIN in wrong:
            mine, theirs = self._state.plain(), example.plain.decode()
            self._state.take_plain(theirs)
            if self._state.plain() != mine:
                what = f"settings ({shown(list(differences(mine, theirs)))})"
                found[what] = bytes_differing(mine.encode(), example.plain)
        wanted = [names[piece - TENSORS] for piece in wrong if piece >= TENSORS]
        fetched = {name: np.empty(arrays[name].size, np.uint8) for name in wanted}
        assert judgement.content is not None
        expected = dict(zip(names, judgement.content[TENSORS:], strict=True))
        try:
            self._runtime.transfer.fetch(key, fetched, expected, donors)
        except TransferError:
            return found
        for name in wanted:
            found[name] = int(np.count_nonzero(fetched[name] != arrays[name]))
            write_bytes(fetched[name], tensors[name])
        return found

    def forget_state(self) -> None:
        """This rank's state is of no use: it has no vote, and is taken over from the others in the
        next examination. It is written over, since torch_npu refuses to read damaged tensors."""
        with contextlib.suppress(RuntimeError):  # it was being hashed, on a device that has failed
            self.settle()
        self.damaged = True
        for tensor in self._state.pieces().values():
            write_bytes(np.zeros(tensor.nbytes, np.uint8), tensor)

    # -- faults on purpose -------------------------------------------------------------------------

    def flip(self, member: int, step: int) -> None:
        """Flip a bit of a parameter, and tell nobody."""
        self.settle()
        flip_bit(self._state.parameters(), member, step)
