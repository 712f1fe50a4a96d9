"""``hvd.elastic``: a training state whose versions all ranks agree on.

A commit copies the state in memory and returns; a three-phase commit decides behind the training
whether a majority of the ranks holds the same. ``restore`` goes back to the last version that was
decided, ``sync`` makes all ranks hold the newest one.

A version is 1000 times the number of rounds applied, plus the commits since: so late ranks give the
same state the same number. Without a distributed optimizer there are no rounds; give numbers by
hand then, if ranks may skip commits. What ranks compare is what training keeps equal on all of
them: parameters, optimizer and schedulers. Buffers, samplers and other attributes belong to a
version but are this rank's own.

A copy is where its tensors are: of a state on a device, on the device. There are at most four at a
time beside the state itself: the last version that was decided, two that are not yet, and one that
is being taken or put back. In the middle of training it is mostly one, or two; leave room for
those. A state too large for that is saved by a ``CheckpointManager``, which needs no device memory.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpift import runtime
from mpift.checkpoint import CheckpointManager
from mpift.core import history
from mpift.core.ballots import Content
from mpift.core.commit_events import Decided, Entry
from mpift.devices import staging
from mpift.errors import StaleVersionError
from mpift.torch.functions import (
    allgather_object,
    broadcast_object,
    digest,
    digest_later,
    on_devices_of,
)
from mpift.torch.optimizer import DistributedMixin
from mpift.torch.sampler import ElasticSampler

__all__ = ["ElasticSampler", "TorchState"]

_VERSIONS_A_ROUND = 1000
# Commits that may be undecided at a time: each holds a copy of the state.
_PENDING_MAX = 2


@dataclass(slots=True)
class _Snapshot:
    """A copy of the state: of each attribute its ``state_dict`` or itself. ``content`` is None
    until it is hashed; then others may count on this rank's having it."""

    version: int
    parts: dict[str, Any]
    content: Content | None = None
    digest: Callable[[], str] | None = None  # computes it, once, on any thread


class TorchState:
    """The state of a training run: ``model``, ``optimizer``, and any attributes that can be pickled
    or have a ``state_dict``, such as schedulers and samplers. They are attributes of it.

    All ranks make theirs in the same order, after ``init``. With ``checkpoints`` it begins with
    the newest one, if there is one, and is saved as often as the manager says by every round of
    ``optimizer``; going back to a version in memory does not need them.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoints: CheckpointManager | None = None,
        **attributes: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **attributes}
        self._names = tuple(name for name, value in given.items() if value is not None)
        for name in self._names:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"a state can't have an attribute of the name {name!r}")
            setattr(self, name, given[name])
        self._runtime = runtime.current()
        if checkpoints is not None:
            self._save_to(checkpoints)
        self._news = threading.Condition()
        self._reader = staging.Reader()  # the hasher's
        self._hasher = concurrent.futures.ThreadPoolExecutor(1, "mpift-commit")
        self._version = 0  # the last that was committed here, decided or not
        self._pending: dict[int, _Snapshot] = {}
        self._kept = _Snapshot(0, self._copy())  # the last decided, or the beginning
        self._decided = 0
        self._by_hand = -1  # the last version whose number the script gave
        self._error: Exception | None = None  # to be raised in the next call
        self._runtime.on_service(self._open)

    def _save_to(self, checkpoints: CheckpointManager) -> None:
        """Begin with the newest checkpoint, and make more."""
        if self.__dict__.get("optimizer") is None:
            raise ValueError("checkpoints are saved by steps of an optimizer: give the state one")
        state = {
            name: value if _has_state(value) else functools.partial(getattr, self, name)
            for name, value in ((name, getattr(self, name)) for name in self._names)
        }
        restored = checkpoints.restore(state=state)
        for name, value in restored.values.items() if restored is not None else ():
            setattr(self, name, value)
        checkpoints.follow(self.__dict__["optimizer"], state)

    # -- for the script ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest version that is decided, as far as this rank knows; 0 before the first."""
        with self._news:
            return self._decided

    def commit(self, version: int | None = None, wait: bool = False) -> int | None:
        """Copy the state in memory and have it agreed on; returns its version.

        Training goes on meanwhile; with ``wait`` this returns once it is decided here, whether or
        not a majority held the same (``self.version`` tells). ``version`` numbers it by hand; it
        must grow. As long as two commits are undecided this one is left out, and None returned.

        Raises ``StaleVersionError`` if ``version`` is not newer than this rank's last, or if the
        last one that was given is older than what others have.
        """
        self._runtime.require_service()
        self._raise_error()
        if version is None:
            number = max(self._version + 1, self._rounds * _VERSIONS_A_ROUND)
        elif version <= self._version:
            raise StaleVersionError(
                f"version {version} of the state is refused: version {self._version} was committed"
                " before; versions only grow"
            )
        else:
            number = self._by_hand = version
        return number if self._commit(number, wait) else None

    def _commit(self, number: int, wait: bool) -> bool:
        """Whether there was room for one more copy."""
        with self._news:
            for old in sorted(self._pending):
                if len(self._pending) >= _PENDING_MAX and self._pending[old].content is None:
                    del self._pending[old]  # nobody has heard of it
            room = len(self._pending) < _PENDING_MAX
        snapshot = _Snapshot(number, self._copy()) if room else None
        if snapshot is not None:
            snapshot.digest = digest_later(self._common(snapshot.parts), self._reader)
        with self._news:  # at once: a version that is not pending is one that was passed
            self._version = number
            if snapshot is None:
                return False
            self._pending[number] = snapshot
        self._hasher.submit(self._offer, number, self._history)
        if wait:
            self.wait()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all commits of this rank are decided, at most ``timeout`` seconds; returns
        whether they are. Raises ``StaleVersionError`` if one whose number was given by hand is
        older than what others have."""
        self._runtime.require_service()
        with self._runtime.waiting(), self._news:
            through = self._news.wait_for(lambda: not self._pending, timeout)
        self._raise_error()
        return through

    def restore(self) -> None:
        """Go back to the last version that was decided; before the first, to the state as it was
        made. Commits that are undecided yet are given up. All ranks call this; a rank that lacks
        the version is given it by one that has it."""
        self._runtime.gradients.settle()
        while True:
            with self._news:
                kept = self._kept
            held = allgather_object(kept.version)
            newest = max(held)
            if min(held) == newest:
                break
            mine = kept.parts if kept.version == newest else None
            parts = broadcast_object(mine, held.index(newest))
            if parts is not None:  # else the one that had it died, and another was asked
                kept = kept if mine is not None else _Snapshot(newest, parts)
                break
        with self._news:
            self._pending.clear()
        self._adopt(kept)

    def sync(self) -> None:
        """Make all ranks hold the newest state: that of the highest decided version, and among
        ranks with that version the one that most of them hold. All ranks call this.

        A rank whose version is older says so in a warning that names both. The result is committed.
        """
        self._runtime.gradients.settle()
        self.wait(self._runtime.config.sync_timeout)
        while True:
            state = (self.version, digest(self._common(self._copy())), self._version)
            everybody = allgather_object(state)
            source = _source(everybody)
            here = self._runtime.rank
            parts = broadcast_object(self._copy() if here == source else None, source)
            if parts is not None:
                break
        newest = everybody[source][0]
        if state[0] < newest:
            warnings.warn(
                f"rank {here}: version {state[0]} of the state is stale and gives way to version"
                f" {newest} of rank {source}",
                stacklevel=2,
            )
        with self._news:
            self._pending.clear()
        if state[:2] != everybody[source][:2]:
            self._adopt(_Snapshot(newest, parts))
        self._commit(max(newest, *(last for *_, last in everybody)) + 1, wait=True)

    # -- copies ------------------------------------------------------------------------------------

    @property
    def _rounds(self) -> int:
        optimizer = getattr(self, "optimizer", None)
        return optimizer.rounds_applied if isinstance(optimizer, DistributedMixin) else 0

    @property
    def _history(self) -> str:
        optimizer = getattr(self, "optimizer", None)
        if isinstance(optimizer, DistributedMixin):
            return optimizer._mpift_reducer.replica.history
        return history.NO_HISTORY

    def _copy(self) -> dict[str, Any]:
        with torch.no_grad():
            return {
                name: copy.deepcopy(value.state_dict() if _has_state(value) else value)
                for name, value in ((name, getattr(self, name)) for name in self._names)
            }

    def _common(self, parts: dict[str, Any]) -> dict[str, Any]:
        """What is equal on all ranks."""
        found = {}
        for name, part in parts.items():
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                found[name] = {key: part[key] for key, _ in value.named_parameters() if key in part}
            elif isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
                found[name] = part
        return found

    def _adopt(self, snapshot: _Snapshot) -> None:
        before = self._copy()
        try:
            self._load(snapshot.parts)
        except BaseException:
            self._load(before)  # not one part new and another old
            raise
        with self._news:
            if snapshot.version >= self._kept.version:
                self._kept = snapshot
            self._decided = max(self._decided, snapshot.version)

    def _load(self, parts: dict[str, Any]) -> None:
        staging.fence()  # what is written to may be part of a snapshot that is being copied
        for name, part in parts.items():
            value = getattr(self, name)
            if _has_state(value):
                value.load_state_dict(copy.deepcopy(part))
            else:
                setattr(self, name, on_devices_of(value, copy.deepcopy(part)))

    # -- the agreement -----------------------------------------------------------------------------

    def _open(self) -> None:
        """On the service thread."""
        self._number = self._runtime.agreements.open(self)

    def _offer(self, version: int, of_history: str) -> None:
        """On the hasher's thread: nobody writes to a copy."""
        with self._news:
            snapshot = self._pending.get(version)
        if snapshot is None or snapshot.digest is None:
            return  # given up meanwhile
        try:
            content = Content(of_history, snapshot.digest())
        except Exception as error:  # noqa: BLE001, it is raised in the script's next call
            self._end(version, error)
            return
        with self._news:
            if self._pending.get(version) is not snapshot:
                return
            snapshot.content, snapshot.digest = content, None
        self._runtime.agreements.hold(self._number, version, content)

    def remember(self, entry: Entry) -> None:
        """On the service thread. This state lives in memory, and so do promises about it."""

    def passed(self, version: int) -> bool:
        """On the service thread."""
        with self._news:
            if version in self._pending:
                return False
        past = self._version
        if past > 0 and self._by_hand < 0:
            past = max(past, self._rounds * _VERSIONS_A_ROUND - 1)
        return self._runtime.leaving or version <= past

    def decided(self, decided: Decided) -> None:
        """On the service thread; again if this rank gets to the version only now."""
        version = decided.proposal.version
        with self._news:
            mine = self._pending.get(version)
            if decided.committed:
                self._decided = max(self._decided, version)
            if mine is not None and mine.content is None:
                return  # it is told again once this rank has hashed it
            same = mine is not None and mine.content == decided.content
            if mine is not None and same and version > self._kept.version:
                self._kept = mine
        self._settle(version, max((newest for _, newest in decided.refused), default=-1))
        if decided.committed and mine is not None and not same:
            self._deviates()

    def stale(self, version: int, newest: int) -> None:
        """On the service thread."""
        self._settle(version, newest)

    def _settle(self, version: int, newest: int) -> None:
        """Something has become of ``version``; others may be at a newer one."""
        error = None
        if version == self._by_hand and newest > version:
            error = StaleVersionError(
                f"version {version} of the state is refused: others are at version {newest}"
            )
        self._end(version, error)

    def _end(self, version: int, error: Exception | None) -> None:
        with self._news:
            self._pending.pop(version, None)
            self._error = self._error or error
            self._news.notify_all()

    def _deviates(self) -> None:
        """A majority holds something else than this rank: let all states be examined."""
        optimizer = getattr(self, "optimizer", None)
        if isinstance(optimizer, DistributedMixin):
            optimizer._mpift_reducer.verification.request_examination()

    def _raise_error(self) -> None:
        with self._news:
            error, self._error = self._error, None
        if error is not None:
            raise error


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _source(everybody: list[tuple[int, str, int]]) -> int:
    """The rank whose state counts, of (version, digest, last commit) of all."""
    newest = max(version for version, *_ in everybody)
    digests = [found for version, found, _ in everybody if version == newest]
    most = max(digests, key=digests.count)
    return [state[:2] for state in everybody].index((newest, most))


# Names of Horovod's module that scripts may ask for.
_NOT_YET = {
    "run": "a fault needs no code here: call the function itself",
    "State": "use TorchState",
    "ObjectState": "use TorchState",
}


def __getattr__(name: str) -> None:
    if name in _NOT_YET:
        raise AttributeError(
            f"hvd.elastic.{name} is not available in this version: {_NOT_YET[name]}"
        )
    raise AttributeError(f"module 'mpift.torch.elastic' has no attribute {name!r}")
