"""``mpift doctor --devices``: what it makes of devices, and that no driver can hang it up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpift.cli import doctor_devices, main
from mpift.cli.doctor import Check
from mpift.cli.doctor_devices import Software, checks
from mpift.devices import backend, cann
from mpift.devices.census import Device, Findings

CPU = Software(
    torch_npu=None,
    torch_npu_installed=False,
    cann_error=None,
    cann=None,
    npu_driver=None,
    npu_files=[],
    nvidia_files=[],
    npu_backend=None,
)
ASCEND = replace(
    CPU,
    torch_npu="2.13.0",
    torch_npu_installed=True,
    cann="8.5.0",
    npu_driver="25.2.1",
    npu_files=[0, 1],
)
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
TORCH = Findings(torch="2.13.0+cpu")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES=4,5"


def npus(*healthy: bool | None) -> Findings:
    """Findings on a node with NPUs of that health."""
    devices = [
        Device(rank, f"npu:{rank}", state, f"Ascend910B3, NPU {rank}")
        for rank, state in enumerate(healthy)
    ]
    return replace(TORCH, counts={"npu": len(healthy)}, devices=devices)


def found(
    software: Software, findings: Findings, **environment: str
) -> list[tuple[str, str, str, str]]:
    """The checks as tuples of name, state, what was found, and what to do."""
    every = checks(software, findings, environment)
    return [(check.name, check.state, check.found, check.advice) for check in every]


def the(name: str, state: str, every: list[tuple[str, str, str, str]]) -> tuple[str, str]:
    """What the only check of that name and state found, and its advice."""
    (check,) = [check for check in every if check[:2] == (name, state)]
    return check[2:]


def test_a_machine_without_accelerators_is_all_right() -> None:
    assert found(CPU, TORCH) == [("devices", "ok", "none; training runs on the CPU", "")]


def test_a_sound_node_shows_versions_and_which_rank_takes_what() -> None:
    every = found(ASCEND, npus(True, True), ASCEND_RT_VISIBLE_DEVICES="4,5")
    assert {state for _, state, _, _ in every} == {"ok"}
    assert [words for _, _, words, _ in every] == [
        "2.13.0, for torch 2.13.0+cpu",
        "8.5.0",
        "25.2.1 (/dev/davinci0-1)",
        f"2 devices ({VISIBLE}): local ranks 0 to 1 take one each, further ones go round",
        "local rank 0: npu:0, Ascend910B3, NPU 0",
        "local rank 1: npu:1, Ascend910B3, NPU 1",
    ]


def test_one_device_is_shared_by_all_ranks_of_the_node() -> None:
    every = found(ASCEND, npus(True))
    assert ("npu", "ok", "1 device: all ranks of the node share it", "") in every


def test_a_device_that_is_not_healthy_is_a_problem() -> None:
    words, advice = the("npu", "problem", found(ASCEND, npus(True, False)))
    assert words.startswith("local rank 1: npu:1, ")
    assert "ASCEND_RT_VISIBLE_DEVICES" in advice


def test_health_that_nobody_can_tell_is_a_warning_with_the_missing_tool() -> None:
    words, advice = the("npu", "warning", found(ASCEND, npus(None, True)))
    assert words == "health of 1 not known"
    assert "npu-smi" in advice
    gpu = Findings(
        torch="2.13.0+cu130",
        torch_cuda="13.0",
        counts={"cuda": 1},
        devices=[Device(0, "cuda:0", None, "H200")],
    )
    assert "nvidia-ml-py" in the("cuda", "warning", found(CPU, gpu))[1]


@pytest.mark.parametrize(
    ("torch_npu", "torch", "state"),
    [
        ("2.13.0", "2.13.1+cpu", "ok"),
        ("2.13.0.post2", "2.13.0", "ok"),
        ("2.9.1", "2.13.0", "problem"),
        ("2.1.3", "2.13.0", "problem"),
        (None, "2.13.0", "ok"),
    ],
)
def test_torch_npu_must_be_of_torchs_own_minor_version(
    torch_npu: str | None, torch: str, state: str
) -> None:
    every = found(replace(ASCEND, torch_npu=torch_npu), replace(npus(True, True), torch=torch))
    _, advice = the("torch_npu", state, every)
    assert advice == ("" if state == "ok" else "pip install 'torch_npu==2.13.*'")


def test_a_cann_that_was_not_sourced_is_a_problem_where_there_are_npus() -> None:
    missing = replace(TORCH, missing={"npu": f"torch_npu is installed, but {NO_CANN}"})
    every = found(replace(ASCEND, cann_error=NO_CANN), missing)
    words, advice = the("cann", "problem", every)
    assert words == f"CANN 8.5.0 is installed, but can't be loaded ({NO_CANN}): no NPU can be used"
    assert "set_env.sh" in advice
    words, advice = the("cann", "warning", every)
    assert "`import torch` fails" in words
    assert advice.startswith("export TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    # It is said once: not again by what torch_npu says.
    assert not [check for check in every if check[0] == "npu"]


def test_a_torch_npu_without_cann_and_npus_is_only_a_warning() -> None:
    bare = replace(ASCEND, npu_files=[], cann=None, cann_error=NO_CANN, npu_driver=None)
    every = found(bare, TORCH, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert [(name, state) for name, state, _, _ in every] == [
        ("torch_npu", "ok"),
        ("cann", "warning"),
        ("devices", "ok"),
    ]


def test_npus_without_torch_npu_are_a_problem() -> None:
    every = found(replace(CPU, npu_files=[0, 1, 2, 7]), TORCH)
    words, advice = the("torch_npu", "problem", every)
    assert words == "not installed, but there are NPUs (/dev/davinci0,1,2,7)"
    assert advice == "pip install 'torch_npu==2.13.*'"


def test_devices_that_were_not_passed_into_a_container_are_a_warning() -> None:
    nothing = replace(TORCH, missing={"npu": "this process sees no npu device"})
    every = found(replace(ASCEND, npu_files=[], npu_driver=None), nothing)
    assert "--device /dev/davinci" in the("npu driver", "warning", every)[1]
    assert the("npu", "warning", every)[0] == "this process sees no npu device"


def test_devices_that_are_there_and_cannot_be_used_are_a_problem() -> None:
    nothing = replace(TORCH, torch_cuda="13.0", missing={"npu": "broken", "cuda": "too old"})
    every = found(replace(ASCEND, nvidia_files=[0]), nothing)
    assert the("npu", "problem", every)[0] == "broken"
    assert the("cuda", "problem", every)[0] == "too old"
    # A torch with CUDA on a machine without GPUs is common, and all right.
    assert found(CPU, nothing)[-1][:2] == ("devices", "ok")


def test_gpus_beside_a_torch_without_cuda_are_a_warning() -> None:
    words, _ = the("cuda", "warning", found(replace(CPU, nvidia_files=[0]), TORCH))
    assert words == "there are GPUs (/dev/nvidia0), but torch 2.13.0+cpu was built without CUDA"


@pytest.mark.parametrize(("value", "wrong"), [("1", True), ("on", True), ("0", False), ("", False)])
def test_the_variable_that_hides_faults_is_a_problem(value: str, wrong: bool) -> None:
    told = replace(TORCH, missing={"npu": f"RESUME_MODE_ENABLE={value} is set: with it"})
    every = found(ASCEND, told if wrong else npus(True), RESUME_MODE_ENABLE=value)
    problems = [check for check in every if check[1] == "problem"]
    assert len(problems) == wrong
    if wrong:
        assert problems[0][3] == "unset RESUME_MODE_ENABLE"


def test_simulated_npus_are_called_so() -> None:
    simulated = replace(CPU, npu_backend="mpift.testing.npu")
    words, advice = the("npu", "warning", found(simulated, npus(True)))
    assert "which simulates them on the CPU" in words
    assert advice == "unset MPIFT_NPU_BACKEND to train on NPUs"


def test_what_a_hanging_driver_left_unsaid_is_a_problem_and_the_rest_is_shown() -> None:
    every = found(ASCEND, replace(npus(True), problem="no answer within 90 s"))
    assert the("devices", "problem", every)[0] == "no answer within 90 s"
    assert ("npu", "ok", "local rank 0: npu:0, Ascend910B3, NPU 0", "") in every


def test_without_torch_nothing_is_counted() -> None:
    assert the("devices", "warning", found(CPU, Findings()))[1] == "pip install 'mpift[torch]'"


def test_names_are_those_of_the_module_that_loads_torch() -> None:
    assert doctor_devices._NPU_BACKEND_VARIABLE == backend.NPU_BACKEND_VARIABLE
    assert doctor_devices._RESUME_VARIABLE == backend._RESUME_VARIABLE
    assert cann.TORCH_NPU == backend.TORCH_NPU


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_the_command_shows_the_checks_and_leaves_with_1_for_a_problem(
    state: Any,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found = ([Check("npu", state, "8 devices", "rest")], {"found": {"counts": {"npu": 8}}})
    monkeypatch.setattr(doctor_devices, "examine", lambda: found)
    with pytest.raises(SystemExit) as left:
        main(("doctor", "--devices", "--json", "-"))
    assert left.value.code == code
    shown = capsys.readouterr()
    assert shown.err.splitlines()[1:] == [f"{state:8}npu: 8 devices; rest"]
    assert "torch: " in shown.err.splitlines()[0]
    told = json.loads(shown.out)
    assert told["settings"] is None  # nobody asked
    assert told["devices"]["found"]["counts"] == {"npu": 8}
    assert told["checks"][1] == {
        "name": "npu",
        "state": state,
        "found": "8 devices",
        "advice": "rest",
    }


def test_settings_are_no_matter_of_devices_unless_both_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPIFT_MIN_SIZE", "0")
    monkeypatch.setattr(doctor_devices, "examine", lambda: ([Check("npu", "ok", "8 devices")], {}))
    with pytest.raises(SystemExit) as left:
        main(("doctor", "--devices"))
    assert left.value.code == 0
    assert "setting" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(("doctor", "--devices", "--config"))
    assert left.value.code == 2
    monkeypatch.delenv("MPIFT_MIN_SIZE")
    with pytest.raises(SystemExit) as left:
        main(("doctor", "--devices", "--config"))
    shown = capsys.readouterr().out
    assert "settings in effect" in shown
    assert "npu: 8 devices" in shown


def test_the_doctor_itself_loads_no_torch_for_devices(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from mpift.cli import main\n"
        "try: main(['doctor', '--devices', '--json', '-'])\n"
        "finally: print(*{'torch', 'numpy', 'mpi4py.MPI'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert json.loads(done.stdout)["devices"]["found"]["torch"]
    assert done.stderr.splitlines()[-1] == ""
    assert "Traceback" not in done.stderr
