"""The benchmark as a user starts it; what it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_small_benchmark_gives_figures_for_all_contenders() -> None:
    words = "bench step -np 2 --model mlp30k --rounds 2 --steps 2 --json -".split()
    done = subprocess.run(
        [sys.executable, "-m", "mpift", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for name in ("local", "mpift", "ddp_gloo", "mpi"):
        assert figures[f"{name}_seconds"] > 0
    assert figures["ratio_to_ddp"] > 0
    assert (figures["ranks"], figures["rounds"]) == (2, 2)
    assert "torch DDP over gloo" in done.stderr
