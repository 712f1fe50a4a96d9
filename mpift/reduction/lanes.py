"""The lanes of gradients: one an optimizer, opened, changed and seen through by all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpift.core import history
from mpift.errors import MismatchError
from mpift.reduction.arenas import Arenas
from mpift.reduction.buckets import Layout
from mpift.reduction.gradients import GradientRounds
from mpift.reduction.operations import Kind, Operation
from mpift.reduction.records import Records
from mpift.transport.service import Service
from mpift.transport.world import MAX_LANES

_CATCH_UP_SECONDS = 0.002


class Follower(Protocol):
    """Whoever applies the rounds of one lane; called on the main thread."""

    workload: GradientRounds
    # Whether the script changes results before they are applied: then a round that no script has
    # dealt with is left out. Ranks agree on it where such rounds come about.
    touches: bool

    @property
    def history(self) -> str:
        """Of the rounds that it has applied (``core.history``)."""

    def catch_up(self) -> None:
        """Apply what is complete."""

    def make_room(self) -> None:
        """The same, if the others wait for it."""

    def flush(self, rounds: int) -> None:
        """Complete and apply all rounds below ``rounds``, as all ranks do."""

    def step_skipped(self) -> None:
        """The script will not use the result that it waited for."""


class GradientLanes:
    """See the module's docstring. ``arenas`` opens memory for a lane, ``operate`` carries out an
    operation with all ranks, ``on_service`` a function on the service thread; ``require_service``
    raises ``NotInitializedError`` if there is none."""

    def __init__(
        self,
        service: Service,
        arenas: Arenas,
        operate: Callable[[Operation], np.ndarray],
        on_service: Callable[[Callable[[], Any]], None],
        require_service: Callable[[], None],
    ) -> None:
        self._service = service
        self._arenas = arenas
        self._operate = operate
        self._on_service = on_service
        self._require_service = require_service
        self.followers: list[Follower] = []
        self.records = Records(service.post, lambda: service.away)
        on_service(lambda: service.attach(self.records))

    def open(self, workload: GradientRounds, follower: Follower) -> int:
        """A lane for one optimizer's rounds; all ranks open theirs in the same order."""
        opened: list[int] = []

        def add() -> None:
            if self._service.lanes_left:
                lane = self._service.add_lane(workload)
                workload.bind(lane, lambda event: self._feed(lane, event), self._service.hurry)
                self.records.open(lane, workload.is_own)
                opened.append(lane)

        self._operate(Operation(Kind.OPEN_LANE))
        arena = self._arenas.open(workload.contributions.layout)
        if arena is not None:
            workload.move_in(arena)
        self._on_service(add)
        if not opened:
            raise MismatchError(
                f"at most {MAX_LANES - 2} distributed optimizers can be made before a shutdown()"
                " and a new init()"
            )
        self.followers.append(follower)
        return opened[0]

    def history(self) -> str:
        """Of the rounds that this rank has applied in all lanes; without a lane of none."""
        return history.joined([follower.history for follower in self.followers])

    def _feed(self, lane: int, event: Any) -> None:
        self._require_service()  # or whoever waits for what follows waits for ever
        self._service.feed(lane, event)

    def relayout(self, lane: int, workload: GradientRounds, layout: Layout) -> None:
        """Give a lane another layout between two rounds; returns when that is done. All ranks call
        this for the same round; ``MismatchError`` if some have left already."""
        self._operate(Operation(Kind.CHANGE_LAYOUT))
        arena = self._arenas.open(layout, anew=False)

        def apply() -> None:
            workload.relayout(layout, arena)
            self._service.lanes[lane].set_buckets(workload.buckets)

        self._on_service(apply)

    def settle(self, followers: Sequence[Follower] | None = None) -> None:
        """Complete all rounds that any rank has something in, and apply them; all ranks call this.
        ``followers``: those of some optimizers only."""
        chosen = self.followers if followers is None else followers
        if self._flush(chosen):
            # What was to be added to a next gradient has nothing to wait for.
            for follower in chosen:
                follower.workload.contribute_carried()
            self._flush(chosen)

    def _flush(self, chosen: Sequence[Follower]) -> bool:
        """Whether anything is carried anywhere beyond the rounds that were flushed."""
        state = np.zeros((len(chosen), 3), np.int64)

        def look() -> None:
            state[:, 0] = [follower.workload.target() for follower in chosen]

        self._on_service(look)
        state[:, 1] = [bool(f.workload.contributions.carries) for f in chosen]
        state[:, 2] = [follower.touches for follower in chosen]
        agreed = self._operate(Operation(Kind.ALLREDUCE, state, "max"))
        for follower, (rounds, _, touches) in zip(chosen, agreed.tolist(), strict=True):
            follower.touches = bool(touches)
            follower.flush(rounds)
        return bool(agreed[:, 1].any())

    def make_room(self) -> None:
        """Where the others wait because this rank is too far behind: apply what is complete."""
        for follower in self.followers:
            follower.make_room()

    def see_through(self) -> None:
        """At the end: apply what the others still complete, until all have left."""
        for follower in self.followers:
            follower.step_skipped()
        while not self._service.finished:
            time.sleep(_CATCH_UP_SECONDS)
            for follower in self.followers:
                follower.catch_up()
        for follower in self.followers:
            follower.catch_up()
        self._service.release()
