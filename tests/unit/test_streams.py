"""What mpirun prints, told apart: ranks' lines, events, noise, and that a job was aborted."""

from __future__ import annotations

import pytest

from mpift.core import events
from mpift.launch.streams import Aborted, Item, Output, Splitter, Words

END = events.ProcessEnded(9.0, 0, "vm", 1, 0, None)


def split(*chunks: bytes, hide_noise: bool = True) -> list[Item]:
    splitter = Splitter(hide_noise)
    return [
        *(item for chunk in chunks for item in splitter.feed(chunk)),
        *splitter.finish(),
    ]


def record(event: events.Event) -> bytes:
    return b"\x1e" + events.encode(event).encode()


def test_lines_are_told_apart_by_rank_and_stream_wherever_they_are_cut() -> None:
    text = b"[1]<stdout>: one\n[12]<stderr>: \xff two\nmpirun itself\n[0]<stdout>: \n"
    items = [
        Output(1, "stdout", b"one"),
        Output(12, "stderr", b"\xff two"),
        Words(b"mpirun itself"),
        Output(0, "stdout", b""),
    ]
    assert split(text) == items
    assert split(*(text[i : i + 1] for i in range(len(text)))) == items


def test_the_labels_of_open_mpi_4_are_known_too() -> None:
    assert split(b"[1,3]<stderr>:text\n") == [Output(3, "stderr", b"text")]


def test_an_event_is_found_behind_a_piece_of_a_line() -> None:
    line = b"[0]<stderr>: loading 50 %" + record(END) + b"\n"
    assert split(line) == [Output(0, "stderr", b"loading 50 %"), END]
    assert split(b"[0]<stderr>: " + record(END) + b"\n") == [END]


def test_what_only_looks_like_an_event_stays_output() -> None:
    assert split(b"[0]<stdout>: a\x1eb\n") == [Output(0, "stdout", b"a\x1eb")]


def test_a_last_line_without_an_end_is_kept() -> None:
    assert split(b"[2]<stdout>: half[0]<stdout>: of it\n") == [
        Output(2, "stdout", b"half"),
        Output(0, "stdout", b"of it"),
    ]
    assert split(b"[0]<stdout>: half") == [Output(0, "stdout", b"half")]


def test_the_noise_of_a_survived_death_is_hidden_with_its_empty_line_and_nothing_else() -> None:
    noise = b"NBC_Progress: an error 75 was found during schedule 0x5 at row - aborting"
    text = (
        b"[1]<stderr>: " + noise + b"\n[2]<stderr>: \n[1]<stderr>: \n[1]<stderr>: \n"
        b"[2]<stderr>: see " + noise + b"\n"
    )
    shown = [
        Output(2, "stderr", b""),
        Output(1, "stderr", b""),
        Output(2, "stderr", b"see " + noise),
    ]
    assert split(text) == shown
    assert len(split(text, hide_noise=False)) == 5


@pytest.mark.parametrize(
    "text",
    [
        b"MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD",
        b"[vm:1] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
    ],
)
def test_an_abort_is_noticed_and_shown(text: bytes) -> None:
    items = split(b"[2]<stderr>: " + text + b"\n")
    assert items == [Aborted(2), Output(2, "stderr", text)]
