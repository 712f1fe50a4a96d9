"""Records of rounds: what they hold, and who is asked for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mpift.core.membership import View
from mpift.errors import MismatchError
from mpift.reduction.buckets import ParameterSpec, empty_bucket, lay_out
from mpift.reduction.records import Answer, Records, RecordWithheldError
from mpift.torch.records import Record, decode, encode, set_settings, settings_of
from mpift.transport.messages import Kind, Message
from mpift.transport.parcels import Parcel
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


def test_settings_of_other_groups_are_refused_in_words() -> None:
    here, there = (
        torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(groups)])
        for groups in (1, 2)
    )
    with pytest.raises(MismatchError, match=r"2 parameter groups, .* 1: make the same groups"):
        set_settings(there, settings_of(here))


# -- who is asked ----------------------------------------------------------------------------------


class Asking:
    """Records of member 1 of four, and what they send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, str, int]] = []
        self.given: list[np.ndarray] = []
        self.handlers: dict[Kind, Callable[[Any], None]] = {}
        self.world: Any = SoloWorld()
        self.world.member, self.world.view = 1, View(0, (0, 1, 2, 3))
        self.away = False
        post: Any = SimpleNamespace(
            mailbox=SimpleNamespace(register=self.handlers.__setitem__, send=self.send),
            parcels=SimpleNamespace(register=self.handlers.__setitem__, send=self.give),
            call=lambda function: function(),
            hurry=lambda: None,
        )
        self.records = Records(post, lambda: self.away)
        self.records.install(self.world)

    def send(self, kind: Kind, text: str, members: list[int]) -> None:
        self.sent += [(kind, text, member) for member in members]

    def give(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        self.given.append(data)
        self.sent.append((kind, text, member))

    def hear_request(self, sender: int, text: str) -> None:
        self.handlers[Kind.RECORD_WANTED](Message(Kind.RECORD_WANTED, 0, sender, text))

    def hear_answer(self, sender: int, answer: int, *values: int) -> None:
        data = np.array(values, np.uint8)
        self.handlers[Kind.RECORD](Parcel(Kind.RECORD, sender, f"1 7 {answer}", data))

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
            self.hear_answer(member, answer)


MISSED, NOT_YET, HERE, LATE, AWAY = map(int, Answer)


def test_the_others_are_asked_in_turn_until_one_has_it() -> None:
    asking = Asking()
    thread, found = asking.fetch()
    asking.answers((2, NOT_YET), (3, MISSED))
    asking.hear_answer(0, HERE, 1, 2, 3, 4)
    thread.join(5)
    assert found[0].tolist() == [1, 2, 3, 4]
    asking.hear_request(3, "1 7")  # who got it gives it, at once
    assert asking.given[0].tolist() == [1, 2, 3, 4]


def test_nobody_is_left_who_knows_only_if_all_others_missed_it_too() -> None:
    asking = Asking()
    thread, found = asking.fetch()
    asking.answers((2, MISSED), (3, NOT_YET), (0, MISSED))
    assert not found
    asking.records.turn(float("inf"))  # a little later only those are asked that may have it
    asking.answers((3, MISSED))
    thread.join(5)
    assert found == [None]


def test_after_a_fault_everybody_is_asked_again() -> None:
    asking = Asking()
    thread, found = asking.fetch()
    asking.answers((2, MISSED), (3, MISSED))
    asking.records.fault()
    asking.world.view = View(1, (1, 2, 3))
    asking.records.install(asking.world)
    asking.answers((2, MISSED))
    assert not found
    asking.answers((3, MISSED))
    thread.join(5)
    assert found == [None]


@pytest.mark.parametrize(("other", "counts"), [(0, False), (2, True)])
def test_of_those_who_were_all_late_the_lowest_member_goes_by_its_own(
    other: int, counts: bool
) -> None:
    asking = Asking()
    thread, found = asking.fetch(own=True)
    asking.answers(*((m, LATE if m == other else MISSED) for m in (2, 3, 0)))
    thread.join(5 if counts else 0.05)
    assert found == ([None] if counts else [])


def test_a_record_that_comes_after_an_operation_is_not_waited_for() -> None:
    asking = Asking()
    thread, found = asking.fetch()
    asking.answers((2, NOT_YET), (3, AWAY), (0, MISSED))
    thread.join(5)
    assert isinstance(found[0], RecordWithheldError)


@pytest.mark.parametrize(
    ("own", "away", "expected"),
    [(None, True, NOT_YET), (True, False, NOT_YET), (True, True, AWAY), (False, True, MISSED)],
)
def test_a_rank_without_a_record_says_why(own: bool | None, away: bool, expected: int) -> None:
    asking = Asking()
    asking.away = away
    asking.records.open(1, lambda _round: own)
    asking.hear_request(3, "1 7")
    assert asking.sent == [(Kind.RECORD, f"1 7 {expected}", 3)]
    assert not asking.given[0].nbytes


def test_a_record_is_kept_for_as_many_rounds_as_somebody_may_be_behind() -> None:
    asking = Asking()
    for round_ in range(10):
        asking.records.put(1, round_, np.array([round_], np.uint8), kept=3)
    assert asking.records.fetch(1, 6) is not None
    asking.hear_request(3, "1 9")
    assert asking.sent == [(Kind.RECORD, f"1 9 {HERE}", 3)]
    assert asking.given[0].tolist() == [9]
    asking.sent.clear()
    asking.records.open(1, lambda _round: False)
    asking.hear_request(3, "1 5")
    assert asking.sent == [(Kind.RECORD, f"1 5 {MISSED}", 3)]
