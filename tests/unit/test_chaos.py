"""The grammar of fault schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.chaos import Fault, Schedule, parse
from mpift.errors import ChaosError


def test_a_schedule_of_several_faults_is_read_in_order() -> None:
    schedule = parse("kill:2@50, kill:0@120:bucket1", world_size=4)
    assert schedule.faults == (Fault("kill", 2, 50), Fault("kill", 0, 120, "bucket1"))


def test_an_empty_schedule_has_no_faults() -> None:
    assert parse("  ") == Schedule()


def test_a_fault_is_due_only_at_its_place() -> None:
    schedule = parse("kill:2@50")
    assert schedule.due(2, 50, "step") == schedule.faults
    assert schedule.due(2, 51, "step") == ()
    assert schedule.due(1, 50, "step") == ()
    assert schedule.due(2, 50, "bucket0") == ()


def test_a_fault_with_a_range_is_due_in_each_of_its_steps_and_before_a_fatal_one() -> None:
    schedule = parse("kill:2@60,slow:2@50-60:0.5", world_size=4)
    slow = Fault("slow", 2, 50, last_step=60, amount=0.5)
    assert [schedule.due(2, step, "step") for step in (49, 50, 61)] == [(), (slow,), ()]
    assert schedule.due(2, 60, "step") == (slow, Fault("kill", 2, 60))


def test_a_fault_in_a_rebuild_is_due_in_the_first_rebuild_after_its_step() -> None:
    schedule = parse("kill:1@20:split")
    assert schedule.due(1, 19, "split") == ()
    assert schedule.due(1, 23, "split") == schedule.faults


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("kill:2", "VERB:MEMBER@STEP"),
        ("kill:2@50,", "VERB:MEMBER@STEP"),
        ("melt:2@50", "unknown verb 'melt'"),
        ("kill:2@50:moon", "unknown point 'moon'"),
        ("kill:4@50", "no member 4 in a world of 4"),
        ("kill:-1@50", "VERB:MEMBER@STEP"),
        ("kill:1@5,kill:1@9", "member 1 is killed already"),
        ("stop:1@5,kill:1@9", "member 1 is stopped already"),
        ("kill:1@5-9", "kill has one step only, as in kill:2@50"),
        ("slow:1@9-5:1", "slow ends before it begins"),
        ("slow:1@5", "slow takes seconds, above 0"),
        ("gil:1@5:-1", "gil takes seconds, above 0"),
        ("drop:1@5-9:1.5", "drop takes a probability above 0, at most 1, not '1.5'"),
        ("drop:1@5-9:nan", "drop takes a probability"),
        ("reset:1@5:7", "reset takes nothing, not '7'"),
        ("flip:1@5:7", "flip takes nothing, not '7'"),
        ("flip:1@5-9", "flip has one step only, as in flip:2@50"),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_item_named(text: str, part: str) -> None:
    with pytest.raises(ChaosError, match="chaos item") as caught:
        parse(text, world_size=4)
    assert part in str(caught.value)


@given(st.text(max_size=40))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        schedule = parse(text)
    except ChaosError:
        return
    assert parse(str(schedule)) == schedule
