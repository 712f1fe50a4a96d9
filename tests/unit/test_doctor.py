"""``mpift doctor``: what it shows of the settings, and what it makes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpift.cli import doctor, main
from mpift.config import SETTINGS, Config
from mpift.errors import TransportError
from mpift.launch import machine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without a settings file, and an environment without settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MPIFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")  # no path is folded
    return tmp_path


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well."""
    fine = [doctor.Check("mpi", "ok", "Open MPI 5.0.8")]
    monkeypatch.setattr(doctor, "machine_checks", lambda: list(fine))


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(("doctor", *words))
    assert isinstance(left.value.code, int)
    return left.value.code


def rows(shown: str) -> dict[str, list[str]]:
    """Setting to the words beside it."""
    lines = [line.split() for line in shown.splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in SETTINGS}


def test_every_setting_is_shown_with_its_value_and_its_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mpift.toml").write_text("observers = 2\nheartbeat_interval = 2")
    monkeypatch.setenv("MPIFT_HEARTBEAT_INTERVAL", "4")
    assert call("--config", "--nodes", "9") == 0
    shown = capsys.readouterr().out
    found = rows(shown)
    assert list(found) == list(SETTINGS)
    assert found["observers"] == ["2", *str(folder / "mpift.toml").split()]
    assert " ".join(found["heartbeat_interval"]) == (
        "4 s environment variable MPIFT_HEARTBEAT_INTERVAL"
    )
    assert " ".join(found["checkpoint_every"]) == "500 steps preset large (9 nodes)"
    assert " ".join(found["hang_timeout"]) == "30 s as heartbeat_timeout"
    assert found["watchdog"] == ["true", "default"]
    assert f"settings file: {folder / 'mpift.toml'}" in shown
    assert [group for group in {s.group for s in SETTINGS.values()} if group not in shown] == []


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIFT_WATCHDOG", "maybe")
    assert call("--config") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "mpift doctor: watchdog = 'maybe' (environment variable MPIFT_WATCHDOG) must be"
        " true or false (1 or 0, yes or no, on or off)\n"
    )


def test_nodes_decide_whether_settings_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIFT_HEARTBEAT_INTERVAL", "12")
    assert [call("--config", "--nodes", nodes) for nodes in ("8", "9")] == [2, 0]
    assert call("--config") == 0
    assert call("--config", "--nodes", "0") == 2


def test_settings_that_go_together_on_many_nodes_only_are_a_warning(
    sound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIFT_HEARTBEAT_INTERVAL", "10")
    assert call() == 0
    assert "refused on 8 nodes or fewer" in capsys.readouterr().out
    assert call("--nodes", "9") == 0
    assert "refused" not in capsys.readouterr().out


def test_a_wrong_setting_does_not_hide_the_other_checks(
    sound: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIFT_MIN_SIZE", "0")
    assert call() == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok      mpi: Open MPI 5.0.8"
    assert lines[1].startswith("problem settings: min_size = 0 (environment variable MPIFT_MIN_SIZ")


def test_a_typing_error_in_a_variable_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIFT_WATCHDOGS", "0")
    assert call("--config") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warning settings: environment variable MPIFT_WATCHDOGS is not known")
    assert last.endswith("did you mean MPIFT_WATCHDOG?")


def test_machine_output_has_all_values_sources_and_checks(
    sound: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--nodes", "2", "--json", "-") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert rows(shown.err).keys() == found["settings"].keys() == SETTINGS.keys()
    config = Config().for_nodes(2)
    for name, entry in found["settings"].items():
        assert (entry["value"], entry["source"]) == (getattr(config, name), config.source(name))
    assert found["nodes"] == 2
    assert found["devices"] is None  # nobody asked
    assert found["checks"] == [
        {"name": "mpi", "state": "ok", "found": "Open MPI 5.0.8", "advice": ""}
    ]
    assert call("--nodes", "2", "--json", "f.json") == 0
    assert json.loads((folder / "f.json").read_text()) == found
    assert call("--json", "nowhere/f.json") == 2


def test_a_problem_is_exit_code_1_and_a_warning_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = doctor.Check("torch", "warning", "old", "get a newer one")
    monkeypatch.setattr(doctor, "machine_checks", lambda: [check])
    assert call() == 0
    assert capsys.readouterr().out.endswith("warning torch: old; get a newer one\n")
    bad = doctor.Check("torch", "problem", "older", "get a newer one")
    monkeypatch.setattr(doctor, "machine_checks", lambda: [check, bad])
    assert call() == 1


def test_the_checks_of_this_machine_find_what_this_test_runs_on() -> None:
    found = {check.name: check for check in doctor.machine_checks()}
    assert list(found) == ["python", "mpi", "torch", "shared memory"]
    assert found["python"].state == "ok"
    assert sys.executable in found["python"].found


@pytest.mark.parametrize(
    ("mpi", "state", "words"),
    [
        (machine.Mpi("/o/bin/mpirun", (5, 0, 8), ulfm=True), "ok", "with ULFM"),
        (machine.Mpi("/o/bin/mpirun", (4, 1), ulfm=False), "warning", "without ULFM"),
        (TransportError("there is no mpirun"), "problem", "there is no mpirun"),
    ],
)
def test_an_mpi_without_ulfm_is_warned_about_and_none_is_a_problem(
    mpi: machine.Mpi | TransportError,
    state: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_mpi() -> machine.Mpi:
        if isinstance(mpi, TransportError):
            raise mpi
        return mpi

    monkeypatch.setattr(machine, "find_mpi", find_mpi)
    check = doctor.check_mpi()
    assert check.state == state
    assert words in check.found


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", "ok"), ("2.4.0", "ok"), ("2.3.1", "problem"), (None, "warning")],
)
def test_torch_must_be_new_enough_and_may_be_absent(version: str | None, state: str) -> None:
    check = doctor.check_torch(version)
    assert check.state == state
    assert bool(check.advice) == (state != "ok")


@pytest.mark.parametrize(("ranks", "state"), [(0, "problem"), (1, "warning"), (4, "ok")])
def test_shared_memory_must_hold_a_rank_and_should_hold_one_a_core(
    ranks: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = ranks * doctor.SHARED_BYTES_PER_RANK
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    check = doctor.check_shared_memory(tmp_path, ranks=4)
    assert check.state == state
    assert f"({free:,} bytes)" in check.found


def test_a_machine_without_shared_memory_has_a_problem(tmp_path: Path) -> None:
    check = doctor.check_shared_memory(tmp_path / "nowhere", ranks=1)
    assert (check.state, check.advice) == ("problem", "mount a tmpfs there")


def test_it_loads_neither_torch_nor_mpi() -> None:
    code = (
        "import sys\n"
        "from mpift.cli import main\n"
        "try: main(['doctor', '--json', '-'])\n"
        "finally: print(*{'torch', 'numpy', 'mpi4py.MPI'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert json.loads(done.stdout)["checks"]
    assert done.stderr.splitlines()[-1] == ""
