"""``mpift ckpt`` where there is nothing, or something else, and by what a file is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mpift.checkpoint.directory import INDEX
from mpift.errors import CheckpointError
from tests.unit.checkpoints import arrays, flip, save
from tests.unit.ckpt_calls import call, figures


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=["", "dry run"])
def test_gc_leaves_a_directory_of_others_as_it_is(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is no directory of checkpoints"):
        call("gc", str(tmp_path), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_where_there_is_no_checkpoint_that_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for words in (("verify", str(tmp_path), "--all"), ("index", str(tmp_path))):
        with pytest.raises(CheckpointError, match="has no committed checkpoint"):
            call(*words)
    assert "has no committed checkpoint" in call("ls", str(tmp_path))[1]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_is_what_its_name_says(tmp_path: Path) -> None:
    save(tmp_path / "run", 7, arrays(1, trunk=100))
    file = tmp_path / "a.safetensors"
    assert call("export", str(tmp_path / "run"), "7", str(file))[0] == 0
    assert load_file(file)
    other = tmp_path / "other"
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


def test_a_log_is_wide_enough_for_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    save(tmp_path, 7, arrays(1, a_tensor_with_a_name_that_is_longer_than_most_of_them_are=100))
    assert (
        "a_tensor_with_a_name_that_is_longer_than_most_of_them_are"
        in call("show", str(tmp_path))[1]
    )


def test_an_index_that_is_missing_is_told_and_written(tmp_path: Path) -> None:
    saved = save(tmp_path, 7, arrays(1, trunk=100))
    index = saved.committed.folder / INDEX
    before = index.read_bytes()
    assert "index" not in call("verify", str(tmp_path))[1]
    index.unlink()
    code, text = call("verify", str(tmp_path))
    assert code == 0
    assert "step 7 has no index.h5 for plain HDF5: mpift ckpt index writes it" in text
    (result,) = figures("verify", str(tmp_path))["checkpoints"]
    assert (result["index"], result["damage"]) == (False, [])
    assert f"wrote {index}" in call("index", str(tmp_path))[1]
    assert index.read_bytes() == before
    assert "no index is missing" in call("index", str(tmp_path))[1]
    assert figures("index", str(tmp_path)) == {"written": [], "damage": []}
    index.unlink()
    flip(saved.committed.folder / "manifest.json", 5)
    code, text = call("index", str(tmp_path))
    assert code == 5
    assert "is not what was committed" in text
