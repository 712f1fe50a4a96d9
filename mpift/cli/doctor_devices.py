"""``mpift doctor --devices``: which accelerators there are, how they are, and what is missing.

What takes torch or a driver is left to ``mpift.devices.census``, which no driver can hang up. The
rest is read from files and the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mpift.cli.doctor import Check
from mpift.devices import cann
from mpift.devices.census import TIME_LIMIT_SECONDS, Findings, ask

_DEVICE_FOLDER = Path("/dev")
# As in mpift.devices.backend, which loads torch.
_NPU_BACKEND_VARIABLE = "MPIFT_NPU_BACKEND"
_RESUME_VARIABLE = "RESUME_MODE_ENABLE"
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_OFF = ("", "0", "false", "off", "no")
_NPU_CONTAINER = (
    "in a container, pass them in: --device /dev/davinciN --device /dev/davinci_manager --device"
    " /dev/devmm_svm --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver"
)


@dataclass(frozen=True, slots=True)
class Software:
    """What files and the environment say of the software for NPUs and CUDA."""

    torch_npu: str | None
    torch_npu_installed: bool
    cann_error: str | None
    cann: str | None
    npu_driver: str | None
    npu_files: list[int]
    nvidia_files: list[int]
    npu_backend: str | None


def examine(time_limit: float = TIME_LIMIT_SECONDS) -> tuple[list[Check], dict[str, Any]]:
    """All checks of devices, and the same for machines."""
    software = look()
    findings = ask(time_limit)
    found = checks(software, findings)
    return found, {"software": asdict(software), "found": asdict(findings)}


def look(environment: Mapping[str, str] = os.environ) -> Software:
    """The software, as far as files and the environment tell."""
    installed = cann.is_installed()
    folder = cann.cann_folder(environment)
    return Software(
        torch_npu=cann.version_installed(),
        torch_npu_installed=installed,
        cann_error=cann.loading_error_apart(environment) if installed else None,
        cann=cann.cann_version(folder) if folder else None,
        npu_driver=cann.driver_version(),
        npu_files=_device_files("davinci"),
        nvidia_files=_device_files("nvidia"),
        npu_backend=environment.get(_NPU_BACKEND_VARIABLE) or None,
    )


def _device_files(name: str) -> list[int]:
    """The numbers N of all /dev/nameN, in order."""
    numbers = (path.name.removeprefix(name) for path in _DEVICE_FOLDER.glob(f"{name}*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


# -- what to make of it ----------------------------------------------------------------------------


def checks(
    software: Software, findings: Findings, environment: Mapping[str, str] = os.environ
) -> list[Check]:
    """What is there, what is wrong, and what to do."""
    found = [*_npu_software(software, findings, environment), *_cuda_software(software, findings)]
    found += _missing(software, findings)
    for kind in ("npu", "cuda"):
        found += _devices(kind, findings, environment)
    if findings.problem is not None:
        advice = "look at `npu-smi info` or `nvidia-smi`, and at the kernel's log (dmesg)"
        found.append(Check("devices", "problem", findings.problem, advice))
    elif findings.torch is None:
        advice = "pip install 'mpift[torch]'"
        found.append(Check("devices", "warning", "not counted: torch is not installed", advice))
    elif not findings.counts:
        found.append(Check("devices", "ok", "none; training runs on the CPU"))
    return found


def _npu_software(
    software: Software, findings: Findings, environment: Mapping[str, str]
) -> Iterator[Check]:
    if environment.get(_RESUME_VARIABLE, "").lower() not in _OFF:
        yield Check(
            "npu",
            "problem",
            f"{_RESUME_VARIABLE}={environment[_RESUME_VARIABLE]} is set: torch_npu turns faults"
            " of a device into warnings, and training goes on with wrong numbers",
            f"unset {_RESUME_VARIABLE}",
        )
    if software.npu_backend is not None:
        found = f"{_NPU_BACKEND_VARIABLE}={software.npu_backend}: NPUs are those of that module"
        if software.npu_backend.startswith("mpift.testing"):
            found += ", which simulates them on the CPU"
        yield Check("npu", "warning", found, f"unset {_NPU_BACKEND_VARIABLE} to train on NPUs")
        return
    here = _numbers("/dev/davinci", software.npu_files) if software.npu_files else ""
    if not software.torch_npu_installed:
        if software.npu_files:
            advice = f"pip install {_fitting(findings.torch)}"
            yield Check(
                "torch_npu", "problem", f"not installed, but there are NPUs ({here})", advice
            )
        return
    yield _fit(software.torch_npu, findings.torch)
    yield from _cann(software, environment)
    if software.npu_files:
        yield Check("npu driver", "ok", f"{software.npu_driver or 'version unknown'} ({here})")
    elif software.cann_error is None:
        yield Check("npu driver", "warning", "no /dev/davinciN: no NPU can be used", _NPU_CONTAINER)


def _fit(torch_npu: str | None, torch: str | None) -> Check:
    """Versions of both go together where their first two numbers are the same."""
    if torch_npu is None or torch is None:
        return Check("torch_npu", "ok", f"{torch_npu or 'version unknown'}")
    if _minor(torch_npu) == _minor(torch):
        return Check("torch_npu", "ok", f"{torch_npu}, for torch {torch}")
    found = f"{torch_npu} does not fit torch {torch}"
    return Check("torch_npu", "problem", found, f"pip install {_fitting(torch)}")


def _cann(software: Software, environment: Mapping[str, str]) -> Iterator[Check]:
    if software.cann_error is None:
        yield Check("cann", "ok", software.cann or "it can be loaded; version unknown")
        return
    state: Literal["problem", "warning"] = "problem" if software.npu_files else "warning"
    installed = f"CANN {software.cann} is installed, but" if software.cann else "CANN"
    found = f"{installed} can't be loaded ({software.cann_error}): no NPU can be used"
    yield Check("cann", state, found, cann.sourcing_advice())
    if environment.get(cann.AUTOLOAD_VARIABLE, "1") == "1":
        yield Check(
            "cann",
            "warning",
            "`import torch` fails without CANN while torch_npu is installed; `mpift run` and"
            " `import mpift.torch` prevent that, other programs don't",
            f"export {cann.AUTOLOAD_VARIABLE}=0 to use torch without NPUs",
        )


def _cuda_software(software: Software, findings: Findings) -> Iterator[Check]:
    if findings.torch_cuda is not None and findings.counts.get("cuda"):
        driver = f"driver {findings.nvidia_driver}" if findings.nvidia_driver else "driver unknown"
        yield Check(
            "cuda", "ok", f"torch {findings.torch} with CUDA {findings.torch_cuda}, {driver}"
        )
    elif software.nvidia_files and findings.torch and findings.torch_cuda is None:
        here = _numbers("/dev/nvidia", software.nvidia_files)
        found = f"there are GPUs ({here}), but torch {findings.torch} was built without CUDA"
        yield Check("cuda", "warning", found, "install a torch with CUDA to use them")


def _missing(software: Software, findings: Findings) -> Iterator[Check]:
    """Why there is none of a kind of device that should be there."""
    for kind, why in findings.missing.items():
        if kind == "npu" and software.npu_backend is None and software.cann_error is not None:
            continue  # said already, with what to do
        if why.startswith(_RESUME_VARIABLE):
            continue  # the same
        expected = {"npu": bool(software.npu_files or software.npu_backend)}
        if expected.get(kind, bool(software.nvidia_files)):
            yield Check(kind, "problem", why)
        elif kind == "npu":
            yield Check(kind, "warning", why)


def _devices(kind: str, findings: Findings, environment: Mapping[str, str]) -> Iterator[Check]:
    visible = environment.get(_VISIBLE[kind])
    limits = f" ({_VISIBLE[kind]}={visible})" if visible is not None else ""
    count = findings.counts.get(kind)
    if count == 1:
        yield Check(kind, "ok", f"1 device{limits}: all ranks of the node share it")
    elif count is not None:
        ranks = f"local ranks 0 to {count - 1} take one each, further ones go round"
        yield Check(kind, "ok", f"{count} devices{limits}: {ranks}")
    unknown = 0
    for device in findings.devices:
        if not device.device.startswith(kind):
            continue
        words = f"local rank {device.local_rank}: {device.device}, {device.words}"
        if device.healthy is False:
            yield Check(kind, "problem", words, f"leave it out with {_VISIBLE[kind]}")
        else:
            unknown += device.healthy is None
            yield Check(kind, "ok", words)
    if unknown:
        tool = {"npu": "npu-smi on PATH", "cuda": "pip install nvidia-ml-py"}[kind]
        yield Check(kind, "warning", f"health of {unknown} not known", f"it takes {tool}")


# -- helpers ---------------------------------------------------------------------------------------


def _numbers(prefix: str, numbers: list[int]) -> str:
    """``/dev/davinci0-7``: what the files are called."""
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers) > 1:
        return f"{prefix}{first}-{last}"
    return prefix + ",".join(map(str, numbers))


def _minor(version: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[0-9]+", version)[:2])


def _fitting(torch: str | None) -> str:
    return f"'torch_npu=={'.'.join(_minor(torch))}.*'" if torch else "torch_npu"
