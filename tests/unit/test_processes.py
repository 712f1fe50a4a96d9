"""Whether a process is really gone."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpift.transport import processes
from mpift.transport.processes import ProcessHandle, ProcessIdentity


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    stat = processes.read_stat(process.pid)
    assert stat is not None
    here = processes.identify(0)
    return dataclasses.replace(here, member=1, pid=process.pid, start_time=stat.start_time)


def wait_without_reaping(process: subprocess.Popen[bytes]) -> None:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_living_process_is_not_gone_and_a_killed_one_is_even_before_it_is_reaped(
    child: subprocess.Popen[bytes],
) -> None:
    here = processes.identify(0)
    identity = identity_of(child)
    assert processes.is_gone(identity, here) is False
    child.kill()
    wait_without_reaping(child)
    assert processes.is_gone(identity, here) is True
    child.wait()
    assert processes.confirmed_gone([identity], here) == {1}


def test_another_process_with_the_same_pid_is_not_the_one() -> None:
    here = processes.identify(0)
    earlier = dataclasses.replace(here, start_time=here.start_time - 1)
    assert processes.is_gone(earlier, here) is True


def test_nothing_is_known_of_processes_on_other_nodes() -> None:
    here = processes.identify(0)
    elsewhere = dataclasses.replace(here, node="other/kernel", pid=1)
    assert processes.is_gone(elsewhere, here) is None
    assert processes.confirmed_gone([elsewhere], here) == frozenset()


def test_a_process_whose_main_thread_alone_has_ended_is_not_gone() -> None:
    script = (
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print(flush=True), input())).start()\n"
        "ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\n"
    )  # exit, not exit_group
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            stat = processes.read_stat(process.pid)
            assert stat is not None
            assert stat.state == "Z"
            assert not processes.has_ended(process.pid, stat.start_time)
        finally:
            process.kill()
        wait_without_reaping(process)
        assert processes.has_ended(process.pid, stat.start_time)


def test_a_name_with_brackets_and_spaces_does_not_confuse(child: subprocess.Popen[bytes]) -> None:
    name = "import os; open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); input()"
    command = [sys.executable, "-c", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = processes.read_stat(process.pid)
        assert stat is not None
        assert stat.parent == os.getpid()
        process.kill()


def test_a_handle_kills_its_process_and_no_other(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child)
    with pytest.raises(ProcessLookupError):
        ProcessHandle(child.pid, identity.start_time - 1)
    handle = ProcessHandle(child.pid, identity.start_time)
    assert not handle.has_ended()
    handle.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert handle.has_ended()
    handle.kill()  # nothing left to kill
    handle.close()
    with pytest.raises(ProcessLookupError):
        ProcessHandle(child.pid, identity.start_time)


def test_without_pidfds_the_start_time_is_checked_before_each_signal(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_open_pidfd", lambda pid: None)
    handle = ProcessHandle(child.pid, identity_of(child).start_time)
    handle.start_time -= 1
    handle.kill()
    assert child.poll() is None
    handle.start_time += 1
    handle.kill()
    assert child.wait(10) == -signal.SIGKILL
    handle.close()
