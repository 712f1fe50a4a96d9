"""What a process of its own finds out about a node's devices, and that no driver can hang it up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpift.devices import accelerators, backend, census
from mpift.devices.accelerators import AcceleratorState
from mpift.devices.census import Device, Findings


class Npu:
    """As ``torch.npu``, on a node with two."""

    def device_count(self) -> int:
        return 2

    def get_device_name(self, index: int) -> str:
        return "Ascend910B3"


class Probe:
    def __init__(self, local_rank: int) -> None:
        self._local_rank = local_rank

    def sample(self) -> AcceleratorState:
        if self._local_rank == 1:
            raise OSError("npu-smi is broken\nin two lines")
        return AcceleratorState(healthy=False, words="NPU 0: Alarm")


def census_of_this_process(capsys: pytest.CaptureFixture[str]) -> Findings:
    print("noise of a driver")
    census.tell()
    return census.gather(capsys.readouterr().out)


def test_a_census_tells_counts_and_health_of_each_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "simulated")
    monkeypatch.setattr(backend, "module", lambda kind: {"npu": Npu()}[kind])
    monkeypatch.setattr(accelerators, "accelerator_probe", Probe)
    told = census_of_this_process(capsys)
    assert told.counts == {"npu": 2}
    assert told.devices == [
        Device(0, "npu:0", False, "Ascend910B3, NPU 0: Alarm"),
        Device(1, "npu:1", None, "Ascend910B3: npu-smi is broken"),
    ]
    assert told.torch is not None
    assert told.problem is None


def test_a_device_that_no_probe_knows_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "simulated")
    monkeypatch.setattr(backend, "module", lambda kind: {"npu": Npu()}[kind])
    monkeypatch.setattr(accelerators, "accelerator_probe", lambda local_rank: None)
    assert census_of_this_process(capsys).devices[0] == Device(0, "npu:0", None, "Ascend910B3")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no driver\nmore"), "no driver"),
        (
            RuntimeError("NPU function error: aclInit, error code is 507033"),
            "NPU: it is dead, or another process has it [507033]",
        ),
        (TypeError(), "TypeError"),
    ],
)
def test_why_there_is_no_device_is_told_in_one_line(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def module(kind: str) -> Any:
        raise error

    monkeypatch.setenv(backend.NPU_BACKEND_VARIABLE, "simulated")
    monkeypatch.setattr(backend, "module", module)
    told = census_of_this_process(capsys)
    assert told.counts == {}
    assert told.missing["npu"].startswith(words)
    assert "\n" not in told.missing["npu"]


def test_a_line_that_was_cut_off_is_left_out() -> None:
    out = 'mpift-device: {"torch": "2.13.0"}\nmpift-device: {"kind": "npu", "cou'
    assert census.gather(out) == Findings(torch="2.13.0")


HANGING_TORCH = """
import os, signal
__version__ = "2.13.0"
class version:
    cuda = "13.0"
class cuda:
    @staticmethod
    def is_available():
        open(os.environ["HANGS"], "w").close()
        signal.pause()
"""


def test_a_driver_that_hangs_is_given_up_and_what_was_told_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs"
    os.mkfifo(hangs)
    (tmp_path / "torch.py").write_text(HANGING_TORCH)
    monkeypatch.setenv("HANGS", str(hangs))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    started: list[subprocess.Popen[str]] = []

    class Process(subprocess.Popen):  # type: ignore[type-arg]
        """Its time begins when it hangs."""

        def communicate(self, input: Any = None, timeout: Any = None) -> Any:  # noqa: A002
            if not started:
                started.append(self)
                reader = os.open(hangs, os.O_RDONLY | os.O_NONBLOCK)
                assert select.select([reader], [], [], 60)[0]
                os.close(reader)
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    told = census.ask(time_limit=0.01)
    assert (told.torch, told.torch_cuda) == ("2.13.0", "13.0")
    assert told.problem == "no answer within 0.01 s: a driver hangs, or torch is slow"
    assert started[0].poll() == -signal.SIGKILL


def test_a_process_that_cannot_even_be_killed_is_left_behind() -> None:
    class Stuck:
        """In the kernel, where no signal reaches it."""

        pid = 2**22 + 1  # of nobody: above the highest that Linux gives

        def communicate(self, timeout: float) -> Any:
            raise subprocess.TimeoutExpired("census", timeout, output=b"told before")

    assert census._give_up(Stuck()) == ("told before", "")  # type: ignore[arg-type]


def test_a_census_that_crashes_tells_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is broken')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    assert census.ask(60).problem == "ImportError: libtorch.so is broken"
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    assert census.ask(60).problem == "it ended with code -6"
