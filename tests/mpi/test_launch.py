"""``mpift run`` over a real mpirun: exit codes, warnings, signals, and that no process stays.

The scripts use MPI alone, through mpi4py, so that what is tested is the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mpift.testing.ranks import TOKEN_VARIABLE, end_processes, find_processes

LIMIT_SECONDS = 30.0

BEGIN = """
    import os, signal, sys, time
    import mpi4py
    mpi4py.rc.thread_level, mpi4py.rc.finalize = "serialized", False
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    comm = world.Dup()
    comm.Barrier()

    def go_on_without_the_dead():
        '''Wait for a death, and finish with those that are left.'''
        try:
            while True:
                comm.Barrier()
        except MPI.Exception:
            comm.Revoke()
        survivors = comm.Shrink()
        survivors.Barrier()
        print("finished", survivors.size, flush=True)
        os._exit(0)
"""


@dataclass(frozen=True)
class Done:
    """A run that is over."""

    code: int
    stdout: str
    stderr: str
    seconds: float


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    end_processes(made.token)


class Launcher:
    """Starts ``mpift run`` in a folder; all its processes carry ``token`` in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex

    def script(self, body: str) -> str:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(body))
        return str(path)

    def start(self, *words: str) -> subprocess.Popen[str]:
        paths = [path or str(Path.cwd()) for path in sys.path]
        return subprocess.Popen(
            [sys.executable, "-m", "mpift", "run", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), TOKEN_VARIABLE: self.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> Done:
        begin = time.monotonic()
        process = self.start(*words)
        try:
            stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            end_processes(self.token)
            stdout, stderr = process.communicate()
            pytest.fail(f"still running after {LIMIT_SECONDS} s\n{stdout}\n{stderr}")
        assert find_processes(self.token) == []
        return Done(process.returncode, stdout, stderr, time.monotonic() - begin)


def wait_until(true: Callable[[], object], seconds: float = LIMIT_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_plain_command_runs_on_all_ranks_with_its_output_labelled(launcher: Launcher) -> None:
    done = launcher.run(
        *("-np", "3", "--output-filename", "out", "--env", "WORD=a b"),
        *("sh", "-c", 'echo "$WORD $0"; echo err >&2; printf half', "-v"),
    )
    assert done.code == 0
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{rank}] {text}" for rank in range(3) for text in ("a b -v", "half")]
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("[")) == [
        *("[0] err", "[1] err", "[2] err")
    ]
    assert "\x1e" not in done.stderr
    assert (launcher.folder / "out" / "rank.2" / "stdout").read_text() == "a b -v\nhalf\n"
    assert (launcher.folder / "out" / "rank.0" / "stderr").read_text() == "err\n"


def test_an_exception_on_one_rank_is_survived_with_a_warning(launcher: Launcher) -> None:
    script = launcher.script("""
        if world.rank == 1:
            raise ValueError("a fault of the script")
        go_on_without_the_dead()
    """)
    done = launcher.run("-np", "3", "--summary", "deep/er/summary.json", script)
    assert done.code == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] finished 2", "[2] finished 2"]
    warning = done.stderr.partition("warning: rank 1 on ")[2]
    assert "failed: ValueError: a fault of the script" in warning.splitlines()[0]
    assert 'raise ValueError("a fault of the script")' in warning
    summary = json.loads((launcher.folder / "deep" / "er" / "summary.json").read_text())
    assert (summary["world_start"], summary["world_end"], summary["exit_code"]) == (3, 2, 0)
    assert [(rank["rank"], rank["exit_code"]) for rank in summary["failed_ranks"]] == [(1, 1)]


def test_strict_makes_a_survived_exit_a_failure(launcher: Launcher) -> None:
    script = launcher.script("""
        if world.rank == 0:
            os._exit(3)
        go_on_without_the_dead()
    """)
    done = launcher.run("-np", "3", "--strict", script)
    assert done.code == 1, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] finished 2", "[2] finished 2"]
    assert "--strict forbids that: rank 0 on" in done.stderr
    assert "exit code 3" in done.stderr


def test_a_shell_script_around_the_rank_hides_no_death(launcher: Launcher) -> None:
    script = launcher.script("""
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        go_on_without_the_dead()
    """)
    done = launcher.run("-np", "3", "sh", "-c", '"$0" "$1"; exit $?', sys.executable, script)
    assert done.code == 0, done.stderr
    assert "rank 2 on" in done.stderr
    assert "(SIGKILL)" in done.stderr


def test_an_exception_on_all_ranks_ends_the_job_at_once_with_the_first(launcher: Launcher) -> None:
    script = launcher.script("""
        world.Barrier()
        time.sleep(0.0 if world.rank == 1 else 0.5)
        raise RuntimeError(f"rank {world.rank} has had enough")
    """)
    done = launcher.run("-np", "3", script)
    assert done.code == 1
    assert done.seconds < 10
    assert "all 3 ranks failed:" in done.stderr
    cause = done.stderr.partition("first, rank 1 on ")[2]
    assert "RuntimeError: rank 1 has had enough" in cause.splitlines()[0]
    for rank in range(3):
        assert f"[{rank}] RuntimeError: rank {rank} has had enough" in done.stderr


def test_an_exception_that_is_alike_on_all_ranks_is_shown_once(launcher: Launcher) -> None:
    script = launcher.script("""
        world.Barrier()
        raise RuntimeError("shapes cannot be multiplied")
    """)
    done = launcher.run("-np", "3", "--output-filename", "out", script)
    assert done.code == 1
    assert done.stderr.count("Traceback (most recent call last):") == 1
    assert "ended with the same traceback as rank" in done.stderr
    assert "(its traceback is above)" in done.stderr
    logs = {(launcher.folder / "out" / f"rank.{n}" / "stderr").read_text() for n in range(3)}
    assert len(logs) == 1
    assert "RuntimeError: shapes cannot be multiplied" in logs.pop()


def test_an_abort_of_one_rank_ends_the_others(launcher: Launcher) -> None:
    script = launcher.script("""
        if world.rank == 0:
            world.Abort(7)
        time.sleep(60)
    """)
    done = launcher.run("-np", "3", script)
    assert done.code == 1
    assert "rank 0 aborted the job (MPI_Abort)" in done.stderr


def test_a_command_that_does_not_exist_is_named(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--summary", "summary.json", "no-such-command")
    assert done.code == 1
    assert "cannot start 'no-such-command': No such file or directory" in done.stderr
    failed = json.loads((launcher.folder / "summary.json").read_text())["failed_ranks"]
    assert [rank["exit_code"] for rank in failed] == [127, 127]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("hostname",), "say how many ranks to start: -np N"),
        (("-np", "2"), "Missing argument"),
        (("-np", "2", "--chaos", "kill:2@5", "hostname"), "there is no member 2"),
        (("-np", "2", "--min-np", "3", "hostname"), "--min-np 3 is more than the 2 ranks"),
        (("-H", "a:1,,b", "hostname"), "--hosts:5: expected a host"),
        (("-np", "1", "--summary", "/dev/null/x", "hostname"), "--summary /dev/null/x cannot be"),
        (("-np", "2", "--no-such-option", "hostname"), "--no-such-option"),
    ],
)
def test_a_mistake_in_the_options_ends_before_the_job_with_2(
    launcher: Launcher, words: tuple[str, ...], complaint: str
) -> None:
    done = launcher.run(*words)
    assert (done.code, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


WAIT_FOR_EVER = """
    import subprocess
    subprocess.Popen(["sleep", "1000"])
    {ignore}
    print("up", flush=True)
    world.Barrier()
    time.sleep(1000)
"""
IGNORE = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
)


@pytest.mark.parametrize("ignore", ["", IGNORE], ids=["obedient", "stubborn"])
def test_ctrl_c_ends_everything(launcher: Launcher, ignore: str) -> None:
    process = launcher.start("-np", "2", launcher.script(WAIT_FOR_EVER.format(ignore=ignore)))
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] up\n", "[1] up\n"}
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert "ended by SIGINT" in stderr
    assert find_processes(launcher.token) == []


@pytest.mark.parametrize("victim", ["launcher", "mpirun"])
def test_nothing_outlives_a_launcher_that_is_killed(launcher: Launcher, victim: str) -> None:
    script = launcher.script(WAIT_FOR_EVER.format(ignore=IGNORE))
    process = launcher.start("-np", "2", "sh", "-c", '"$0" "$1"; :', sys.executable, script)
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] up\n", "[1] up\n"}
    (mpirun,) = psutil.Process(process.pid).children()
    (mpirun if victim == "mpirun" else process).kill()
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == (1 if victim == "mpirun" else -signal.SIGKILL)
    assert wait_until(lambda: not find_processes(launcher.token), seconds=5)


def test_a_reader_that_goes_away_ends_the_job(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "sh", "-c", "while echo y; do sleep 0.01; done")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGPIPE
    assert find_processes(launcher.token) == []
