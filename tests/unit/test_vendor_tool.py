"""A vendor's tool that hangs, fails, never stops printing or is none: it costs a call, no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from mpift.devices.vendor_tool import OUTPUT_BYTES_MAX, VendorTool
from tests.unit.fake_npu_tools import LONG_SECONDS, SHORT_SECONDS, FakeTool, smi

__all__ = ["smi"]  # a fixture for these tests


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_tool_that_hangs_is_killed_with_its_children(smi: FakeTool) -> None:
    smi.hang("info")
    tool = VendorTool(str(smi.path), SHORT_SECONDS)
    children: list[int] = []
    while not children:  # it may be killed before it has started one
        answer = tool.ask("info")
        assert answer.timed_out
        assert answer.problem == "npu-smi info did not answer within 0.2 s"
        children = smi.take_children()
    psutil.wait_procs([psutil.Process(p) for p in children if psutil.pid_exists(p)], timeout=10)
    assert all(gone(pid) for pid in children)


def test_a_tool_that_closes_its_output_and_stays_has_hung_too(tmp_path: Path) -> None:
    path = tmp_path / "npu-smi"
    path.write_text("#!/bin/sh\nexec >&- 2>&-\nexec sleep 1000\n")
    path.chmod(0o755)
    assert VendorTool(str(path), SHORT_SECONDS).ask("info").timed_out


def test_a_tool_that_can_not_be_killed_is_not_started_again(
    smi: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.hang("info")
    tool = VendorTool(str(smi.path), SHORT_SECONDS)
    monkeypatch.setattr("mpift.devices.vendor_tool._KILL_SECONDS", 0.05)
    stuck: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("os.killpg", lambda group, signal: stuck.append(group))
        assert tool.ask("info").timed_out
    smi.take_calls()
    again = tool.ask("info")
    assert (again.timed_out, again.problem) == (
        True,
        "npu-smi hangs in the kernel and can't be killed",
    )
    assert smi.take_calls() == []
    os.killpg(stuck[0], signal.SIGKILL)
    assert tool._stuck is not None
    tool._stuck.wait()
    smi.answer("info", "well again")
    assert tool.ask("info").text == "well again"


def test_a_tool_that_never_stops_printing_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "npu-smi"
    path.write_text("#!/bin/sh\nexec yes\n")
    path.chmod(0o755)
    answer = VendorTool(str(path), LONG_SECONDS).ask("info")
    assert answer.problem == f"npu-smi info printed more than {OUTPUT_BYTES_MAX // 1024} KiB"
    assert not answer.timed_out


def test_a_tool_that_fails_or_is_no_program_leaves_its_words(smi: FakeTool) -> None:
    smi.answer("info", b"dcmi\xff init\nretry later \xe4\n", exit_code=8)
    tool = VendorTool(str(smi.path), LONG_SECONDS)
    assert tool.ask("info").problem == "npu-smi info failed (exit code 8): retry later \ufffd"
    smi.path.write_text("no program\x00")
    assert "npu-smi info can't be started: Exec format error" in tool.ask("info").problem
    smi.path.unlink()
    assert "can't be started: No such file" in tool.ask("info").problem
