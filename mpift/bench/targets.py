"""What a benchmark wants a ratio to be: told, met or missed; a target never fails a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio, ``words`` for people, that is wanted at most as large as ``bound``, or smaller where
    not ``inclusive``."""

    name: str
    words: str
    measured: float
    bound: float
    inclusive: bool = True

    @property
    def met(self) -> bool:
        return self.measured < self.bound or (self.inclusive and self.measured == self.bound)

    @property
    def wanted(self) -> str:
        return f"{'at most' if self.inclusive else 'below'} {self.bound:g}"

    @property
    def verdict(self) -> str:
        return "met" if self.met else "missed"

    def as_json(self) -> dict[str, Any]:
        return {"measured": self.measured, "bound": self.bound, "met": self.met}
