"""The command line: what it loads, and what it makes of its words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpift._version import __version__
from mpift.cli import main
from mpift.launch import job
from mpift.launch.command import Options
from mpift.launch.hostfile import Host


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Options, job.Reporting]]:
    """What ``mpift run`` would have started."""
    found: list[tuple[Options, job.Reporting]] = []

    def run(options: Options, reporting: job.Reporting) -> int:
        found.append((options, reporting))
        return 7

    monkeypatch.setattr(job, "run", run)
    monkeypatch.delenv("MPIFT_CHAOS", raising=False)
    return found


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert isinstance(left.value.code, int)
    return left.value.code


def test_help_loads_neither_torch_nor_mpi_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from mpift.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'mpi4py', 'psutil'} & set(sys.modules)\n"
        "    print(*heavy, file=sys.stderr)"
    )
    for words in ((), ("--help",), ("run", "--help")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr.split()) == (0, [])
        assert "Usage: mpift" in done.stdout


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"mpift {__version__}\n"


def test_options_end_at_the_command_and_its_own_are_left_alone(
    started: list[tuple[Options, job.Reporting]],
) -> None:
    words = ("python", "train.py", "--epochs", "3", "-v", "-np", "9")
    assert call("run", "-np", "2", *words) == 7
    assert call("run", "--num-proc", "2", "--", *words) == 7
    for options, reporting in started:
        assert (options.command, options.ranks, reporting.verbose) == (words, 2, False)


def test_all_options_arrive(started: list[tuple[Options, job.Reporting]]) -> None:
    call(
        *("run", "-np", "3", "-H", "a:2,b:2", "--chaos", " kill:2@50 ", "--min-np", "2"),
        *("--summary", "s.json", "--output-filename", "out", "--strict", "--quiet"),
        *("--mpi-args", "--mca pml ob1", "-x", "HOME", "--env", "A=b=c", "train.py"),
    )
    options, reporting = started[0]
    assert options == Options(
        command=("train.py",),
        ranks=3,
        hosts=(Host("a", 2), Host("b", 2)),
        settings={"A": "b=c", "MPIFT_CHAOS": "kill:2@50", "MPIFT_MIN_SIZE": "2"},
        forward=("HOME",),
        mpi_arguments="--mca pml ob1",
    )
    assert reporting == job.Reporting(Path("s.json"), Path("out"), strict=True, quiet=True)


def test_without_a_number_of_ranks_all_slots_of_the_hosts_are_used(
    started: list[tuple[Options, job.Reporting]], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=3\n")
    call("run", "--hostfile", str(hostfile), "hostname")
    assert started[0][0].ranks == 5
    hostfile.write_text("a slots=2\nb\n")
    assert call("run", "--hostfile", str(hostfile), "hostname") == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("run", "-np", "2", "--hostfile", "/nowhere", "x"), "mpift run: /nowhere: cannot be read"),
        (("run", "-np", "two", "x"), "mpift run: Invalid value for '-np'"),
        (("run", "-np4", "x"), "No such option"),
        (("run", "-np", "1", "-H", "a", "--hostfile", "f", "x"), "not both"),
        (("run", "-np", "1", "--env", "9=x", "x"), "--env '9=x' is neither NAME nor NAME=VALUE"),
        (("run", "-np", "1", "--chaos", "boom", "x"), "'boom' is not VERB:MEMBER@STEP"),
        (("fly",), "No such command 'fly'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


def test_a_schedule_from_the_environment_is_checked_too(
    started: list[tuple[Options, job.Reporting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIFT_CHAOS", "kill:5@1")
    assert call("run", "-np", "2", "x") == 2
    assert started == []
