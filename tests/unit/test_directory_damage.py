"""Damage in a checkpoint directory: it is found, told and passed over, and can be set aside."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mpift.checkpoint import manifest as manifests
from mpift.checkpoint.damage import work_bytes
from mpift.checkpoint.directory import Directory
from mpift.errors import CheckpointDamagedError
from tests.unit.checkpoints import arrays, flip, save


def test_a_commit_that_says_nothing_is_listed_as_damaged_and_not_as_a_checkpoint(
    tmp_path: Path,
) -> None:
    good, bad, moved = (save(tmp_path, step, arrays(w=10)).committed for step in (1, 2, 3))
    (bad.folder / "COMMIT").write_bytes(b"\0" * 90)
    moved.folder.rename(tmp_path / "steps" / "0000000004")
    directory = Directory(tmp_path)
    assert [c.step for c in directory.committed()] == [good.step]
    (first, why), (second, other) = directory.damaged()
    assert first == bad.folder
    assert "COMMIT is no COMMIT file" in why
    assert second.name == "0000000004"
    assert "is that of step 3, not of 4" in other


def test_a_changed_manifest_is_named_with_both_digests(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10)).committed
    path = saved.folder / "manifest.json"
    directory = Directory(tmp_path)
    flip(path, 60)
    with pytest.raises(CheckpointDamagedError) as caught:
        directory.manifest(saved)
    found = manifests.manifest_digest(path.read_bytes())
    for part in (str(path), "not what was committed", found, saved.record.manifest):
        assert part in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json is missing"):
        directory.manifest(saved)


def test_a_manifest_of_another_checkpoint_is_refused_even_if_commit_names_it(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    directory = Directory(tmp_path)
    for change, what in (({"step": 6}, "step 6"), ({"order": (9, 5)}, r"order \(9, 5\)")):
        data = manifests.encode(replace(saved.manifest, **change))
        (saved.committed.folder / "manifest.json").write_bytes(data)
        record = replace(saved.committed.record, manifest=manifests.manifest_digest(data))
        with pytest.raises(CheckpointDamagedError, match=f"has {what}, and COMMIT says"):
            directory.manifest(replace(saved.committed, record=record))


def test_a_look_at_the_files_sees_missing_and_short_ones_and_a_thorough_one_every_bit(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=1000))
    directory = Directory(tmp_path)
    path = tmp_path / saved.manifest.files[0].name
    size = path.stat().st_size
    assert directory.check(saved.committed, thorough=True) == saved.manifest

    flip(path, saved.manifest.tensors[0].blocks[2].offset)
    directory.check(saved.committed)
    with pytest.raises(CheckpointDamagedError, match=f"step 5: .*{path.name}"):
        directory.check(saved.committed, thorough=True)

    os.truncate(path, size - 1)
    with pytest.raises(CheckpointDamagedError, match=f"has {size - 1} bytes instead of {size}"):
        directory.check(saved.committed)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match=f"{path.name} is missing"):
        directory.check(saved.committed)


def test_every_damage_is_told_and_the_whole_way_is_counted(tmp_path: Path) -> None:
    first = save(tmp_path, 5, arrays(w=1000, v=300))
    both = {**arrays(w=1000, v=300), "u": arrays(3, u=600)["u"]}
    second = save(tmp_path, 6, both, base=first)
    directory = Directory(tmp_path)
    w = second.manifest.named()["w"].blocks
    path = tmp_path / w[0].file
    for index in (0, 3):
        flip(path, w[index].offset)
    (tmp_path / second.manifest.named()["u"].blocks[0].file).unlink()
    went: list[int] = []
    told = list(directory.damage(second.committed, went.append))
    assert sum(went) == work_bytes(second.manifest)
    assert len(told) == 4, told
    assert f"{path} is not what was written" in told[0]
    assert "g1.h5 is missing" in told[1]
    for line, index in zip(told[2:], (0, 3), strict=True):
        assert "w" in line
        assert f"block {index}" in line
    assert len(list(directory.damage(first.committed))) == 3


def test_the_newest_good_checkpoint_comes_with_the_damaged_newer_ones(tmp_path: Path) -> None:
    saved = [save(tmp_path, step, arrays(step, w=100)) for step in (1, 2, 3, 4)]
    directory = Directory(tmp_path)
    assert directory.newest_good() == ((saved[3].committed, saved[3].manifest), [])
    (saved[3].committed.folder / "COMMIT").write_text("{")
    flip(saved[2].committed.folder / "manifest.json", 9)
    (tmp_path / saved[1].manifest.files[0].name).unlink()
    good, problems = directory.newest_good()
    assert good == (saved[0].committed, saved[0].manifest)
    assert [folder.name[-1] for folder, _ in problems] == ["4", "3", "2"]


def test_quarantine_moves_the_folder_with_its_reason_and_leaves_the_blocks(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=100))
    directory = Directory(tmp_path)
    place = directory.quarantine(saved.committed.folder, "a block is wrong")
    assert place == tmp_path / "quarantine" / "0000000005"
    assert (place / "REASON.txt").read_text() == "a block is wrong\n"
    assert directory.committed() == []
    assert (tmp_path / saved.manifest.files[0].name).exists()
    # Another rank that found the same gets there too late.
    assert directory.quarantine(saved.committed.folder, "a block is wrong") == place

    save(tmp_path, 5, arrays(w=101), generation=2)
    again = directory.quarantine(saved.committed.folder, "again")
    assert again.name == "0000000005-2"
    assert directory.quarantine(saved.committed.folder, "again") == again
    with pytest.raises(FileNotFoundError):
        directory.quarantine(tmp_path / "steps" / "0000000009", "never was")


def test_storage_that_cannot_be_reached_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    read = Path.read_bytes
    for number in (errno.EACCES, errno.ETIMEDOUT, errno.EIO):
        for name in ("COMMIT", "manifest.json"):

            def refused(path: Path, number: int = number, name: str = name) -> bytes:
                if path.name == name:
                    raise OSError(number, os.strerror(number), str(path))
                return read(path)

            monkeypatch.setattr(Path, "read_bytes", refused)
            if number == errno.EIO:  # a bad sector is
                good, problems = Directory(tmp_path).newest_good()
                assert good is None
                assert problems[0][0] == saved.committed.folder
                assert f"{name} can't be read: Input/output error" in problems[0][1]
            else:
                with pytest.raises(OSError, match=name):
                    Directory(tmp_path).newest_good()
