"""NPUs through Huawei's DCMI library (libdcmi.so, of the driver), where it is present.

A call takes milliseconds where npu-smi takes tenths of a second and a process. Only functions are
called that are documented, the same in all versions of the library's header, and whose arguments
are plain integers: the layouts of structures (memory errors, HBM) can't be checked without the
hardware, and are left to npu-smi. A function that the library lacks, or that fails, is unknown.

The calls let go of the interpreter's lock. Like any driver's they may block while a device fails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mpift.devices.npu_text import Level, Reading

LIBRARIES = (
    "libdcmi.so",
    "/usr/local/dcmi/libdcmi.so",
    "/usr/local/Ascend/driver/lib64/driver/libdcmi.so",
)
_LEVELS = {
    0: Level.OK,
    1: Level.WARNING,
    2: Level.ALARM,
    3: Level.CRITICAL,
    0xFFFFFFFF: Level.ABSENT,
}
# What dcmi_get_device_utilization_rate is asked for.
_AICORE, _HBM, _MEMORY = 2, 6, 1
_DECIWATTS = 10
_CODES_MAX = 128  # as the documentation's examples have it
_CODES_KEPT = 16

_INT, _UNSIGNED = ctypes.c_int, ctypes.c_uint
_INT_OUT, _UNSIGNED_OUT = ctypes.POINTER(_INT), ctypes.POINTER(_UNSIGNED)
_ARGUMENTS: dict[str, list[type]] = {
    "dcmi_init": [],
    "dcmi_get_card_id_device_id_from_logicid": [_INT_OUT, _INT_OUT, _UNSIGNED],
    "dcmi_get_device_health": [_INT, _INT, _UNSIGNED_OUT],
    "dcmi_get_device_errorcode_v2": [_INT, _INT, _INT_OUT, _UNSIGNED_OUT, _UNSIGNED],
    "dcmi_get_device_temperature": [_INT, _INT, _INT_OUT],
    "dcmi_get_device_power_info": [_INT, _INT, _INT_OUT],
    "dcmi_get_device_utilization_rate": [_INT, _INT, _INT, _UNSIGNED_OUT],
}


class Dcmi:
    """The library, initialized; ``load`` makes one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def find(self, logical: int) -> tuple[int, int] | None:
        """The (card, chip) of a device by its logical number; None if there is no such device."""
        card, chip = _INT(-1), _INT(-1)
        name = "dcmi_get_card_id_device_id_from_logicid"
        if not self._call(name, ctypes.byref(card), ctypes.byref(chip), logical):
            return None
        return (card.value, chip.value) if card.value >= 0 and chip.value >= 0 else None

    def read(self, card: int, chip: int) -> Reading:
        """All but the memory errors, which take a structure."""
        health = self._unsigned("dcmi_get_device_health", card, chip)
        temperature = self._signed("dcmi_get_device_temperature", card, chip)
        power = self._signed("dcmi_get_device_power_info", card, chip)
        memory = self._rate(card, chip, _HBM)
        return Reading(
            level=None if health is None else _LEVELS.get(health),
            codes=self._codes(card, chip),
            use=self._rate(card, chip, _AICORE),
            memory=self._rate(card, chip, _MEMORY) if memory is None else memory,
            temperature=_within(temperature, 200),
            power=_within(None if power is None else power / _DECIWATTS, 5000),
        )

    def _codes(self, card: int, chip: int) -> tuple[str, ...] | None:
        count, codes = _INT(0), (_UNSIGNED * _CODES_MAX)()
        name = "dcmi_get_device_errorcode_v2"
        if not self._call(name, card, chip, ctypes.byref(count), codes, _CODES_MAX):
            return None
        kept = max(0, min(count.value, _CODES_KEPT))
        return tuple(f"{code:08X}" for code in codes[:kept] if code)

    def _rate(self, card: int, chip: int, kind: int) -> float | None:
        percent = self._unsigned("dcmi_get_device_utilization_rate", card, chip, kind)
        known = _within(percent, 100)
        return None if known is None else known / 100

    def _unsigned(self, name: str, *arguments: int) -> int | None:
        value = _UNSIGNED(0)
        return value.value if self._call(name, *arguments, ctypes.byref(value)) else None

    def _signed(self, name: str, *arguments: int) -> int | None:
        value = _INT(0)
        return value.value if self._call(name, *arguments, ctypes.byref(value)) else None

    def _call(self, name: str, *arguments: object) -> bool:
        """Whether the library has that function and it succeeded."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return False
        function.argtypes, function.restype = _ARGUMENTS[name], _INT
        return bool(function(*arguments) == 0)


def load(libraries: Sequence[str] | None = None) -> Dcmi | None:
    """The first of ``libraries``, by default ``LIBRARIES``, that can be loaded and initialized.

    None if none can.
    """
    for path in LIBRARIES if libraries is None else libraries:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        dcmi = Dcmi(library)
        if dcmi._call("dcmi_init"):
            return dcmi
    return None


def _within(value: float | None, maximum: float) -> float | None:
    return float(value) if value is not None and 0 <= value <= maximum else None
