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

from mpift.core.health import Device, Metrics
from mpift.devices import probes
from mpift.devices.accelerators import AcceleratorState
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


def test_a_driver_that_does_not_answer_is_told_of_its_device() -> None:
    hanging, release = threading.Event(), threading.Event()
    first = AcceleratorState(healthy=True, words="NPU 3", device="NPU 3", temperature_celsius=50)
    states = iter([first])

    class Device3:
        spacing_seconds = 1.0

        def sample(self) -> AcceleratorState:
            state = next(states, None)
            if state is None:
                hanging.set()
                release.wait()
            return state or first

    probe = HostProbe(None, accelerator=Device3())
    try:
        assert probe.sample(0.0).device is None  # nothing is known yet
        assert probe.wait(WAIT_SECONDS)
        told = probe.sample(2.0)
        assert told.device == Device(name="NPU 3", temperature_celsius=50)
        assert hanging.wait(WAIT_SECONDS)
        assert probe.sample(2.0 + PATIENCE_SECONDS).device == told.device
        metrics = probe.sample(12.0 + PATIENCE_SECONDS)
        assert metrics.device == Device(
            name="NPU 3", warning="its driver has not answered for 30 s"
        )
        assert metrics.accelerator_fault is None
        release.set()
        assert probe.wait(WAIT_SECONDS)
        assert probe.sample(13.0 + PATIENCE_SECONDS).device == told.device
    finally:
        release.set()
        probe.close()


def test_a_device_fault_and_what_may_become_one_reach_the_metrics() -> None:
    class BrokenDevice:
        spacing_seconds = 1.0

        def sample(self) -> AcceleratorState:
            return AcceleratorState(
                healthy=False,
                words="NPU 3: lost",
                device="NPU 3",
                use=0.5,
                corrected_errors=7,
                temperature_celsius=99.0,
                temperature_limit_celsius=105.0,
                link_up=False,
                warning="hot",
            )

    probe = HostProbe(None, accelerator=BrokenDevice())
    try:
        probe.sample(0.0)
        assert probe.wait(WAIT_SECONDS)
        metrics = probe.sample(1.0)
        assert (metrics.accelerator, metrics.accelerator_fault) == (0.5, "NPU 3: lost")
        assert metrics.device == Device(
            name="NPU 3",
            corrected_errors=7,
            temperature_celsius=99.0,
            temperature_limit_celsius=105.0,
            link_up=False,
            warning="hot",
        )
        assert metrics.disk is None
    finally:
        probe.close()


def test_a_device_whose_health_is_unknown_has_no_fault_and_sets_its_own_pace() -> None:
    class SlowDevice:
        spacing_seconds = 60.0
        samples = 0

        def sample(self) -> AcceleratorState:
            self.samples += 1
            self.spacing_seconds = 5.0  # it has found a cheaper way
            return AcceleratorState(healthy=None, words="NPU 3: its tool fails")

    device = SlowDevice()
    probe = HostProbe(None, accelerator=device)
    try:
        for now, samples in ((0.0, 1), (4.0, 1), (5.0, 2)):
            metrics = probe.sample(now)
            assert probe.wait(WAIT_SECONDS)
            assert device.samples == samples
            assert metrics.accelerator_fault is None
    finally:
        probe.close()


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
