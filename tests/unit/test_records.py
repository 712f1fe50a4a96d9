"""Records of rounds: what they hold, and who is asked for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mpift.core.membership import View
from mpift.reduction.buckets import ParameterSpec, empty_bucket, lay_out
from mpift.reduction.records import Answer, Records, RecordWithheldError
from mpift.torch.records import Record, decode, encode, set_settings, settings_of
from mpift.transport.messages import Kind, Message
from mpift.transport.solo import SoloWorld

# -- what is in them -------------------------------------------------------------------------------


def test_a_record_keeps_every_bit() -> None:
    layout = lay_out(
        [ParameterSpec("a", 3, "float32"), ParameterSpec("b", 2, "float64")], 1 << 20, 1 << 20
    )
    gradients = [empty_bucket(bucket) for bucket in layout.buckets]
    for array in gradients:
        array[:] = np.random.default_rng(1).standard_normal(array.size)
    settings = [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False}]
    given = Record(settings, True, {"scale": 65536.0}, gradients)
    found = decode(encode(given), layout)
    assert found.settings == [settings[0] | {"betas": [0.9, 0.999]}]
    assert (found.skipped, found.scaler) == (True, {"scale": 65536.0})
    assert found.gradients is not None
    for before, after in zip(gradients, found.gradients, strict=True):
        assert before.dtype == after.dtype
        assert before.tobytes() == after.tobytes()


def test_settings_of_one_optimizer_become_those_of_another() -> None:
    here, there = (
        torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=lr, betas=betas)
        for lr, betas in ((0.1, (0.5, 0.6)), (torch.tensor(0.3), (0.9, 0.999)))
    )
    kept = there.param_groups[0]["lr"]
    set_settings(there, decode(encode(Record(settings_of(here))), lay_out([], 1, 1)).settings)
    assert there.param_groups[0]["betas"] == (0.5, 0.6)
    assert there.param_groups[0]["lr"] is kept  # a tensor stays the one that a graph may hold
    assert float(kept) == pytest.approx(0.1)


# -- who is asked ----------------------------------------------------------------------------------


class Post:
    """A mailbox that keeps what is sent, and a world of four of which this rank is member 1."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, str, int]] = []
        self.handlers: dict[Kind, Callable[[Message], None]] = {}
        self.world: Any = SoloWorld()
        self.world.member, self.world.view = 1, View(0, (0, 1, 2, 3))
        self.world.control = self
        self.away = False
        self.records = Records(self, lambda function: function(), lambda: self.away, lambda: None)  # type: ignore[arg-type]
        self.records.install(self.world)
        self.transfers: list[np.ndarray] = []

    def register(self, kind: Kind, handler: Callable[[Message], None]) -> None:
        self.handlers[kind] = handler

    def send(self, kind: Kind, text: str, members: list[int]) -> None:
        self.sent += [(kind, text, member) for member in members]

    def Isend(self, data: np.ndarray, dest: int, tag: int) -> object:
        self.transfers.append(data)
        return object()

    def Irecv(self, data: np.ndarray, source: int, tag: int) -> object:
        self.transfers.append(data)
        return object()

    def hear(self, kind: Kind, sender: int, text: str) -> None:
        self.handlers[kind](Message(kind, 0, sender, text))

    def fetch(self, own: bool = False) -> tuple[threading.Thread, list[Any]]:
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(self.records.fetch(1, 7, own))
            except RecordWithheldError as error:
                found.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        while not self.sent:
            pass
        return thread, found

    def answers(self, *answers: tuple[int, int]) -> None:
        for member, answer in answers:
            assert self.sent[-1] == (Kind.RECORD_WANTED, "1 7", member)
            self.hear(Kind.RECORD, member, f"1 7 {answer} 0")


MISSED, NOT_YET, HERE, LATE, AWAY = map(int, Answer)


def test_the_others_are_asked_in_turn_until_one_has_it() -> None:
    post = Post()
    thread, found = post.fetch()
    post.answers((2, NOT_YET), (3, MISSED))
    post.hear(Kind.RECORD, 0, f"1 7 {HERE} 4")
    post.transfers[0][:] = 1, 2, 3, 4
    post.records.complete([0])
    thread.join(5)
    assert found[0].tolist() == [1, 2, 3, 4]


def test_nobody_is_left_who_knows_only_if_all_others_missed_it_too() -> None:
    post = Post()
    thread, found = post.fetch()
    post.answers((2, MISSED), (3, NOT_YET), (0, MISSED))
    assert not found
    post.records.turn(float("inf"))  # a little later only those are asked that may have it
    post.answers((3, MISSED))
    thread.join(5)
    assert found == [None]


def test_after_a_fault_everybody_is_asked_again() -> None:
    post = Post()
    thread, found = post.fetch()
    post.answers((2, MISSED), (3, MISSED))
    post.records.fault()
    post.world.view = View(1, (1, 2, 3))
    post.records.install(post.world)
    post.answers((2, MISSED))
    assert not found
    post.answers((3, MISSED))
    thread.join(5)
    assert found == [None]


@pytest.mark.parametrize(("other", "counts"), [(0, False), (2, True)])
def test_of_those_who_were_all_late_the_lowest_member_goes_by_its_own(
    other: int, counts: bool
) -> None:
    post = Post()
    thread, found = post.fetch(own=True)
    post.answers(*((m, LATE if m == other else MISSED) for m in (2, 3, 0)))
    thread.join(5 if counts else 0.05)
    assert found == ([None] if counts else [])


def test_a_record_that_comes_after_an_operation_is_not_waited_for() -> None:
    post = Post()
    thread, found = post.fetch()
    post.answers((2, NOT_YET), (3, AWAY), (0, MISSED))
    thread.join(5)
    assert isinstance(found[0], RecordWithheldError)


@pytest.mark.parametrize(
    ("own", "away", "expected"),
    [(None, True, NOT_YET), (True, False, NOT_YET), (True, True, AWAY), (False, True, MISSED)],
)
def test_a_rank_without_a_record_says_why(own: bool | None, away: bool, expected: int) -> None:
    post = Post()
    post.away = away
    post.records.open(1, lambda _round: own)
    post.hear(Kind.RECORD_WANTED, 3, "1 7")
    assert post.sent == [(Kind.RECORD, f"1 7 {expected} 0", 3)]


def test_a_record_is_kept_for_as_many_rounds_as_somebody_may_be_behind() -> None:
    post = Post()
    for round_ in range(10):
        post.records.put(1, round_, np.array([round_], np.uint8), kept=3)
    assert post.records.fetch(1, 6) is not None
    post.hear(Kind.RECORD_WANTED, 3, "1 9")
    assert post.sent == [(Kind.RECORD, "1 9 2 1", 3)]
    assert post.transfers[0].tolist() == [9]
    post.sent.clear()
    post.records.open(1, lambda _round: False)
    post.hear(Kind.RECORD_WANTED, 3, "1 5")
    assert post.sent == [(Kind.RECORD, f"1 5 {MISSED} 0", 3)]
