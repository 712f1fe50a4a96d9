"""Whether processes of this node are gone, and killing them, without MPI; small parts beside it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpift.core.suspicion import Finding
from mpift.errors import ConfigError
from mpift.transport import interface, segments
from mpift.transport.fencing import Fencing
from mpift.transport.injection import reset_connection
from mpift.transport.liveness import Liveness
from mpift.transport.processes import ProcessIdentity, identify, read_stat

SLEEPS = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
BEATS = """
import sys, time
from mpift.transport.liveness import Liveness
slot = Liveness.open(__import__("pathlib").Path(sys.argv[1])).slots[1]
print(flush=True)
while True:
    slot.beat()
    time.sleep(0.01)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPS, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def identity_of(pid: int, node: str = "") -> ProcessIdentity:
    stat = read_stat(pid)
    assert stat is not None
    return ProcessIdentity(1, 1, "host", node or identify(0).node, pid, stat.start_time)


def test_a_process_is_gone_only_once_the_kernel_says_so(sleeper: subprocess.Popen[bytes]) -> None:
    fencing = Fencing(identify(0), timeout_seconds=0.1)
    suspect = identity_of(sleeper.pid)
    assert fencing.gone([suspect], kill=False) == frozenset()
    assert fencing.examine(suspect, kill=False) is Finding.UNWATCHED
    assert fencing.examine(suspect, kill=True) is Finding.GONE
    assert sleeper.wait(5) == -signal.SIGKILL
    assert fencing.gone([suspect], kill=False) == {1}


def test_a_process_with_the_pid_of_a_dead_one_is_not_killed(
    sleeper: subprocess.Popen[bytes],
) -> None:
    here = identify(0)
    older = ProcessIdentity(1, 1, "host", here.node, sleeper.pid, 1)
    assert Fencing(here, 0.1).gone([older], kill=True) == {1}
    assert sleeper.poll() is None


def test_of_a_process_on_a_node_that_nobody_answers_for_nothing_is_known(
    sleeper: subprocess.Popen[bytes],
) -> None:
    fencing = Fencing(identify(0), timeout_seconds=0.1)
    elsewhere = identity_of(sleeper.pid, node="another")
    assert fencing.examine(elsewhere, kill=False) is None
    assert fencing.gone([elsewhere], kill=True) == frozenset()
    assert sleeper.poll() is None


def test_without_a_watchdog_the_signs_of_life_and_the_kernel_decide(tmp_path: Path) -> None:
    here = identify(0)
    liveness = Liveness.create("token", here.node, (0, 1), tmp_path)
    fencing = Fencing(here, 0.5)
    fencing.arm("token", liveness, {})
    process = subprocess.Popen(
        [sys.executable, "-c", BEATS, str(liveness.path)], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        suspect = identity_of(process.pid)
        assert fencing.examine(suspect, kill=False) is Finding.ALIVE
        os.kill(process.pid, signal.SIGSTOP)
        assert fencing.examine(suspect, kill=False) is Finding.STANDS_STILL
        os.kill(process.pid, signal.SIGCONT)
        assert fencing.examine(suspect, kill=False) is Finding.ALIVE
        liveness.slots[1].enter(30.0, time.monotonic())
        assert fencing.examine(suspect, kill=False) is Finding.ALIVE  # it may wait in MPI
    finally:
        process.kill()
        process.communicate()
        liveness.close()
        liveness.unlink()


def test_one_that_stood_down_is_no_confirmed_death(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    here = identify(0)
    liveness = Liveness.create("token", here.node, (0, 1), tmp_path)
    fencing = Fencing(here, 0.1)
    fencing.arm("token", liveness, {})
    suspect = identity_of(sleeper.pid)
    liveness.slots[1].stood_down()
    sleeper.kill()
    sleeper.wait()
    assert fencing.gone([suspect], kill=False) == frozenset()
    assert fencing.examine(suspect, kill=False) is Finding.UNREACHABLE
    liveness.slots[1].run()
    assert fencing.gone([suspect], kill=False) == {1}
    liveness.close()


def test_files_of_open_mpi_are_removed_for_their_own_job_alone(tmp_path: Path) -> None:
    for name in ("host.0.aa.0", "host.0.aa.1", "host.0.aab.0", "host.0.ab.0"):
        (tmp_path / f"sm_segment.{name}").touch()
    segments.remove(str(tmp_path / "sm_segment.host.0.aa"))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["sm_segment.host.0.aab.0", "sm_segment.host.0.ab.0"]
    segments.remove("")
    segments.remove(str(tmp_path / "anything"))
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interface_is_looked_up_by_name_and_a_wrong_name_is_refused() -> None:
    assert interface.job_address("lo", {}) == "127.0.0.1"
    assert interface.job_address("", {"OMPI_MCA_btl_tcp_if_include": "lo,eth9"}) == "127.0.0.1"
    socket.inet_aton(interface.job_address("", {}))
    with pytest.raises(ConfigError, match=r"network_interface = 'nowhere0'.*it has .*lo"):
        interface.job_address("nowhere0", {})


def test_a_reset_shuts_one_connection_to_a_peer_and_leaves_others_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            assert not reset_connection([])
            assert reset_connection([os.getpid()])
            near.settimeout(5)
            far.settimeout(5)
            assert near.recv(1) == b"" or far.recv(1) == b""
