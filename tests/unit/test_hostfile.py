"""Hostfiles and host lists: every grammar is read, and every mistake is pointed at."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.errors import HostfileError
from mpift.launch.hostfile import (
    Host,
    format_hostfile,
    format_hosts,
    parse_hostfile,
    parse_hosts,
    read,
)

HOSTFILES = Path(__file__).resolve().parents[2] / "hostfiles"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=4 max_slots=8", [Host("a", 4, 8)]),
        ("a max-slots=8 slots = 4 # both orders, spaces", [Host("a", 4, 8)]),
        ("\n  # nothing\n\ta\tslots=2\r\n", [Host("a", 2)]),
        ("a:4\nb:2", [Host("a", 4), Host("b", 2)]),
        ("a:4,b:2", [Host("a", 4), Host("b", 2)]),
        ("node[01-03,07] slots=8", [Host(f"node{n}", 8) for n in ("01", "02", "03", "07")]),
        ("rack[1-2]n[1-2]:3", [Host(f"rack{r}n{n}", 3) for r in (1, 2) for n in (1, 2)]),
        ("10.0.0.1 slots=2", [Host("10.0.0.1", 2)]),
        ("a", [Host("a", None)]),
        ("^b\na slots=1\nb slots=1\nc slots=1\n^c", [Host("a", 1)]),
        ("n[1-4] slots=2\n^n[2-3]", [Host("n1", 2), Host("n4", 2)]),
    ],
)
def test_each_launchers_grammar_is_read(text: str, hosts: list[Host]) -> None:
    assert list(parse_hostfile(text)) == hosts


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a slots=2\nb slots=1\na slots=3", Host("a", 5)),
        ("a\nb slots=1\na", Host("a", 2)),
        ("a slots=2 max_slots=2\nb slots=1\na slots=2 max_slots=3", Host("a", 4, 5)),
        ("a slots=2 max_slots=2\nb slots=1\na slots=2", Host("a", 4, None)),
    ],
)
def test_a_host_named_again_adds_its_slots_and_keeps_its_place(text: str, host: Host) -> None:
    assert parse_hostfile(text) == (host, Host("b", 1))


def test_a_host_list_gives_one_rank_to_each_naming_without_a_number() -> None:
    assert parse_hosts("a,b,a") == (Host("a", 2), Host("b", 1))
    assert parse_hosts(" a:2 , n[1-2]:3 ") == (Host("a", 2), Host("n1", 3), Host("n2", 3))


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a slots=1\nb slots=four", "f:2:9:", "slots: expected a number from 1 to 999999"),
        ("a slots=0", "f:1:9:", "expected a number"),
        ("a slots=", "f:1:9:", "expected a number"),
        ("  a port=22", "f:1:5:", "'port=22' is not known here, expected slots=N or max_slots=N"),
        ("a slots", "f:1:3:", "is not known here"),
        ("a slots=2 slots=3", "f:1:11:", "slots is given twice"),
        ("a:2 slots=3", "f:1:1:", "slots given twice"),
        ("a slots=4 max_slots=2", "f:1:1:", "max_slots=2 is less than the 4 slots"),
        ("slots=4", "f:1:1:", "expected a host first"),
        ("a:x", "f:1:3:", "expected a number"),
        ("n[1-", "f:1:2:", "this bracket is not closed"),
        ("n1]", "f:1:3:", "this bracket has no counterpart"),
        ("n[4-1]", "f:1:1:", "not a node list"),
        ("a,-b", "f:1:3:", "'-b' is not a host name"),
        ("[fe80::1]:2", "f:1:1:", "no IPv6 address"),
        ("^a slots=2", "f:1:2:", "'a slots=2' is not a host name"),
        ("# nothing\n", "f:", "there is no host in it"),
        ("a slots=1\n^a", "f:", "there is no host in it"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_column(text: str, place: str, words: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "f")
    assert str(caught.value).startswith(place)
    assert words in str(caught.value)


def test_a_mistake_is_shown_with_a_caret_under_it() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("ok\n  node1 slots=four # comment", "hosts")
    assert str(caught.value).splitlines()[1:] == ["    node1 slots=four # comment", " " * 16 + "^"]


def test_an_empty_item_of_a_host_list_is_a_mistake() -> None:
    for text, column in (("a:2,,b", 5), ("a,", 3), ("", 1)):
        with pytest.raises(HostfileError, match=f"--hosts:{column}: expected a host"):
            parse_hosts(text)


def test_a_file_that_cannot_be_read_is_a_hostfile_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        with pytest.raises(HostfileError, match="cannot be read as a hostfile"):
            read(path)


@pytest.mark.parametrize(
    ("name", "hosts", "slots"),
    [("local", 1, 4), ("small-cluster", 4, 32), ("large-cluster", 11, 88)],
)
def test_the_shipped_examples_can_be_read(name: str, hosts: int, slots: int) -> None:
    found = read(HOSTFILES / name)
    assert (len(found), sum(host.slots or 0 for host in found)) == (hosts, slots)


NAMES = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9_])?", fullmatch=True)


@st.composite
def some_hosts(draw: st.DrawFn) -> tuple[Host, ...]:
    hosts = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        slots = draw(st.none() | st.integers(1, 999_999))
        limit = draw(st.none() | st.integers(slots or 1, 999_999))
        hosts.append(Host(name, slots, limit))
    return tuple(hosts)


@given(some_hosts())
def test_hosts_written_as_a_hostfile_read_back_the_same(hosts: tuple[Host, ...]) -> None:
    assert parse_hostfile(format_hostfile(hosts)) == hosts


@given(some_hosts())
def test_hosts_written_as_a_list_keep_names_and_slots(hosts: tuple[Host, ...]) -> None:
    known = [Host(host.name, host.slots or 1) for host in hosts]
    assert list(parse_hosts(format_hosts(known))) == known


# Mostly what almost is a hostfile, now and then anything at all.
ALMOST = st.lists(
    st.sampled_from(
        ["a", "n", "1", "0", "[", "]", "-", ",", ":", "^", "#", "=", " ", "\t", "\n", "slots",
         "max_slots=", "slots=2", "[1-3]", "[01-", "é", "٣", "\x00", "\r", "9" * 30]
    ),
    max_size=30,
).map("".join)  # fmt: skip


@given(st.text(max_size=60) | ALMOST)
def test_whatever_the_text_nothing_but_a_hostfile_error_is_raised(text: str) -> None:
    for parse in (parse_hostfile, parse_hosts):
        with contextlib.suppress(HostfileError):
            hosts = parse(text)
            assert hosts
            assert all(host.slots is None or host.slots > 0 for host in hosts)


def test_a_node_list_that_would_never_end_is_refused() -> None:
    for text in ("n[1-999999999]", "n" + "[1-999]" * 4, "n" + "[1]" * 2000, "n[1-" + "9" * 5000):
        with pytest.raises(HostfileError):
            parse_hosts(text)
