"""NPUs by their tools: all that these print or fail to, and which chip is whose."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mpift.devices import dcmi, npu_smi
from mpift.devices.npu_smi import HANGS_TO_FAULT, NpuProbe
from mpift.devices.npu_text import (
    Level,
    Reading,
)
from mpift.devices.vendor_tool import OUTPUT_BYTES_MAX, VendorTool
from tests.unit.fake_npu_tools import (
    COMMON,
    ECC,
    HEALTH,
    MAPPING,
    MAPPING_TWO_CHIPS,
    TABLE,
    FakeTool,
    put_on_path,
)

LONG_SECONDS = 30.0  # of a call that is not to end by its limit
SHORT_SECONDS = 0.2
HEALTH_OF_3 = "info -t health -i 3 -c 0"
COMMON_OF_3 = "info -t common -i 3"
ECC_OF_3 = "info -t ecc -i 3 -c 0"
LINK_OF_1 = "-i 1 -link -g"


# -- the tool's process ----------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path) -> FakeTool:
    return FakeTool(tmp_path, "npu-smi")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_tool_that_hangs_is_killed_with_its_children(smi: FakeTool) -> None:
    smi.hang("info")
    tool = VendorTool(str(smi.path), SHORT_SECONDS)
    children: list[int] = []
    while not children:  # it may be killed before it has started one
        answer = tool.ask("info")
        assert answer.timed_out
        assert answer.problem == "npu-smi info did not answer within 0.2 s"
        children = smi.take_children()
    psutil.wait_procs([psutil.Process(p) for p in children if psutil.pid_exists(p)], timeout=10)
    assert all(gone(pid) for pid in children)


def test_a_tool_that_closes_its_output_and_stays_has_hung_too(tmp_path: Path) -> None:
    path = tmp_path / "npu-smi"
    path.write_text("#!/bin/sh\nexec >&- 2>&-\nexec sleep 1000\n")
    path.chmod(0o755)
    assert VendorTool(str(path), SHORT_SECONDS).ask("info").timed_out


def test_a_tool_that_can_not_be_killed_is_not_started_again(
    smi: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.hang("info")
    tool = VendorTool(str(smi.path), SHORT_SECONDS)
    monkeypatch.setattr("mpift.devices.vendor_tool._KILL_SECONDS", 0.05)
    stuck: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("os.killpg", lambda group, signal: stuck.append(group))
        assert tool.ask("info").timed_out
    smi.take_calls()
    again = tool.ask("info")
    assert (again.timed_out, again.problem) == (
        True,
        "npu-smi hangs in the kernel and can't be killed",
    )
    assert smi.take_calls() == []
    os.killpg(stuck[0], signal.SIGKILL)
    assert tool._stuck is not None
    tool._stuck.wait()
    smi.answer("info", "well again")
    assert tool.ask("info").text == "well again"


def test_a_tool_that_never_stops_printing_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "npu-smi"
    path.write_text("#!/bin/sh\nexec yes\n")
    path.chmod(0o755)
    answer = VendorTool(str(path), LONG_SECONDS).ask("info")
    assert answer.problem == f"npu-smi info printed more than {OUTPUT_BYTES_MAX // 1024} KiB"
    assert not answer.timed_out


def test_a_tool_that_fails_or_is_no_program_leaves_its_words(smi: FakeTool) -> None:
    smi.answer("info", b"dcmi\xff init\nretry later \xe4\n", exit_code=8)
    tool = VendorTool(str(smi.path), LONG_SECONDS)
    assert tool.ask("info").problem == "npu-smi info failed (exit code 8): retry later \ufffd"
    smi.path.write_text("no program\x00")
    assert "npu-smi info can't be started: Exec format error" in tool.ask("info").problem
    smi.path.unlink()
    assert "can't be started: No such file" in tool.ask("info").problem


# -- the probe -------------------------------------------------------------------------------------


@pytest.fixture
def hccn(tmp_path: Path) -> FakeTool:
    return FakeTool(tmp_path, "hccn_tool")


@pytest.fixture
def well(smi: FakeTool, hccn: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of two cards, 0 and 3, of which all is well."""
    put_on_path(tmp_path, monkeypatch)
    monkeypatch.setattr(npu_smi, "_SMI_SECONDS", LONG_SECONDS)
    smi.answer("info -m", MAPPING)
    smi.answer(HEALTH_OF_3, HEALTH)
    smi.answer(COMMON_OF_3, COMMON)
    smi.answer(ECC_OF_3, ECC.format(corrected=40, uncorrected=6))
    hccn.answer(LINK_OF_1, "link status: UP\n")


def new_probe(local_rank: int = 1) -> NpuProbe:
    probe = npu_smi.probe(local_rank)
    assert probe is not None
    return probe


def new_slow_round(probe: NpuProbe) -> None:
    """Sample until the errors and the port have been asked for once more."""
    for _ in range(round(npu_smi.SLOW_SECONDS / probe.spacing_seconds)):
        probe.sample()


@pytest.mark.usefixtures("well")
def test_a_healthy_npu_tells_all_of_itself() -> None:
    state = new_probe().sample()
    assert (state.healthy, state.words) == (True, "NPU 1 (card 3, chip 0)")
    assert (state.use, state.memory) == (pytest.approx(0.92), 0.75)
    assert (state.temperature_celsius, state.temperature_limit_celsius) == (58, 105)
    assert (state.power_watts, state.corrected_errors, state.uncorrected_errors) == (311.5, 42, 6)
    assert (state.link_up, state.error_codes, state.warning) == (True, (), "")


@pytest.mark.usefixtures("well")
def test_a_sample_takes_two_calls_and_now_and_then_two_more(smi: FakeTool, hccn: FakeTool) -> None:
    probe = new_probe()
    assert smi.take_calls() == []  # a driver that hangs does not hang the start
    probe.sample()
    assert smi.take_calls() == ["info -m", HEALTH_OF_3, COMMON_OF_3, ECC_OF_3]
    probe.sample()
    probe.sample()
    assert smi.take_calls() == [HEALTH_OF_3, COMMON_OF_3] * 2
    assert hccn.take_calls() == [LINK_OF_1]
    probe.sample()
    assert smi.take_calls() == [HEALTH_OF_3, COMMON_OF_3, ECC_OF_3]
    assert hccn.take_calls() == [LINK_OF_1]


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize(
    ("visible", "local_rank", "card", "chip"),
    [(None, 3, 1, 1), (None, 6, 1, 0), ("2-3", 1, 1, 1), ("3,1", 3, 0, 1), ("1", 5, 0, 1)],
)
def test_the_device_is_the_one_that_cann_shows_to_the_rank(
    smi: FakeTool,
    hccn: FakeTool,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    local_rank: int,
    card: int,
    chip: int,
) -> None:
    if visible is not None:
        monkeypatch.setenv(npu_smi.VISIBLE_VARIABLE, visible)
    smi.answer("info -m", MAPPING_TWO_CHIPS)
    smi.answer(f"info -t health -i {card} -c {chip}", HEALTH)
    state = new_probe(local_rank).sample()
    logical = 2 * card + chip
    assert state.healthy
    assert state.words == f"NPU {logical} (card {card}, chip {chip})"
    assert hccn.take_calls() == [f"-i {8 + logical} -link -g"]  # by the physical number


@pytest.mark.usefixtures("well")
def test_a_card_that_bears_the_number_of_its_device_is_not_named_twice(smi: FakeTool) -> None:
    smi.answer("info -t health -i 0 -c 0", HEALTH)
    assert new_probe(0).sample().words == "NPU 0"


def test_there_is_no_probe_without_the_tool_or_a_visible_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path, monkeypatch)
    monkeypatch.setattr(npu_smi, "_PLACES", (str(tmp_path / "driver"),))
    assert npu_smi.probe(0) is None
    (tmp_path / "driver").mkdir()
    FakeTool(tmp_path / "driver", "npu-smi")
    assert npu_smi.probe(0) is not None  # it is often not on the PATH
    monkeypatch.setenv(npu_smi.VISIBLE_VARIABLE, "")
    assert npu_smi.probe(0) is None


@pytest.mark.usefixtures("well")
def test_an_old_version_is_asked_by_single_queries_and_then_by_its_table(smi: FakeTool) -> None:
    smi.forget(COMMON_OF_3)
    smi.answer("info -t usages -i 3 -c 0", "Aicore Usage Rate(%) : 30\nHBM Usage Rate(%) : 20\n")
    smi.answer("info -t temp -i 3 -c 0", "NPU Temperature (C) : 44\nChip ID : 0\n")
    smi.answer("info -t power -i 3 -c 0", "NPU Real-time Power(W) : 70.5\nChip ID : 0\n")
    probe = new_probe()
    state = probe.sample()
    assert (state.use, state.memory, state.temperature_celsius) == (0.3, 0.2, 44)
    assert state.power_watts == 70.5
    smi.take_calls()
    for kind in ("usages", "temp", "power", "health"):
        smi.forget(f"info -t {kind} -i 3 -c 0")
    smi.answer("info", TABLE)
    state = probe.sample()
    assert (state.healthy, state.use, state.temperature_celsius) == (False, 0.5, 61)
    assert "it reports Alarm" in state.words
    smi.take_calls()
    probe.sample()
    assert "info -t temp -i 3 -c 0" not in smi.take_calls()


@pytest.mark.usefixtures("well")
def test_a_version_without_a_mapping_numbers_devices_as_its_table_does(smi: FakeTool) -> None:
    smi.forget("info -m")
    smi.answer("info", TABLE)
    assert new_probe().sample().words == "NPU 1 (card 3, chip 0)"


@pytest.mark.usefixtures("well")
def test_a_tool_that_fails_makes_the_device_unknown_with_the_tools_words(smi: FakeTool) -> None:
    probe = new_probe()
    for asked in (HEALTH_OF_3, COMMON_OF_3):
        smi.answer(asked, "dcmi module initialize failed. ret is -8005\n", exit_code=255)
    state = probe.sample()
    assert state.healthy is None
    assert state.words == (
        "NPU 1 (card 3, chip 0): npu-smi info -t health -i 3 -c 0 failed (exit code 255):"
        " dcmi module initialize failed. ret is -8005"
    )
    assert state.temperature_celsius is None


@pytest.mark.usefixtures("well")
def test_garbage_makes_everything_unknown_and_nothing_wrong(smi: FakeTool, hccn: FakeTool) -> None:
    garbage = b"\xff\xfe\x00Health\x80 : \xf0\nTemperature(C) : -40\nHBM Usage Rate(%) : 1e9"
    for asked in (HEALTH_OF_3, COMMON_OF_3, ECC_OF_3):
        smi.answer(asked, garbage)
    smi.answer("info", b"")
    for kind in ("usages", "temp", "power"):
        smi.answer(f"info -t {kind} -i 3 -c 0", garbage)
    hccn.answer(LINK_OF_1, garbage)
    state = new_probe().sample()
    assert (state.healthy, state.words) == (None, "NPU 1 (card 3, chip 0): its health is unknown")
    assert state.temperature_celsius is state.memory is state.corrected_errors is None
    assert state.link_up is None


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize("level", ["Alarm", "Critical"])
def test_an_alarm_of_the_device_is_a_fault_with_its_error_codes(smi: FakeTool, level: str) -> None:
    smi.answer(HEALTH_OF_3, f"Health Status : {level}\nError Code : 80E01801\n")
    state = new_probe().sample()
    assert (state.healthy, state.error_codes) == (False, ("80E01801",))
    assert f"it reports {level} (error codes 80E01801)" in state.words


@pytest.mark.usefixtures("well")
def test_a_warning_of_the_device_is_no_fault(smi: FakeTool) -> None:
    smi.answer(HEALTH_OF_3, "Health Status : Warning\nError Code : 80C78008\n")
    state = new_probe().sample()
    assert (state.healthy, state.warning) == (True, "it reports Warning (error codes 80C78008)")


@pytest.mark.usefixtures("well")
def test_a_device_that_is_gone_is_a_fault_and_one_that_never_was_there_is_unknown(
    smi: FakeTool,
) -> None:
    known = new_probe()
    assert known.sample().healthy
    smi.answer(HEALTH_OF_3, "Health Status : UNKNOWN\n")
    state = known.sample()
    assert (state.healthy, "it is gone" in state.words) == (False, True)
    assert new_probe().sample().healthy is None


@pytest.mark.usefixtures("well")
def test_only_uncorrected_errors_since_the_job_began_are_a_fault_until_the_driver_is_reset(
    smi: FakeTool,
) -> None:
    probe = new_probe()
    assert probe.sample().healthy  # 6 of them, from before
    smi.answer(ECC_OF_3, ECC.format(corrected=40, uncorrected=8))
    new_slow_round(probe)
    state = probe.sample()
    assert (state.healthy, "2 uncorrected memory errors" in state.words) == (False, True)
    smi.answer(ECC_OF_3, "", exit_code=1)
    new_slow_round(probe)
    assert probe.sample().healthy is False  # what is not told is not repaired
    smi.answer(ECC_OF_3, ECC.format(corrected=0, uncorrected=0))
    new_slow_round(probe)
    assert probe.sample().healthy
    smi.answer(ECC_OF_3, ECC.format(corrected=0, uncorrected=1))
    new_slow_round(probe)
    assert "1 uncorrected memory errors" in probe.sample().words


@pytest.mark.usefixtures("well")
def test_a_port_that_goes_down_is_told_and_a_node_without_the_tool_is_not_bothered(
    smi: FakeTool, hccn: FakeTool
) -> None:
    probe = new_probe()
    assert probe.sample().link_up
    hccn.answer(LINK_OF_1, "link status: DOWN\n")
    new_slow_round(probe)
    assert probe.sample().link_up is False
    hccn.forget(LINK_OF_1)
    probe = new_probe()
    hccn.take_calls()
    new_slow_round(probe)
    new_slow_round(probe)
    assert probe.sample().link_up is None
    assert len(hccn.take_calls()) == 1


@pytest.mark.usefixtures("well")
def test_only_a_tool_that_hangs_again_and_again_is_a_fault(
    smi: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = new_probe()
    assert probe.sample().healthy
    monkeypatch.setattr(probe._smi, "limit_seconds", SHORT_SECONDS)
    smi.hang(HEALTH_OF_3)
    states = [probe.sample() for _ in range(HANGS_TO_FAULT)]
    assert [state.healthy for state in states] == [None] * (HANGS_TO_FAULT - 1) + [False]
    assert "did not answer within 0.2 s, 3 times in a row: its driver hangs" in states[-1].words
    assert states[0].words.endswith("-c 0 did not answer within 0.2 s")
    monkeypatch.setattr(probe._smi, "limit_seconds", LONG_SECONDS)
    smi.answer(HEALTH_OF_3, HEALTH)
    assert probe.sample().healthy
    monkeypatch.setattr(probe._smi, "limit_seconds", SHORT_SECONDS)
    smi.hang(HEALTH_OF_3)
    assert probe.sample().healthy is None  # counted anew


@pytest.mark.usefixtures("well")
def test_a_node_without_devices_and_a_number_that_does_not_exist_are_told(
    smi: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.answer("info -m", "NPU ID  Chip ID  Chip Logic ID  Chip Name\n")
    smi.answer("info", "")
    assert new_probe(2).sample().words == "NPU of local rank 2: npu-smi lists no device"
    smi.answer("info -m", MAPPING)
    monkeypatch.setenv(npu_smi.VISIBLE_VARIABLE, "7")
    assert new_probe().sample().words == "NPU 7: npu-smi does not list it"


# -- the driver's library --------------------------------------------------------------------------

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
