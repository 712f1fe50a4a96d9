"""Control groups: what a container or a batch system leaves to a job of memory and processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpift.devices import cgroups


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def version_2(tmp_path: Path, root: str = "/") -> Path:
    top = tmp_path / "cgroup"
    group(
        top / "job",
        {
            "memory.max": "1000\n",
            "memory.current": "900\n",
            "memory.stat": "anon 400\ninactive_file 500\nactive_file 0\n",
            "cpu.max": "150000 100000\n",
            "cpu.stat": "usage_usec 3000000\nuser_usec 1\n",
        },
    )
    group(
        top / "job" / "step",
        {
            "memory.max": "max\n",
            "memory.current": "900\n",
            "memory.stat": "",
            "cpu.max": "max 100000\n",
        },
    )
    proc = tmp_path / "proc"
    group(
        proc,
        {
            "cgroup": f"0::{root.rstrip('/')}/job/step\n",
            "mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
            f"30 22 0:26 {root} {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        },
    )
    return proc


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_a_containers_memory_limit_counts_without_the_page_cache(tmp_path: Path, root: str) -> None:
    limits = cgroups.memory_limits(version_2(tmp_path, root))
    assert [item.limit.parent.name for item in limits] == ["job"]
    assert cgroups.memory_share(limits) == pytest.approx(0.4)
    limits[0].limit.write_text("max\n")
    assert cgroups.memory_share(limits) is None


def test_a_containers_processor_quota_is_found_at_the_level_that_has_one(tmp_path: Path) -> None:
    limits = cgroups.processor_limits(version_2(tmp_path))
    assert [(item.processors, item.used_seconds()) for item in limits] == [(1.5, 3.0)]


def test_version_1_keeps_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu,cpuacct"
    unlimited = {"memory.limit_in_bytes": "9223372036854771712\n"}
    limited = {
        "memory.limit_in_bytes": "2000\n",
        "memory.usage_in_bytes": "1500\n",
        "memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
    }
    quota = {
        "cpu.cfs_quota_us": "200000\n",
        "cpu.cfs_period_us": "100000\n",
        "cpuacct.usage": "7000000000\n",
    }
    group(memory, unlimited)
    group(memory / "slurm", limited)
    group(cpu, {**quota, "cpu.cfs_quota_us": "-1\n"})
    group(cpu / "slurm", quota)
    proc = tmp_path / "proc"
    group(
        proc,
        {
            "cgroup": "4:memory:/slurm\n3:cpu,cpuacct:/slurm\n0::/\n",
            "mountinfo": f"31 1 0:1 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
            f"32 1 0:2 / {memory} rw - cgroup cgroup rw,memory\n"
            f"33 1 0:3 / {cpu} rw - cgroup cgroup rw,cpu,cpuacct\n",
        },
    )
    assert cgroups.memory_share(cgroups.memory_limits(proc)) == pytest.approx(0.5)
    quotas = [(q.processors, q.used_seconds()) for q in cgroups.processor_limits(proc)]
    assert quotas == [(2.0, 7.0)]


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroups.memory_limits(tmp_path) == []
    assert cgroups.processor_limits(tmp_path) == []
    assert cgroups.memory_share([]) is None
