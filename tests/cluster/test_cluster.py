"""The virtual cluster itself: nodes that are cut off or killed, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from mpift.testing.cluster import VirtualCluster
from tests.cluster.clusters import cluster, require_clusters, wait_until

__all__ = ["cluster"]  # a fixture for these tests

SERVER = """
import socket
listener = socket.create_server(("", 7000))
print("ready", flush=True)
while True:
    listener.accept()[0].close()
"""
CLIENT = """
import socket, sys
socket.create_connection((sys.argv[1], 7000), timeout=1).close()
"""
OWNER = """
import subprocess, sys, time
from mpift.testing.cluster import VirtualCluster
with VirtualCluster(2) as cluster:
    subprocess.Popen([*cluster.enter("node2"), "sleep", "600"])
    while not any(p.name() == "sleep" for p in cluster.processes("node2")):
        time.sleep(0.01)
    print(cluster.login.parent, *(p.pid for p in cluster.processes()), flush=True)
    time.sleep(600)
"""


def start_server(cluster: VirtualCluster, node: str) -> None:
    """Ends with the cluster."""
    words = [*cluster.enter(node), sys.executable, "-c", SERVER]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()


def reaches(cluster: VirtualCluster, node: str, other: str) -> bool:
    words = [*cluster.enter(node), sys.executable, "-c", CLIENT, other]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "Error" in done.stderr, done.stderr
    return done.returncode == 0


def log_in(cluster: VirtualCluster, node: str, other: str, command: str) -> tuple[int, str]:
    words = [*cluster.enter(node), str(cluster.login), other, command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    return done.returncode, done.stdout.strip() + done.stderr.strip()


# -- nodes -------------------------------------------------------------------------------------


def test_a_node_is_cut_off_until_it_is_healed(cluster: VirtualCluster) -> None:
    start_server(cluster, "node2")
    start_server(cluster, "node3")
    assert reaches(cluster, "node1", "node3")
    cluster.cut("node3")
    assert not reaches(cluster, "node1", "node3")
    assert not reaches(cluster, "node3", "node2")
    assert reaches(cluster, "node1", "node2")
    assert log_in(cluster, "node1", "node3", "true")[0] == 255
    assert log_in(cluster, "node3", "node2", "true")[0] == 255
    cluster.heal("node3")
    assert reaches(cluster, "node1", "node3")
    assert reaches(cluster, "node3", "node2")


def test_a_login_has_the_other_node_s_name_and_nothing_of_the_environment(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIFT_SECRET", "of node1")
    assert log_in(cluster, "node1", "node2", "hostname") == (0, "node2")
    assert log_in(cluster, "node1", "node2", "echo $MPIFT_SECRET; exit 7") == (7, "")
    assert log_in(cluster, "node1", "node2", "kill -9 $$")[0] == 255


def test_a_killed_node_has_no_process_no_memory_and_no_login(cluster: VirtualCluster) -> None:
    sleeper = subprocess.Popen([*cluster.enter("node2"), "sleep", "600"])
    other = subprocess.Popen([*cluster.enter("node3"), "sleep", "600"])
    for node in ("node2", "node3"):
        wait_until(lambda node=node: cluster.processes(node))
        (cluster.shared_memory(node) / "state").write_text(node)
    assert list(cluster.shared_memory("node1").iterdir()) == []
    cluster.kill_node("node2")
    assert sleeper.wait(10) == -9
    assert other.poll() is None
    assert cluster.processes("node2") == []
    assert list(cluster.shared_memory("node2").iterdir()) == []
    assert (cluster.shared_memory("node3") / "state").read_text() == "node3"
    assert log_in(cluster, "node1", "node2", "hostname")[0] == 255
    cluster.heal("node2")
    assert log_in(cluster, "node1", "node2", "hostname") == (0, "node2")
    with pytest.raises(ValueError, match=r"no node 'node9', the nodes are node1, node2, node3"):
        cluster.kill_node("node9")
    cluster.kill_node("node3")
    other.wait()


def test_two_clusters_do_not_see_each_other(cluster: VirtualCluster) -> None:
    start_server(cluster, "node2")
    with VirtualCluster(2) as second:
        assert reaches(cluster, "node1", "node2")
        assert not reaches(second, "node1", "node2")
    assert reaches(cluster, "node1", "node2")


# -- the end of a cluster ----------------------------------------------------------------------


def links() -> set[Path]:
    return set(Path("/sys/class/net").iterdir())


def network_spaces(processes: Iterable[psutil.Process]) -> set[Path]:
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found.add(Path(f"/proc/{process.pid}/ns/net").readlink())
    return found


def test_nothing_is_left_of_a_cluster_whatever_happened_in_it() -> None:
    require_clusters()
    links_before = links()
    stack = contextlib.ExitStack()
    cluster = stack.enter_context(VirtualCluster(2))
    # Neither a hang-up nor a polite signal ends it.
    stubborn = "trap '' TERM HUP; sleep 600 & echo ready; wait"
    words = [*cluster.enter("node2"), "sh", "-c", stubborn]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    assert len(cluster.processes()) == 2
    folder = cluster.login.parent
    below = psutil.Process().children(recursive=True)
    assert set(cluster.processes()) < set(below)
    spaces = network_spaces(below) - network_spaces([psutil.Process()])
    assert len(spaces) == 3
    assert links() == links_before
    with pytest.raises(ZeroDivisionError), stack:
        raise ZeroDivisionError
    process.wait()
    assert not any(p.is_running() for p in below)
    assert spaces.isdisjoint(network_spaces(psutil.process_iter()))
    assert links() == links_before
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()


def test_nothing_is_left_when_the_owner_of_a_cluster_is_killed() -> None:
    require_clusters()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder, *pids = owner.stdout.readline().split()
    inside = [psutil.Process(int(pid)) for pid in pids]
    assert len(inside) == 1
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not any(p.is_running() for p in inside), 10)
    wait_until(lambda: not Path(folder).exists(), 10)
