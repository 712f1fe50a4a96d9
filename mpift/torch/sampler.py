"""``ElasticSampler``: each live rank's share of an epoch, dealt anew when the world shrinks.

A sample counts once the round that used it completed. So after a fault no sample is trained on
twice and none is skipped: what a dead rank had drawn but not finished goes to the survivors. (A
last turn that doesn't go up is filled with at most size - 1 repeated samples, as in torch's own
distributed sampler.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from mpift import runtime
from mpift.core.membership import View
from mpift.core.partition import Deal, first_deal
from mpift.errors import MpiftError


class ElasticSampler(Sampler[int]):
    """Deals the indices of ``dataset`` to the live ranks; give it to a ``DataLoader``.

    With a loader that works in the main process (``num_workers=0``) nothing else is needed. A
    loader with workers draws ahead: give ``prefetch``, at least how many samples a rank it draws
    beyond the batch in training (workers * prefetch_factor * batch size), and call ``record_batch``
    after each step. A loader that has seen the end of the epoch asks for no more: what a rank had
    drawn that dies in its last batch, or its last ``prefetch`` samples, is not dealt again.

    Call ``set_epoch`` before each epoch for another order. All ranks must use equal batch sizes.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, prefetch: int = 0
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {prefetch}")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.prefetch = prefetch
        self._runtime = runtime.current()
        self._resumed = False
        self._begin(self._order())

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``: all samples, in an order that depends on seed and epoch. Right after a
        ``load_state_dict`` that was in the middle of this very epoch, go on in it."""
        resumed, self._resumed = self._resumed, False
        if resumed and epoch == self.epoch:
            return
        self.epoch = epoch
        self._begin(self._order())

    def _order(self) -> list[int]:
        size = len(self.dataset)
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator()
        generator.manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(size, generator=generator).tolist()

    def _begin(self, samples: list[int]) -> None:
        if not samples:
            raise ValueError(
                "there is nothing to sample: the dataset, or what is left of it, is empty"
            )
        self._deal: Deal = first_deal(samples, self._runtime.view.members, self.prefetch)
        self._drawn = 0  # turns handed to the loader
        self._finished = 0  # turns whose rounds completed
        self._rounds_seen = self._runtime.steps_applied
        self._drawn_a_round = 0  # turns

    def __len__(self) -> int:
        """Samples that this rank will still draw in this epoch, as things stand; after its end, or
        before its beginning, those of a whole epoch."""
        return self._deal.turns - self._drawn or self._deal.turns

    def __iter__(self) -> Iterator[int]:
        """Draw this rank's samples to the end of the epoch; a new iterator goes on where the
        last one stopped, unless it had reached the end."""
        if self._drawn >= self._deal.turns:
            self._begin(self._order())
        while True:
            if not self.prefetch:
                self._notice_rounds()
            sample = self._deal.sample(self._drawn, self._runtime.member)
            if sample is None:
                return
            self._drawn += 1
            if self.prefetch and self._drawn - self._finished > 2 * self.prefetch:
                raise MpiftError(
                    f"the loader has drawn {self._drawn - self._finished} samples ahead of"
                    f" training, far more than prefetch={self.prefetch}: give the right number,"
                    " and call record_batch after each step"
                )
            yield sample

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The step that used a batch of ``batch_size`` samples is complete. Needed only with
        ``prefetch``."""
        if self.prefetch:
            finished = self._finished + batch_size
            self._finish(finished, self._runtime.round_view, self._runtime.view)

    def miss_round(self, view: View) -> None:
        """This rank has missed a round, which ``view`` reduced: the samples that it would have used
        are passed over, so that all ranks stand at the same place. Not with ``prefetch``."""
        if self._deal.turns > self._drawn:
            self._drawn = min(self._drawn + self._drawn_a_round, self._deal.turns)
            self._finish(self._drawn, view, view)
        self._rounds_seen = self._runtime.steps_applied

    def _notice_rounds(self) -> None:
        """Nothing is drawn ahead: if rounds completed since, all that was drawn is finished."""
        applied = self._runtime.steps_applied
        if applied != self._rounds_seen or self._deal.members != self._runtime.view.members:
            if applied != self._rounds_seen:
                self._drawn_a_round = self._drawn - self._finished
            self._rounds_seen = applied
            self._finish(self._drawn, self._runtime.round_view, self._runtime.view)

    def _finish(self, finished: int, round_view: View, view: View) -> None:
        before, self._finished = self._finished, finished
        # Who took part in the last round has finished it, even if it has died since.
        of_round, living = round_view.members, view.members
        for members, finished_by_lost in ((of_round, before), (living, finished)):
            left = tuple(member for member in self._deal.members if member in members)
            if left != self._deal.members:
                self._deal = self._deal.change(left, finished, finished_by_lost)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, for any later world size: epoch, seed, unfinished samples."""
        if not self.prefetch:
            self._notice_rounds()
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "unfinished": list(self._deal.unfinished(self._finished)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``, with the ranks there are now."""
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._begin(list(state["unfinished"]) or self._order())
        self._resumed = bool(state["unfinished"])
