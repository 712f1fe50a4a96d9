"""Stand-ins for npu-smi and hccn_tool: they print what a test has given them, fail, or hang.

What they print is here too, and a node of two cards of which all is well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpift.devices import npu_smi
from mpift.devices.npu_smi import NpuProbe

SCRIPT = """\
#!/bin/sh
here="$(dirname "$0")/$(basename "$0").answers"
asked="$*"
name="$(echo "$asked" | tr ' ' '_')"
echo "$asked" >> "$here/calls"
if [ -e "$here/$name.hangs" ]; then
    sleep 1000 &
    echo $! >> "$here/children"
    wait
fi
if [ -e "$here/$name" ]; then
    cat "$here/$name"
    exit "$(cat "$here/$name.exit" 2>/dev/null || echo 0)"
fi
echo "This command is not supported."
exit 1
"""


class FakeTool:
    """One tool, put into ``folder``. What it was given no answer for, it does not support."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.path.write_text(SCRIPT)
        self.path.chmod(0o755)
        self.answers = folder / f"{name}.answers"
        self.answers.mkdir()

    def answer(self, asked: str, text: str | bytes, exit_code: int = 0) -> None:
        place = self.answers / asked.replace(" ", "_")
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
        place.with_name(f"{place.name}.exit").write_text(str(exit_code))
        place.with_name(f"{place.name}.hangs").unlink(missing_ok=True)

    def hang(self, asked: str) -> None:
        (self.answers / f"{asked.replace(' ', '_')}.hangs").touch()

    def forget(self, asked: str) -> None:
        (self.answers / asked.replace(" ", "_")).unlink()

    def take_calls(self) -> list[str]:
        """What it was asked since the last time."""
        return self._take("calls")

    def take_children(self) -> list[int]:
        """The processes that it has started before it hung."""
        return [int(line) for line in self._take("children")]

    def _take(self, name: str) -> list[str]:
        place = self.answers / name
        lines = place.read_text().split("\n")[:-1] if place.exists() else []
        place.unlink(missing_ok=True)
        return lines


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-ins in ``folder`` be found, and no real tool."""
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("MPIFT_NPU_BACKEND", raising=False)
    monkeypatch.setattr("mpift.devices.dcmi.LIBRARIES", ())


# -- what the tools print, of our own making, in the layouts of the versions -----------------------

MAPPING = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B3
\t0                              1                              -                              Mcu
\t3                              0                              1                              Ascend 910B3
\t3                              1                              -                              Mcu
"""  # noqa: E501 - as wide as it is printed
MAPPING_TWO_CHIPS = """\
\tNPU ID    Chip ID   Chip Logic ID   Chip Phy-ID   Chip Name
\t0         0         0               8             Ascend910
\t0         1         1               9             Ascend910
\t0         2         -               -             Mcu
\t1         0         2               10            Ascend910
\t1         1         3               11            Ascend910
\t1         2         -               -             Mcu
"""
HEALTH = """\
\tHealth Status                  : OK
\tError Code                     : NA
\tError Information              : NA
"""
COMMON = """\
\tNPU ID                         : 3
\tChip Count                     : 1

\tChip ID                        : 0
\tMemory Usage Rate(%)           : 6
\tHBM Usage Rate(%)              : 75
\tAicore Usage Rate(%)           : 92
\tAicore Freq(MHZ)               : 1800
\tTemperature(C)                 : 58
\tNPU Real-time Power(W)         : 311.5

\tChip Name                      : MCU
\tTemperature(C)                 : 40
\tPower Dissipation(W)           : 21.0
"""
ECC = """\
\tNPU ID                                   : 3
\tChip Count                               : 1

\tDDR Single Bit Error Count               : 2
\tDDR Double Bit Error Count               : 0
\tHBM Single Bit Error Count               : {corrected}
\tHBM Double Bit Error Count               : {uncorrected}
\tHBM Single Bit Aggregate Total Err Cnt   : 900
\tHBM Double Bit Aggregate Total Err Cnt   : 70
\tHBM Single Bit Isolated Pages Count      : 0
\tChip ID                                  : 0
"""
TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Device              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 88.1        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3300 / 66000         |
+===========================+===============+====================================================+
| 3     910B3               | Alarm         | 97.6        61                0    / 0             |
| 0                         | 0000:C2:00.0  | 50          0    / 0          33000/ 66000         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4711          | python                   | 3000                    |
| No running processes found in NPU 3                                                            |
+===========================+===============+====================================================+
"""
TABLE_TWO_CHIPS = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 1     Ascend910           | OK            | 180.2       44                0    / 0             |
| 0     10                  | 0000:0A:00.0  | 10          0    / 0          1024 / 65536         |
| 1     Ascend910           | Warning       | -           45                0    / 0             |
| 1     11                  | 0000:0C:00.0  | 20          0    / 0          2048 / 65536         |
"""


# -- a node of two cards, and its probe ------------------------------------------------------------


LONG_SECONDS = 30.0  # of a call that is not to end by its limit
SHORT_SECONDS = 0.2
HEALTH_OF_3 = "info -t health -i 3 -c 0"
COMMON_OF_3 = "info -t common -i 3"
ECC_OF_3 = "info -t ecc -i 3 -c 0"
LINK_OF_1 = "-i 1 -link -g"


@pytest.fixture
def smi(tmp_path: Path) -> FakeTool:
    return FakeTool(tmp_path, "npu-smi")


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
