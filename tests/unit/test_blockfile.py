"""Files of blocks: what is in them, who can read them, and what is left when the disk fails."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from mpift.checkpoint import blockfile, blocks, reading, rereading
from mpift.checkpoint.blocks import Block, TensorSpec, storage_dtype
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.manifest import BlockFile, Stored
from mpift.errors import CheckpointError

BLOCK_BYTES = 4096
RNG = np.random.default_rng(0)


def a_block(values: NDArray[Any], dtype: str, block_bytes: int = BLOCK_BYTES) -> Block:
    data = values.reshape(-1).view("u1")
    return Block(data, dtype, block_bytes, blocks.digest(data, dtype))


def weights(elements: int = 1024) -> Block:
    return a_block(RNG.normal(0, 0.02, elements).astype("f4"), "float32")


def of_every_kind() -> list[Block]:
    return [
        weights(),
        a_block(RNG.integers(0, 65536, 2048, np.uint16), "bfloat16"),
        weights(10),
        a_block(RNG.integers(-9, 9, 512), "int64"),
        weights(),
        a_block(RNG.integers(0, 2, 100).astype(bool), "bool"),
        a_block(RNG.normal(size=512).view("c8"), "complex64"),
        weights(1),
        a_block(RNG.integers(0, 256, 4096, np.uint8), "float8_e4m3fn"),
        a_block(RNG.normal(0, 0.02, 512), "float64"),
        a_block(RNG.normal(0, 0.02, 32).astype("f2"), "float16", 64),
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "blocks").mkdir()
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "blocks").iterdir())


def read_all(root: Path, written: Sequence[Block], stored: Sequence[Stored]) -> None:
    with reading.Reader(root) as reader:
        for block, where in zip(written, stored, strict=True):
            spec = TensorSpec("any", block.dtype, (block.elements,), block.block_bytes)
            np.testing.assert_array_equal(reader.read(where, spec, 0), block.data)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("encode", [False, True], ids=["raw", "encoded"])
def test_blocks_of_every_kind_come_back(root: Path, encode: bool, threads: int) -> None:
    written = of_every_kind()
    file, stored = blockfile.write_blocks(Disk(), root, "a.h5", written, encode, threads)
    assert names(root) == ["a.h5"]
    assert file.name == "blocks/a.h5"
    assert stat.S_IMODE((root / file.name).stat().st_mode) == 0o444
    assert [where.digest for where in stored] == [block.digest for block in written]
    read_all(root, written, stored)
    reading.verify_file(root, file)


@pytest.mark.parametrize("encode", [False, True], ids=["raw", "encoded"])
def test_stock_h5py_finds_each_block_where_it_is_said_to_be(root: Path, encode: bool) -> None:
    written = of_every_kind()
    _, stored = blockfile.write_blocks(Disk(), root, "a.h5", written, encode, 2)
    with h5py.File(root / "blocks/a.h5") as file:
        for block, where in zip(written, stored, strict=True):
            found = file[where.dataset][where.place : where.place + block.elements]
            assert found.dtype == storage_dtype(block.dtype)
            assert file[where.dataset].attrs["torch_dtype"] == block.dtype
            np.testing.assert_array_equal(found.view("u1"), block.data)


def test_full_blocks_and_ends_have_a_dataset_for_each_kind(root: Path) -> None:
    _, stored = blockfile.write_blocks(Disk(), root, "a.h5", of_every_kind(), False, 1)
    assert [(where.dataset, where.place) for where in stored] == [
        ("float32_1024", 0),
        ("bfloat16_2048", 0),
        ("float32_ends", 0),
        ("int64_512", 0),
        ("float32_1024", 1024),
        ("bool_ends", 0),
        ("complex64_512", 0),
        ("float32_ends", 10),
        ("float8_e4m3fn_4096", 0),
        ("float64_512", 0),
        ("float16_32", 0),
    ]


def test_only_full_blocks_of_floating_point_that_get_smaller_are_encoded(root: Path) -> None:
    noise = a_block(RNG.integers(0, 1 << 32, 1024, np.uint32).view("f4"), "float32")
    written = [weights(), noise, weights(100), a_block(np.zeros(512, "i8"), "int64"), weights()]
    _, stored = blockfile.write_blocks(Disk(), root, "a.h5", written, True, 2)
    saved = [b.data.nbytes - w.stored_bytes for w, b in zip(stored, written, strict=True)]
    assert saved[1:4] == [0, 0, 0]
    assert saved[0] > 0
    assert saved[4] > 0
    read_all(root, written, stored)
    with h5py.File(root / "blocks/a.h5") as file:
        np.testing.assert_array_equal(file["float32_1024"][1024:2048].view("u1"), noise.data)


def test_results_come_in_order_and_few_are_begun_ahead() -> None:
    drawn = 0

    def calls() -> Iterator[Callable[[], int]]:
        nonlocal drawn
        for number in range(20):
            drawn += 1
            yield functools.partial(int, number)

    with ThreadPoolExecutor(2) as pool:
        for taken, result in enumerate(rereading.in_order(pool, calls(), 3)):
            assert result == taken
            assert drawn <= taken + 4
    assert drawn == 20


def test_writes_that_return_less_are_gone_on_with(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        return pwritev(descriptor, [views[0][:1000]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    written = of_every_kind()
    _, stored = blockfile.write_blocks(Disk(), root, "a.h5", written, False, 1)
    read_all(root, written, stored)


def test_a_file_is_never_replaced(root: Path) -> None:
    file, _ = blockfile.write_blocks(Disk(), root, "a.h5", [weights()], False, 1)
    with pytest.raises(CheckpointError, match=r"a\.h5 was written already"):
        blockfile.write_blocks(Disk(), root, "a.h5", [weights()], False, 1)
    assert names(root) == ["a.h5"]
    reading.verify_file(root, file)


class Recording(Disk):
    """Tells what happened, in order; fails where it is told to."""

    def __init__(self, fail_at: str = "") -> None:
        self.log: list[str] = []
        self.fail_at = fail_at

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def sync(self, path: Path) -> None:
        self.note(f"sync {'folder' if path.is_dir() else 'file'}")

    def link(self, old: Path, new: Path) -> None:
        self.note("link")
        super().link(old, new)

    def unlink(self, path: Path) -> None:
        self.note(f"unlink {'named' if path.suffix == '.h5' else 'unfinished'}")
        super().unlink(path)

    def reached(self, point: str) -> None:
        self.note(point)


def test_storage_begins_with_what_is_written_while_the_rest_is_copied(root: Path) -> None:
    begun: list[tuple[int, int]] = []

    class Beginning(Disk):
        def begin(self, path: Path, start: int, size_bytes: int) -> None:
            assert path.stat().st_size >= start + size_bytes
            begun.append((start, size_bytes))
            super().begin(path, start, size_bytes)

        def sync(self, path: Path) -> None:
            begun.append((-1, 0))
            super().sync(path)

    mib = 1 << 20
    data = np.zeros(mib, np.uint8)
    block = Block(data, "uint8", mib, blocks.digest(data, "uint8"))
    blockfile.write_blocks(Beginning(), root, "a.h5", [block] * 20, False, 1)
    (first, size), (second, _), synced, *_ = begun
    assert first + size == second  # nothing in between is left out
    assert size >= blockfile.BEGIN_BYTES
    assert synced == (-1, 0)


def test_the_file_is_synced_before_it_is_named_and_its_name_before_that_is_told(
    root: Path,
) -> None:
    disk = Recording()
    blockfile.write_blocks(disk, root, "a.h5", [weights()], False, 1)
    assert disk.log == [
        "sync file",
        "block_file_synced",
        "link",
        "unlink unfinished",
        "sync folder",
        "block_file_named",
    ]


@pytest.mark.parametrize("at", ["sync file", "link", "sync folder"])
def test_when_the_disk_fails_nothing_is_left(root: Path, at: str) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        blockfile.write_blocks(Recording(at), root, "a.h5", [weights()], True, 1)
    assert names(root) == []


@pytest.mark.parametrize("encode", [False, True], ids=["raw", "encoded"])
def test_a_disk_that_fills_up_leaves_nothing(
    root: Path, encode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.h5") as raised:
        blockfile.write_blocks(Disk(), root, "a.h5", of_every_kind(), encode, 2)
    assert raised.value.errno == errno.ENOSPC
    assert names(root) == []


def test_too_little_space_is_told_before_anything_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(os.statvfs(root))
    found[1], found[4] = 4096, 3  # f_frsize, f_bavail

    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found))
    disk = Recording()
    with pytest.raises(
        CheckpointError, match=r"a\.h5 needs \d+ bytes, and .*blocks has 12288 free"
    ):
        blockfile.write_blocks(disk, root, "a.h5", [weights()], False, 1)
    assert disk.log == []
    assert names(root) == []


@pytest.mark.parametrize("encode", [False, True], ids=["raw", "encoded"])
def test_a_limit_met_while_hdf5_writes_leaves_nothing_and_the_process_lives(
    root: Path, encode: bool
) -> None:
    script = f"""
        import os, resource
        from glob import glob
        from pathlib import Path
        from mpift.checkpoint.durable import Disk
        from tests.unit.test_blockfile import blockfile, weights
        root = Path({str(root)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        written = [weights() for _ in range(40)]
        try:
            blockfile.write_blocks(Disk(), root, "a.h5", written, {encode}, 2)
        except (OSError, blockfile.CheckpointError) as error:
            print(type(error).__name__, "a.h5" in str(error), "File too large" in str(error))
        print(os.listdir(root / "blocks"))
        print([t for t in map(os.path.realpath, glob("/proc/self/fd/*")) if "a.h5" in t])
        blockfile.write_blocks(Disk(), root, "b.h5", [weights()], True, 2)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        cwd=Path(__file__).parents[2],
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Neither a name nor an open descriptor holds space.
    kind = "OSError" if encode else "CheckpointError"
    assert done.stdout.splitlines() == [f"{kind} True True", "[]", "[]"]
    assert names(root) == ["b.h5"]


class Flipping(Disk):
    """Syncs other bytes than it was given."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def sync(self, path: Path) -> None:
        if path.is_file():
            with path.open("r+b") as file:
                file.seek(self.offset)
                byte = file.read(1)[0] ^ 16
                file.seek(self.offset)
                file.write(bytes([byte]))
        super().sync(path)


@pytest.mark.parametrize("encode", [False, True], ids=["raw", "encoded"])
def test_a_block_that_reads_back_other_than_written_is_named_and_the_file_removed(
    root: Path, encode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = of_every_kind()
    _, stored = blockfile.write_blocks(Disk(), root, "a.h5", written, encode, 1)
    disk, write = Flipping(stored[4].offset + 77), blockfile._write

    def write_other_bytes(path: Path, *rest: Any) -> Any:
        spans = write(path, *rest)
        disk.sync(path)
        return spans

    monkeypatch.setattr(blockfile, "_write", write_other_bytes)
    with pytest.raises(CheckpointError, match=r"written block 4, .* damaged in .*b\.h5"):
        blockfile.write_blocks(Disk(), root, "b.h5", written, encode, 1)
    assert names(root) == ["a.h5"]


def test_a_file_that_hdf5_no_longer_opens_is_removed(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.h5 was written, but HDF5 cannot open"):
        blockfile.write_blocks(Flipping(1), root, "a.h5", [weights()], False, 1)
    assert names(root) == []


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_reads_an_encoded_file(root: Path) -> None:
    block = a_block(np.arange(1024, dtype="f4"), "float32")
    blockfile.write_blocks(Disk(), root, "a.h5", [block], True, 1)
    done = subprocess.run(
        ["h5dump", "-d", "/float32_1024", "-w", "0", str(root / "blocks/a.h5")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1020, 1021, 1022, 1023" in done.stdout


def test_the_result_is_the_manifests_words(root: Path) -> None:
    file, stored = blockfile.write_blocks(Disk(), root, "a.h5", [weights()], False, 1)
    path = root / file.name
    assert file == BlockFile("blocks/a.h5", path.stat().st_size, file.digest)
    assert len(file.digest) == 32
    assert stored[0].file == file.name
    assert path.read_bytes()[stored[0].offset :][:BLOCK_BYTES]
