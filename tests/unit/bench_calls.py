"""Commands of benchmarks, called without measuring; no test in itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from mpift.cli import main
from mpift.errors import MpiftError


def call_bench(
    monkeypatch: pytest.MonkeyPatch, bench: ModuleType, *words: str, report: Any = None
) -> tuple[int, list[Any]]:
    """The exit code of ``mpift bench`` with ``words`` where the module ``bench`` measures
    ``report``, or fails without one; and the plans that it would have run."""
    asked: list[Any] = []

    def measure(plan: Any) -> Any:
        asked.append(plan)
        if report is None:
            raise MpiftError("1 of 2 ranks failed")
        return report

    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(SystemExit) as left:
        main(["bench", *words])
    assert isinstance(left.value.code, int)
    return left.value.code, asked
