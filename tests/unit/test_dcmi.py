"""The driver's library of an NPU, by a stand-in that is built here, and a probe that has it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpift.devices import dcmi, npu_smi
from mpift.devices.npu_text import Level, Reading
from tests.unit.fake_npu_tools import ECC_OF_3, HEALTH_OF_3, FakeTool, hccn, new_probe, smi, well

__all__ = ["hccn", "smi", "well"]  # fixtures for these tests

LIBRARY = """\
#include <stdlib.h>
static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
int dcmi_init(void) { return number("FAKE_INIT", 0); }
int dcmi_get_card_id_device_id_from_logicid(int *card, int *chip, unsigned int logical) {
    if (logical > 1) return -8001;
    *card = logical * number("FAKE_CARD", 3); *chip = 0;
    return 0;
}
int dcmi_get_device_health(int card, int chip, unsigned int *health) {
    *health = (unsigned int)number("FAKE_HEALTH", 0);
    return number("FAKE_HEALTH_FAILS", 0);
}
int dcmi_get_device_temperature(int card, int chip, int *celsius) {
    *celsius = number("FAKE_CELSIUS", 63);
    return 0;
}
int dcmi_get_device_power_info(int card, int chip, int *deciwatts) { *deciwatts = 2505; return 0; }
int dcmi_get_device_utilization_rate(int card, int chip, int kind, unsigned int *percent) {
    if (kind == 6 && number("FAKE_NO_HBM", 0)) return -8255;
    *percent = kind == 2 ? 88 : kind == 6 ? 55 : kind == 1 ? 11 : 101;
    return 0;
}
#ifndef OLD
int dcmi_get_device_errorcode_v2(int card, int chip, int *count, unsigned int *codes,
                                 unsigned int size) {
    if (size < 2) return -8001;
    *count = number("FAKE_CODES", 0); codes[0] = 0x80E01801; codes[1] = 0x1234;
    return 0;
}
#endif
"""


@pytest.fixture(scope="module")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc to build a stand-in for libdcmi.so")

    def build(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("dcmi")
        (folder / "dcmi.c").write_text(LIBRARY)
        path = folder / "libdcmi.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-Wall", *flags, "-o", str(path), "dcmi.c"],
            cwd=folder,
            check=True,
            timeout=60,
        )
        return path

    return build


@pytest.fixture(scope="module")
def library(build_library: Callable[..., Path]) -> Path:
    return build_library()


def test_the_library_tells_what_takes_no_structure(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = dcmi.load((str(library.parent / "none.so"), str(library)))
    assert loaded is not None
    assert (loaded.find(1), loaded.find(2)) == ((3, 0), None)
    assert loaded.read(3, 0) == Reading(
        level=Level.OK, codes=(), use=0.88, memory=0.55, temperature=63, power=250.5
    )
    monkeypatch.setenv("FAKE_NO_HBM", "1")
    monkeypatch.setenv("FAKE_CODES", "2")
    monkeypatch.setenv("FAKE_HEALTH", "-1")
    monkeypatch.setenv("FAKE_CELSIUS", "-99")
    assert loaded.read(3, 0) == Reading(
        level=Level.ABSENT,
        codes=("80E01801", "00001234"),
        use=0.88,
        memory=0.11,
        temperature=None,
        power=250.5,
    )


def test_a_library_that_is_missing_or_finds_no_driver_is_not_used(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dcmi.load((str(library.parent / "none.so"),)) is None
    monkeypatch.setenv("FAKE_INIT", "-8005")
    assert dcmi.load((str(library),)) is None


def test_an_old_library_that_lacks_a_function_tells_the_rest(
    build_library: Callable[..., Path],
) -> None:
    loaded = dcmi.load((str(build_library("-DOLD")),))
    assert loaded is not None
    found = loaded.read(3, 0)
    assert (found.codes, found.level) == (None, Level.OK)


@pytest.mark.usefixtures("well")
def test_with_the_library_the_tool_is_left_with_the_memory_errors(
    library: Path, smi: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcmi, "LIBRARIES", (str(library),))
    probe = new_probe()
    state = probe.sample()
    assert smi.take_calls() == ["info -m", ECC_OF_3]
    assert (state.healthy, state.temperature_celsius, state.corrected_errors) == (True, 63, 42)
    assert probe.spacing_seconds == npu_smi.LIBRARY_SPACING_SECONDS
    monkeypatch.setenv("FAKE_HEALTH_FAILS", "-8020")
    assert probe.sample().healthy
    assert smi.take_calls() == [HEALTH_OF_3]  # where the library fails, the tool may know


@pytest.mark.usefixtures("well")
def test_a_library_that_numbers_devices_in_another_way_is_not_used(
    library: Path, smi: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcmi, "LIBRARIES", (str(library),))
    monkeypatch.setenv("FAKE_CARD", "1")
    new_probe().sample()
    assert HEALTH_OF_3 in smi.take_calls()
