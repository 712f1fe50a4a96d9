"""``mpift ckpt flatten``, ``export`` and ``import``: checkpoints that leave, and come in."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mpift.checkpoint.directory import Directory
from mpift.checkpoint.flat_copy import flat_copy
from mpift.checkpoint.progress import CountingReader
from mpift.checkpoint.reading import Job
from tests.unit.checkpoints import Saved, arrays, flip, save
from tests.unit.ckpt_calls import call, figures, leave, run, wide

__all__ = ["run", "wide"]


@pytest.mark.parametrize("encode", [False, True])
def test_a_flat_copy_is_a_full_checkpoint_on_its_own(tmp_path: Path, encode: bool) -> None:
    h5py = pytest.importorskip("h5py")
    root, out = tmp_path / "run", tmp_path / "deep" / "flat"
    tensors = {**arrays(1, w=5000), "scalar": np.float32(3), "empty": np.zeros((0, 4), np.int64)}
    first = save(root, 1, {**tensors, "v": tensors["w"][:3000] + 1}, encode=encode)
    second = save(root, 2, tensors | arrays(4, v=3000), base=first, encode=encode)
    assert len(second.manifest.files) == 2
    found = figures("flatten", str(root), "2", str(out))
    assert found["step"] == 2
    assert found["files"] == 1
    assert found["bytes"] == sum(p.stat().st_size for p in (out / "blocks").iterdir())
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()

    copy = Directory(out)
    (committed,) = copy.committed()
    manifest = copy.check(committed, thorough=True)
    assert (manifest.base, manifest.new_blocks) == (None, manifest.block_count)
    assert manifest.shared == second.manifest.shared
    encoded = any(s.stored_bytes < 1024 for s in manifest.named()["w"].blocks[:-1])
    assert encoded == encode
    with h5py.File(committed.folder / "index.h5") as file:
        for name, array in (tensors | arrays(4, v=3000)).items():
            np.testing.assert_array_equal(file[name][()], array)


def test_a_flat_copy_of_more_than_fits_in_memory_is_made_in_parts(tmp_path: Path) -> None:
    saved = save(tmp_path / "run", 1, arrays(1, w=5000, v=700))
    went: list[int] = []
    out = Directory(tmp_path / "out")
    source = Directory(tmp_path / "run")
    copied = flat_copy(source, saved.committed, out, advance=went.append, batch_bytes=4096)
    manifest = out.check(copied, thorough=True)
    assert len(manifest.files) == 6
    assert went == [4096] * 4 + [3 * 1024 + 544, 2 * 1024 + 752]
    digests = [[s.digest for s in entry.blocks] for entry in manifest.tensors]
    assert digests == [[s.digest for s in entry.blocks] for entry in saved.manifest.tensors]


def test_a_damaged_block_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save(tmp_path / "run", 1, arrays(1, w=5000))
    stored = saved.manifest.tensors[0].blocks[3]
    flip(tmp_path / "run" / stored.file, stored.offset)
    assert leave("ckpt", "flatten", str(tmp_path / "run"), "1", str(tmp_path / "out")) == 5
    assert "block 3" in capsys.readouterr().err
    assert Directory(tmp_path / "out").committed() == []


def test_an_export_holds_the_tensors_and_counts_the_way(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = arrays(1, w=5000, b=3)
    save(tmp_path / "run", 1, tensors)
    file = tmp_path / "one.pt"
    found = figures("export", str(tmp_path / "run"), "1", str(file))
    assert found == {"step": 1, "file": str(file), "format": "pt", "bytes": file.stat().st_size}
    loaded = torch.load(file, weights_only=True)
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name].numpy(), array)

    safetensors = pytest.importorskip("safetensors.numpy")
    file = tmp_path / "one.safetensors"
    figures("export", str(tmp_path / "run"), "1", str(file), "--format", "safetensors")
    loaded = safetensors.load_file(file)
    assert sorted(loaded) == ["b", "w"]


def test_an_imported_file_is_a_checkpoint_beside_those_that_were_there(
    tmp_path: Path, run: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "old.pt"
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"weight": weight, "epoch": 3}, file)
    found = figures("import", str(file), str(tmp_path), "--step", "7")
    assert found["step"] == 7
    directory = Directory(tmp_path)
    assert [c.step for c in directory.committed()] == [100, 200, 150, 7]
    assert directory.live() is None
    assert call("verify", str(tmp_path), "7")[0] == 0
    again = tmp_path / "again.pt"
    figures("export", str(tmp_path), "7", str(again))
    loaded = torch.load(again, weights_only=True)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["weight"], weight)

    file.write_bytes(b"no such file")
    assert leave("ckpt", "import", str(file), str(tmp_path), "--step", "8") == 2
    assert str(file) in capsys.readouterr().err


def test_reading_for_an_export_tells_of_every_byte(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, arrays(1, w=5000))
    (entry,) = saved.manifest.tensors
    went: list[int] = []
    arrived: list[int] = []
    jobs: list[Job] = []
    for index, (stored, (start, stop)) in enumerate(
        zip(entry.blocks, entry.spec.blocks(), strict=True)
    ):
        out = np.empty(stop - start, np.uint8)
        jobs.append((stored, entry.spec, index, out, partial(arrived.append, index)))
    with CountingReader(tmp_path, went.append) as reader:
        reader.read_many(jobs, 1)
    assert sum(went) == 20000
    assert sorted(arrived) == list(range(20))
