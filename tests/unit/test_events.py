"""Events as lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpift.core import events
from mpift.observe import lines


def test_every_kind_of_event_survives_its_line() -> None:
    samples = [
        events.RankStarting(1.5, 0),
        events.RankStarted(1.5, 0, "node1", 17, 4),
        events.FaultInjected(1.5, 2, "kill:2@50", 50),
        events.ViewChanged(1.5, 0, 1, (0, 1, 3), (2,), 0.03),
        events.StepFinished(1.5, 0, 51, 1, 3),
        events.Reported(1.5, 0, {"loss": 0.25, "note": "fine"}),
        events.RankFailed(1.5, 2, "node1", 1, "ValueError: no", "Traceback ..."),
        events.RankLeft(1.5, 0, "node1", 100, 100),
        events.ProcessEnded(1.5, 2, "node1", 17, None, 9),
        events.RankStopped(1.5, 0, 3, "quorum lost"),
        events.JobStopped(1.5, 0, 1, "an exit from C"),
    ]
    for event in samples:
        assert events.decode(events.encode(event)) == event


def test_the_launcher_knows_every_kind_of_event() -> None:
    kinds = {kind.__name__ for kind in events.Event.__subclasses__()}
    assert kinds == set(events._KINDS)


def test_a_long_traceback_keeps_its_end_and_fits_a_pipe() -> None:
    event = events.RankFailed(1.5, 2, "node1", 1, "why", "x" * 10_000 + "the end")
    line = events.encode(event)
    assert len(line) < 4096
    decoded = events.decode(line)
    assert isinstance(decoded, events.RankFailed)
    assert decoded.traceback.endswith("the end")


def test_texts_are_cut_by_bytes_not_characters() -> None:
    line = events.encode(events.RankFailed(1.5, 2, "node1", 1, "E", "错误" * 5000))
    assert len(line.encode()) <= events.LINE_BYTES_MAX
    decoded = events.decode(line)
    assert isinstance(decoded, events.RankFailed)
    assert decoded.reason == "E"
    assert decoded.traceback.endswith("错误")


def test_half_a_surrogate_does_not_stop_an_event() -> None:
    assert events.decode(events.encode(events.RankFailed(1.5, 2, "n", 1, "\ud800"))) is not None


def test_fields_of_a_newer_version_are_passed_over() -> None:
    line = '{"kind":"StepFinished","time":1,"member":0,"step":3,"epoch":0,"size":4,"new":1}'
    assert events.decode(line) == events.StepFinished(1, 0, 3, 0, 4)


@given(st.text(max_size=80))
def test_no_line_raises(text: str) -> None:
    events.decode(text)


def test_what_a_person_should_know_is_put_in_words() -> None:
    words = lines.in_words(events.ViewChanged(0.0, 0, 1, (0, 1, 3), (2,), 0.0251))
    assert words == "lost member 2; 3 ranks go on (rebuilt in 0.025 s)"
    told = events.ViewChanged(0.0, 0, 1, (0,), (1, 2), 0.03, ("ValueError: no",))
    assert "lost member 1, 2 (ValueError: no); 1 rank goes on" in str(lines.in_words(told))
    assert lines.in_words(events.StepFinished(0.0, 0, 3, 0, 4)) is None
    stopped = lines.in_words(events.JobStopped(0.0, 0, 3, "no majority"))
    assert stopped is not None
    assert "no majority" in stopped
