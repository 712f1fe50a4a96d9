"""The directory of checkpoints: what counts, by which name, and what a job may make there."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from mpift.checkpoint.directory import Directory, block_name, step_of, written_at
from mpift.checkpoint.durable import Disk
from mpift.errors import CheckpointError
from tests.unit.checkpoints import Refusing, arrays, commit, save

# -- names -----------------------------------------------------------------------------------------


def test_a_block_file_names_the_generation_and_the_step_that_wrote_it() -> None:
    name = block_name(150, member=1, epoch=0, attempt=2, generation=3)
    assert name == "0000000150-w1-e0-a2-g3.h5"
    assert written_at(name) == written_at(f"{name}.0a1b2c3d.new") == (3, 150)
    assert written_at("notes.h5") is None
    assert step_of("0000000150") == (150, None)
    assert step_of("0000000150.g4") == (150, 4)
    assert step_of("0000000150.0a1b2c3d.new") is None


# -- what there is ---------------------------------------------------------------------------------


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "none")
    assert not directory.committed()
    assert not directory.damaged()
    assert not directory.readers()
    assert directory.newest_good() == (None, [])
    assert directory.live() is None
    assert directory.generation() == 0
    assert not (tmp_path / "none").exists()


def test_a_folder_without_commit_is_no_checkpoint(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    (saved.committed.folder / "COMMIT").unlink()
    assert Directory(tmp_path).committed() == []


def test_steps_of_a_later_generation_are_newer_than_higher_steps_of_an_older_one(
    tmp_path: Path,
) -> None:
    save(tmp_path, 100, arrays(w=10))
    save(tmp_path, 150, arrays(w=10))
    save(tmp_path, 110, arrays(w=10), generation=2)
    again = save(tmp_path, 150, arrays(1, w=10), generation=3)
    directory = Directory(tmp_path)
    found = [(c.order, c.folder.name) for c in directory.committed()]
    assert found == [
        ((1, 100), "0000000100"),
        ((1, 150), "0000000150"),
        ((2, 110), "0000000110"),
        ((3, 150), "0000000150.g3"),
    ]
    assert directory.find(150) == again.committed
    assert directory.find(150, 1).folder.name == "0000000150"
    assert directory.generation() == 3


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 100, arrays(w=10))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7.*newest ones are: 100"):
        Directory(tmp_path).find(7)
    with pytest.raises(CheckpointError, match="step 100 of generation 9"):
        Directory(tmp_path).find(100, 9)


def test_pins_are_listed_by_name(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    for name in ("PIN.paper", "PIN.best", "PIN.half.0a1b2c3d.new"):
        (saved.committed.folder / name).touch()
    assert Directory(tmp_path).committed()[0].pins == ("best", "paper")


# -- writing ---------------------------------------------------------------------------------------


def test_a_new_checkpoint_has_the_plain_name_unless_a_committed_one_has_it(
    tmp_path: Path,
) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    directory = Directory(tmp_path)
    assert directory.free_name(6, 1) == "0000000006"
    assert directory.free_name(5, 2) == "0000000005.g2"
    with pytest.raises(CheckpointError, match=r"step 5 can't be saved twice in generation 1"):
        directory.free_name(5, 1)
    commit(directory, replace(saved.manifest, order=(2, 5)))
    with pytest.raises(CheckpointError, match=r"0000000005\.g2 is committed already"):
        directory.free_name(5, 2)
    # What a damaged one was is not known: it keeps its name.
    (saved.committed.folder / "COMMIT").write_text("?")
    assert directory.free_name(5, 3) == "0000000005.g3"


def test_what_was_never_committed_makes_room_for_the_next_attempt(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    (saved.committed.folder / "COMMIT").unlink()
    assert Directory(tmp_path).free_name(5, 1) == "0000000005"
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_commit_that_comes_while_its_folder_is_discarded_is_not_lost(tmp_path: Path) -> None:
    saved = save(tmp_path, 5, arrays(w=10))
    record = saved.committed.folder / "COMMIT"
    data = record.read_bytes()
    record.unlink()

    class CommittedMeanwhile(Disk):
        def rename(self, old: Path, new: Path) -> None:
            if old == saved.committed.folder:
                record.write_bytes(data)
            super().rename(old, new)

    directory = Directory(tmp_path, CommittedMeanwhile())
    assert directory.discard(saved.committed.folder) is None
    assert directory.committed() == [saved.committed]
    directory.check(saved.committed, thorough=True)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission is denied"),
        (errno.EPERM, "not permitted"),
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_directory_that_cannot_be_written_is_refused_with_a_remedy(
    tmp_path: Path, number: int, remedy: str
) -> None:
    with pytest.raises(CheckpointError, match=f"written to {tmp_path}.*{remedy}"):
        Directory(tmp_path, Refusing(number)).prepare()


def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a file is in the way"):
        Directory(tmp_path / "file").prepare()
    with pytest.raises(CheckpointError, match="a file is in the way"):
        Directory(tmp_path / "file" / "deeper").prepare()


def test_preparing_makes_the_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "down"
    Directory(root).prepare()
    Directory(root).prepare()
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*")) == [
        "ID",
        "blocks",
        "steps",
    ]
