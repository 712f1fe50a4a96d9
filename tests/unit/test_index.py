"""The index: every tensor whole for any program that reads HDF5, wherever the tree is copied."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from mpift.checkpoint import blockfile, blocks
from mpift.checkpoint.blocks import TensorSpec, storage_dtype
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.index import write_index
from mpift.checkpoint.manifest import BlockFile, Manifest, Stored, TensorEntry

BLOCK_BYTES = 512
RNG = np.random.default_rng(0)
INDEX = Path("steps/0000000007/index.h5")


def weights(*shape: int, dtype: str = "f4") -> NDArray[Any]:
    return RNG.normal(0, 0.02, shape).astype(dtype)


# Name, torch's dtype, values as stored.
TENSORS: tuple[tuple[str, str, NDArray[Any]], ...] = (
    ("model/fc.weight", "float32", weights(30, 41)),
    ("model/fc.bias", "bfloat16", RNG.integers(0, 65536, (1000,), np.uint16)),
    ("model/deep", "float32", weights(3, 4, 5, 17)),
    ("optimizer/state/0/step", "float32", np.array(3.5, "f4")),
    ("optimizer/state/0/exp_avg", "float64", weights(11, 23, dtype="f8")),
    ("ranks/0/seen", "int64", RNG.integers(-99, 99, (7, 50))),
    ("ranks/0/mask", "bool", RNG.integers(0, 2, (40, 40)).astype(bool)),
    ("ranks/0/phase", "complex64", weights(100, 4).view("c8")),
    ("ranks/0/größe", "uint8", RNG.integers(0, 256, (2, 600), np.uint8)),
    ("ranks/0/nothing", "float32", np.zeros((0, 4), "f4")),
)


def save(root: Path, encode: bool, **others: Any) -> Manifest:
    """The tensors, their blocks dealt in turn to two files."""
    (root / "blocks").mkdir()
    (root / INDEX).parent.mkdir(parents=True)
    specs = [TensorSpec(name, dtype, a.shape, BLOCK_BYTES) for name, dtype, a in TENSORS]
    hands: tuple[list[blockfile.Block], list[blockfile.Block]] = ([], [])
    dealt: list[list[tuple[int, int]]] = []  # a block's file, and its number there
    turn = itertools.count()
    for spec, (_, dtype, values) in zip(specs, TENSORS, strict=True):
        data = values.reshape(-1).view("u1") if values.size else np.zeros(0, np.uint8)
        dealt.append([])
        for start, stop in spec.blocks():
            hand = next(turn) // 3 % 2
            piece = data[start:stop]
            dealt[-1].append((hand, len(hands[hand])))
            hands[hand].append(
                blockfile.Block(piece, dtype, BLOCK_BYTES, blocks.digest(piece, dtype))
            )
    results = [
        blockfile.write_blocks(Disk(), root, f"{number}.h5", hand, encode, 2)
        for number, hand in enumerate(hands)
    ]
    entries = [
        TensorEntry(spec, tuple(results[hand][1][number] for hand, number in places))
        for spec, places in zip(specs, dealt, strict=True)
    ]
    manifest = a_manifest(entries, [file for file, _ in results], **others)
    write_index(Disk(), root / INDEX, manifest, "../..")
    return manifest


def a_manifest(entries: list[TensorEntry], files: list[BlockFile], **others: Any) -> Manifest:
    trees: Mapping[str, Any] = {"shared": {"lr": 0.1}, "own": ({"seen": 3}, None), **others}
    return Manifest(7, (2, 1), "abc", "job", 2, 0.0, "1.2.3", tuple(files), tuple(entries), **trees)


# Knows h5py and numpy alone.
STRANGER = """
    import sys
    import h5py, numpy as np
    assert not [name for name in sys.modules if name.startswith("mpift")]
    found = {}
    dtypes = {}
    def take(name, item):
        if isinstance(item, h5py.Dataset):
            found[name.replace("/", "|")] = item[()]
            dtypes[name] = item.attrs["torch_dtype"]
    with h5py.File(sys.argv[1], "r") as file:
        file.visititems(take)
        print(int(file.attrs["step"]), file.attrs["mpift_version"], file.attrs["history"])
        print(dtypes == eval(sys.argv[3]))
    np.savez(sys.argv[2], **found)
"""


@pytest.mark.parametrize("encode", [False, True], ids=["raw", "encoded"])
def test_stock_h5py_reads_every_tensor_from_a_copy(tmp_path: Path, encode: bool) -> None:
    (tmp_path / "here").mkdir()
    save(tmp_path / "here", encode)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    dtypes = {name: dtype for name, dtype, _ in TENSORS}
    done = subprocess.run(
        [
            sys.executable,
            "-P" if sys.version_info >= (3, 11) else "-s",
            "-c",
            textwrap.dedent(STRANGER),
            str(tmp_path / "there" / INDEX),
            str(tmp_path / "found.npz"),
            repr(dtypes),
        ],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["7 1.2.3 abc", "True"]
    with np.load(tmp_path / "found.npz") as found:
        assert len(found.files) == len(TENSORS)
        for name, _, values in TENSORS:
            got = found[name.replace("/", "|")]
            assert (got.shape, got.dtype) == (values.shape, values.dtype)
            assert got.tobytes() == values.tobytes(), name


def test_what_lies_together_is_one_mapping_and_a_tensor_of_two_files_more(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    values = weights(8, 128).view("u1").reshape(-1)
    pieces = values.reshape(-1, BLOCK_BYTES)
    written = [
        blockfile.Block(piece, "float32", BLOCK_BYTES, blocks.digest(piece, "float32"))
        for piece in pieces
    ]
    one, first = blockfile.write_blocks(Disk(), tmp_path, "1.h5", written[:5], False, 1)
    two, second = blockfile.write_blocks(Disk(), tmp_path, "2.h5", written[5:], True, 1)
    whole = TensorEntry(TensorSpec("w", "float32", (8, 128), BLOCK_BYTES), (*first, *second))
    write_index(Disk(), tmp_path / "index.h5", a_manifest([whole], [one, two]), ".")
    with h5py.File(tmp_path / "index.h5") as file:
        sources = [source.file_name for source in file["w"].virtual_sources()]
        assert sources == ["./blocks/1.h5", "./blocks/2.h5"]
        np.testing.assert_array_equal(file["w"][()].view("u1").reshape(-1), values)


def test_a_missing_file_reads_as_what_no_one_takes_for_values(tmp_path: Path) -> None:
    save(tmp_path, encode=False)
    for path in (tmp_path / "blocks").iterdir():
        path.unlink()
    with h5py.File(tmp_path / INDEX) as file:
        for name, dtype, values in TENSORS:
            found = np.asarray(file[name][()])
            assert found.shape == values.shape
            if storage_dtype(dtype).kind in "fc":
                assert np.isnan(found).all()
            else:
                assert (found == (True if dtype == "bool" else np.iinfo(found.dtype).max)).all()


def test_trees_are_attributes_while_small_and_datasets_when_large(tmp_path: Path) -> None:
    large = {"losses": [0.5] * 20_000}
    save(tmp_path, encode=False, shared=large)
    with h5py.File(tmp_path / INDEX) as file:
        assert json.loads(file.attrs["own"]) == [{"seen": 3}, None]
        assert "shared" not in file.attrs
        assert json.loads(file["_trees/shared"].asstr()[()]) == large


def test_an_older_index_is_replaced_at_once_and_the_new_one_synced_first(tmp_path: Path) -> None:
    log: list[str] = []

    class Recording(Disk):
        def create(self, path: Path, data: bytes) -> None:
            log.append("create")
            super().create(path, data)

        def rename(self, old: Path, new: Path) -> None:
            log.append("rename")
            super().rename(old, new)

        def sync_folder(self, path: Path) -> None:
            log.append(f"sync {path.name}")
            super().sync_folder(path)

        def reached(self, point: str) -> None:
            log.append(point)

    path = tmp_path / "index.h5"
    path.write_bytes(b"old")
    write_index(Recording(), path, a_manifest([], []), "../..")
    assert log == ["create", "rename", f"sync {tmp_path.name}", "index_written"]
    assert [found.name for found in tmp_path.iterdir()] == ["index.h5"]
    with h5py.File(path) as file:
        assert file.attrs["step"] == 7


def test_a_thousand_tensors_are_indexed_in_a_moment(tmp_path: Path) -> None:
    entries = [
        TensorEntry(
            TensorSpec(f"model/{i // 10}/w{i}", "float32", (20, 5)),
            (Stored("blocks/1.h5", "float32_ends", 100 * i, 4096, 400, "0" * 32),),
        )
        for i in range(1000)
    ]
    write_index(Disk(), tmp_path / "index.h5", a_manifest(entries, []), "..")
    assert (tmp_path / "index.h5").stat().st_size < 1_000 * 1_000
    with h5py.File(tmp_path / "index.h5") as file:
        assert file["model/99/w999"].virtual_sources()[0].src_space.get_regular_hyperslab()[0] == (
            99_900,
        )


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
def test_h5dump_reads_a_tensor_through_the_index(tmp_path: Path) -> None:
    save(tmp_path, encode=True)
    done = subprocess.run(
        ["h5dump", "-d", "/optimizer/state/0/step", str(tmp_path / INDEX)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "3.5" in done.stdout
