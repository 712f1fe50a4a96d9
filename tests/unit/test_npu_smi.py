"""NPUs by their tools: what a probe makes of all that these print, and which chip is whose."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpift.devices import npu_smi
from mpift.devices.npu_smi import HANGS_TO_FAULT, NpuProbe
from tests.unit.fake_npu_tools import (
    COMMON_OF_3,
    ECC,
    ECC_OF_3,
    HEALTH,
    HEALTH_OF_3,
    LINK_OF_1,
    LONG_SECONDS,
    MAPPING,
    MAPPING_TWO_CHIPS,
    SHORT_SECONDS,
    TABLE,
    FakeTool,
    hccn,
    new_probe,
    put_on_path,
    smi,
    well,
)

__all__ = ["hccn", "smi", "well"]  # fixtures for these tests


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
