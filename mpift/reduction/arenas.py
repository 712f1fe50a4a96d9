"""How the gradients of a lane are summed, and the arenas for it: chosen by all ranks together.

An arena is made for all nodes or for none: every rank makes its own region, then maps those of its
node, then the files lose their names. After each of these steps all ranks hear how it went
everywhere, in an operation, so that deaths meanwhile leave the others in agreement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpift import memory
from mpift.config import Config
from mpift.core import events
from mpift.core.membership import View, by_node
from mpift.errors import GradientError, MpiftError
from mpift.memory import Region
from mpift.reduction import arena
from mpift.reduction.arena import Arena
from mpift.reduction.buckets import Layout
from mpift.transport.processes import ProcessIdentity

_ATTEMPTS = 5  # a death while all map costs one; more in a row are no accident
_MEGA = 1e6


class Job(Protocol):
    """What is asked of the job; the runtime provides it."""

    config: Config
    member: int
    view: View
    identities: dict[int, ProcessIdentity]
    exchange: Callable[[Any], list[Any]]  # says something to all; what all say, in rank order
    emit: Callable[..., None]  # reports an event

    @property
    def node_name(self) -> str:
        """Of this job on this node, for ``memory.region_path``."""


@dataclass(frozen=True, slots=True)
class _Regions:
    """What one attempt has made and mapped here."""

    own: Region
    others: dict[int, Region]
    results: Region


class Arenas:
    """Opens the arenas of a job, one after the other; see the module's docstring."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened = 0  # the same number on all ranks
        self._told: str | None = None

    def open(self, layout: Layout, anew: bool = True) -> Arena | None:
        """An arena for ``layout``, or None if its gradients go through MPI; all ranks call this.

        Raises ``GradientError`` on all ranks if ``reduction`` is "node" and that can't be; but not
        in the middle of training, which is not ``anew``, nor where it can't be because of deaths.
        """
        job, way = self._job, self._job.config.reduction
        if way == "mpi" or job.view.size == 1:
            alone = job.view.size == 1
            self._tell("mpi", "there is one rank" if alone else "as the setting reduction asks")
            return None
        reason = ""
        for _ in range(_ATTEMPTS):
            view = job.view
            reason = self._why_not()
            if reason:
                break
            opened, reason = self._attempt(layout)
            if opened is not None:
                self._tell("node", self._words(layout))
                return opened
            if job.view == view:
                reason = f"{reason}; in all these gradients need {self._extent(layout)}"
                break
        by_deaths = bool(self._why_not()) and job.view.size < len(job.identities)
        if way == "node" and anew and not by_deaths:
            raise GradientError(
                f"reduction = 'node' (MPIFT_REDUCTION) can't be: {reason}; with 'auto' gradients"
                " would go through MPI"
            )
        self._tell("mpi", reason)
        return None

    def _why_not(self) -> str:
        """Why shared memory is no use in this view, as all ranks find; empty if it is."""
        return "no two ranks share a node" if self._most == 1 else ""

    def _tell(self, way: str, words: str) -> None:
        """Once, unless the choice is another one later; by one rank for all."""
        if way != self._told and self._job.view.coordinator == self._job.member:
            self._job.emit(events.ReductionChosen, way, words)
        self._told = way

    def _words(self, layout: Layout) -> str:
        nodes = len(self._nodes)
        nodes_of_it = f"{nodes} node{'s' * (nodes > 1)}"
        return f"{self._job.view.size} ranks on {nodes_of_it}, {self._extent(layout)}"

    def _extent(self, layout: Layout) -> str:
        size = arena.arena_bytes(layout, self._most) / _MEGA
        return f"{size:.3g} MB of shared memory on a node of {self._most} ranks"

    @property
    def _nodes(self) -> dict[str, tuple[int, ...]]:
        """The members of the view by node."""
        identities = self._job.identities
        return by_node(self._job.view.members, lambda member: identities[member].node)

    @property
    def _most(self) -> int:
        """Ranks on the node that has most."""
        return max(map(len, self._nodes.values()))

    # -- one attempt -------------------------------------------------------------------------------

    def _attempt(self, layout: Layout) -> tuple[Arena | None, str]:
        """An arena, or why there is none: the same on all ranks."""
        self._opened += 1
        job, view = self._job, self._job.view
        neighbours = self._nodes[job.identities[job.member].node]
        made = _tried(lambda: self._make(layout, neighbours))
        reason = self._first_problem(made)
        mapped: Any = "other ranks have none"
        if not reason and not isinstance(made, str):
            mapped = _tried(lambda: self._map(layout, neighbours, *made))
            reason = self._first_problem(mapped)
        for member in (None, *neighbours):
            with contextlib.suppress(OSError):
                self._path(member).unlink(missing_ok=True)
        if reason or not isinstance(mapped, _Regions):
            return None, reason
        everybody = view.members
        found = Arena(layout, job.member, everybody, mapped.own, mapped.others, mapped.results)
        return found, ""

    def _first_problem(self, done: Any) -> str:
        """Of all ranks, with whose it is; empty if there is none."""
        job = self._job
        problem = done if isinstance(done, str) else ""
        said = job.exchange([job.member, job.identities[job.member].host, problem])
        return next((f"rank {m} on {host}: {words}" for m, host, words in said if words), "")

    def _path(self, member: int | None) -> Path:
        """The file of a member's contributions; None for the node's results."""
        whose = "results" if member is None else f"rank{member}"
        name = f"gradients{self._opened}-{whose}"
        return memory.region_path(memory.default_folder(), self._job.node_name, name)

    def _make(self, layout: Layout, neighbours: Sequence[int]) -> tuple[Region, Region | None]:
        """This rank's region, and as the node's first rank that of its results."""
        memory.require_shared_memory()
        size_bytes = arena.contributions_bytes(layout)
        own = arena.create(self._path(self._job.member), layout, size_bytes)
        results = None
        if self._job.member == neighbours[0]:
            results = arena.create(self._path(None), layout, arena.results_bytes(layout))
        return own, results

    def _map(
        self, layout: Layout, neighbours: Sequence[int], own: Region, results: Region | None
    ) -> _Regions:
        size_bytes = arena.contributions_bytes(layout)
        others = {
            member: arena.attach(self._path(member), layout, size_bytes)
            for member in neighbours
            if member != self._job.member
        }
        if results is None:
            results = arena.attach(self._path(None), layout, arena.results_bytes(layout))
        return _Regions(own, others, results)


def _tried(do: Callable[[], Any]) -> Any:
    """What ``do`` returns, or the words of the error that it raises."""
    try:
        return do()
    except (MpiftError, OSError) as error:
        return str(error) or type(error).__name__
