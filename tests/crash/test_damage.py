"""Whatever happens to the files of a checkpoint: it is found, named, and never loaded as good."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpift.checkpoint.directory import Directory
from mpift.checkpoint.index import write_missing
from mpift.checkpoint.manifest import CommitRecord, manifest_digest
from mpift.errors import CheckpointDamagedError, CheckpointError
from tests.crash.scenes import Training, manager, restored_from, same, told
from tests.unit.checkpoints import flip

Whole = tuple[Path, Training]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A directory with the checkpoints of steps 1 to 3; to be copied, not touched."""
    root = tmp_path_factory.mktemp("whole") / "checkpoints"
    training = Training()
    with manager(root) as checkpoints:
        for _ in range(3):
            assert checkpoints.save(training.advance(), training.state, wait=True)
    return root, training


@pytest.fixture
def copied(whole: Whole, tmp_path: Path) -> Whole:
    shutil.copytree(whole[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints", whole[1]


def folder(root: Path, step: int) -> Path:
    return root / "steps" / f"{step:010d}"


def block_file(root: Path, step: int) -> Path:
    (found,) = (root / "blocks").glob(f"{step:010d}-*.h5")
    return found


def rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


# -- one after the other ---------------------------------------------------------------------------


def data_bit(root: Path) -> None:
    made = Directory(root).manifest(Directory(root).find(3))
    stored = next(s for s in made.named()["model/table.weight"].blocks if "0000000003" in s.file)
    flip(root / stored.file, stored.offset + stored.stored_bytes // 2)


def cut_short(root: Path) -> None:
    path = block_file(root, 3)
    rewrite(path, path.read_bytes()[:-100])


def zeros_at_the_end(root: Path) -> None:
    path = block_file(root, 3)
    data = path.read_bytes()
    rewrite(path, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def emptied(root: Path) -> None:
    rewrite(block_file(root, 3), b"")


def missing(root: Path) -> None:
    block_file(root, 3).unlink()


def of_another_step(root: Path) -> None:
    assert block_file(root, 2).stat().st_size == block_file(root, 3).stat().st_size
    rewrite(block_file(root, 3), block_file(root, 2).read_bytes())


def swapped(root: Path) -> None:
    second, third = block_file(root, 2), block_file(root, 3)
    aside = root / "aside"
    second.rename(aside)
    third.rename(second)
    aside.rename(third)


def other_digest_in_the_manifest(root: Path) -> None:
    path = folder(root, 3) / "manifest.json"
    record = json.loads(path.read_bytes())
    row = record["tensors"][0]["blocks"][0]
    row[-1] = ("0" if row[-1][0] != "0" else "1") + row[-1][1:]
    rewrite(path, json.dumps(record, separators=(",", ":")).encode())


def manifest_of_another_step(root: Path) -> None:
    """Consistent in itself, COMMIT included, but not what its place says."""
    data = (folder(root, 2) / "manifest.json").read_bytes()
    rewrite(folder(root, 3) / "manifest.json", data)
    record = CommitRecord(3, (1, 3), manifest_digest(data))
    rewrite(folder(root, 3) / "COMMIT", record.encode())


def no_manifest(root: Path) -> None:
    (folder(root, 3) / "manifest.json").unlink()


def edited_commit(root: Path) -> None:
    path = folder(root, 3) / "COMMIT"
    record = json.loads(path.read_bytes())
    rewrite(path, json.dumps({**record, "order": [9, 3]}).encode())


def commit_of_another_step(root: Path) -> None:
    rewrite(folder(root, 3) / "COMMIT", (folder(root, 2) / "COMMIT").read_bytes())


def empty_commit(root: Path) -> None:
    rewrite(folder(root, 3) / "COMMIT", b"")


DAMAGES: list[tuple[Callable[[Path], None], int, str]] = [
    (data_bit, 2, "0000000003-w0"),
    (cut_short, 2, "0000000003-w0"),
    (zeros_at_the_end, 2, "0000000003-w0"),
    (emptied, 2, "0000000003-w0"),
    (missing, 2, "0000000003-w0"),
    (of_another_step, 2, "0000000003-w0"),
    (swapped, 1, "0000000002-w0"),
    (other_digest_in_the_manifest, 2, "manifest.json"),
    (manifest_of_another_step, 2, "manifest.json"),
    (no_manifest, 2, "manifest.json"),
    (edited_commit, 2, "COMMIT"),
    (commit_of_another_step, 2, "COMMIT"),
    (empty_commit, 2, "COMMIT"),
]


@pytest.mark.parametrize(("damage", "left", "named"), DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_it_is_restored(
    copied: Whole, damage: Callable[[Path], None], left: int, named: str
) -> None:
    root, training = copied
    damage(root)
    directory = Directory(root)
    found = dict(directory.damaged())
    if folder(root, 3) not in found:
        committed = directory.find(3)
        with pytest.raises(CheckpointDamagedError):
            directory.check(committed, thorough=True)
        found[folder(root, 3)] = "; ".join(directory.damage(committed))
    assert named in found[folder(root, 3)]
    with told() as warnings:
        restored = restored_from(root)
    assert training.require(restored) == left
    assert len(warnings) == 3 - left
    assert "checkpoint 0000000003 is damaged and was moved to" in warnings[0]
    assert named in warnings[0]
    assert (root / "quarantine" / "0000000003" / "REASON.txt").read_text().strip() in warnings[0]
    assert [c.step for c in Directory(root).committed()] == list(range(1, left + 1))


def test_a_damaged_header_of_hdf5_is_found_and_harms_no_restore(copied: Whole) -> None:
    root, training = copied
    flip(block_file(root, 3), 40)
    with told() as warnings:
        assert training.require(restored_from(root)) == 3
    assert warnings == []
    with pytest.raises(CheckpointDamagedError, match=r"0000000003-w0.*is not what was written"):
        Directory(root).check(Directory(root).find(3), thorough=True)


def test_a_missing_index_is_no_damage_and_is_written_anew(copied: Whole) -> None:
    root, training = copied
    index = folder(root, 3) / "index.h5"
    before = index.read_bytes()
    index.unlink()
    assert training.require(restored_from(root)) == 3
    directory = Directory(root)
    assert list(directory.damage(directory.find(3))) == []
    assert write_missing(directory) == ([index], [])
    assert index.read_bytes() == before
    assert write_missing(directory) == ([], [])


def test_a_job_completes_some_indexes_at_a_time_and_the_newest_first(copied: Whole) -> None:
    root, _ = copied
    directory = Directory(root)
    missing = [found.folder / "index.h5" for found in directory.committed()]
    for index in missing:
        index.unlink()
    flip(missing[0].with_name("manifest.json"), 5)
    written, problems = write_missing(directory, at_most=1)
    assert (written, problems) == ([missing[-1]], [])
    written, (problem,) = write_missing(directory)
    assert written == missing[-2:0:-1]
    assert "is not what was committed" in problem


def test_without_commit_it_is_no_checkpoint_and_no_damage(copied: Whole) -> None:
    root, training = copied
    (folder(root, 3) / "COMMIT").unlink()
    with told() as warnings:
        assert training.require(restored_from(root)) == 2
    assert warnings == []


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_whichever_bit_is_wrong_what_is_restored_is_what_was_saved(
    copied: Whole, count: int
) -> None:
    root, training = copied
    choice = random.Random(count)
    files = sorted(path for path in root.rglob("*") if path.is_file() and "steps" in path.parts)
    files += sorted((root / "blocks").iterdir())
    for _ in range(count):
        path = choice.choice(files)
        where = path.relative_to(root)
        before = path.read_bytes()
        bit = choice.randrange(8 * len(before))
        changed = bytearray(before)
        changed[bit // 8] ^= 1 << bit % 8
        rewrite(path, bytes(changed))
        step = 0  # blocks of the first one are in all of them
        with told(), contextlib.suppress(CheckpointError):
            step = training.require(restored_from(root))
        # What was damaged is out of the way, or was not needed.
        quarantined = {place.name for place in (root / "quarantine").glob("*")}
        assert {f"{newer:010d}" for newer in range(step + 1, 4)} <= quarantined, where
        for name in quarantined:
            (root / "quarantine" / name / "REASON.txt").unlink()
            (root / "quarantine" / name).rename(root / "steps" / name)
        rewrite(path, before)
    assert training.require(restored_from(root)) == 3


def test_when_all_are_damaged_training_does_not_begin_anew_in_silence(copied: Whole) -> None:
    root, _ = copied
    for step in (1, 2, 3):
        rewrite(block_file(root, step), b"")
    with told() as warnings, pytest.raises(CheckpointError, match="quarantine"):
        restored_from(root)
    assert len(warnings) == 3
    # Nor when the job is started again.
    with pytest.raises(CheckpointError, match="quarantine"):
        restored_from(root)


def test_a_manager_puts_the_older_state_in_place_and_goes_on_from_it(copied: Whole) -> None:
    root, training = copied
    data_bit(root)
    run = Training()
    with manager(root) as checkpoints:
        with told() as warnings:
            restored = checkpoints.restore(state=run.state)
        assert restored is not None
        assert restored.step == 2
        assert len(warnings) == 1
        same(run.model.state_dict(), training.states[2])
        run.step = 2
        assert checkpoints.save(run.advance(), run.state, wait=True)
    assert run.require(restored_from(root)) == 3
    assert [c.order for c in Directory(root).committed()] == [(1, 1), (1, 2), (3, 3)]


def test_a_step_that_was_asked_for_and_is_damaged_is_not_replaced_by_another(
    copied: Whole,
) -> None:
    root, _ = copied
    data_bit(root)
    with manager(root) as checkpoints:
        with pytest.raises(CheckpointDamagedError, match=r"model/table\.weight, block 3"):
            checkpoints.restore(3, Training().state)
        assert checkpoints.steps() == [1, 2, 3]


# -- other programs --------------------------------------------------------------------------------

_PLAIN = """
import sys, h5py, numpy
with h5py.File(sys.argv[1]) as file:
    assert file.attrs["step"] == 3
    found = {name: file["model"][name][...] for name in ("table.weight", "bias")}
    found["seen"] = file["ranks/0/model/seen"][...]
    numpy.savez(sys.argv[2], **found)
assert not {name for name in sys.modules if name.startswith(("mpift", "torch"))}
"""


def test_plain_h5py_reads_a_copied_directory(copied: Whole, tmp_path: Path) -> None:
    root, training = copied
    index = folder(shutil.copytree(root, tmp_path / "else" / "where"), 3) / "index.h5"
    shutil.rmtree(root)
    out = tmp_path / "found.npz"
    subprocess.run([sys.executable, "-I", "-c", _PLAIN, index, out], cwd=tmp_path, check=True)
    with np.load(out) as found:
        for name, tensor in training.states[3].items():
            assert np.array_equal(found[name], tensor.numpy()), name
