"""Samples of a node's health, and what becomes of it sample by sample; no test in itself."""

from __future__ import annotations

from collections.abc import Iterable

from mpift.core.health import SAMPLES_TO_FALL, Band, Health, Metrics

CALM = Metrics(cpu=0.3, memory=0.3, disk=0.3, network=0.1)
ALL_OVER = Metrics(cpu=0.95, memory=0.9, disk=0.9, network=0.97)


def observed(samples: Iterable[Metrics], health: Health | None = None) -> list[Health]:
    """The health after each sample, one a second."""
    health = health or Health()
    start = max(0.0, health.observed_at + 1)
    story = []
    for second, sample in enumerate(samples):
        health = health.observe(start + second, sample)
        story.append(health)
    return story


def settled(sample: Metrics, health: Health | None = None) -> Health:
    """The health once nothing changes any more."""
    return observed([sample] * (SAMPLES_TO_FALL + len(Band)), health)[-1]
