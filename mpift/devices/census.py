"""A census of this node's accelerators, taken by a process of its own.

Counting devices takes torch and their driver, and a driver may hang while a device fails. So a
process of its own does that (``tell``), line by line, and is given up after a time limit
(``ask``): what it has told until then is kept. The process that asks loads neither.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpift.devices import cann

# Importing torch from a cold network file system takes half a minute.
TIME_LIMIT_SECONDS = 90.0
_KILL_SECONDS = 2.0
# Before each line that is told: drivers print to the same place.
_MARK = "mpift-device: "


@dataclass(frozen=True, slots=True)
class Device:
    """What the node's ``local_rank``-th process gets; ``healthy`` is None where nobody can tell."""

    local_rank: int
    device: str
    healthy: bool | None
    words: str


@dataclass(slots=True)
class Findings:
    """What the process apart has told, by kind of device (npu, cuda).

    ``problem`` is why it told no more, None where it came to its end.
    """

    torch: str | None = None
    torch_cuda: str | None = None
    nvidia_driver: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    problem: str | None = None


def ask(time_limit: float) -> Findings:
    """What a process that loads torch and the drivers tells within ``time_limit`` seconds."""
    code = "from mpift.devices import census; census.tell()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, cann.AUTOLOAD_VARIABLE: "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # to be killed with whatever it has started
    )
    try:
        out, error = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        out, error = _give_up(process)
        findings = gather(out)
        findings.problem = f"no answer within {time_limit:g} s: a driver hangs, or torch is slow"
        return findings
    findings = gather(out)
    if process.returncode != 0:
        said = error.strip().splitlines()
        findings.problem = said[-1] if said else f"it ended with code {process.returncode}"
    return findings


def _give_up(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill it and take what it said; one that hangs in the kernel is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_KILL_SECONDS)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), ""


def gather(out: str) -> Findings:
    """The findings in what the process apart has printed."""
    findings = Findings()
    for line in out.splitlines():
        if not line.startswith(_MARK):
            continue
        with contextlib.suppress(ValueError):  # cut off
            told = json.loads(line.removeprefix(_MARK))
            kind = told.pop("kind", None)
            if "local_rank" in told:
                findings.devices.append(Device(**told))
            elif "count" in told:
                findings.counts[kind] = told["count"]
            elif "missing" in told:
                findings.missing[kind] = told["missing"]
            else:
                for name, value in told.items():
                    setattr(findings, name, value)
    return findings


def tell() -> None:
    """Print what there is, line by line; run in the process apart."""
    for told in _tell():
        print(f"{_MARK}{json.dumps(told)}", flush=True)


def _tell() -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    yield {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    from mpift.devices import backend
    from mpift.devices.faults import classify

    expected = {
        "npu": backend.npu_backend() != cann.TORCH_NPU or cann.is_installed(),
        "cuda": torch.version.cuda is not None,
    }
    for kind in (kind for kind, is_expected in expected.items() if is_expected):
        try:
            module = backend.module(kind)
            count = module.device_count()
            name = module.get_device_name(0)
        except Exception as error:  # noqa: BLE001 -- drivers raise whatever they like
            fault = classify(error)
            words = fault.words if fault else str(error) or type(error).__name__
            yield {"kind": kind, "missing": words.strip().partition("\n")[0]}
            continue
        yield {"kind": kind, "count": count}
        yield from _tell_devices(kind, count, name)
    if expected["cuda"]:
        yield {"nvidia_driver": _nvidia_driver()}


def _tell_devices(kind: str, count: int, name: str) -> Iterator[dict[str, Any]]:
    """How each device is that a local rank would take."""
    from mpift.devices.accelerators import accelerator_probe

    for local_rank in range(count):
        told = {"local_rank": local_rank, "device": f"{kind}:{local_rank}"}
        try:
            probe = accelerator_probe(local_rank)
            state = probe.sample() if probe else None
        except Exception as error:  # noqa: BLE001 -- see _tell
            yield {**told, "healthy": None, "words": f"{name}: {error}".partition("\n")[0]}
            continue
        if state is None:
            yield {**told, "healthy": None, "words": name}
        else:
            yield {**told, "healthy": state.healthy, "words": f"{name}, {state.words}"}


def _nvidia_driver() -> str | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 -- not installed, no driver, no permission
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
