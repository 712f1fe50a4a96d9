"""Arenas: where everything lies in a node's regions, and that no other file is taken for one."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpift.core.sharing import RESULTS_KEPT, Kind, Stamp
from mpift.errors import GradientError, MpiftError
from mpift.reduction import arena
from mpift.reduction.arena import Arena
from mpift.reduction.buckets import Layout, ParameterSpec, lay_out

PAGE = 4096


def layout_of(*sizes: int, dtype: str = "float32") -> Layout:
    specs = [ParameterSpec(f"p{n}", size, dtype) for n, size in enumerate(reversed(sizes))]
    return lay_out(specs, 1, 1)


LAYOUT = layout_of(5, 3000)


def test_sizes_are_known_beforehand_in_whole_pages() -> None:
    buckets = [PAGE, 3 * PAGE]  # 5 and 3000 float32 with their counts
    assert arena.contributions_bytes(LAYOUT) == PAGE + sum(buckets)
    assert arena.results_bytes(LAYOUT) == PAGE + RESULTS_KEPT * sum(buckets)
    assert arena.arena_bytes(LAYOUT, 8) == 8 * (PAGE + sum(buckets)) + PAGE + 2 * sum(buckets)
    many = layout_of(*[5] * 100)  # whose stamps need more than a page
    assert arena.contributions_bytes(many) == 2 * PAGE + 100 * PAGE
    # 1020 float64 and four counts end on a page's border.
    assert arena.contributions_bytes(layout_of(1020, dtype="float64")) == PAGE + 2 * PAGE


def open_node(folder: Path, layout: Layout, members: Sequence[int]) -> list[Arena]:
    """Each of the members' own, with maps of its own."""
    size_bytes, of_results = arena.contributions_bytes(layout), arena.results_bytes(layout)
    own = {m: arena.create(folder / f"r{m}", layout, size_bytes) for m in members}
    arena.create(folder / "results", layout, of_results)
    found = []
    for member in members:
        others = {
            m: arena.attach(folder / f"r{m}", layout, size_bytes) for m in members if m != member
        }
        results = arena.attach(folder / "results", layout, of_results)
        found.append(Arena(layout, member, [*members, 99], own[member], others, results))
    return found


MANY = layout_of(*[7] * 100, dtype="float64")


@pytest.mark.parametrize(
    "layout", [LAYOUT, MANY, layout_of(1020, dtype="bfloat16")], ids=["two", "many", "page"]
)
def test_what_each_rank_writes_all_of_its_node_read_and_nothing_overlaps(
    tmp_path: Path, layout: Layout
) -> None:
    members = (2, 5, 7)
    ranks = open_node(tmp_path, layout, members)
    for rank in ranks:
        assert rank.members == members
        assert rank.everybody == {*members, 99}
        for number, (bucket, home) in enumerate(zip(layout.buckets, rank.homes, strict=True)):
            assert home.shape == (bucket.length,)
            assert home.dtype == bucket.dtype
            assert rank.contribution(rank.member, number) is home
            home[:] = 1000 * rank.member + number
            rank.put(number, Stamp(rank.member + number, Kind.REAL))
            ranks[number % 3].result(0, number)[:] = -number
            ranks[number % 3].result(1, number)[:] = -1000 - number
    for reader in ranks:
        for number in range(len(layout.buckets)):
            for member in members:
                assert reader.stamp(member, number) == Stamp(member + number, Kind.REAL)
                assert (reader.contribution(member, number) == 1000 * member + number).all()
            for round_ in range(6):
                result = reader.result(round_, number)
                assert result is reader.results[round_ % RESULTS_KEPT][number]
                assert (result == -1000 * (round_ % RESULTS_KEPT) - number).all()


def test_stamps_say_nothing_at_first_and_after_they_were_cleared(tmp_path: Path) -> None:
    one, two = open_node(tmp_path, LAYOUT, (0, 1))
    assert [two.stamp(0, bucket).round for bucket in (0, 1)] == [-1, -1]
    for kind in Kind:
        one.put(0, Stamp(7, kind))
        assert two.stamp(0, 0) == Stamp(7, kind)
        assert two.stamp(0, 1).round == -1
    one.put(1, Stamp(7, Kind.ALARM))
    two.put(0, Stamp(7, Kind.REAL))
    one.clear()
    assert [two.stamp(0, bucket).round for bucket in (0, 1)] == [-1, -1]
    assert one.stamp(1, 0) == Stamp(7, Kind.REAL), "that is another rank's"


@pytest.mark.parametrize(
    "other",
    [layout_of(3000, 5), layout_of(5, 3001), layout_of(5, 3000, dtype="float64"), layout_of(5)],
    ids=["order", "length", "dtype", "buckets"],
)
def test_a_region_for_other_gradients_is_refused(tmp_path: Path, other: Layout) -> None:
    path = tmp_path / "region"
    size_bytes = arena.contributions_bytes(LAYOUT)
    arena.create(path, other, arena.contributions_bytes(other))
    with pytest.raises(GradientError, match="region was made for other gradients: ranks have"):
        arena.attach(path, LAYOUT, size_bytes)


def test_a_region_that_is_another_ones_or_of_another_size_is_refused(tmp_path: Path) -> None:
    size_bytes = arena.contributions_bytes(LAYOUT)
    arena.create(tmp_path / "a", LAYOUT, size_bytes)
    arena.attach(tmp_path / "a", LAYOUT, size_bytes)
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(GradientError, match="made for other gradients"):
        arena.attach(tmp_path / "b", LAYOUT, size_bytes)
    for length in (size_bytes - 1, 32, 1):
        os.truncate(tmp_path / "a", length)
        with pytest.raises(GradientError, match="made for other gradients"):
            arena.attach(tmp_path / "a", LAYOUT, size_bytes)
    os.truncate(tmp_path / "a", 0)
    with pytest.raises(MpiftError, match="not a file with contents"):
        arena.attach(tmp_path / "a", LAYOUT, size_bytes)


def test_a_foreign_file_of_the_right_size_is_refused_and_left_alone(tmp_path: Path) -> None:
    path, size_bytes = tmp_path / "region", arena.contributions_bytes(LAYOUT)
    path.write_bytes(b"x" * size_bytes)
    path.chmod(0o600)
    with pytest.raises(GradientError, match="made for other gradients"):
        arena.attach(path, LAYOUT, size_bytes)
    with pytest.raises(FileExistsError):
        arena.create(path, LAYOUT, size_bytes)
    assert path.read_bytes() == b"x" * size_bytes
    with pytest.raises(FileNotFoundError):
        arena.attach(tmp_path / "none", LAYOUT, size_bytes)


def test_where_there_is_no_space_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    size_bytes = arena.contributions_bytes(LAYOUT)
    with pytest.raises(MpiftError, match=f"needs {size_bytes} bytes of shared memory"):
        arena.create(tmp_path / "region", LAYOUT, size_bytes)
    assert list(tmp_path.iterdir()) == []
