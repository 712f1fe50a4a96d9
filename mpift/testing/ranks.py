"""``run_ranks``: start a few ranks under a real ``mpirun``, collect what they return, clean up.

A scenario is a plain function of an importable module; every rank calls it and what it returns
(anything JSON can carry) comes back by member id. Whatever happens, the ranks have a time limit and
nothing is left running: processes are found by a token in their environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import math
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
from typing import IO, Any

import psutil

TOKEN_VARIABLE = "MPIFT_TEST_TOKEN"
RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"
TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
_ROOT_VARIABLES = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)

# What a rank on another node needs of this environment; a login there brings none of it.
_FORWARDED = ("PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", TOKEN_VARIABLE)
# Seconds. Ranks whose launcher is gone notice it within one, and then have to end; the watchdog of
# a node that lost ranks answers the other nodes for five more.
_LINGER_SECONDS = 8.0
_END_SECONDS = 10.0
# As many ranks as were asked for may never be seen together: the first may have ended before the
# last has started. After so long without a new one, those that are there are taken.
_SETTLED_SECONDS = 2.0
# What ranks that are out of time get to say where each of their threads is.
_STACKS_SECONDS = 1.0

# Faults of Open MPI itself, by words that they all print. Its launcher may not start. And a rank
# that hears of a death while it activates a communicator uses a table which that has not got yet:
# so one rank more has ended than a test which counts its survivors can expect.
_FAULTS_OF_MPI = (
    ("The PMIx server's listener thread failed to start",),
    ("Segmentation fault", "(ompi_comm_revoke_local+", "(ompi_comm_activate+"),
)
_STARTS = 3

Scenario = Callable[..., Any]
During = Callable[[list[psutil.Process]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the ranks.

    ``results[i]`` is what member i's scenario returned (a list if several were given); members that
    died are missing. ``timed_out`` ranks were killed at the limit. ``seconds`` is the time to
    mpirun's end, ``left_running`` are the command lines of what had not ended 8 s later, and was
    killed then.
    """

    results: dict[int, Any]
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    left_running: tuple[str, ...] = ()

    def __str__(self) -> str:
        end = "timed out" if self.timed_out else f"exit code {self.exit_code}"
        left = "".join(f"\nleft running: {line}" for line in self.left_running)
        return f"{end} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}{left}"


def run_ranks(
    ranks: int,
    scenario: Scenario | Sequence[Scenario],
    *arguments: Any,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    mpi_arguments: Sequence[str] = (),
    fault_tolerant: bool = True,
    during: During | None = None,
    prefix: Sequence[str] = (),
) -> Outcome:
    """Run ``scenario(*arguments)`` on ``ranks`` ranks; several scenarios share one start.

    ``during`` is called once with the ranks' processes, by member id, while they run: to stop or
    kill them from outside. ``prefix`` are words before ``mpirun``, which start it somewhere else.
    """
    scenarios = [scenario] if callable(scenario) else list(scenario)
    names = [f"{item.__module__}:{item.__qualname__}" for item in scenarios]
    with tempfile.TemporaryDirectory(prefix="mpift-ranks-") as folder:
        job = {"scenarios": names, "arguments": arguments, "folder": folder}
        exports = sorted({*_FORWARDED, *(environment or {})})
        command = [
            *prefix,
            _mpirun(),
            *(("--with-ft", "ulfm") if fault_tolerant else ()),
            *("--oversubscribe", "--bind-to", "none", "-np", str(ranks)),
            *(word for name in exports for word in ("-x", name)),
            *mpi_arguments,
            *(sys.executable, "-m", "mpift.testing.ranks", json.dumps(job)),
        ]
        outcome = run_job(
            command,
            ranks=ranks,
            timeout_seconds=timeout_seconds,
            environment=environment,
            during=during,
        )
        results = {}
        for path in Path(folder).glob("result-*.json"):
            values = json.loads(path.read_text())
            results[int(path.stem.removeprefix("result-"))] = (
                values[0] if callable(scenario) else values
            )
    return dataclasses.replace(outcome, results=dict(sorted(results.items())))


def run_job(
    command: Sequence[str],
    *,
    ranks: int,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    during: During | None = None,
) -> Outcome:
    """Run a launcher's ``command`` that starts ``ranks`` ranks, and end whatever it leaves.

    The outcome has no results. ``environment`` is added to this process's own; ``during`` is as in
    ``run_ranks``. A job in which a known fault of Open MPI itself showed is run again, up to twice.
    """
    for again in range(_STARTS):
        try:
            outcome = _run_once(command, ranks, timeout_seconds, environment, during)
            told = outcome.stderr
        except ChildProcessError as error:
            told = str(error)
            if again == _STARTS - 1 or not _is_fault_of_mpi(told):
                raise
            continue
        if not _is_fault_of_mpi(told):
            break
    return outcome


def _is_fault_of_mpi(told: str) -> bool:
    return any(all(word in told for word in words) for words in _FAULTS_OF_MPI)


def _run_once(
    command: Sequence[str],
    ranks: int,
    timeout_seconds: float,
    environment: Mapping[str, str] | None,
    during: During | None,
) -> Outcome:
    whole = _environment(environment)
    token = whole[TOKEN_VARIABLE]
    begin = time.monotonic()
    deadline = begin + timeout_seconds
    # Files, not pipes: a pipe that an orphan holds open would keep us waiting.
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        process = subprocess.Popen(
            command, env=whole, stdout=out, stderr=err, stdin=subprocess.DEVNULL
        )
        timed_out = False
        left: tuple[str, ...] = ()
        try:
            if during is not None:
                during(_wait_for_ranks(process, token, ranks, deadline))
            process.wait(max(0.1, deadline - time.monotonic()))
            seconds = time.monotonic() - begin
            left = _still_running(token)
        except subprocess.TimeoutExpired:
            timed_out = True
            seconds = time.monotonic() - begin
            _print_stacks(token)
        except (ChildProcessError, TimeoutError) as error:
            raise type(error)(f"{error}; it said:\n{_text_of(out)}\n{_text_of(err)}") from None
        finally:
            end_processes(token)
            process.wait()
        stdout, stderr = _text_of(out), _text_of(err)
    return Outcome({}, process.returncode, stdout, stderr, seconds, timed_out, left)


def _print_stacks(token: str) -> None:
    """Have the ranks of a job that hangs print where each thread is, to their standard error."""
    for rank in find_ranks(token).values():
        with contextlib.suppress(psutil.Error):
            if _catches(rank, signal.SIGUSR1):
                rank.send_signal(signal.SIGUSR1)
    time.sleep(_STACKS_SECONDS)


def _catches(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether the signal would not end it: not every rank of a job is one of ``run_ranks``."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _text_of(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


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


def _wait_for_ranks(
    launcher: subprocess.Popen[bytes], token: str, ranks: int, deadline: float
) -> list[psutil.Process]:
    known = 0
    settled = math.inf
    while time.monotonic() < deadline:
        found = find_ranks(token)
        if len(found) != known:
            known, settled = len(found), time.monotonic() + _SETTLED_SECONDS
        if len(found) == ranks or (found and time.monotonic() > settled):
            return list(found.values())
        if launcher.poll() is not None:
            raise ChildProcessError(
                f"the launcher ended with code {launcher.returncode} before its {ranks} ranks were"
                " seen"
            )
        time.sleep(0.1)
    raise TimeoutError(f"the launcher started none of {ranks} ranks in time")


def _still_running(token: str) -> tuple[str, ...]:
    """Command lines of what has not ended some time after the launcher."""
    deadline = time.monotonic() + _LINGER_SECONDS
    while left := find_processes(token):
        if time.monotonic() > deadline:
            return tuple(line for process in left if (line := " ".join(_command_of(process))))
        time.sleep(0.1)
    return ()


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def find_ranks(token: str) -> dict[int, psutil.Process]:
    """The process of each rank whose environment carries ``token``, by member id.

    Without the launcher's guards, and what a rank has started itself: its children are younger.
    """
    found: dict[int, psutil.Process] = {}
    for process in sorted(find_processes(token), key=_age_key):
        with contextlib.suppress(psutil.Error, OSError):
            member = process.environ().get(RANK_VARIABLE, "")
            if member.isdigit() and "mpift.launch.guard" not in process.cmdline():
                found.setdefault(int(member), process)
    return dict(sorted(found.items()))


def _age_key(process: psutil.Process) -> tuple[float, int]:
    return process.create_time(), process.pid


def find_processes(token: str) -> list[psutil.Process]:
    """All processes whose environment carries ``token``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process)
    return found


def end_processes(token: str) -> None:
    """Kill what a job has left; returns when it has ended, though perhaps not yet been reaped."""
    deadline = time.monotonic() + _END_SECONDS
    while (left := find_processes(token)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def _main() -> None:
    """One rank: carry out the scenarios, and write their results where ``run_ranks`` looks."""
    faulthandler.register(signal.SIGUSR1)
    job = json.loads(sys.argv[1])
    member = os.environ.get(RANK_VARIABLE, "0")
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
