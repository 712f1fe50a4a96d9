"""What ranks end with alike is shown once, whatever differs is shown, and nothing is kept back."""

from __future__ import annotations

from collections.abc import Sequence

from mpift.launch.streams import Output
from mpift.launch.tracebacks import GATHER_SECONDS, HOLD_SECONDS, Tracebacks

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "RuntimeError: shapes cannot be multiplied",
    "and a second line of that",
]
OTHER = [*TRACEBACK[:-1], "and a second line, on rank 1"]


def line(member: int, text: str, stream: str = "stderr") -> Output:
    return Output(member, stream, text.encode())


def write(
    found: Tracebacks, member: int, texts: Sequence[str], now: float = 0.0, stream: str = "stderr"
) -> list[Output]:
    return [shown for text in texts for shown in found.take(line(member, text, stream), now)]


def lines(member: int, texts: Sequence[str]) -> list[Output]:
    return [line(member, text) for text in texts]


def test_what_ranks_end_with_alike_is_shown_once_and_whole_although_they_write_in_turn() -> None:
    found = Tracebacks()
    for text in TRACEBACK:
        for member in (2, 0, 1):
            assert write(found, member, [text]) == []
    assert found.ended(2, 0.1) == lines(2, TRACEBACK)
    assert found.ended(0, 0.1) == found.ended(1, 0.2) == ()
    assert found.news(0.1 + GATHER_SECONDS / 2) == []
    assert found.news(0.2 + GATHER_SECONDS) == [
        "ranks 0, 1 ended with the same traceback as rank 2"
    ]
    assert found.news(9.0) == []
    assert [found.repeats(member) for member in (0, 1, 2)] == [True, True, False]
    assert found.latest == ("\n".join(TRACEBACK),)


def test_tracebacks_that_differ_anywhere_are_all_shown() -> None:
    found = Tracebacks()
    assert write(found, 0, TRACEBACK) == write(found, 1, OTHER) == []
    assert found.ended(0, 0.1) == lines(0, TRACEBACK)
    assert found.ended(1, 0.1) == lines(1, OTHER)
    assert found.news(9.0) == []


def test_a_rank_that_goes_on_after_a_traceback_has_it_shown_and_repeats_nothing() -> None:
    found = Tracebacks()
    for member in (0, 1):
        assert write(found, member, TRACEBACK) == []
    assert found.due(HOLD_SECONDS / 2) == []
    assert found.due(HOLD_SECONDS) == lines(0, TRACEBACK) + lines(1, TRACEBACK)
    assert found.latest == ()
    assert found.ended(0, 9.0) == ()
    assert not found.repeats(0)


def test_other_output_does_not_wait() -> None:
    found = Tracebacks()
    assert write(found, 0, ["a warning"]) == [line(0, "a warning")]
    assert write(found, 0, TRACEBACK) == []
    assert write(found, 0, ["loss 0.1"], stream="stdout") == [line(0, "loss 0.1", "stdout")]
    assert write(found, 1, ["a warning"]) == [line(1, "a warning")]
    assert found.ended(0, 0.1) == lines(0, TRACEBACK)
    assert write(found, 0, ["exit handlers"]) == [line(0, "exit handlers")]
    assert found.latest == ()  # something came after it


def test_a_flood_of_lines_is_let_go() -> None:
    found = Tracebacks()
    flood = [TRACEBACK[0], *["  line"] * 5000]
    assert write(found, 0, flood) + list(found.finish(0.0)) == lines(0, flood)


def test_at_the_end_of_the_job_nothing_is_kept_back() -> None:
    found = Tracebacks()
    for member in (0, 1, 2):
        write(found, member, OTHER if member == 1 else TRACEBACK)
    assert found.finish(0.1) == lines(0, TRACEBACK) + lines(1, OTHER)
    assert found.news(float("inf")) == ["rank 2 ended with the same traceback as rank 0"]
