"""The table of versions in the documentation, held against what the wheels of torch_npu say.

Nothing of a wheel is run here: its metadata and sources are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mpift.devices.backend import NPU_NAMES
from tests.npu import wheels

# Fetching a wheel may take a while.
pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs/reference/npu-versions.md"
COLUMNS = ["torch_npu", "torch", "CANN, by its wheel", "CANN, elsewhere", "names missing", "run"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    release: str
    torch: str
    cann: str
    elsewhere: str
    missing: str
    run: str


def table() -> dict[str, Row]:
    """Its rows by the release of torch_npu."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    start = cells.index(COLUMNS)
    rows = []
    for row in cells[start + 2 :]:
        if len(row) != len(COLUMNS):
            break
        rows.append(Row(*row))
    return {row.release: row for row in rows}


def row_of(release: str, root: wheels.Root) -> Row:
    """What its wheel says, for comparison; as the table has it where a wheel says nothing."""
    documented = table()[release]
    missing = [name for name in NPU_NAMES if name not in wheels.names_of_npu(root)]
    return Row(
        release=release,
        torch=wheels.required_torch(root),
        cann=wheels.stated_cann(root).get(release, "-"),
        elsewhere=documented.elsewhere,
        missing=", ".join(missing) or "none",
        run=documented.run,
    )


def test_the_table_has_a_row_for_each_release_that_is_looked_at() -> None:
    assert tuple(table()) == wheels.RELEASES


def test_only_the_version_of_the_contract_tests_is_said_to_have_been_run() -> None:
    run = [row.release for row in table().values() if row.run != "no"]
    assert run == [wheels.release_for(torch.__version__)]


def test_the_table_is_right_about_the_version_of_the_contract_tests() -> None:
    release = wheels.release_for(torch.__version__)
    assert release is not None
    try:
        site = wheels.installed(release)
    except wheels.UnavailableError as error:
        pytest.skip(f"torch_npu can't be fetched: {error}")
    assert row_of(release, site) == table()[release]


@pytest.mark.long
@pytest.mark.parametrize("release", wheels.RELEASES)
def test_the_table_is_right_about_every_release(release: str, tmp_path: Path) -> None:
    try:
        wheel = wheels.downloaded(release, tmp_path)
    except wheels.UnavailableError as error:
        pytest.skip(f"torch_npu can't be fetched: {error}")
    assert row_of(release, wheels.contents(wheel)) == table()[release]
    wheel.unlink()


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.9.0", "2.9.0.post9"),
        ("2.9.1", "2.9.1"),
        ("2.13.1", "2.13.0"),
        ("2.4.0", "2.4.0.post4"),
        ("3.0.0", None),
    ],
)
def test_torch_npu_goes_by_the_version_of_torch(version: str, release: str | None) -> None:
    assert wheels.release_for(version) == release


def test_names_are_followed_through_imports_of_all(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu" / "npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from .listed import *\nfrom .public import *\nfrom .one import stream as current\n"
        "import os\nlimit = 1\ndef synchronize(): ...\nclass Event: ...\ndel limit\n"
    )
    (package / "listed.py").write_text("__all__ = ['shown']\ndef shown(): ...\ndef hidden(): ...\n")
    (package / "public").mkdir()
    (package / "public" / "__init__.py").write_text("def open_(): ...\ndef _private(): ...\n")
    names = wheels.names_of_npu(tmp_path)
    assert names == {"shown", "open_", "current", "synchronize", "Event"}
