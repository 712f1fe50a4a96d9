"""One of Huawei's NPUs through the tools of its driver: npu-smi, hccn_tool, and DCMI if present.

npu-smi is a process that takes tenths of a second, so a sample asks it twice: for the health, and
for everything that ``-t common`` prints. Memory errors and the network port change seldom and are
asked for every ``SLOW_SECONDS``. Where ``common`` tells nothing, the single queries do, and where
they tell nothing, the table of plain ``npu-smi info``. Where the driver's library can be loaded,
it answers instead, and npu-smi is left with the memory errors (see ``dcmi``).

Faults are an alarm of the device itself, memory errors since the job began that could not be
corrected, a device that is gone, and a tool that hangs: a driver that is stuck makes it hang. Once
may be chance or a busy machine; ``HANGS_TO_FAULT`` samples in a row are the driver. A tool that
fails has said nothing about the device: that is unknown, with the tool's words.

Neither tool tells a temperature limit, and none is published; ``TEMPERATURE_LIMIT_CELSIUS`` is
what chips of this kind are commonly built for. Nothing here was seen on a real NPU: the formats
are those of public documentation and sources.
"""

from __future__ import annotations

import os
import shutil

from mpift.devices import dcmi
from mpift.devices.accelerators import AcceleratorState, ErrorsOfThisJob
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
from mpift.devices.vendor_tool import VendorTool

VISIBLE_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
TEMPERATURE_LIMIT_CELSIUS = 105.0
TOOL_SPACING_SECONDS = 10.0
LIBRARY_SPACING_SECONDS = 2.0
SLOW_SECONDS = 30.0
HANGS_TO_FAULT = 3

# For one call; all calls of a sample together stay below what ``probes`` waits.
_SMI_SECONDS = 5.0
_HCCN_SECONDS = 3.0
# The tools are often not on the PATH of a job.
_PLACES = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/local/Ascend/driver/tools",
    "/usr/local/Ascend/ascend-toolkit/latest/tools",
)
# Queries that tell how busy, full and hot a chip is, to be tried in this order. Not all versions
# take a chip with "common"; its block is found in the answer.
_QUERIES = (("common",), ("usages", "temp", "power"))


class NpuProbe:
    """The NPU at ``position`` among the visible ones, counted round.

    ``visible`` are their logical numbers, None for all. Nothing is asked before the first sample: a
    driver that hangs must not hang who makes a probe.
    """

    def __init__(
        self,
        smi: VendorTool,
        hccn: VendorTool | None,
        visible: list[int] | None,
        position: int,
    ) -> None:
        self.spacing_seconds = TOOL_SPACING_SECONDS
        self._smi = smi
        self._hccn = hccn
        self._visible = visible
        self._position = position
        self._library: dcmi.Dcmi | None = None
        self._chip: Chip | None = None
        # Until npu-smi has said which it is.
        self._name = (
            f"NPU of local rank {position}"
            if visible is None
            else f"NPU {visible[position % len(visible)]}"
        )
        self._samples_to_slow = 0
        self._query = 0  # of _QUERIES; beyond them, the table
        self._hangs = 0
        self._was_known = False
        self._problem = ""
        self._link_up: bool | None = None
        self._errors = Reading()
        self._of_this_job = ErrorsOfThisJob()

    def sample(self) -> AcceleratorState:
        """See ``AcceleratorProbe``."""
        self._problem = ""
        try:
            reading = self._read()
        except _HangsError:
            self._hangs += 1
            return self._state(self._errors)
        self._hangs = 0
        return self._state(reading)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> Reading:
        chip = self._chip = self._chip or self._find()
        if chip is None:
            return Reading()
        reading = Reading() if self._library is None else self._library.read(chip.card, chip.chip)
        if reading.level is None:
            reading = reading.or_else(self._ask_chip("health", chip))
        if reading.use is None and reading.temperature is None:
            reading = reading.or_else(self._read_use(chip))
        if reading.level is None:
            reading = reading.or_else(self._read_table(chip))
        if self._samples_to_slow == 0:
            self._samples_to_slow = round(SLOW_SECONDS / self.spacing_seconds)
            self._errors = self._ask_chip("ecc", chip).or_else(self._errors)
            self._ask_link(chip)
        self._samples_to_slow -= 1
        return reading.or_else(self._errors)

    def _find(self) -> Chip | None:
        """Which chip it is, on which card."""
        chips = parse_mapping(self._ask("info", "-m"))
        if not chips:  # a version without that query: the table's order is that of the numbers
            places = parse_table(self._ask("info"))
            chips = [Chip(*place, logical) for logical, place in enumerate(places)]
        numbers = [chip.logical for chip in chips] if self._visible is None else self._visible
        if not numbers:
            self._problem = self._problem or f"{self._smi.name} lists no device"
            return None
        logical = numbers[self._position % len(numbers)]
        chip = next((chip for chip in chips if chip.logical == logical), None)
        self._name = f"NPU {logical}"
        if chip is None:
            self._problem = self._problem or f"{self._smi.name} does not list it"
            return None
        if (chip.card, chip.chip) != (logical, 0):
            self._name += f" (card {chip.card}, chip {chip.chip})"
        self._library = dcmi.load()
        # What the library means by the number has to be what npu-smi means by it.
        if self._library and self._library.find(logical) != (chip.card, chip.chip):
            self._library = None
        if self._library:
            self.spacing_seconds = LIBRARY_SPACING_SECONDS
        return chip

    def _read_use(self, chip: Chip) -> Reading:
        while self._query < len(_QUERIES):
            reading = Reading()
            for kind in _QUERIES[self._query]:
                reading = reading.or_else(self._ask_chip(kind, chip))
            if reading.use is not None or reading.temperature is not None:
                return reading
            self._query += 1
        return self._read_table(chip)

    def _read_table(self, chip: Chip) -> Reading:
        return parse_table(self._ask("info")).get((chip.card, chip.chip), Reading())

    def _ask_chip(self, kind: str, chip: Chip) -> Reading:
        where = ["-i", str(chip.card)]
        if kind != "common":
            where += ["-c", str(chip.chip)]
        return parse_values(self._ask("info", "-t", kind, *where), chip.chip)

    def _ask(self, *arguments: str) -> str:
        """What npu-smi prints; "" where it fails, which leaves its words."""
        answer = self._smi.ask(*arguments)
        if answer.timed_out:
            self._problem = answer.problem
            raise _HangsError
        if answer.problem:
            self._problem = self._problem or answer.problem
            return ""
        return answer.text

    def _ask_link(self, chip: Chip) -> None:
        """The port is not used by mpift: where the tool fails at once, it is not asked again."""
        if self._hccn is None:
            return
        number = chip.logical if chip.physical is None else chip.physical
        answer = self._hccn.ask("-i", str(number), "-link", "-g")
        up = None if answer.problem else parse_link(answer.text)
        if up is None and self._link_up is None:
            self._hccn = None
        self._link_up = up if up is not None else self._link_up

    # -- judging -----------------------------------------------------------------------------------

    def _state(self, reading: Reading) -> AcceleratorState:
        fault = self._fault(reading)
        known = reading.level not in {None, Level.ABSENT}
        self._was_known = self._was_known or known
        codes = reading.codes or ()
        warning = _told(reading.level, codes) if reading.level is Level.WARNING else ""
        words = fault or warning or ("" if known else self._problem or "its health is unknown")
        return AcceleratorState(
            healthy=False if fault else True if known else None,
            words=f"{self._name}: {words}" if words else self._name,
            use=reading.use,
            memory=reading.memory,
            temperature_celsius=reading.temperature,
            temperature_limit_celsius=TEMPERATURE_LIMIT_CELSIUS,
            power_watts=reading.power,
            corrected_errors=reading.corrected,
            uncorrected_errors=reading.uncorrected,
            link_up=self._link_up,
            error_codes=codes,
            warning=warning,
            device=self._name,
        )

    def _fault(self, reading: Reading) -> str | None:
        new = self._of_this_job.of(reading.uncorrected)
        if self._hangs >= HANGS_TO_FAULT:
            return (
                f"{self._problem}, {self._hangs} times in a row: its driver hangs; look at dmesg,"
                " and reset the device or its node"
            )
        if reading.level in {Level.ALARM, Level.CRITICAL}:
            return f"{_told(reading.level, reading.codes or ())}; look at npu-smi info -t health"
        if reading.level is Level.ABSENT and self._was_known:
            return "it is gone: the driver no longer knows its state; reset it or its node"
        if new > 0:
            return f"{new} uncorrected memory errors since the job began; reset the device"
        return None


class _HangsError(Exception):
    """npu-smi did not answer: the rest of the sample is not asked for."""


def probe(local_rank: int) -> NpuProbe | None:
    """The probe of the node's ``local_rank``-th rank; None without npu-smi or a visible device."""
    smi = _find_tool("npu-smi", _SMI_SECONDS)
    if smi is None:
        return None
    text = os.environ.get(VISIBLE_VARIABLE)
    visible = None if text is None else parse_visible(text)
    if visible == []:
        return None
    return NpuProbe(smi, _find_tool("hccn_tool", _HCCN_SECONDS), visible, local_rank)


def _find_tool(name: str, limit_seconds: float) -> VendorTool | None:
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PLACES))
    return None if path is None else VendorTool(path, limit_seconds)


def _told(level: Level | None, codes: tuple[str, ...]) -> str:
    """The device's own words for its health."""
    told = f"it reports {level.value}" if level else ""
    return f"{told} (error codes {', '.join(codes)})" if codes else told
