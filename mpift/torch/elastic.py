"""``hvd.elastic``: a training state whose versions all ranks agree on.

A commit copies the state in memory and returns; a three-phase commit decides behind the training
whether a majority of the ranks holds the same. ``restore`` goes back to the last version that was
decided, ``sync`` makes all ranks hold the newest one.

A version is 1000 times the number of rounds applied, plus the commits since: so late ranks give the
same state the same number. What ranks compare is what training keeps equal on all of them:
parameters, optimizer and schedulers. Buffers, samplers and other attributes belong to a version but
are this rank's own.
"""

from __future__ import annotations

import concurrent.futures
import copy
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from mpift import runtime
from mpift.core import history
from mpift.core.ballots import Content
from mpift.core.commit_events import Decided, Entry
from mpift.errors import StaleVersionError
from mpift.torch.functions import allgather_object, broadcast_object, digest
from mpift.torch.optimizer import DistributedMixin
from mpift.torch.sampler import ElasticSampler

__all__ = ["ElasticSampler", "TorchState"]

_VERSIONS_A_ROUND = 1000
# Commits that may be undecided at a time: each holds a copy of the state.
_PENDING_MAX = 2


@dataclass(slots=True)
class _Snapshot:
    """A copy of the state: of each attribute its ``state_dict`` or itself. ``content`` is None
    until it is hashed; once ``promised``, this rank has voted for it."""

    version: int
    parts: dict[str, Any]
    content: Content | None = None
    promised: bool = False


class TorchState:
    """The state of a training run: ``model``, ``optimizer``, and any attributes that can be pickled
    or have a ``state_dict``, such as schedulers and samplers. They are attributes of it.

    All ranks make theirs in the same order, after ``init``.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **attributes: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **attributes}
        self._names = tuple(name for name, value in given.items() if value is not None)
        for name in self._names:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"a state can't have an attribute of the name {name!r}")
            setattr(self, name, given[name])
        self._runtime = runtime.current()
        self._news = threading.Condition()
        self._hasher = concurrent.futures.ThreadPoolExecutor(1, "mpift-commit")
        self._version = 0  # the last that was committed here, decided or not
        self._pending: dict[int, _Snapshot] = {}
        self._kept = _Snapshot(0, self._copy())  # the last decided, or the beginning
        self._decided = 0
        self._unmatched: dict[int, Content | None] = {}  # decided before this rank had hashed it
        self._refusal = ""
        self._runtime.on_service(self._open)

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

        Raises ``StaleVersionError`` if ``version`` is not newer than the last, or if the last
        commit was refused since others had a newer one.
        """
        self._raise_refusal()
        after = max(self._version + 1, self._rounds * _VERSIONS_A_ROUND)
        number = after if version is None else version
        newest = max(self._version, self.version)
        if number <= newest:
            raise StaleVersionError(
                f"version {number} of the state is refused: version {newest} was committed before;"
                " versions only grow"
            )
        self._version = number
        if not self._has_room():
            return None
        snapshot = _Snapshot(number, self._copy())
        with self._news:
            self._pending[number] = snapshot
        self._hasher.submit(self._offer, snapshot, self._history)
        if wait:
            self.wait()
        return number

    def _has_room(self) -> bool:
        """Whether there may be one more copy; what nobody has asked for gives way."""
        with self._news:
            for old in sorted(self._pending):
                if len(self._pending) >= _PENDING_MAX and not self._pending[old].promised:
                    del self._pending[old]
            return len(self._pending) < _PENDING_MAX

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all commits of this rank are decided, at most ``timeout`` seconds; returns
        whether they are. Raises ``StaleVersionError`` if one was refused as older than others'."""
        with self._runtime.waiting(), self._news:
            through = self._news.wait_for(lambda: not self._pending, timeout)
        self._raise_refusal()
        return through

    def restore(self) -> None:
        """Go back to the last version that was decided; before the first, to the state as it was
        made. All ranks call this; a rank that lacks it is given it by one that has it."""
        self._runtime.gradients.settle()
        while True:
            with self._news:
                kept = self._kept
            held = allgather_object(kept.version)
            newest = max(held)
            if min(held) == newest:
                break
            parts = broadcast_object(
                kept.parts if kept.version == newest else None, held.index(newest)
            )
            if parts is None:  # the one that had it died, and another was asked
                continue
            if kept.version < newest:
                kept = _Snapshot(newest, parts)
            break
        self._adopt(kept)

    def sync(self) -> None:
        """Make all ranks hold the newest state: that of the highest decided version, and among
        ranks with that version the one that most of them hold. All ranks call this.

        A rank whose version is older says so in a warning that names both. The result is committed.
        """
        self._runtime.gradients.settle()
        self.wait(self._runtime.config.sync_timeout)
        while True:
            here = self._runtime.rank
            everybody = allgather_object((self.version, digest(self._common(self._copy()))))
            source = _source(everybody)
            parts = broadcast_object(self._copy() if here == source else None, source)
            if parts is not None:
                break
        newest, mine = everybody[source][0], everybody[here][0]
        if mine < newest:
            warnings.warn(
                f"rank {here}: version {mine} of the state is stale and gives way to version"
                f" {newest} of rank {source}",
                stacklevel=2,
            )
        if everybody[here] != everybody[source]:
            self._adopt(_Snapshot(newest, parts))
        self._version = max(self._version, newest)
        self.commit(wait=True)

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
        for name, part in snapshot.parts.items():
            value = getattr(self, name)
            if _has_state(value):
                value.load_state_dict(copy.deepcopy(part))
            else:
                setattr(self, name, copy.deepcopy(part))
        with self._news:
            self._kept = snapshot
            self._decided = max(self._decided, snapshot.version)

    # -- the agreement -----------------------------------------------------------------------------

    def _open(self) -> None:
        """On the service thread."""
        self._number = self._runtime.agreements.open(self)

    def _offer(self, snapshot: _Snapshot, of_history: str) -> None:
        """On the hasher's thread: nobody writes to a copy."""
        content = Content(of_history, digest(self._common(snapshot.parts)))
        version = snapshot.version
        with self._news:
            snapshot.content = content
            late = version in self._unmatched
            decided = self._unmatched.pop(version, None)
        if late:
            self._compare(snapshot, decided)
        self._runtime.agreements.hold(self._number, version, content)

    def remember(self, entry: Entry) -> None:
        """On the service thread. This state lives in memory, and so do promises about it."""
        with self._news:
            mine = self._pending.get(entry.proposal.version)
            if mine is not None and entry.content is not None:
                mine.promised = True

    def decided(self, decided: Decided) -> None:
        """On the service thread."""
        version = decided.proposal.version
        with self._news:
            mine = self._pending.get(version)
            if decided.committed:
                self._decided = max(self._decided, version)
            newest = max((newest for _, newest in decided.refused), default=-1)
            if newest > version and not self._refusal:
                self._refusal = _refusal(version, newest)
            hashing = mine is not None and mine.content is None
            if decided.committed and hashing:
                self._unmatched[version] = decided.content
        if decided.committed and mine is not None and not hashing:
            self._compare(mine, decided.content)
        else:
            self._drop(version, older=decided.committed, keep=hashing and decided.committed)

    def _compare(self, mine: _Snapshot, decided: Content | None) -> None:
        """A version is committed that this rank has a copy of."""
        same = mine.content == decided
        with self._news:
            if same and mine.version > self._kept.version:
                self._kept = mine
        self._drop(mine.version, older=True)
        optimizer = getattr(self, "optimizer", None)
        if not same and isinstance(optimizer, DistributedMixin):
            # A majority holds something else: let all states be examined.
            optimizer._mpift_reducer.verification.request_examination()

    def _drop(self, version: int, older: bool, keep: bool = False) -> None:
        """The copy of ``version`` is not needed any more, nor are ``older`` ones."""
        with self._news:
            for old in tuple(self._pending):
                if (old == version and not keep) or (old < version and older):
                    del self._pending[old]
            self._news.notify_all()

    def stale(self, version: int, newest: int) -> None:
        """On the service thread."""
        with self._news:
            if newest > version and not self._refusal:
                self._refusal = _refusal(version, newest)
        self._drop(version, older=False)

    def _raise_refusal(self) -> None:
        with self._news:
            refusal, self._refusal = self._refusal, ""
        if refusal:
            raise StaleVersionError(refusal)


def _refusal(version: int, newest: int) -> str:
    return f"version {version} of the state is refused: others have voted for version {newest}"


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _source(everybody: list[tuple[int, str]]) -> int:
    """The rank whose state counts, of (version, digest) of all."""
    newest = max(version for version, _ in everybody)
    digests = [found for version, found in everybody if version == newest]
    most = max(digests, key=digests.count)
    return everybody.index((newest, most))


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
