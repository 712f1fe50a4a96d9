"""Which checkpoints stay, and which files have so little in use that they are written anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.checkpoint.blocks import TensorSpec
from mpift.checkpoint.manifest import BlockFile, Manifest, Stored, TensorEntry
from mpift.checkpoint.retention import Order, files_to_compact, live_share, retained
from tests.unit.checkpoints import arrays, save

# -- the rule --------------------------------------------------------------------------------------


def test_the_newest_every_nth_and_the_pinned_stay() -> None:
    found = [((1, step), step, step == 130) for step in range(100, 200, 10)]
    kept = retained(found, keep=2, keep_every=50)
    assert kept == {(1, 100), (1, 130), (1, 150), (1, 180), (1, 190)}
    assert retained([], 3, None) == set()


def test_newest_means_of_the_latest_generation_and_not_the_highest_step() -> None:
    assert retained([((1, 900), 900, False), ((2, 100), 100, False)], 1, None) == {(2, 100)}


@pytest.mark.parametrize(("keep", "keep_every"), [(0, None), (1, 0)])
def test_keeping_nothing_is_refused(keep: int, keep_every: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        retained([], keep, keep_every)


founds = st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(0, 40)), st.booleans(), min_size=1
).map(lambda pins: [(order, order[1], pinned) for order, pinned in pins.items()])


@given(founds, st.integers(1, 5), st.none() | st.integers(1, 7))
def test_what_stays_is_what_the_rule_says_of_each(
    found: Sequence[tuple[Order, int, bool]], keep: int, keep_every: int | None
) -> None:
    kept = retained(found, keep, keep_every)
    for order, step, pinned in found:
        newer = sum(other > order for other, _, _ in found)
        every = keep_every is not None and step % keep_every == 0
        assert (order in kept) == (newer < keep or pinned or every)


# -- how much of a file is used --------------------------------------------------------------------


def manifest_of(**used: Sequence[int]) -> Manifest:
    """A manifest that uses MiB blocks at these places of files of 8 MiB."""
    mib = 1 << 20
    files = tuple(BlockFile(name, 8 * mib) for name in used)
    tensors = tuple(
        TensorEntry(
            TensorSpec(name, "uint8", (mib * len(places),)),
            tuple(Stored(name, "d", 0, place * mib, mib, "") for place in places),
        )
        for name, places in used.items()
    )
    return Manifest(1, (1, 1), "", "", 1, 0.0, "", files, tensors, {}, ({},))


def test_the_live_share_of_a_file_counts_each_used_block_once() -> None:
    manifests = [manifest_of(a=[0, 1]), manifest_of(a=[1, 2, 3], b=[0])]
    assert live_share(manifests, "a") == 4 / 8
    assert live_share(manifests, "b") == 1 / 8
    assert live_share(manifests, "c") == 0.0


def test_files_of_which_little_is_used_are_to_be_written_anew() -> None:
    manifests = [manifest_of(a=[0, 1, 2, 3], b=[0, 1, 2])]
    assert files_to_compact(manifests) == {"b"}
    assert files_to_compact(manifests, below=0.6) == {"a", "b"}


def test_small_files_are_not_written_anew_for_the_sake_of_their_headers(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 1, arrays(w=3))
    assert live_share([saved.manifest], saved.manifest.files[0].name) < 0.5
    assert files_to_compact([saved.manifest]) == set()
