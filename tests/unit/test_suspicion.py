"""Who suspects whom, who is asked, who is killed, and who ends: one story for each rule."""

from __future__ import annotations

import pytest

from mpift.core.membership import View, initial_view
from mpift.core.suspicion import (
    Condemned,
    Ended,
    Event,
    Examine,
    Examined,
    Finding,
    Heard,
    Installed,
    Instruction,
    Missed,
    Rebuild,
    Stop,
    Suspicion,
    Tell,
    Tick,
    Told,
)

TWO_NODES_OF_2 = (0, 0, 1, 1)
FOUR_NODES_OF_1 = (0, 1, 2, 3)


def rank(member: int, nodes: tuple[int, ...] = FOUR_NODES_OF_1) -> Suspicion:
    """A rank that suspects nobody, in epoch 0."""
    return Suspicion(member, initial_view(len(nodes)), nodes)


def after(machine: Suspicion, *events: Event) -> tuple[Suspicion, list[Instruction]]:
    """The machine after all ``events``, and what it wanted done at the last one."""
    instructions: tuple[Instruction, ...] = ()
    for event in events:
        machine, instructions = machine.handle(event)
    return machine, list(instructions)


def misses(member: int, for_good: bool = False, epoch: int = 0) -> Missed:
    return Missed(epoch, member, for_good)


def hears(member: int, epoch: int = 0) -> Heard:
    return Heard(epoch, member)


def told_by(observer: int, *suspects: int, epoch: int = 0) -> Told:
    return Told(epoch, observer, frozenset(suspects))


def finds(member: int, finding: Finding, epoch: int = 0) -> Examined:
    return Examined(epoch, member, finding)


def asks(member: int) -> Examine:
    return Examine(0, member, kill=False)


def kills(member: int) -> Examine:
    return Examine(0, member, kill=True)


def tells(to: int, *suspects: int) -> Tell:
    return Tell(to, frozenset(suspects))


def answered(
    machine: Suspicion, instructions: list[Instruction], findings: dict[int, Finding]
) -> list[Instruction]:
    """What else it wants done while each question is answered as ``findings`` say, and at the next
    tick."""
    rest: list[Instruction] = []
    while instructions:
        instruction = instructions.pop(0)
        if isinstance(instruction, Examine):
            event = finds(instruction.member, findings[instruction.member])
            machine, more = machine.handle(event)
            instructions += more
        else:
            rest.append(instruction)
    return [*rest, *machine.handle(Tick())[1]]


def may_restart(instructions: list[Instruction]) -> bool:
    (stop,) = instructions
    assert isinstance(stop, Stop), stop
    return stop.may_restart


# -- who is told -----------------------------------------------------------------------------------


def test_a_suspicion_is_told_to_the_coordinator() -> None:
    _, instructions = after(rank(2), misses(3))
    assert instructions == [tells(0, 3)]


def test_what_is_still_true_is_told_again_at_each_tick_since_a_word_may_be_lost() -> None:
    machine, instructions = after(rank(2), misses(3), Tick())
    assert instructions == [tells(0, 3)]
    assert after(machine, Tick())[1] == [tells(0, 3)]


def test_a_rank_that_suspects_nobody_says_nothing() -> None:
    assert after(rank(2), Tick())[1] == []


def test_a_suspect_that_is_heard_again_is_taken_back() -> None:
    _, instructions = after(rank(2), misses(3), hears(3))
    assert instructions == [tells(0)]


def test_the_first_of_another_node_stands_in_for_a_silent_coordinator() -> None:
    _, instructions = after(rank(3, TWO_NODES_OF_2), misses(0))
    assert instructions == [tells(2, 0)]


def test_the_neighbours_of_a_silent_coordinator_come_last_in_line() -> None:
    assert rank(0, (0, 0, 1, 1, 2)).line == (0, 2, 4, 1, 3)
    _, instructions = after(rank(3, TWO_NODES_OF_2), misses(0), misses(2))
    assert instructions == [tells(1, 0, 2)]


def test_one_that_stands_in_acts_on_what_it_is_told() -> None:
    _, instructions = after(rank(1), misses(0), told_by(3, 0))
    assert instructions == [asks(0)]


# -- two observers ---------------------------------------------------------------------------------


def test_the_suspicion_of_one_observer_has_no_consequence() -> None:
    assert after(rank(0), misses(3))[1] == []
    assert after(rank(0), told_by(2, 3))[1] == []
    assert after(rank(0), told_by(1, 3), told_by(2, 3))[1] == []


@pytest.mark.parametrize("events", [(misses(3), told_by(2, 3)), (told_by(2, 3), misses(3))])
def test_the_coordinator_and_one_more_observer_are_enough_to_ask(events: tuple[Event, ...]) -> None:
    assert after(rank(0), *events)[1] == [asks(3)]


def test_a_question_under_way_is_not_asked_twice() -> None:
    assert after(rank(0), misses(3), told_by(2, 3), told_by(1, 3), Tick())[1] == []


def test_the_word_of_one_that_is_silent_itself_does_not_count() -> None:
    assert after(rank(0), misses(2), misses(3), told_by(2, 3))[1] == []


def test_a_word_that_was_taken_back_does_not_count() -> None:
    assert after(rank(0), told_by(2, 3), told_by(2), misses(3))[1] == []


def test_a_word_that_is_not_said_again_has_expired_by_the_second_tick() -> None:
    machine, _ = after(rank(0), told_by(2, 3), Tick())
    assert after(machine, misses(3))[1] == [asks(3)]
    assert after(machine, Tick(), misses(3))[1] == []
    assert after(machine, told_by(2, 3), Tick(), misses(3))[1] == [asks(3)]


def test_in_a_view_of_two_the_kernel_is_the_second_observer() -> None:
    machine, instructions = after(rank(0, (0, 0)), misses(1))
    assert instructions == [asks(1)]
    assert after(machine, finds(1, Finding.ALIVE))[1] == []
    assert after(machine, finds(1, Finding.STANDS_STILL))[1] == [kills(1)]


def test_in_a_view_of_two_silence_alone_kills_nobody_however_long_it_lasts() -> None:
    machine, _ = after(rank(0, (0, 0)), misses(1), misses(1, for_good=True))
    assert after(machine, finds(1, Finding.ALIVE), Tick())[1] == [asks(1)]


def test_one_that_finds_all_others_silent_asks_by_itself_but_kills_nobody() -> None:
    machine, instructions = after(rank(2, (0, 1, 2)), misses(0), misses(1))
    assert instructions == [asks(0), asks(1)]
    machine, instructions = after(machine, finds(0, Finding.UNWATCHED), misses(0, for_good=True))
    assert kills(0) not in instructions


def test_one_deaf_rank_of_a_large_view_asks_and_does_not_end_the_job() -> None:
    deaf = rank(5, tuple(range(6)))
    events = [misses(m) for m in (0, 1, 2, 3)]
    machine, instructions = after(deaf, *events)
    assert [i for i in instructions if isinstance(i, Examine)] == [asks(m) for m in (0, 1, 2, 3)]
    assert not machine.stopped


# -- the suspect's node ----------------------------------------------------------------------------


def test_one_that_its_watchdog_vouches_for_is_asked_about_again_at_each_tick() -> None:
    machine, _ = after(rank(0), misses(3), told_by(2, 3))
    machine, instructions = after(machine, finds(3, Finding.ALIVE))
    assert instructions == []
    machine, instructions = after(machine, Tick())
    assert instructions == [asks(3)]


def test_it_is_killed_once_it_has_been_silent_for_good() -> None:
    machine, _ = after(rank(0), misses(3), told_by(2, 3), finds(3, Finding.ALIVE))
    assert after(machine, misses(3, for_good=True))[1] == [kills(3)]


def test_for_good_by_the_word_of_one_observer_kills_nobody() -> None:
    assert after(rank(0), misses(3), misses(3, for_good=True), Tick())[1] == []


def test_one_that_is_heard_again_has_its_whole_time_anew() -> None:
    machine, _ = after(rank(0), misses(3), misses(3, for_good=True), hears(3), misses(3))
    assert after(machine, told_by(2, 3))[1] == [asks(3)]


def test_a_suspect_that_no_watchdog_sees_is_killed_by_whoever_can() -> None:
    machine, _ = after(rank(0, TWO_NODES_OF_2), misses(3), told_by(2, 3))
    assert after(machine, finds(3, Finding.UNWATCHED))[1] == [kills(3)]


def test_one_that_was_heard_while_it_was_asked_about_is_not_killed() -> None:
    machine, _ = after(rank(0, TWO_NODES_OF_2), misses(3), told_by(2, 3), hears(3))
    for finding in (Finding.UNWATCHED, Finding.STANDS_STILL, Finding.UNREACHABLE):
        assert after(machine, finds(3, finding))[1] == []


def test_having_stood_still_before_it_was_heard_is_not_held_against_it() -> None:
    machine, _ = after(rank(0, (0, 0)), misses(1), hears(1), finds(1, Finding.STANDS_STILL))
    assert after(machine, misses(1))[1] == [asks(1)]


# -- who is left out -------------------------------------------------------------------------------


def test_a_member_is_left_out_once_the_system_has_said_that_it_is_gone() -> None:
    machine, _ = after(rank(0, TWO_NODES_OF_2), misses(3), told_by(2, 3))
    machine, instructions = after(machine, finds(3, Finding.UNWATCHED))
    assert instructions == [kills(3)]
    machine, instructions = after(machine, finds(3, Finding.GONE))
    assert instructions == [Rebuild(frozenset({3}))]
    assert after(machine, Tick())[1] == []


def test_two_that_are_gone_are_left_out_together() -> None:
    machine, _ = after(rank(0), misses(2), misses(3), told_by(1, 2, 3), finds(2, Finding.GONE))
    assert after(machine, finds(3, Finding.GONE))[1] == [Rebuild(frozenset({2, 3}))]


def test_a_condemned_member_is_killed_though_everybody_hears_it() -> None:
    machine, instructions = after(rank(0), Condemned(0, 3))
    assert instructions == [kills(3)]
    assert after(machine, finds(3, Finding.GONE))[1] == [Rebuild(frozenset({3}))]


def test_a_condemned_member_that_could_not_be_killed_is_tried_again_at_the_next_tick() -> None:
    assert after(rank(0), Condemned(0, 3), finds(3, Finding.ALIVE), Tick())[1] == [kills(3)]


# -- cuts ------------------------------------------------------------------------------------------


def test_the_larger_side_of_a_cut_ends_and_may_be_started_again() -> None:
    machine, instructions = after(rank(0), misses(3), told_by(1, 3))
    here = {1: Finding.UNWATCHED, 2: Finding.UNWATCHED, 3: Finding.UNREACHABLE}
    assert may_restart(answered(machine, instructions, here))


def test_the_smaller_side_of_a_cut_ends_for_good() -> None:
    machine, instructions = after(rank(3), misses(0), misses(1), misses(2))
    away = dict.fromkeys((0, 1, 2), Finding.UNREACHABLE)
    stops = answered(machine, instructions, away)
    assert not may_restart(stops[:1])


def test_of_two_halves_none_calls_itself_the_larger() -> None:
    machine, instructions = after(rank(0, TWO_NODES_OF_2), misses(2), told_by(1, 2))
    away = dict.fromkeys((2, 3), Finding.UNREACHABLE)
    assert not may_restart(answered(machine, instructions, away))


def test_a_cut_is_seen_whole_before_it_is_judged() -> None:
    # Members 2 and 3 are cut off; the silence of 3 has not lasted long enough to be noticed.
    machine, instructions = after(rank(0), misses(2), told_by(1, 2))
    found = {1: Finding.UNWATCHED, 2: Finding.UNREACHABLE, 3: Finding.UNREACHABLE}
    assert not may_restart(answered(machine, instructions, found))


def test_nothing_is_judged_when_the_suspect_is_heard_while_the_other_nodes_are_asked() -> None:
    machine, _ = after(rank(0), misses(2), told_by(1, 2), finds(2, Finding.UNREACHABLE))
    machine, _ = after(machine, hears(2))
    for member in (1, 3):
        machine, instructions = after(machine, finds(member, Finding.UNWATCHED))
        assert instructions == []
    assert after(machine, Tick())[1] == []


def test_the_dead_are_no_part_of_a_side_even_if_a_late_beat_of_theirs_was_heard() -> None:
    three = rank(0, (0, 1, 2))
    machine, _ = after(three, misses(1), told_by(2, 1), finds(1, Finding.GONE), hears(1))
    machine, instructions = after(machine, misses(2))
    away = {2: Finding.UNREACHABLE}
    assert not may_restart(answered(machine, instructions, away))


# -- the end, and another view ---------------------------------------------------------------------


def test_one_that_is_told_to_end_passes_it_on_and_ends_likewise() -> None:
    machine, instructions = after(rank(2), Ended(True, "member 3 is silent"))
    assert instructions == [Stop(True, "member 3 is silent")]
    for event in (misses(0), Tick(), Ended(False, ""), Installed(View(1, (0, 1)), (0, 1))):
        assert machine.handle(event) == (machine, ())


@pytest.mark.parametrize(
    "event",
    [
        misses(3, epoch=1),
        told_by(2, 3, epoch=1),
        Condemned(1, 3),
        finds(3, Finding.GONE, epoch=1),
        misses(0),
        misses(7),
        told_by(7, 3),
    ],
    ids=str,
)
def test_what_belongs_to_another_view_or_to_a_stranger_is_dropped(event: Event) -> None:
    suspicious, _ = after(rank(0), misses(3))
    assert suspicious.handle(event) == (suspicious, ())


def test_a_new_view_starts_afresh() -> None:
    machine, _ = after(rank(0), misses(3), told_by(2, 3), finds(3, Finding.GONE), Condemned(0, 1))
    view = View(1, (0, 1, 2))
    machine, instructions = after(machine, Installed(view, (0, 1, 2)))
    assert machine == Suspicion(0, view, (0, 1, 2))
    assert instructions == []
    assert after(machine, misses(2, epoch=1), told_by(1, 2, epoch=0))[1] == []
    assert after(machine, misses(2, epoch=1), told_by(1, 2, epoch=1))[1] == [Examine(1, 2, False)]
