"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from mpift.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def run_script(path: str) -> dict[str, Any]:
    runpy.run_path(path, run_name="__main__")
    return {}


def test_the_script_of_the_readme_trains_and_survives_the_fault_that_it_rehearses(
    tmp_path: Path,
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    script = tmp_path / "train.py"
    script.write_text(block[1])
    outcome = run_ranks(3, run_script, str(script), environment={"MPIFT_CHAOS": "kill:2@50"})
    assert sorted(outcome.results) == [0, 1], str(outcome)
    assert outcome.exit_code == 0
    assert "lost member 2; 2 ranks go on" in outcome.stderr
