"""``mpift ckpt``: what it prints, what it writes for machines, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpift.checkpoint.directory import Directory
from tests.unit.checkpoints import Saved, arrays, flip, save
from tests.unit.ckpt_calls import call, figures, leave, run, wide

__all__ = ["run", "wide"]


# -- the whole -------------------------------------------------------------------------------------


def test_help_loads_neither_torch_nor_h5py_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from mpift.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'h5py', 'numpy', 'mpi4py', 'psutil'} & set(sys.modules)\n"
        "    print(*heavy, file=sys.stderr)"
    )
    for words in (("ckpt", "--help"), ("ckpt", "verify", "--help")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr.split()) == (0, [])
        assert "Usage: mpift ckpt" in done.stdout


def test_mistakes_of_usage_end_with_2_and_say_what_is_right(
    tmp_path: Path, run: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(tmp_path)
    for words, said in (
        (("ls", f"{here}/none"), "does not exist"),
        (("show", here, "abc"), "give a number such as 150"),
        (("show", here, "7"), "no checkpoint of step 7"),
        (("verify", here, "100", "--all"), "not both"),
        (("gc", here, "--keep", "0"), "'--keep'"),
        (("gc", here, "--keep-every", "5"), "--keep-every needs --keep"),
        (("ls", here, "--json", f"{here}/none/x"), "no folder"),
        (("flatten", here, "100", here), "is not empty: name a new directory"),
    ):
        assert leave("ckpt", *words) == 2, words
        assert said in capsys.readouterr().err, words


def test_an_empty_directory_has_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures("ls", str(tmp_path)) == {"checkpoints": [], "damaged": []}
    assert leave("ckpt", "verify", str(tmp_path)) == 2
    assert "has no committed checkpoint" in capsys.readouterr().err


# -- looking ---------------------------------------------------------------------------------------


def test_the_list_has_a_line_a_checkpoint(tmp_path: Path, run: list[Saved]) -> None:
    code, text = call("ls", str(tmp_path))
    assert code == 0
    rows = [line.split() for line in text.splitlines() if " kB " in line]
    assert [(row[1], row[3]) for row in rows] == [("100", "1"), ("200", "1"), ("150", "2")]
    assert "gen: generation. One begins when a job opens the directory or goes back" in text
    assert "best" in text

    found = figures("ls", str(tmp_path))["checkpoints"]
    wanted = [(100, 1, 1.0, None, []), (200, 1, 1.0, 100, ["best"]), (150, 2, 2 / 6, 200, [])]
    facts = ("step", "generation", "changed_share", "base", "pins")
    assert [tuple(row[fact] for fact in facts) for row in found] == wanted
    assert found[2]["state_bytes"] == 6000
    assert found[2]["new_bytes"] == 2000
    assert found[2]["ranks"] == 2


def test_the_list_has_no_column_that_says_nothing(tmp_path: Path) -> None:
    save(tmp_path, 200, arrays(2, head=500), base=save(tmp_path, 100, arrays(1, head=500)))
    code, text = call("ls", str(tmp_path))
    assert code == 0
    assert "ranks" in text
    assert "gen" not in text
    assert "pins" not in text


def test_a_list_fits_a_narrow_terminal_with_all_it_says(
    tmp_path: Path, run: list[Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run[1].committed.folder / "PIN.best").unlink()
    monkeypatch.setenv("COLUMNS", "80")
    _, text = call("ls", str(tmp_path))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\d{4}-\d\d-\d\d ", text)


def test_a_list_with_damaged_checkpoints_names_them_and_ends_with_5(
    tmp_path: Path, run: list[Saved]
) -> None:
    flip(run[0].committed.folder / "manifest.json", 30)
    (run[1].committed.folder / "COMMIT").write_text("")
    found = figures("ls", str(tmp_path), code=5)
    assert [row["step"] for row in found["checkpoints"]] == [150]
    assert [Path(row["folder"]).name for row in found["damaged"]] == ["0000000200", "0000000100"]
    code, text = call("ls", str(tmp_path))
    assert code == 5
    assert "damaged:" in text
    assert "COMMIT is no COMMIT file" in text


def test_json_goes_to_a_file_beside_the_table(tmp_path: Path, run: list[Saved]) -> None:
    file = tmp_path / "list.json"
    code, text = call("ls", str(tmp_path), "--json", str(file))
    assert code == 0
    assert "generation" in text
    assert len(json.loads(file.read_text())["checkpoints"]) == 3


def test_a_dense_step_is_called_one(tmp_path: Path, run: list[Saved]) -> None:
    code, text = call("show", str(tmp_path), "200")
    assert code == 0
    assert "6 of 6 blocks (100 %) differ from step 100. Dense optimizers change every block" in text
    assert "pinned: best" in text


def test_showing_the_newest_tells_its_tensors_and_the_files_it_needs(
    tmp_path: Path, run: list[Saved]
) -> None:
    code, text = call("show", str(tmp_path))
    assert code == 0
    assert "step 150, generation 2" in text
    assert "2 of 6 blocks (33 %) differ from step 200. The others are shared" in text
    found = figures("show", str(tmp_path), "150.g2")
    assert [(t["name"], t["blocks"], t["new_blocks"]) for t in found["tensors"]] == [
        ("trunk", 4, 0),
        ("head", 2, 2),
    ]
    new, old = found["files"]
    assert old["name"].endswith("g1.h5")
    assert old["live_share"] == pytest.approx(4000 / old["size_bytes"])
    assert new["live_share"] == pytest.approx(2000 / new["size_bytes"])
    assert found["encoding_ratio"] == 1.0
    assert "A full write" in figures("show", str(tmp_path), "100")["about_change"]


def test_showing_few_tensors_says_what_is_left_out(tmp_path: Path, run: list[Saved]) -> None:
    _, text = call("show", str(tmp_path), "--top", "1")
    assert "and 1 smaller ones of 2.0 kB together: --all" in text
    assert "head" not in text
    _, text = call("show", str(tmp_path), "--top", "1", "--all")
    assert "head" in text


def test_the_ratio_is_that_of_encoded_blocks(tmp_path: Path) -> None:
    zeros = np.zeros(1024, np.float32)
    save(tmp_path, 1, {"zeros": zeros, "ones": zeros + 1}, encode=True)
    found = figures("show", str(tmp_path))
    assert found["stored_bytes"] < 8192
    assert found["encoding_ratio"] == pytest.approx(8192 / found["stored_bytes"])


def test_a_difference_names_tensors_and_counts_blocks(tmp_path: Path) -> None:
    old = arrays(1, same=600, gone=10, grown=100, changed=1000)
    first = save(tmp_path, 1, old)
    changed = old["changed"].copy()
    changed[[0, 999]] = 7
    new = {"same": old["same"], "grown": arrays(2, g=300)["g"], "changed": changed, "new": changed}
    save(tmp_path, 2, new, base=first)
    found = figures("diff", str(tmp_path), "1", "2")
    assert found == {
        "older": 1,
        "newer": 2,
        "added": ["new"],
        "removed": ["gone"],
        "changed": [
            {"name": "grown", "what": "shape (100,) is (300,)", "blocks": 2, "blocks_changed": 2},
            {"name": "changed", "what": "values", "blocks": 4, "blocks_changed": 2},
        ],
        "unchanged": 1,
        "blocks": 13,
        "blocks_changed": 8,
    }
    code, text = call("diff", str(tmp_path), "1", "2")
    assert code == 0
    assert "+ new" in text
    assert "- gone" in text
    assert "8 of 13 blocks (62 %) are new" in text


# -- verifying -------------------------------------------------------------------------------------


def test_verifying_good_checkpoints_says_so(tmp_path: Path, run: list[Saved]) -> None:
    code, text = call("verify", str(tmp_path))
    assert (code, text) == (0, "step 150: every digest is right\n")
    found = figures("verify", str(tmp_path), "--all")["checkpoints"]
    assert [(row["step"], row["damage"]) for row in found] == [(100, []), (200, []), (150, [])]


def test_verifying_lists_every_damage_and_ends_with_5(tmp_path: Path, run: list[Saved]) -> None:
    trunk = run[1].manifest.named()["trunk"].blocks
    for index in (1, 2):
        flip(tmp_path / trunk[index].file, trunk[index].offset + 3)
    found = figures("verify", str(tmp_path), "--all", code=5)["checkpoints"]
    assert [len(row["damage"]) for row in found] == [0, 3, 3]
    code, text = call("verify", str(tmp_path), "200")
    assert code == 5
    assert text.count("damaged: step 200: ") == 3
    assert call("verify", str(tmp_path), "100")[0] == 0

    # Where nothing is known any more, that is the answer.
    for saved in run:
        (saved.committed.folder / "COMMIT").write_text("")
    found = figures("verify", str(tmp_path), code=5)["checkpoints"]
    assert [row["step"] for row in found] == [None] * 3


def test_a_damaged_manifest_ends_every_command_with_5(
    tmp_path: Path, run: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run[0].committed.folder / "manifest.json", 30)
    here, out = str(tmp_path), str(tmp_path / "out")
    for words in (
        ("show", here, "100"),
        ("diff", here, "100", "200"),
        ("flatten", here, "100", out),
        ("export", here, "100", f"{out}.pt"),
    ):
        assert leave("ckpt", *words) == 5, words
        assert "is not what was committed" in capsys.readouterr().err
    assert leave("ckpt", "verify", here, "100") == 5


def test_a_directory_that_may_not_be_read_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Directory) -> None:
        raise PermissionError(13, "Permission denied", "/x/COMMIT")

    monkeypatch.setattr(Directory, "committed", refused)
    assert leave("ckpt", "ls", str(tmp_path)) == 2
    assert "Permission denied: '/x/COMMIT'" in capsys.readouterr().err


# -- cleaning up -----------------------------------------------------------------------------------


def test_cleaning_up_keeps_the_newest_and_the_pinned(tmp_path: Path, run: list[Saved]) -> None:
    here = str(tmp_path)
    foretold = figures("gc", here, "--keep", "1", "--dry-run")
    assert foretold["steps"] == [100]
    assert foretold["dry_run"] is True
    assert len(Directory(tmp_path).committed()) == 3
    done = figures("gc", here, "--keep", "1")
    assert done == {**foretold, "dry_run": False}
    assert [c.step for c in Directory(tmp_path).committed()] == [200, 150]
    code, text = call("gc", here)
    assert code == 0
    assert "removed 0 files" in text
    assert "checkpoints of steps: none" in text


def test_cleaning_up_says_why_something_stays(tmp_path: Path, run: list[Saved]) -> None:
    flip(run[1].committed.folder / "manifest.json", 30)
    code, text = call("gc", str(tmp_path), "--keep", "1")
    assert code == 0
    assert "no block file is removed, since" in text


def test_cleaning_up_refuses_while_a_job_writes_and_names_it(
    tmp_path: Path, run: list[Saved], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Directory(tmp_path)
    directory.claim("training-7")
    for words in (("--keep", "1"), ("--keep", "1", "--dry-run")):
        assert leave("ckpt", "gc", str(tmp_path), *words) == 2
        assert f"by job training-7: process {os.getpid()}" in capsys.readouterr().err
    directory.release("training-7")
    assert len(directory.committed()) == 3
