"""``run_ranks``: start a few ranks under a real ``mpirun``, collect what they return, clean up.

A scenario is a plain function of an importable module; every rank calls it and what it returns
(anything JSON can carry) comes back by member id. Whatever happens, the ranks have a time limit and
nothing is left running: processes are found as descendants of ``mpirun`` and by a token in their
environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TOKEN_VARIABLE = "MPIFT_TEST_TOKEN"
TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
_ROOT_VARIABLES = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)

Scenario = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the ranks.

    ``results[i]`` is what member i's scenario returned (a list if several were given); members that
    died are missing. ``timed_out`` ranks were killed at the limit.
    """

    results: dict[int, Any]
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool

    def __str__(self) -> str:
        end = "timed out" if self.timed_out else f"exit code {self.exit_code}"
        return f"{end} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


def run_ranks(
    ranks: int,
    scenario: Scenario | Sequence[Scenario],
    *arguments: Any,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    mpi_arguments: Sequence[str] = (),
    fault_tolerant: bool = True,
    during: Callable[[list[psutil.Process]], None] | None = None,
) -> Outcome:
    """Run ``scenario(*arguments)`` on ``ranks`` ranks; several scenarios share one start.

    ``during`` is called once with the ranks' processes, in no special order, while they run: to
    stop or kill them from outside.
    """
    scenarios = [scenario] if callable(scenario) else list(scenario)
    names = [f"{item.__module__}:{item.__qualname__}" for item in scenarios]
    with tempfile.TemporaryDirectory(prefix="mpift-ranks-") as folder:
        job = {"scenarios": names, "arguments": arguments, "folder": folder}
        command = [
            _mpirun(),
            *(("--with-ft", "ulfm") if fault_tolerant else ()),
            *("--oversubscribe", "--bind-to", "none", "-np", str(ranks)),
            *mpi_arguments,
            *(sys.executable, "-m", "mpift.testing.ranks", json.dumps(job)),
        ]
        outcome = _run(command, _environment(environment), timeout_seconds, during, Path(folder))
        results = {}
        for path in Path(folder).glob("result-*.json"):
            values = json.loads(path.read_text())
            results[int(path.stem.removeprefix("result-"))] = (
                values[0] if callable(scenario) else values
            )
    code, stdout, stderr, seconds, timed_out = outcome
    return Outcome(dict(sorted(results.items())), code, stdout, stderr, seconds, timed_out)


def _mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    environment = dict(os.environ)
    if os.geteuid() == 0:
        environment |= dict.fromkeys(_ROOT_VARIABLES, "1")
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment[TOKEN_VARIABLE] = uuid.uuid4().hex
    return environment | dict(more or {})


def _run(
    command: list[str],
    environment: dict[str, str],
    timeout_seconds: float,
    during: Callable[[list[psutil.Process]], None] | None,
    folder: Path,
) -> tuple[int, str, str, float, bool]:
    begin = time.monotonic()
    # Files, not pipes: a pipe that an orphan holds open would keep us waiting.
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
        timed_out = False
        try:
            if during is not None:
                during(_ranks_of(process.pid, begin + timeout_seconds))
            process.wait(max(0.1, begin + timeout_seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_processes(environment[TOKEN_VARIABLE])
            process.wait()
        seconds = time.monotonic() - begin
        return (
            process.returncode,
            (folder / "stdout").read_text(errors="replace"),
            (folder / "stderr").read_text(errors="replace"),
            seconds,
            timed_out,
        )


def _ranks_of(pid: int, deadline: float) -> list[psutil.Process]:
    """The Python processes below ``mpirun``, once there are any and no more appear."""
    known: list[psutil.Process] = []
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        ranks = [p for p in found if "mpift.testing.ranks" in " ".join(_command_of(p))]
        if ranks and len(ranks) == len(known):
            return ranks
        known = ranks
        time.sleep(0.2)
    raise TimeoutError("mpirun started no ranks")


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def find_processes(token: str) -> list[psutil.Process]:
    """All processes whose environment carries ``token``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process)
    return found


def end_processes(token: str) -> None:
    """Kill what a job has left; returns when it is gone."""
    left = find_processes(token)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(left, timeout=10)


def _main() -> None:
    """One rank: carry out the scenarios, and write their results where ``run_ranks`` looks."""
    job = json.loads(sys.argv[1])
    member = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    results = []
    for name in job["scenarios"]:
        module, _, function = name.partition(":")
        results.append(getattr(importlib.import_module(module), function)(*job["arguments"]))
    path = Path(job["folder"]) / f"result-{member}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results))
    partial.rename(path)


if __name__ == "__main__":
    _main()
