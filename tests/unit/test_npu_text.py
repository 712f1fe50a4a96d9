"""What npu-smi and hccn_tool print, in all the forms that are known, and nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.devices.npu_text import (
    Chip,
    Level,
    Reading,
    parse_link,
    parse_mapping,
    parse_table,
    parse_values,
    parse_visible,
)
from tests.unit.fake_npu_tools import (
    COMMON,
    ECC,
    HEALTH,
    MAPPING,
    MAPPING_TWO_CHIPS,
    TABLE,
    TABLE_TWO_CHIPS,
)


def test_the_mapping_gives_every_chip_but_the_controllers() -> None:
    assert parse_mapping(MAPPING) == [Chip(0, 0, 0), Chip(3, 0, 1)]
    assert parse_mapping(MAPPING_TWO_CHIPS)[3] == Chip(1, 1, 3, physical=11)
    assert len(parse_mapping(MAPPING_TWO_CHIPS)) == 4
    in_a_frame = "| NPU ID | Chip ID | Chip Logic ID |\n| 5 | 0 | 2 | Ascend |\n| 4 | 0 | 1 | x |"
    assert parse_mapping(in_a_frame) == [Chip(4, 0, 1), Chip(5, 0, 2)]
    assert parse_mapping("dcmi module initialize failed. ret is -8005\n") == []


def test_the_common_query_tells_use_memory_heat_and_power_of_the_chip_not_of_its_controller() -> (
    None
):
    assert parse_values(COMMON, 0) == Reading(
        use=pytest.approx(0.92), memory=0.75, temperature=58, power=311.5
    )
    assert parse_values(COMMON, 1) == Reading()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NPU Temperature (C)   : 39\nChip ID : 0\n", 39.0),
        ("Temperature(C):39", 39.0),
        ("   temperature ( C )  :  39 C ", 39.0),
        ("Temperature\uff08\u2103\uff09\uff1a39", 39.0),  # the wide characters of Chinese
        ("Temperature(C) : 39.5C", 39.5),
        ("Notice: driver upgraded\n\tTemperature (C) : 39\nbye", 39.0),
        ("HBM Temperature (C) : 41\nNPU Temperature (C) : 39", 39.0),
        ("NPU Temperature (C) : NA\nTemperature(C) : 39", 39.0),
        *[
            (f"Temperature(C) : {value}", None)
            for value in (
                "-",
                "N/A",
                "NA",
                "",
                "hot",
                "-7",
                "201",
                "1000000000",
                "9" * 50,
                "1.2.3",
                "1e2",
                "0x20",
            )
        ],
        ("Temperature(C)", None),
        ("Temp", None),
        ("", None),
    ],
)
def test_a_value_is_found_however_its_key_is_written_and_nonsense_is_unknown(
    text: str, expected: float | None
) -> None:
    assert parse_values(text, 0).temperature == expected


def test_a_model_without_hbm_tells_its_memory_and_power_under_other_names() -> None:
    text = (
        "Chip ID : 0\nMemory Usage Rate(%) : 44\nAicore Usage Rate(%) : 7\nPower Dissipation : 13"
    )
    assert parse_values(text, 0) == Reading(memory=0.44, use=pytest.approx(0.07), power=13)
    assert parse_values("HBM Bandwidth Usage Rate(%) : 9\nAicpu Usage Rate(%) : 3", 0) == Reading()


@pytest.mark.parametrize(
    "text",
    [
        "Chip ID : 0\nHealth : OK\nTemperature(C) : 50\nChip ID : 1\nHealth : Alarm\n",
        "Health : OK\nTemperature(C) : 50\nChip ID : 0\nHealth : Alarm\nChip ID : 1\n",
        "Chip Count:2\n\nChip ID:0\nHealth:OK\nTemperature(C):50\n\nChip ID:1\nHealth:Alarm\n",
    ],
)
def test_each_chip_of_a_card_has_its_own_values(text: str) -> None:
    assert parse_values(text, 0) == Reading(level=Level.OK, temperature=50)
    assert parse_values(text, 1) == Reading(level=Level.ALARM)
    assert parse_values(text, 2) == Reading()


def test_a_controller_is_never_taken_for_the_chip_where_no_chip_is_named() -> None:
    first = "Health : Alarm\nTemperature(C) : 90\nChip Name : MCU\n\nHealth : OK\n"
    assert parse_values(first, 0) == Reading(level=Level.OK)
    last = "Health : OK\n\nHealth : Alarm\nTemperature(C) : 90\nChip Name : Mcu\n"
    assert parse_values(last, 0) == Reading(level=Level.OK)


def test_health_comes_with_its_error_codes() -> None:
    assert parse_values(HEALTH, 0) == Reading(level=Level.OK, codes=())
    sick = "Health Status : Critical\nError Code : 80E01801 0x80cf8009, 00000000 oops\n"
    expected = Reading(level=Level.CRITICAL, codes=("80E01801", "80CF8009"))
    assert parse_values(sick, 0) == expected
    assert parse_values("Health : UNKNOWN", 0).level is Level.ABSENT
    assert parse_values("Health : splendid", 0).level is None


def test_errors_are_summed_over_the_memories_that_a_chip_has() -> None:
    found = parse_values(ECC.format(corrected=5, uncorrected=1), 0)
    assert (found.corrected, found.uncorrected) == (7, 1)
    lifetime = "HBM Single Bit Aggregate Total Err Cnt : 12\nHBM Single Bit Error Count : NA\n"
    assert parse_values(lifetime, 0).corrected == 12
    absurd = ECC.format(corrected="4294967295", uncorrected=-1)
    assert parse_values(absurd, 0) == Reading(corrected=2, uncorrected=0)  # those of DDR


def test_the_table_tells_all_but_errors_and_its_processes_are_no_chips() -> None:
    assert parse_table(TABLE) == {
        (0, 0): Reading(level=Level.OK, power=88.1, temperature=41, use=0, memory=0.05),
        (3, 0): Reading(level=Level.ALARM, power=97.6, temperature=61, use=0.5, memory=0.5),
    }


def test_the_table_of_a_card_with_two_chips_has_no_power_for_the_second() -> None:
    found = parse_table(TABLE_TWO_CHIPS)
    assert list(found) == [(1, 0), (1, 1)]
    assert found[1, 0].power == 180.2
    assert (found[1, 1].power, found[1, 1].level) == (None, Level.WARNING)
    assert found[1, 1].memory == 2048 / 65536


def test_a_table_cut_off_anywhere_gives_the_chips_before_the_cut() -> None:
    whole = parse_table(TABLE)
    for length in range(len(TABLE)):
        cut = parse_table(TABLE[:length])
        assert cut.keys() <= whole.keys()
    assert parse_table(TABLE[: TABLE.index("97.6")]).keys() == {(0, 0)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("link status: UP\n", True),
        ("[devid 3] Link  Status : down", False),
        ("link status: unknown", None),
        ("link status:", None),
        ("hccn_tool execute failed", None),
        ("", None),
    ],
)
def test_a_port_is_up_down_or_unknown(text: str, expected: bool | None) -> None:
    assert parse_link(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [3]),
        ("4,5,7", [4, 5, 7]),
        ("0-3", [0, 1, 2, 3]),
        ("6,0-1\n", [6, 0, 1]),
        ("1,2,-1,3", [1, 2]),  # CANN reads up to what is not valid
        ("1, 2", [1]),
        ("3-1", []),
        ("0-99999999", []),
        ("\u00b2", []),  # a digit to Python, and no number
        ("", []),
        ("all", []),
    ],
)
def test_the_visible_devices_are_read_as_cann_reads_them(text: str, expected: list[int]) -> None:
    assert parse_visible(text) == expected


keys = st.sampled_from(
    (
        *("Chip ID", "Health", "Error Code", "Temperature(C)", "HBM Usage Rate(%)", "Chip Phy-ID"),
        *("HBM Single Bit Error Count", "DDR Double Bit Error Count", "NPU Real-time Power(W)"),
    )
)
lines = st.tuples(keys, st.sampled_from([" : ", ":", " ", " | "]), st.text(max_size=20)).map(
    "".join
)
rows = st.lists(st.text(max_size=12), max_size=5).map(lambda cells: f"| {' | '.join(cells)} |")
texts = st.text() | st.lists(lines | rows | st.just(""), max_size=30).map("\n".join)


@given(texts, st.integers(0, 3))
def test_no_text_raises_and_no_value_is_out_of_its_range(text: str, chip: int) -> None:
    parse_mapping(text)
    parse_link(text)
    parse_visible(text)
    for reading in (parse_values(text, chip), *parse_table(text).values()):
        for share in (reading.use, reading.memory):
            assert share is None or 0 <= share <= 1
        for number in (reading.temperature, reading.power, reading.corrected, reading.uncorrected):
            assert number is None or 0 <= number <= 1e9


@given(st.binary())
def test_no_bytes_raise(data: bytes) -> None:
    parse_values(data.decode(errors="replace"), 0)
