"""The shipped test kit, as far as it needs no MPI: finding, judging and ending processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mpift.testing import cluster, ranks


def start(token: str, member: int, *words: str) -> subprocess.Popen[bytes]:
    """A process like a rank's, once it runs its own program."""
    marks = {ranks.TOKEN_VARIABLE: token, ranks.RANK_VARIABLE: str(member)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, **marks})
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return process


def test_ranks_are_found_by_member_without_their_children_and_other_jobs() -> None:
    with_child = start("one", 1, "sh", "-c", "sleep 60 & echo ready; wait")
    first = start("one", 0, "sh", "-c", "echo ready; exec sleep 60")
    other = start("two", 0, "sh", "-c", "echo ready; exec sleep 60")
    try:
        found = ranks.find_ranks("one")
        assert {member: process.pid for member, process in found.items()} == {
            0: first.pid,
            1: with_child.pid,
        }
        assert len(ranks.find_processes("one")) == 3
        ranks.end_processes("one")
        assert ranks.find_processes("one") == []
        assert (first.wait(), with_child.wait()) == (-9, -9)
        assert other.poll() is None
    finally:
        for token in ("one", "two"):
            ranks.end_processes(token)
        other.wait()


def test_what_outlives_the_launcher_is_reported_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LINGER_SECONDS", 0.1)
    outcome = ranks.run_job(["sh", "-c", "sleep 61 & echo started; exit 3"], ranks=1)
    assert (outcome.exit_code, outcome.stdout) == (3, "started\n")
    assert outcome.left_running == ("sleep 61",)
    assert "left running: sleep 61" in str(outcome)


def test_a_launcher_that_ends_without_ranks_is_reported_with_its_words() -> None:
    with pytest.raises(ChildProcessError, match=r"code 3 before its 2 ranks(.|\n)*no such host"):
        ranks.run_job(
            ["sh", "-c", "echo no such host >&2; exit 3"], ranks=2, during=lambda found: None
        )


def test_a_cluster_that_cannot_be_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    why = cluster.availability.__wrapped__
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cluster.shutil, "which", lambda tool: None if tool == "ip" else tool)
    assert why() == "not installed: ip (packages iproute2, util-linux, hostname)"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why() == "network namespaces need root"


def test_a_cluster_that_does_not_come_up_is_refused_with_the_tool_s_words_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "unshare"
    broken.write_text("#!/bin/sh\necho unshare: Operation not permitted >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(folder))
    with pytest.raises(RuntimeError, match="2 nodes did not come up: unshare: Operation not perm"):
        cluster.VirtualCluster(2).__enter__()
    assert list(folder.iterdir()) == []
    with pytest.raises(ValueError, match="1 to 200 nodes, not 0"):
        cluster.VirtualCluster(0)


CRASH_IN_A_CREATION = """Signal: Segmentation fault (11)
[ 1] lib/libmpi.so.40(ompi_comm_revoke_local+0x3f)[0x7f440dc745df]
[13] lib/libmpi.so.40(ompi_comm_activate+0x31)[0x7f440dc6f8f1]"""


@pytest.mark.parametrize(
    "words",
    ["The PMIx server's listener thread failed to start", CRASH_IN_A_CREATION],
    ids=["not started", "crash in a creation"],
)
def test_a_job_in_which_a_known_fault_of_mpi_showed_is_run_again(
    words: str, tmp_path: Path
) -> None:
    mark = tmp_path / "tried"
    script = f'test -e {mark} && exit 0; touch {mark}; echo "{words}" >&2; exit 213'
    assert ranks.run_job(["sh", "-c", script], ranks=1).exit_code == 0
    always = f'echo x >> {mark}; echo "{words}" >&2; exit 213'
    assert ranks.run_job(["sh", "-c", always], ranks=1).exit_code == 213
    assert mark.read_text() == "x\n" * 3


def test_any_other_crash_is_not_run_again(tmp_path: Path) -> None:
    mark = tmp_path / "tried"
    words = "Segmentation fault\n[1] (ompi_comm_revoke_local+0x3f)\n[2] (MPI_Send+0x1)"
    script = f'echo x >> {mark}; echo "{words}" >&2; exit 139'
    assert ranks.run_job(["sh", "-c", script], ranks=1).exit_code == 139
    assert mark.read_text() == "x\n"
