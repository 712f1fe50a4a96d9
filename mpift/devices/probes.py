"""Probing a node: how much of its processors, memory, checkpoint disk and network is in use.

``HostProbe.sample`` is made to be called on the service thread: it collects the last readings and
asks for new ones, and neither reads a file nor waits. The reading is done by up to three daemon
threads, one each for the kernel's counters, the checkpoint file system, and the accelerator: a
dead file server or a failing driver can hold a call for ever. Then that thread is lost, and what
it would have read is unknown (None); nothing else notices. That a driver does not answer is itself
something to know of the device, and told as such.

Everything is read in ways that let go of the interpreter's lock while the kernel is busy. That is
why link speeds come from /sys: psutil's system call keeps the lock, and may wait for another's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import psutil

from mpift.core.health import Device, Metrics
from mpift.devices import cgroups
from mpift.devices.accelerators import AcceleratorProbe, AcceleratorState

# Seconds. A reading is asked for at most this often: file servers and drivers are not to be
# bothered by health checks, and rates over less than a second are noise.
HOST_SPACING_SECONDS = 1.0
DISK_SPACING_SECONDS = 10.0
# A reading that is out for longer is unknown.
PATIENCE_SECONDS = 20.0

_STAT = Path("/proc/stat")
_INTERFACES = Path("/sys/class/net")
_BITS_PER_MEGABIT = 1_000_000

T = TypeVar("T")


class HostReading(NamedTuple):
    """Used shares from 0 to 1; None where unknown."""

    cpu: float | None
    memory: float | None
    network: float | None


class HostProbe:
    """What this node is used by; ``close`` ends its threads.

    ``directory`` is where checkpoints go: its file system is the disk, that of the nearest parent
    where it does not exist yet; None leaves the disk unknown. ``link_bytes_per_second`` is for
    network interfaces whose speed the kernel does not know, one direction. ``accelerator`` is from
    ``accelerator_probe``.
    """

    def __init__(
        self,
        directory: Path | None,
        link_bytes_per_second: float | None = None,
        accelerator: AcceleratorProbe | None = None,
    ) -> None:
        host = _HostReader(link_bytes_per_second)
        self._host = Background("host", host.read, HOST_SPACING_SECONDS)
        self._disk: Background[float | None] | None = None
        self._accelerator: Background[AcceleratorState] | None = None
        if directory is not None:
            here = directory.absolute()
            self._disk = Background("disk", lambda: disk_share(here), DISK_SPACING_SECONDS)
        self._probe = accelerator
        self._device = "accelerator"  # its name, once it is known
        if accelerator is not None:
            self._accelerator = Background(
                "accelerator", accelerator.sample, accelerator.spacing_seconds
            )

    def sample(self, now: float) -> Metrics:
        """The latest readings; ``now`` is in seconds on any steady clock.

        They are as old as the previous call. The first call knows nothing yet, and rates
        (processor, network) take one more.
        """
        host = self._host.latest(now) or HostReading(None, None, None)
        disk = self._disk.latest(now) if self._disk else None
        state, device = self._accelerator_state(now)
        return Metrics(
            cpu=host.cpu,
            memory=host.memory,
            disk=disk,
            network=host.network,
            accelerator=state.use if state else None,
            accelerator_fault=state.words if state and state.healthy is False else None,
            device=device,
        )

    def _accelerator_state(self, now: float) -> tuple[AcceleratorState | None, Device | None]:
        """As the probe gave it, and what the health check makes use of."""
        if self._accelerator is None or self._probe is None:
            return None, None
        state = self._accelerator.latest(now)
        # A probe may find a cheaper way than it had at first.
        self._accelerator.spacing_seconds = self._probe.spacing_seconds
        if state is not None:
            self._device = state.device or self._device
            return state, _device(state)
        seconds = self._accelerator.out_for(now)
        if seconds <= PATIENCE_SECONDS:
            return None, None  # no reading yet
        warning = f"its driver has not answered for {seconds:.0f} s"
        return None, Device(name=self._device, warning=warning)

    def wait(self, timeout_seconds: float) -> bool:
        """Until all readings that were asked for are there; whether they are."""
        deadline = time.monotonic() + timeout_seconds
        parts = [part for part in (self._host, self._disk, self._accelerator) if part]
        return all(part.idle.wait(max(0.0, deadline - time.monotonic())) for part in parts)

    def close(self) -> None:
        """End the threads; one that hangs in a call is left to end with the process."""
        for part in (self._host, self._disk, self._accelerator):
            if part:
                part.close()


class Background(Generic[T]):
    """The latest result of a function that may block, called on a daemon thread when asked.

    A function that fails with an operating system's error has no result. Its thread begins with
    the first question.
    """

    def __init__(self, name: str, read: Callable[[], T], spacing_seconds: float) -> None:
        self.idle = threading.Event()  # set while no reading is out
        self.idle.set()
        self.spacing_seconds = spacing_seconds
        self._read = read
        self._value: T | None = None
        self._asked_at: float | None = None
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"mpift-{name}-probe", daemon=True)

    def latest(self, now: float) -> T | None:
        """The last result, and ask for the next; None while a reading is out for too long."""
        if self.idle.is_set():
            if self._asked_at is None or now - self._asked_at >= self.spacing_seconds:
                self._ask(now)
        elif self.out_for(now) > PATIENCE_SECONDS:
            return None
        return self._value

    def out_for(self, now: float) -> float:
        """Seconds for which the present reading is out; 0 if there is none."""
        return 0.0 if self.idle.is_set() or self._asked_at is None else now - self._asked_at

    def close(self) -> None:
        """End the thread, once the reading that is out comes back."""
        self._closed = True
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join(0.1)

    def _ask(self, now: float) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._asked_at = now
        self.idle.clear()
        self._wanted.set()

    def _serve(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            try:
                self._value = self._read()
            except (OSError, psutil.Error):
                self._value = None
            self.idle.set()


def _device(state: AcceleratorState) -> Device:
    return Device(
        name=state.device or "accelerator",
        corrected_errors=state.corrected_errors,
        temperature_celsius=state.temperature_celsius,
        temperature_limit_celsius=state.temperature_limit_celsius,
        link_up=state.link_up,
        warning=state.warning,
    )


def disk_share(directory: Path) -> float | None:
    """The used share of the file system of ``directory``, or of its nearest parent that exists.

    What is reserved for root counts as used up, as ``df`` has it; None for a file system without
    a size. ``OSError`` where it can't be asked.
    """
    while True:
        try:
            state = os.statvfs(directory)
            break
        except FileNotFoundError:
            if directory == directory.parent:
                raise
            directory = directory.parent
    used = state.f_blocks - state.f_bfree
    size = used + state.f_bavail
    return used / size if size > 0 else None


@dataclass(frozen=True, slots=True)
class Ticks:
    """Time that some processors spent since boot, in clock ticks, all of it and busy."""

    processors: Collection[int]
    total: int
    busy: int


def read_ticks(processors: Collection[int], stat: Path = _STAT) -> Ticks:
    """The ticks of ``processors`` (their numbers); waiting for a disk is not busy.

    psutil lists them without their numbers, so with one offline it can't be told which is whose.
    """
    total = busy = 0
    with stat.open() as lines:
        for line in lines:
            if not line.startswith("cpu"):
                break
            name, *columns = line.split()
            if name != "cpu" and int(name[3:]) in processors:
                # user nice system idle iowait irq softirq steal; guest time is within user's.
                ticks = [int(column) for column in columns[:8]]
                total += sum(ticks)
                busy += sum(ticks) - ticks[3] - ticks[4]
    return Ticks(processors, total, busy)


def cpu_share(before: Ticks, after: Ticks) -> float | None:
    """The busy share between two readings; None if they can't be compared."""
    total = after.total - before.total
    if before.processors != after.processors or total <= 0:
        return None
    return _share((after.busy - before.busy) / total)


def network_share(
    before: Mapping[str, tuple[int, int]],
    after: Mapping[str, tuple[int, int]],
    seconds: float,
    bytes_per_second: Callable[[str], float | None],
) -> float | None:
    """The used share of the busiest link, in its busier direction; None if no link is known.

    ``before`` and ``after`` hold (sent, received) bytes of every interface. One whose counters ran
    backwards (wrapped, or the interface was set up anew) or that has no speed is left out.
    """
    shares = []
    for name in before.keys() & after.keys():
        moved = [new - old for old, new in zip(before[name], after[name], strict=True)]
        speed = bytes_per_second(name)
        if seconds > 0 and speed and min(moved) >= 0:
            shares.append(_share(max(moved) / seconds / speed))
    return max(shares, default=None)


def link_bytes_per_second(interface: str, interfaces: Path = _INTERFACES) -> float | None:
    """What the interface can carry in one direction; None if the kernel does not know."""
    try:
        megabits = int((interfaces / interface / "speed").read_text())
    except (OSError, ValueError):  # down, virtual, or of another network namespace
        return None
    return megabits * _BITS_PER_MEGABIT / 8 if megabits > 0 else None


class _HostReader:
    """Reads the kernel's counters; rates need two readings, so the first gives None for them.

    Traffic that the kernel does not see (InfiniBand verbs) is not counted.
    """

    def __init__(self, assumed_bytes_per_second: float | None) -> None:
        self._assumed_bytes_per_second = assumed_bytes_per_second
        self._memory_limits = cgroups.memory_limits()
        self._processor_limits = cgroups.processor_limits()
        self._at: float | None = None
        self._ticks = Ticks((), 0, 0)
        self._used_seconds: list[float] = []
        self._bytes: dict[str, tuple[int, int]] = {}

    def read(self) -> HostReading:
        at = time.monotonic()
        ticks = read_ticks(os.sched_getaffinity(0))
        used_seconds = [limit.used_seconds() for limit in self._processor_limits]
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        moved = {n: (c.bytes_sent, c.bytes_recv) for n, c in counters.items() if n != "lo"}
        cpu = network = None
        if self._at is not None:
            seconds = at - self._at
            cpu = self._cpu_share(ticks, used_seconds, seconds)
            network = network_share(self._bytes, moved, seconds, self._speed)
        self._at, self._ticks = at, ticks
        self._used_seconds, self._bytes = used_seconds, moved
        return HostReading(cpu, self._memory_share(), network)

    def _cpu_share(self, ticks: Ticks, used_seconds: list[float], seconds: float) -> float | None:
        """Of the cores that this process may run on, or of its quota: what is nearer its end."""
        shares = [cpu_share(self._ticks, ticks)]
        for limit, old, new in zip(
            self._processor_limits, self._used_seconds, used_seconds, strict=True
        ):
            shares.append(_share((new - old) / (limit.processors * seconds)))
        return max((share for share in shares if share is not None), default=None)

    def _memory_share(self) -> float:
        """Of the host's memory, or of the container's: what is nearer its end."""
        memory = psutil.virtual_memory()
        host = 1 - memory.available / memory.total
        return _share(max(host, cgroups.memory_share(self._memory_limits) or 0.0))

    def _speed(self, interface: str) -> float | None:
        return link_bytes_per_second(interface) or self._assumed_bytes_per_second


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
