"""What mpift expects of torch_npu, held against the genuine one over a fake CANN.

Skipped only where the wheel can't be fetched or there is no C compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.npu import wheels
from tests.npu.contract import CHECKS
from tests.npu.contract_faults import CODES
from tests.npu.fake_cann import build

# The first run fetches 45 MB.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 120
FAULTS = [name for name in CHECKS if name.startswith("fault_")]

# What torch_npu makes of an error code, where it has words of its own for it.
WORDS = {
    507053: "UCE ERROR",
    507054: "HBM MULTI BIT ECC ERROR",
    507055: "SUSPECT MEM ERROR",
    507056: "HCCS LINK ERROR",
    507057: "SUSPECT REMOTE ERROR",
    107022: "FORCE STOP",
    507904: "HCCL OP RETRY FAILED",
}
# The call that failed, where it has none.
CALLS = {
    "event": "aclrtSynchronizeEvent(event_)",
    "device": "AclrtSynchronizeDeviceWithTimeout",
}
INNER_ERROR = (
    "The Inner error is reported as above. The process exits for this inner error, and the current"
    " copy params are srclen=24, dstlen=24, kind=2."
)
REMEDIES = {
    507053: "REPAIR",
    507054: "REPAIR",
    507055: "REPAIR",
    507056: "NODE",
    507057: "REPAIR",
    107022: "REPAIR",
    507904: "LEAVE",
    507010: "LEAVE",
    507014: "LEAVE",
    507046: "RETRY",
    107020: "RETRY",
}


@pytest.fixture(scope="module")
def site() -> Path:
    release = wheels.release_for(torch.__version__)
    assert release is not None, f"tests/npu/wheels.py knows no torch_npu for {torch.__version__}"
    try:
        return wheels.installed(release)
    except wheels.UnavailableError as error:
        pytest.skip(f"torch_npu can't be fetched: {error}")


@pytest.fixture(scope="module")
def answers(site: Path) -> dict[str, Any]:
    """The result of each check of ``tests.npu.contract``."""
    if build.compiler() is None:
        pytest.skip("there is no C compiler to build the fake CANN with")
    libraries = [str(build.build()), str(Path(torch.__file__).parent / "lib")]
    done = run(site, ["-m", "tests.npu.contract"], LD_LIBRARY_PATH=os.pathsep.join(libraries))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run(site: Path, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with the genuine torch_npu on its path."""
    cleared = ("RESUME_MODE_ENABLE", "MPIFT_NPU_BACKEND", "ASCEND_RT_VISIBLE_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in cleared}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **variables,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )


def value_of(answers: dict[str, Any], name: str) -> Any:
    """What a check has returned; it must have held."""
    answer = answers[name]
    assert answer["ok"], answer["error"]
    return answer["value"]


# -- over the fake CANN ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in FAULTS])
def test_torch_npu_does_what_mpift_expects(answers: dict[str, Any], name: str) -> None:
    value_of(answers, name)


@pytest.mark.parametrize("code", CODES)
def test_the_text_of_an_error_where_the_host_waits(answers: dict[str, Any], code: int) -> None:
    errors = value_of(answers, f"fault_{code}_where_the_host_waits")
    for place, error in errors.items():
        text = heading(error["text"])
        if code in WORDS:
            # The words of an ECC error go on with the time of the error, which is not known here.
            said = f"NPU function error: {WORDS[code]}"
            assert re.fullmatch(rf"{said}(\.time is )?, error code is {code}", text)
        elif place in CALLS:
            assert text == f"NPU function error: {CALLS[place]}, error code is {code}"
        else:
            assert text == f"ACL stream synchronize failed, error code:{code}"
        assert error["type"] == "builtins.RuntimeError"


@pytest.mark.parametrize("code", CODES)
def test_the_text_of_an_error_where_work_is_launched(answers: dict[str, Any], code: int) -> None:
    error = value_of(answers, f"fault_{code}_where_work_is_launched")["work"]
    silent = code not in WORDS or code == 107022
    assert heading(error["text"]) == (INNER_ERROR if silent else f"{WORDS[code]}, ")
    assert "error code" not in error["text"]
    assert error["type"] == "builtins.RuntimeError"


@pytest.mark.parametrize("code", CODES)
def test_an_error_where_the_host_waits_is_told_by_its_code(
    answers: dict[str, Any], code: int
) -> None:
    for place, error in value_of(answers, f"fault_{code}_where_the_host_waits").items():
        assert (error["code"], error["remedy"]) == (code, REMEDIES[code])
        # A copy that can't be waited for doesn't say on which device.
        names_device = code in WORDS or place in CALLS
        assert error["device"] == (1 if names_device else None)
        assert not error["out_of_memory"]


@pytest.mark.parametrize("code", CODES)
def test_an_error_where_work_is_launched_is_told_by_its_words(
    answers: dict[str, Any], code: int
) -> None:
    error = value_of(answers, f"fault_{code}_where_work_is_launched")["work"]
    if code in WORDS and code != 107022:
        assert (error["code"], error["remedy"]) == (code, REMEDIES[code])
    else:  # torch_npu does not say which
        assert (error["code"], error["remedy"]) == (None, "LEAVE")
    assert error["device"] == 1


def heading(text: str) -> str:
    """The first line, without the place in torch_npu's source."""
    return re.sub(r"^\w+:\S+\.cpp:[0-9]+ ", "", text.partition("\n")[0])


def test_full_memory_is_no_fault_of_the_device(answers: dict[str, Any]) -> None:
    error = value_of(answers, "full_memory")
    assert error["type"] == "torch.OutOfMemoryError"
    assert error["text"].startswith("NPU out of memory. Tried to allocate 100.00 GiB")
    assert error["out_of_memory"]
    assert error["remedy"] is None


def test_a_stopped_device_says_so(answers: dict[str, Any]) -> None:
    error = value_of(answers, "a_stopped_device_refuses_until_it_is_restarted")
    assert (error["code"], error["device"]) == (107022, 0)


def test_a_damaged_tensor_is_refused_until_it_is_written_over(answers: dict[str, Any]) -> None:
    error = value_of(answers, "an_error_in_a_tensor_is_persistent")
    assert error["type"] == "builtins.RuntimeError"
    assert heading(error["text"]) == "There is unsafe data in the input tensor."


def test_the_check_of_memory_has_four_answers_and_gives_them_once(answers: dict[str, Any]) -> None:
    given = value_of(answers, "what_the_check_of_memory_says")
    assert given[::2] == [0, 1, 2, 3]
    assert given[1::2] == [0, 0, 0, 3]


def test_what_is_read_of_the_wheel_is_there_once_it_is_imported(
    answers: dict[str, Any], site: Path
) -> None:
    imported = set(value_of(answers, "names_are_there"))
    assert not wheels.names_of_npu(site) - imported


# -- without CANN ----------------------------------------------------------------------------------

REFUSED = """
from mpift.devices import backend
from mpift.errors import DeviceError
try:
    backend.module("npu")
except DeviceError as error:
    print(error)
"""

TRAINED = """
import torch
from mpift.devices import backend
print(backend.available())
layer = torch.nn.Linear(2, 1).to(backend.select(None, 0))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
before = layer.weight.detach().clone()
layer(torch.ones(3, 2)).sum().backward()
optimizer.step()
print((before - layer.weight.detach()).tolist())
"""


def test_torch_npu_without_cann_says_what_to_do(site: Path) -> None:
    done = run(site, ["-c", REFUSED])
    assert done.returncode == 0, done.stderr
    assert "CANN" in done.stdout
    assert "set_env.sh" in done.stdout
    assert "libhccl.so" in done.stdout


def test_torch_npu_without_cann_leaves_the_cpu(site: Path) -> None:
    done = run(site, ["-c", TRAINED])
    assert done.returncode == 0, done.stderr
    kind, steps = done.stdout.splitlines()[-2:]
    assert kind == "cpu"
    assert json.loads(steps) == [[pytest.approx(0.3), pytest.approx(0.3)]]


def test_a_mode_that_hides_faults_is_refused(site: Path) -> None:
    done = run(site, ["-c", REFUSED], RESUME_MODE_ENABLE="1")
    assert done.returncode == 0, done.stderr
    assert "RESUME_MODE_ENABLE=1 is set" in done.stdout
