"""``mpift ckpt`` as it is called by the tests, and a directory for it to look into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mpift.cli import main
from mpift.cli.ckpt import app
from tests.unit.checkpoints import Saved, arrays, save


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run(tmp_path: Path) -> list[Saved]:
    """Three checkpoints of a run: a full one, a dense step, and one of a later generation in which
    only ``head`` changes."""
    first = save(tmp_path, 100, arrays(1, trunk=1000, head=500))
    second = save(tmp_path, 200, arrays(2, trunk=1000, head=500), base=first)
    third = save(
        tmp_path,
        150,
        {**arrays(2, trunk=1000), "head": arrays(3, h=500)["h"]},
        generation=2,
        base=second,
    )
    (second.committed.folder / "PIN.best").touch()
    return [first, second, third]


def call(*words: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def figures(*words: str, code: int = 0) -> Any:
    """The JSON on standard output, which nothing else is mixed into."""
    result = CliRunner().invoke(app, [*words, "--json", "-"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def leave(*words: str) -> int:
    """The exit code of the whole program."""
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(str(left.value.code))
