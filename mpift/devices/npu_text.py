"""What Huawei's npu-smi and hccn_tool print, as values: text in, values out, nothing else.

Formats differ between versions and models, so lines are found by how their keys begin, whatever
their case, spaces and units ("Temperature(C)", "NPU Temperature (C)"), and all else is skipped.
What is not there, says that it is not known ("-", "NA", "N/A"), or can't be true (negative, beyond
``_FIELDS``) is None. No text makes anything here raise.

A card may have several chips. Then there is a block of lines for each, whose line "Chip ID" is the
first or the last of the block, as the version likes; the card's controller ("MCU") has one too.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

_NUMBER = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(?:%|[A-Za-z]{1,3})?(?=\s|$)")
_INTEGER = re.compile(r"[0-9]{1,6}")
_CODE = re.compile(r"(?:0x)?[0-9a-fA-F]{4,16}")
_UNITS = re.compile(r"[(\uff08][^()\uff08\uff09]*[)\uff09]")
_LINK = re.compile(r"link\s+status\s*[:\uff1a]\s*(up|down)\b", re.IGNORECASE)
_PAIR = re.compile(r"([0-9]{1,9})\s*/\s*([0-9]{1,9})")
_BUS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_CODES_MAX = 16
_COUNT_MAX = 100_000_000  # of errors: a device with more does not live to tell

Fields = dict[str, str]


class Level(enum.Enum):
    """What a device says of its health: the words of npu-smi, the numbers of DCMI."""

    OK = "OK"
    WARNING = "Warning"  # a minor alarm: it works
    ALARM = "Alarm"
    CRITICAL = "Critical"
    ABSENT = "UNKNOWN"  # documented as: not there, or not started


_LEVELS = {level.value.casefold(): level for level in Level}


@dataclass(frozen=True, slots=True)
class Chip:
    """One device: where it sits, and its logical number, by which programs know it."""

    card: int
    chip: int
    logical: int
    physical: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Values of one chip: shares from 0 to 1, Celsius, watts, counts; None where unknown."""

    level: Level | None = None
    codes: tuple[str, ...] | None = None
    use: float | None = None
    memory: float | None = None
    temperature: float | None = None
    power: float | None = None
    corrected: int | None = None
    uncorrected: int | None = None

    def or_else(self, other: Reading) -> Reading:
        """These values, those of ``other`` where they are unknown."""
        missing = [f.name for f in fields(self) if getattr(self, f.name) is None]
        return replace(self, **{name: getattr(other, name) for name in missing})


# Field, how its keys begin (the best first), the largest number that can be true, and its scale.
_FIELDS: Sequence[tuple[str, tuple[str, ...], float, float]] = (
    ("use", ("aicore usage rate", "npu utilization"), 100, 0.01),
    # Where there is HBM, "memory" is that of the controlling processor.
    ("memory", ("hbm usage rate", "ddr usage rate", "memory usage rate"), 100, 0.01),
    ("temperature", ("npu temperature", "temperature"), 200, 1),
    ("power", ("npu real-time power", "real-time power", "power dissipation"), 5000, 1),
)
# How keys of error counts end, the best first: since the driver was loaded, or for life.
_CORRECTED = ("single bit error count", "single bit aggregate total err cnt")
_UNCORRECTED = ("double bit error count", "double bit aggregate total err cnt")


def parse_values(text: str, chip: int) -> Reading:
    """What any of ``npu-smi info -t health | common | usages | temp | power | ecc`` tells."""
    found = _fields_of_chip(text, chip)
    values = {
        name: _scaled(_first_number(found, keys, maximum), scale)
        for name, keys, maximum, scale in _FIELDS
    }
    health = _first(found, ("health",))
    codes = _first(found, ("error code",))
    return Reading(
        level=None if health is None else _LEVELS.get(health.casefold()),
        codes=None if codes is None else _codes(codes),
        corrected=_errors(found, _CORRECTED),
        uncorrected=_errors(found, _UNCORRECTED),
        **values,
    )


def parse_mapping(text: str) -> list[Chip]:
    """What ``npu-smi info -m`` tells, in the order of the logical numbers.

    Its columns are the card, the chip, the logical number, in newer versions the physical one, and
    a name. Controllers have no logical number and are left out.
    """
    chips = {}
    has_physical = False
    for line in text.splitlines():
        if "chip" in line.casefold() and "phy" in line.casefold():
            has_physical = True
            continue
        numbers = [_integer(token) for token in line.replace("|", " ").split()[:4]]
        if len(numbers) < 3:
            continue
        card, chip, logical = numbers[:3]
        if card is None or chip is None or logical is None:
            continue
        physical = numbers[3] if has_physical and len(numbers) > 3 else None
        chips[logical] = Chip(card, chip, logical, physical)
    return [chips[logical] for logical in sorted(chips)]


def parse_table(text: str) -> dict[tuple[int, int], Reading]:
    """What ``npu-smi info`` tells of each (card, chip), in its order.

    Two rows a chip, of three cells: name, health, power and temperature; then chip, bus, use and
    memory. The last memory is the HBM. Rows of processes have more cells.
    """
    found: dict[tuple[int, int], Reading] = {}
    first: tuple[int, str, list[str]] | None = None
    for cells in _rows(text):
        number = _integer(cells[0].split()[0]) if cells[0].split() else None
        if number is None:
            first = None
        elif first is None:
            first = (number, cells[1], cells[2].split())
        else:
            card, health, numbers = first
            first = None
            if _BUS.fullmatch(cells[1]) is None and cells[1].casefold() not in {"na", "n/a", "-"}:
                continue
            power, temperature, *_ = [*numbers, "", ""]
            use = cells[2].split()
            found[card, number] = Reading(
                level=_LEVELS.get(health.casefold()),
                power=_number(power, 5000),
                temperature=_number(temperature, 200),
                use=_scaled(_number(use[0], 100) if use else None, 0.01),
                memory=_used_share(cells[2]),
            )
    return found


def parse_link(text: str) -> bool | None:
    """What ``hccn_tool -i N -link -g`` tells of the network port."""
    found = _LINK.search(text)
    return None if found is None else found[1].casefold() == "up"


def parse_visible(text: str) -> list[int]:
    """The logical numbers in ``ASCEND_RT_VISIBLE_DEVICES``: "1,2,3", "0-3".

    As CANN does, it reads up to the first entry that it does not understand.
    """
    numbers: list[int] = []
    for entry in text.strip().split(","):
        begin, dash, end = entry.partition("-")
        first, last = _integer(begin), _integer(end if dash else begin)
        if first is None or last is None or not first <= last < first + 1024:
            break
        numbers.extend(range(first, last + 1))
    return numbers


# -- lines -----------------------------------------------------------------------------------------


def _blocks(text: str) -> Iterator[Fields]:
    """The lines "key : value", cut at empty lines and where a key comes again."""
    block: Fields = {}
    for line in text.splitlines():
        if not line.strip():
            if block:
                yield block
            block = {}
            continue
        raw, colon, value = line.replace("\uff1a", ":").partition(":")
        key = " ".join(_UNITS.sub(" ", raw).split()).casefold()
        if not colon or not key:
            continue
        if key in block:
            yield block
            block = {}
        block[key] = value.strip()
    if block:
        yield block


def _fields_of_chip(text: str, chip: int) -> Fields:
    """The lines of one chip; all of them where no chip is named, since only one was asked for."""
    blocks = list(_blocks(text))
    named = [block for block in blocks if _integer(block.get("chip id", "")) is not None]
    if named:
        chosen = [block for block in named if _integer(block["chip id"]) == chip]
    else:
        chosen = [block for block in blocks if block.get("chip name", "").casefold() != "mcu"]
    found: Fields = {}
    for block in chosen:
        found = {**block, **found}
    return found


def _rows(text: str) -> Iterator[list[str]]:
    """The rows of a table that have three cells."""
    for line in text.splitlines():
        if line.strip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) == 3:
                yield cells


def _first(found: Fields, beginnings: Sequence[str]) -> str | None:
    for beginning in beginnings:
        for key, value in found.items():
            if key.startswith(beginning):
                return value
    return None


def _first_number(found: Fields, beginnings: Sequence[str], maximum: float) -> float | None:
    for beginning in beginnings:
        for key, value in found.items():
            number = _number(value, maximum) if key.startswith(beginning) else None
            if number is not None:
                return number
    return None


def _errors(found: Fields, endings: Sequence[str]) -> int | None:
    """The sum over the kinds of memory that the chip has (DDR, HBM)."""
    for ending in endings:
        counts = [
            _number(value, _COUNT_MAX) for key, value in found.items() if key.endswith(ending)
        ]
        known = [int(count) for count in counts if count is not None]
        if known:
            return sum(known)
    return None


# -- values ----------------------------------------------------------------------------------------


def _number(text: str, maximum: float) -> float | None:
    found = _NUMBER.match(text)
    value = None if found is None else float(found[1])
    return value if value is not None and value <= maximum else None


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _codes(text: str) -> tuple[str, ...]:
    tokens = (token.upper() for token in text.replace(",", " ").split() if _CODE.fullmatch(token))
    codes = [token.removeprefix("0X") for token in tokens]
    return tuple(code for code in codes if code.strip("0"))[:_CODES_MAX]


def _used_share(cell: str) -> float | None:
    """Of the last "used / size" in the cell whose size is not 0."""
    for used, size in reversed(_PAIR.findall(cell)):
        if int(size) > 0:
            share = int(used) / int(size)
            return share if share <= 1 else None
    return None
