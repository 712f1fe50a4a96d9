"""Probing a node: shares from the kernel's counters, and calls that never come back."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpift.core.health import Metrics
from mpift.devices import accelerators, cgroups, probes
from mpift.devices.accelerators import AcceleratorState, accelerator_probe
from mpift.devices.probes import (
    PATIENCE_SECONDS,
    Background,
    HostProbe,
    cpu_share,
    disk_share,
    link_bytes_per_second,
    network_share,
    read_ticks,
)

WAIT_SECONDS = 20.0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostProbe]:
    probe = HostProbe(tmp_path)
    yield probe
    probe.close()


def test_the_first_sample_knows_nothing_and_the_third_knows_rates(host: HostProbe) -> None:
    assert host.sample(0.0) == Metrics()
    assert host.wait(WAIT_SECONDS)
    second = host.sample(10.0)
    assert second.memory is not None
    assert second.disk is not None
    assert second.cpu is None
    assert host.wait(WAIT_SECONDS)
    ticks = read_ticks(os.sched_getaffinity(0)).total
    while read_ticks(os.sched_getaffinity(0)).total < ticks + 5:  # the clock has to tick
        time.sleep(0.01)
    host.sample(20.0)
    assert host.wait(WAIT_SECONDS)
    assert host.sample(20.0).cpu is not None


def test_probes_load_neither_torch_nor_numpy() -> None:
    script = "import sys, mpift.devices.probes; print(*({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == []


def test_a_file_system_that_never_answers_blocks_nobody_and_becomes_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def statvfs_of_a_dead_server(directory: Path) -> float:
        hanging.set()
        release.wait()
        return 0.5

    monkeypatch.setattr(probes, "disk_share", statvfs_of_a_dead_server)
    probe = HostProbe(tmp_path)
    try:
        probe.sample(0.0)
        assert hanging.wait(WAIT_SECONDS)
        for now in itertools.count(1):
            sample = probe.sample(float(now))
            assert sample.disk is None
            if now > 200 and sample.memory is not None:  # the others are read all the same
                break
            time.sleep(0.0)  # lets the readers run
        release.set()
        assert probe.wait(WAIT_SECONDS)
        assert probe.sample(201.0).disk == 0.5
    finally:
        release.set()
        probe.close()


def test_a_reading_that_is_out_keeps_the_last_one_until_patience_ends() -> None:
    turns = iter([0.1, 0.2])
    started, release = threading.Event(), threading.Event()

    def read() -> float:
        value = next(turns)
        if value == 0.2:
            started.set()
            release.wait()
        return value

    reading = Background("test", read, spacing_seconds=1.0)
    try:
        assert reading.latest(0.0) is None
        assert reading.idle.wait(WAIT_SECONDS)
        assert reading.latest(0.9) == 0.1  # too early to ask again
        assert not started.is_set()
        assert reading.latest(5.0) == 0.1
        assert started.wait(WAIT_SECONDS)
        assert reading.latest(5.0 + PATIENCE_SECONDS) == 0.1
        assert reading.latest(5.1 + PATIENCE_SECONDS) is None
        release.set()
        assert reading.idle.wait(WAIT_SECONDS)
        assert reading.latest(5.2 + PATIENCE_SECONDS) == 0.2
    finally:
        release.set()
        reading.close()


def test_a_reading_that_fails_is_unknown_and_the_next_one_counts_again() -> None:
    turns: Iterator[OSError | float] = iter([OSError("stale file handle"), 0.3])

    def read() -> float:
        turn = next(turns)
        if isinstance(turn, OSError):
            raise turn
        return turn

    reading = Background("test", read, spacing_seconds=1.0)
    try:
        reading.latest(0.0)
        assert reading.idle.wait(WAIT_SECONDS)
        assert reading.latest(2.0) is None
        assert reading.idle.wait(WAIT_SECONDS)
        assert reading.latest(2.0) == 0.3
    finally:
        reading.close()


def test_close_ends_the_threads(tmp_path: Path) -> None:
    probe = HostProbe(tmp_path)
    probe.sample(0.0)
    assert probe.wait(WAIT_SECONDS)
    named = [t for t in threading.enumerate() if t.name in {"mpift-host-probe", "mpift-disk-probe"}]
    assert len(named) == 2
    probe.close()
    for thread in named:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in named)


def test_a_directory_that_does_not_exist_yet_is_measured_at_its_parent(tmp_path: Path) -> None:
    share = disk_share(tmp_path)
    assert share is not None
    assert 0 < share <= 1
    assert disk_share(tmp_path / "not" / "there") == pytest.approx(share, abs=0.01)


def test_a_disk_counts_what_is_kept_for_root_as_used_up_and_may_have_no_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(f_blocks=100, f_bfree=30, f_bavail=10)
    monkeypatch.setattr(os, "statvfs", lambda _: state)
    assert disk_share(Path("/")) == pytest.approx(70 / 80)
    state.f_blocks = state.f_bfree = state.f_bavail = 0
    assert disk_share(Path("/")) is None


STAT = """\
cpu  9 9 9 9 9 9 9 9 9 9
cpu0 {busy} 0 0 {idle} 0 0 0 0 50 0
cpu2 100 0 0 100 100 0 0 0 0 0
intr 1 2 3
"""


def test_only_the_processors_that_this_process_may_use_are_counted(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT.format(busy=100, idle=100))
    before = read_ticks(frozenset({0}), stat)
    assert (before.total, before.busy) == (200, 100)
    both = read_ticks(frozenset({0, 2}), stat)
    assert (both.total, both.busy) == (500, 200)
    stat.write_text(STAT.format(busy=190, idle=110))
    after = read_ticks(frozenset({0}), stat)
    assert cpu_share(before, after) == pytest.approx(0.9)
    assert cpu_share(after, before) is None  # counters ran backwards
    assert cpu_share(after, after) is None
    assert cpu_share(both, after) is None  # bound to other processors in between


def test_the_busiest_direction_of_the_busiest_known_link_counts() -> None:
    before = {"eth0": (0, 0), "ib0": (1000, 1000), "tap": (0, 0), "new": (0, 0)}
    after = {"eth0": (500, 100), "ib0": (1100, 1000), "tap": (10**9, 0)}
    speeds = {"eth0": 100.0, "ib0": 1000.0, "new": 1.0}
    assert network_share(before, after, 10.0, speeds.get) == pytest.approx(0.5)
    assert network_share(before, after, 10.0, lambda _: None) is None
    assert network_share(before, after, 0.0, speeds.get) is None


def test_counters_that_wrap_or_begin_anew_give_no_share() -> None:
    def share(old: int, new: int) -> float | None:
        return network_share({"eth0": (old, 7)}, {"eth0": (new, 7)}, 1.0, lambda _: 100.0)

    assert share(2**32 - 10, 40) is None
    assert share(0, 10**12) == 1.0


def test_the_kernel_tells_a_links_speed_or_does_not(tmp_path: Path) -> None:
    for name, text in {"eth0": "25000\n", "virtual": "-1\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(text)
    assert link_bytes_per_second("eth0", tmp_path) == 3.125e9
    assert link_bytes_per_second("virtual", tmp_path) is None
    assert link_bytes_per_second("missing", tmp_path) is None


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


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({15: "GPU is lost", 3: "Not Supported"}.get(value, str(value)))
        self.value = value


class FakeNvml:
    """As much of NVIDIA's ``pynvml`` as a probe uses, for two devices."""

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_NO_DATA = 21

    def __init__(self) -> None:
        self.errors = 5  # from before the job
        self.remap_failed = 0
        self.raises: int | None = None
        self.driver = True

    def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name, as those below
        if not self.driver:
            raise FakeNvmlError(12)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"#{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        if self.raises is not None:
            raise FakeNvmlError(self.raises)
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=30, total=120)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:  # noqa: N802
        return (0, 0, 0, self.remap_failed)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:  # noqa: N802
        return self.errors


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


def test_a_cuda_device_tells_its_use_and_that_it_is_well(nvml: FakeNvml) -> None:
    probe = accelerator_probe(local_rank=3)
    assert probe is not None
    assert probe.sample() == AcceleratorState(
        healthy=True, words="CUDA device 1", use=0.97, memory=0.25, temperature_celsius=61
    )


@pytest.mark.parametrize(
    ("visible", "name"), [("7,GPU-12ab", "CUDA device GPU-12ab"), (" 4 ", "CUDA device 4")]
)
def test_the_device_is_the_one_that_cuda_shows_to_the_rank(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    probe = accelerator_probe(local_rank=1)
    assert probe is not None
    assert probe.sample().words == name


def test_there_is_no_probe_without_a_device_a_driver_or_the_library(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert accelerator_probe() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvml.driver = False
    assert accelerator_probe() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert accelerator_probe() is None


def test_a_device_fault_is_told_in_words_and_errors_from_before_the_job_are_none(
    nvml: FakeNvml,
) -> None:
    probe = accelerator_probe()
    assert probe is not None
    assert probe.sample().healthy
    nvml.errors += 2
    state = probe.sample()
    assert (state.healthy, "2 uncorrected memory errors" in state.words) == (False, True)
    nvml.remap_failed = 1
    assert "could not be replaced" in probe.sample().words
    nvml.raises = 15
    assert probe.sample() == AcceleratorState(healthy=False, words="CUDA device 0: GPU is lost")


def test_what_a_model_of_device_cannot_tell_is_unknown_and_no_fault(nvml: FakeNvml) -> None:
    probe = accelerator_probe()
    assert probe is not None
    nvml.raises = nvml.NVML_ERROR_NOT_SUPPORTED
    state = probe.sample()
    assert (state.healthy, state.temperature_celsius, state.use) == (True, None, 0.97)


def test_a_device_fault_reaches_the_metrics(tmp_path: Path) -> None:
    class BrokenDevice:
        def sample(self) -> AcceleratorState:
            return AcceleratorState(healthy=False, words="device 3: lost", use=0.5)

    device: accelerators.AcceleratorProbe = BrokenDevice()
    probe = HostProbe(None, accelerator=device)
    try:
        probe.sample(0.0)
        assert probe.wait(WAIT_SECONDS)
        metrics = probe.sample(1.0)
        assert (metrics.accelerator, metrics.accelerator_fault) == (0.5, "device 3: lost")
        assert metrics.disk is None
    finally:
        probe.close()
