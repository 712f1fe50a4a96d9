"""Which probe is taken for the accelerator of a rank, and what CUDA devices tell of themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpift.devices import accelerators, npu_smi
from mpift.devices.accelerators import AcceleratorState, ErrorsOfThisJob, accelerator_probe
from mpift.devices.npu_smi import NpuProbe
from mpift.devices.nvml import NvmlProbe
from tests.unit.fake_npu_tools import FakeTool, put_on_path


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({15: "GPU is lost", 3: "Not Supported"}.get(value, str(value)))
        self.value = value


class OldNvml:
    """As much of an old ``pynvml`` as a probe uses, for two devices."""

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_NO_DATA = 21

    def __init__(self) -> None:
        self.errors = 5  # from before the job
        self.remap_failed = 0
        self.raises: int | None = None
        self.driver = True

    def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name, as those below
        if not self.driver:
            raise FakeNvmlError(12)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"#{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        if self.raises is not None:
            raise FakeNvmlError(self.raises)
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=30, total=120)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:  # noqa: N802
        return (0, 0, 0, self.remap_failed)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:  # noqa: N802
        assert kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return self.errors


class NewNvml(OldNvml):
    """One that tells more."""

    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self) -> None:
        super().__init__()
        self.links: list[int] = [1, 1, 1]
        self.limit_raises: int | None = None

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:  # noqa: N802
        return 1234 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else self.errors

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, kind: int) -> int:  # noqa: N802
        if self.limit_raises is not None:
            raise FakeNvmlError(self.limit_raises)
        return 89

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 612_500

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link >= len(self.links):
            raise FakeNvmlError(self.NVML_ERROR_INVALID_ARGUMENT)
        return self.links[link]


@pytest.fixture
def no_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)
    monkeypatch.setattr(npu_smi, "_PLACES", ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def old(no_npu: None, monkeypatch: pytest.MonkeyPatch) -> OldNvml:
    module = OldNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def new(no_npu: None, monkeypatch: pytest.MonkeyPatch) -> NewNvml:
    module = NewNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def cuda_probe(local_rank: int = 0) -> NvmlProbe:
    probe = accelerator_probe(local_rank)
    assert isinstance(probe, NvmlProbe)
    return probe


@pytest.mark.usefixtures("old")
def test_an_old_library_tells_what_it_can() -> None:
    assert cuda_probe(3).sample() == AcceleratorState(
        healthy=True,
        words="CUDA device 1",
        device="CUDA device 1",
        use=0.97,
        memory=0.25,
        temperature_celsius=61,
        uncorrected_errors=5,
    )


@pytest.mark.usefixtures("new")
def test_a_new_library_tells_corrected_errors_limit_power_and_links_too() -> None:
    state = cuda_probe().sample()
    assert (state.healthy, state.corrected_errors, state.uncorrected_errors) == (True, 1234, 5)
    assert (state.temperature_limit_celsius, state.power_watts) == (89, 612.5)
    assert state.link_up is True


@pytest.mark.parametrize(("links", "expected"), [([1, 0, 1], False), ([], None), ([1] * 18, True)])
def test_the_links_of_a_device_are_up_if_all_are(
    new: NewNvml, links: list[int], expected: bool | None
) -> None:
    new.links = links
    assert cuda_probe().sample().link_up is expected


@pytest.mark.parametrize("error", [2, 3, 999])
def test_a_model_that_tells_its_limit_elsewhere_is_no_broken_one(new: NewNvml, error: int) -> None:
    new.limit_raises = error
    state = cuda_probe().sample()
    assert (state.healthy, state.temperature_limit_celsius) == (True, None)


@pytest.mark.parametrize(
    ("visible", "name"), [("7,GPU-12ab", "CUDA device GPU-12ab"), (" 4 ", "CUDA device 4")]
)
@pytest.mark.usefixtures("old")
def test_the_device_is_the_one_that_cuda_shows_to_the_rank(
    monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_probe(1).sample().words == name


def test_there_is_no_probe_without_a_device_a_driver_or_the_library(
    old: OldNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert accelerator_probe() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    old.driver = False
    assert accelerator_probe() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert accelerator_probe() is None


def test_a_device_fault_is_told_in_words_and_errors_from_before_the_job_are_none(
    old: OldNvml,
) -> None:
    probe = cuda_probe()
    assert probe.sample().healthy
    old.errors += 2
    state = probe.sample()
    assert (state.healthy, "2 uncorrected memory errors" in state.words) == (False, True)
    old.remap_failed = 1
    assert "could not be replaced" in probe.sample().words
    old.raises = 15
    state = probe.sample()
    assert (state.healthy, state.words) == (False, "CUDA device 0: GPU is lost")
    assert state.device == "CUDA device 0"


def test_errors_between_the_start_and_the_first_sample_are_of_this_job(old: OldNvml) -> None:
    probe = cuda_probe()
    old.errors += 1
    assert probe.sample().healthy is False


def test_what_a_model_of_device_cannot_tell_is_unknown_and_no_fault(old: OldNvml) -> None:
    probe = cuda_probe()
    old.raises = old.NVML_ERROR_NOT_SUPPORTED
    state = probe.sample()
    assert (state.healthy, state.temperature_celsius, state.use) == (True, None, 0.97)


def test_errors_count_from_the_first_that_were_seen_and_anew_after_a_reset() -> None:
    errors = ErrorsOfThisJob()
    assert [errors.of(count) for count in (None, 70, 72, None, 72, 0, 0, 3)] == [
        *(0, 0, 2, 0, 2, 0, 0, 3)
    ]


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("new")
def test_an_npu_is_taken_before_a_cuda_device_unless_another_module_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = FakeTool(tmp_path, "npu-smi")
    for backend in (None, "", "torch_npu"):
        if backend is not None:
            monkeypatch.setenv(accelerators.NPU_BACKEND_VARIABLE, backend)
        assert isinstance(accelerator_probe(), NpuProbe)
    monkeypatch.setenv(accelerators.NPU_BACKEND_VARIABLE, "mpift.testing.npu")
    assert isinstance(accelerator_probe(), NvmlProbe)
    assert tool.take_calls() == []


@pytest.mark.usefixtures("no_npu")
def test_a_machine_without_tools_has_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert accelerator_probe() is None


def test_the_variable_of_the_backend_has_one_name() -> None:
    backend = pytest.importorskip("mpift.devices.backend")
    assert backend.NPU_BACKEND_VARIABLE == accelerators.NPU_BACKEND_VARIABLE


def test_a_probe_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    FakeTool(tmp_path, "npu-smi")
    script = """
import sys
from mpift.devices.accelerators import accelerator_probe
print(accelerator_probe().sample().healthy, *({'torch', 'torch_npu', 'numpy'} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["None"]
