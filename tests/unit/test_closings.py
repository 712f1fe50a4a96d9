"""Words of the coordinator, as a rank hears them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mpift.core import rounds
from mpift.core.membership import View
from mpift.reduction.gradients import RoundRules
from mpift.transport.closings import Closings
from mpift.transport.mailbox import Mailbox
from mpift.transport.messages import Kind, Message

RULES = RoundRules("majority", 1.0, True, 4)


def test_what_is_said_of_a_lane_before_this_rank_opens_it_is_heard_then() -> None:
    told: list[Any] = []
    mailbox = Mailbox()
    closings = Closings(
        mailbox,
        1.0,
        lambda lane, event: told.append((lane, event)),
        lambda lane: 0,
        lambda lane, round_, late: told.append((lane, round_, late)),
    )
    world: Any = SimpleNamespace(view=View(0, (0, 1, 2)), member=2)
    mailbox._world = world
    closings.install(world)
    closings.open(1, RULES)
    mailbox.deliver(Message(Kind.NUDGE, 0, 0, "2 0 2"))
    mailbox.deliver(Message(Kind.LANE_END, 0, 0, "3 5"))
    assert told == []
    closings.open(2, RULES)
    assert told == [(2, 0, [2]), (2, rounds.Nudged(0, 0))]
    closings.open(3, RULES)
    assert told[2:] == [(3, rounds.Ended(0, 5))]


def test_what_was_said_in_an_older_view_is_not_heard() -> None:
    told: list[Any] = []
    mailbox = Mailbox()
    closings = Closings(
        mailbox, 1.0, lambda *event: told.append(event), lambda lane: 0, lambda *_: None
    )
    for view in (View(0, (0, 1, 2)), View(1, (0, 2))):
        world: Any = SimpleNamespace(view=view, member=2)
        mailbox._world = world
        closings.install(world)
        if view.epoch == 0:
            mailbox.deliver(Message(Kind.NUDGE, 0, 0, "0 0"))
    closings.open(0, RULES)
    assert told == []
