"""Tensors here are tiny: torch's threads would only wait for each other."""

from __future__ import annotations

from tests.unit.trainings import one_thread

__all__ = ["one_thread"]
