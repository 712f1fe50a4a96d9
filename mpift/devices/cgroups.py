"""What a container leaves of its host: the memory and processor limits of control groups.

A process may use no more than the tightest limit between its own group and the root that it sees,
so every level with a limit is watched. Both versions are read: 1, with a hierarchy a controller,
and 2, with one for all; each group is a folder of small files (Linux, admin-guide/cgroup-v1 and
cgroup-v2.rst). Reading ``memory.stat`` makes the kernel gather counts from all processors, which
can take milliseconds: call ``memory_share`` where that hurts nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC_SELF = Path("/proc/self")
# Version 1 says "no limit" with the largest multiple of the page size that fits 63 bits.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One group's limit in bytes, and the files that tell its use."""

    limit: Path
    usage: Path
    stat: Path
    reclaimable_key: str

    def share(self) -> float | None:
        """The used share, without the page cache that the kernel drops first; None if unlimited.

        Written checkpoints fill the page cache up to any limit; counted in, it would look like a
        lack of memory (Kubernetes' working set leaves it out for the same reason).
        """
        limit = _bytes_limit(self.limit)
        if limit is None:
            return None
        lines = (line.split() for line in self.stat.read_text().splitlines())
        reclaimable = next((int(v) for key, v in lines if key == self.reclaimable_key), 0)
        return max(0.0, (int(self.usage.read_text()) - reclaimable) / limit)


@dataclass(frozen=True, slots=True)
class ProcessorLimit:
    """One group's quota: as many processors at once, and how to read the seconds it has used."""

    processors: float
    used_seconds: Callable[[], float]


def memory_limits(proc: Path = PROC_SELF) -> list[MemoryLimit]:
    """The memory limits that this process is under now, innermost first."""
    version, levels = _levels("memory", proc)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit, usage, key = names[version]
    found = (MemoryLimit(at / limit, at / usage, at / "memory.stat", key) for at in levels)
    return [item for item in found if _bytes_limit(item.limit) is not None]


def memory_share(limits: Sequence[MemoryLimit]) -> float | None:
    """The used share of the tightest of ``limits``; None without any."""
    shares = [share for item in limits if (share := item.share()) is not None]
    return max(shares, default=None)


def processor_limits(proc: Path = PROC_SELF) -> list[ProcessorLimit]:
    """The processor quotas that this process is under now, innermost first."""
    version, levels = _levels("cpu", proc)
    if version == 2:
        return list(_quotas_2(levels))
    _, usage_levels = _levels("cpuacct", proc)
    return list(_quotas_1(levels, usage_levels))


def _quotas_2(levels: Sequence[Path]) -> Iterator[ProcessorLimit]:
    for at in levels:
        quota, _, period = _text(at / "cpu.max").partition(" ")
        if quota.isdigit():  # "max" is no quota
            used = functools.partial(_used_seconds_2, at / "cpu.stat")
            yield ProcessorLimit(int(quota) / int(period), used)


def _quotas_1(levels: Sequence[Path], usage_levels: Sequence[Path]) -> Iterator[ProcessorLimit]:
    # Both controllers are mounted as one nearly everywhere; where not, the paths may differ in
    # depth, and a quota without its own group's usage says nothing.
    if len(levels) != len(usage_levels):
        return
    for at, usage_at in zip(levels, usage_levels, strict=True):
        quota, period = _text(at / "cpu.cfs_quota_us"), _text(at / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # -1 is no quota
            used = functools.partial(_used_seconds_1, usage_at / "cpuacct.usage")
            yield ProcessorLimit(int(quota) / int(period), used)


def _used_seconds_2(stat: Path) -> float:
    lines = (line.split() for line in stat.read_text().splitlines())
    return next(int(value) / 1e6 for key, value in lines if key == "usage_usec")


def _used_seconds_1(usage: Path) -> float:
    return int(usage.read_text()) / 1e9


def _levels(controller: str, proc: Path) -> tuple[int, list[Path]]:
    """(version, folders of this process's group and its parents, innermost first)."""
    groups: dict[str, str] = {}
    for line in _text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    version = 1 if controller in groups else 2
    group = groups.get(controller if version == 1 else "")
    if group is None:
        return version, []
    for line in _text(proc / "mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        root, point = mount.split()[3:5]
        file_system, _, options = kind.split(maxsplit=2)
        if version == 2:
            matches = file_system == "cgroup2"
        else:
            matches = file_system == "cgroup" and controller in options.split(",")
        if matches:
            # In a container the mount may begin at its own group: ``root`` is cut off the path.
            inside = group[len(root) :] if root != "/" and group.startswith(root) else group
            top, leaf = Path(point), Path(point, inside.lstrip("/"))
            return version, [at for at in (leaf, *leaf.parents) if at == top or top in at.parents]
    return version, []


def _bytes_limit(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def _text(path: Path) -> str:
    """A file's content; empty where it does not exist, as at the root of a hierarchy."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
