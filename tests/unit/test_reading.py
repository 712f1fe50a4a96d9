"""Reading blocks back: straight into place, checked, and every damage told by name."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mpift.checkpoint import blockfile, blocks, reading
from mpift.checkpoint.blocks import TensorSpec
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.manifest import BlockFile, Stored
from mpift.errors import CheckpointDamagedError

BLOCK_BYTES = 4096
SPEC = TensorSpec("model/w", "float32", (10, 1000), BLOCK_BYTES)
Written = tuple[Path, NDArray[np.uint8], BlockFile, list[Stored]]


def write(root: Path, seed: int, encode: bool) -> Written:
    (root / "blocks").mkdir(exist_ok=True)
    values = np.random.default_rng(seed).normal(0, 0.02, 10_000).astype("f4").view("u1")
    pieces = [values[start:stop] for start, stop in SPEC.blocks()]
    written = [
        blocks.Block(piece, "float32", BLOCK_BYTES, blocks.digest(piece, "float32"))
        for piece in pieces
    ]
    file, stored = blockfile.write_blocks(Disk(), root, f"{seed}.h5", written, encode, 1)
    (root / file.name).chmod(0o644)
    return root, values, file, stored


@pytest.fixture(params=[False, True], ids=["raw", "encoded"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return write(tmp_path, 1, request.param)


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


PIECE = reading.RUN_BYTES


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, NDArray[np.uint8], TensorSpec, Stored]:
    """A block that is read in pieces, the last of them shorter."""
    (tmp_path / "blocks").mkdir()
    spec = TensorSpec("model/w", "uint8", (2 * PIECE + 100,), 4 * PIECE)
    values = np.random.default_rng(3).integers(0, 256, spec.size_bytes, np.uint8)
    block = blocks.Block(values, "uint8", spec.block_bytes, blocks.digest(values, "uint8"))
    file, [stored] = blockfile.write_blocks(Disk(), tmp_path, "a.h5", [block], False, 1)
    (tmp_path / file.name).chmod(0o644)
    return tmp_path, values, spec, stored


def test_a_large_block_is_read_in_pieces(
    large: tuple[Path, NDArray[np.uint8], TensorSpec, Stored],
) -> None:
    root, values, spec, stored = large
    np.testing.assert_array_equal(reading.read_block(root, stored, spec, 0), values)


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE, 2 * PIECE + 99])
def test_damage_in_any_piece_of_a_large_block_is_told(
    large: tuple[Path, NDArray[np.uint8], TensorSpec, Stored], at: int
) -> None:
    root, _, spec, stored = large
    path = root / stored.file
    change(path, stored.offset + at)
    with pytest.raises(CheckpointDamagedError, match="its digest is"):
        reading.read_block(root, stored, spec, 0)
    os.truncate(path, stored.offset + at)
    with pytest.raises(CheckpointDamagedError, match=f"{at} are left"):
        reading.read_block(root, stored, spec, 0)


def test_each_block_comes_back_alone(written: Written) -> None:
    root, values, _, stored = written
    for index, (start, stop) in enumerate(SPEC.blocks()):
        got = reading.read_block(root, stored[index], SPEC, index)
        np.testing.assert_array_equal(got, values[start:stop])


@pytest.mark.parametrize("threads", [1, 3])
def test_many_go_straight_to_their_places_and_each_is_reported(
    written: Written, threads: int
) -> None:
    root, values, _, stored = written
    out = np.zeros_like(values)
    done: list[int] = []

    def report(index: int) -> Callable[[], None]:
        return lambda: done.append(index)

    jobs = [
        (stored[index], SPEC, index, out[start:stop], report(index))
        for index, (start, stop) in enumerate(SPEC.blocks())
    ]
    with reading.Reader(root) as reader:
        reader.read_many(jobs, threads)
    np.testing.assert_array_equal(out, values)
    assert sorted(done) == list(range(SPEC.block_count))


def test_neighbours_in_the_file_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, values, _, stored = write(tmp_path, 1, encode=False)
    sizes: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(len(views))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    out = np.zeros_like(values)
    jobs = [(stored[i], SPEC, i, out[a:b], None) for i, (a, b) in enumerate(SPEC.blocks())]
    with reading.Reader(root) as reader:
        reader.read_many([*jobs[5:], *jobs[:5]], 1)
    assert sizes == [4, 1, 5]  # the tensor's end is in a dataset of its own
    np.testing.assert_array_equal(out, values)


def test_a_read_that_returns_less_is_gone_on_with(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, values, _, stored = written
    preadv = os.preadv

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [views[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", short)
    out = np.zeros_like(values)
    jobs = [(stored[i], SPEC, i, out[a:b], None) for i, (a, b) in enumerate(SPEC.blocks())]
    with reading.Reader(root) as reader:
        reader.read_many(jobs, 1)
    np.testing.assert_array_equal(out, values)


def test_one_flipped_bit_anywhere_in_a_block_is_found_and_named(written: Written) -> None:
    root, _, file, stored = written
    block = stored[4]
    for at in (0, 1, block.stored_bytes // 2, block.stored_bytes - 1):
        change(root / file.name, block.offset + at)
        with pytest.raises(CheckpointDamagedError, match=r"model/w, block 4 of 10, .*blocks/1\.h5"):
            reading.read_block(root, block, SPEC, 4)
        with pytest.raises(CheckpointDamagedError, match=r"1\.h5 is not what was written"):
            reading.verify_file(root, file)
        change(root / file.name, block.offset + at)
    reading.read_block(root, block, SPEC, 4)
    reading.verify_file(root, file)


def test_of_many_the_damaged_one_is_named_and_not_reported_as_there(written: Written) -> None:
    root, values, file, stored = written
    change(root / file.name, stored[6].offset + 9)
    done: list[int] = []
    out = np.zeros_like(values)
    jobs = [
        (stored[i], SPEC, i, out[a:b], lambda i=i: done.append(i))
        for i, (a, b) in enumerate(SPEC.blocks())
    ]
    with (
        reading.Reader(root) as reader,
        pytest.raises(CheckpointDamagedError, match="model/w, block 6 of 10"),
    ):
        reader.read_many(jobs, 1)
    assert done == [0, 1, 2, 3, 4, 5]


def test_a_file_cut_short_is_named_with_what_is_left(written: Written) -> None:
    root, values, file, stored = written
    last = max(range(10), key=lambda index: stored[index].offset)
    os.truncate(root / file.name, stored[last].offset + 3)
    out = np.zeros_like(values)
    jobs = [(stored[i], SPEC, i, out[a:b], None) for i, (a, b) in enumerate(SPEC.blocks())]
    with (
        reading.Reader(root) as reader,
        pytest.raises(CheckpointDamagedError, match=rf"block {last} of 10, .* cut short.*, 3 are"),
    ):
        reader.read_many(jobs, 1)
    with pytest.raises(
        CheckpointDamagedError, match=rf"has {stored[last].offset + 3} bytes, .* {file.size_bytes}"
    ):
        reading.verify_file(root, file)


def test_a_missing_file_is_named(written: Written) -> None:
    root, _, file, stored = written
    (root / file.name).unlink()
    with pytest.raises(
        CheckpointDamagedError, match=r"model/w, block 0: .*1\.h5 cannot be read \(No such file"
    ):
        reading.read_block(root, stored[0], SPEC, 0)
    with pytest.raises(CheckpointDamagedError, match=r"1\.h5 cannot be read \(No such file"):
        reading.verify_file(root, file)


def test_files_in_each_others_place_are_told(tmp_path: Path) -> None:
    _, _, one, stored = write(tmp_path, 1, encode=False)
    _, _, two, _ = write(tmp_path, 2, encode=False)
    (tmp_path / one.name).rename(tmp_path / "aside")
    (tmp_path / two.name).rename(tmp_path / one.name)
    (tmp_path / "aside").rename(tmp_path / two.name)
    with pytest.raises(CheckpointDamagedError, match=r"block 0 of 10, .* its digest is"):
        reading.read_block(tmp_path, stored[0], SPEC, 0)
    with pytest.raises(CheckpointDamagedError, match="not what was written"):
        reading.verify_file(tmp_path, one)


def test_a_block_in_anothers_place_is_told(written: Written) -> None:
    root, _, _, stored = written
    with pytest.raises(CheckpointDamagedError, match="block 2 of 10"):
        reading.read_block(root, stored[3]._replace(digest=stored[2].digest), SPEC, 2)


def test_the_bits_of_another_dtype_are_told(written: Written) -> None:
    root, _, _, stored = written
    spec = dataclasses.replace(SPEC, dtype="int32")
    with pytest.raises(CheckpointDamagedError, match="digest"):
        reading.read_block(root, stored[0], spec, 0)


def test_a_length_that_no_block_can_have_is_told(written: Written) -> None:
    root, _, _, stored = written
    longer = stored[0]._replace(stored_bytes=BLOCK_BYTES + 4)
    with pytest.raises(CheckpointDamagedError, match=r"block 0 of 10"):
        reading.read_block(root, longer, SPEC, 0)


def test_memory_of_the_wrong_length_is_refused(written: Written) -> None:
    root, _, _, stored = written
    with pytest.raises(ValueError, match="block 0: 4096 bytes do not fit the 4000 of `out`"):
        reading.read_block(root, stored[0], SPEC, 0, np.empty(4000, np.uint8))


def test_a_bad_sector_is_damage_and_a_lack_of_permission_is_not(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, _, stored = written

    def failing(number: int) -> Callable[..., int]:
        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        return fail

    monkeypatch.setattr(os, "preadv", failing(5))
    with pytest.raises(CheckpointDamagedError, match=r"1\.h5 cannot be read \(Input/output"):
        reading.read_block(root, stored[0], SPEC, 0)
    monkeypatch.setattr(os, "preadv", failing(13))
    with pytest.raises(PermissionError):
        reading.read_block(root, stored[0], SPEC, 0)


def test_a_bounded_number_of_files_stays_open_and_none_in_use_is_closed(tmp_path: Path) -> None:
    files = [write(tmp_path, seed, encode=False) for seed in range(4)]
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    errors: list[Exception] = []

    def many(reader: reading.Reader) -> None:
        try:
            for (_, values, _, stored), index in itertools.product(files, range(10)):
                start, stop = SPEC.block(index)
                got = reader.read(stored[index], SPEC, index)
                np.testing.assert_array_equal(got, values[start:stop])
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    with reading.Reader(tmp_path, open_files_max=2) as reader:
        threads = [threading.Thread(target=many, args=(reader,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        reader.read(files[0][3][0], SPEC, 0)
        assert len(list(descriptors.iterdir())) == before + 2
    assert len(list(descriptors.iterdir())) == before
