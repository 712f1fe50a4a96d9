"""Which errors are faults of a device, and what helps against each.

Devices report their faults as plain ``RuntimeError``s, so the text decides: for an NPU the error
code of the Ascend runtime in it, else the words of torch_npu or CANN; for CUDA the words of
``cudaGetErrorString``. The tables below say for each what it is and what helps. Everything else
(shapes that don't match, an index on the wrong device, memory that is full) is the script's own
matter and is no fault here. Where a text can't tell a broken device from a broken operation, the
process has to leave either way: its context on the device is lost.

Nothing here loads torch or talks to a device. What a check of the device's memory says is judged
later, by whoever repairs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpift.errors import MpiftError


class Remedy(enum.Enum):
    """What helps against a fault, from the mildest to the strongest."""

    # The device is fine; what was computed in this step is not.
    RETRY = "retry the step"
    # Stop the device, check it, restart it, take the state from a peer, redo the step.
    REPAIR = "repair in place"
    # The device is of no use any more to this process.
    LEAVE = "leave"
    # The fault is the node's (links between its devices, its driver): no rank is well off there.
    NODE = "leave the node"


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """A fault of a device: what ``words`` says in one line, with what to do about it.

    ``code`` is the error code of the Ascend runtime, None where there is none (CUDA has none in its
    texts). ``device`` is its number in the process that had the error, None if the text has none.
    """

    code: int | None
    remedy: Remedy
    words: str
    device: int | None = None


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A row of the tables: ``texts`` are the wordings that it has, ``advice`` says what to do."""

    remedy: Remedy
    what: str
    advice: str
    texts: tuple[str, ...]
    code: int | None = None


_Row = tuple[int | None, str, tuple[str, ...]]


def _rows(remedy: Remedy, advice: str, *rows: _Row) -> tuple[KnownFault, ...]:
    return tuple(KnownFault(remedy, what, advice, texts, code) for code, what, texts in rows)


_EITHER = (
    "the device or an operation (an index out of range, for example) is at fault: if it comes back"
    " on other devices, find the operation with {}_LAUNCH_BLOCKING=1"
)

_LOOK = "the rank leaves; look at `nvidia-smi -q` and at the kernel's log (Xid) of the node"

# Names and numbers: rt_error_codes.h of CANN 8.5. Texts: what torch_npu 2.13 throws (in capitals),
# and the reasons that CANN's runtime gives. Repaired is what Huawei's own recovery repairs.
NPU_FAULTS = (
    *_rows(
        Remedy.REPAIR,
        "the device is stopped, checked and restarted, and gets its state from another rank",
        (
            507053,
            "uncorrectable memory error (UCE)",
            ("UCE ERROR", "device mem error", "device local mem error"),
        ),
        (
            507054,
            "multi-bit ECC error in its memory (HBM)",
            ("HBM MULTI BIT ECC ERROR", "hbm Multi-bit ECC error"),
        ),
        (
            507055,
            "its memory is suspected to be faulty",
            ("SUSPECT MEM ERROR", "suspect device mem error"),
        ),
        (
            507057,
            "access to the memory of another device failed",
            ("SUSPECT REMOTE ERROR", "suspect remote error", "device remote mem error"),
        ),
        # Aborted in the middle of an optimizer step, parameters are neither old nor new.
        (
            107022,
            "its work was aborted (stop_device was called)",
            ("FORCE STOP", "device task abort"),
        ),
    ),
    *_rows(
        Remedy.NODE,
        "no rank is well off on this node; look at `npu-smi info -t health -i CARD` there",
        (
            507056,
            "a link between the devices of the node failed (HCCS)",
            ("HCCS LINK ERROR", "link error", "device network link error"),
        ),
    ),
    # mpift itself uses no HCCL: it is the script's, and only a new process gets a sound one.
    *_rows(
        Remedy.LEAVE,
        "the rank leaves; look at the links with `hccn_tool -i N -link -g`",
        (
            507904,
            "HCCL gave up an operation of the script after its retries",
            ("HCCL OP RETRY FAILED", "hccl op retry failed"),
        ),
    ),
    # The caller stopped waiting; nothing is known to be broken. What hangs for good fails again.
    *_rows(
        Remedy.RETRY,
        "the step is done again",
        (107020, "a task took longer than its time limit", ("task timeout",)),
        (507046, "a stream took longer than the time limit", ("stream sync timeout",)),
        (507047, "an event took longer than the time limit", ("event sync timeout",)),
    ),
    *_rows(
        Remedy.LEAVE,
        "the rank leaves; look at `npu-smi info -t health -i CARD` before it is used again",
        (507001, "its task scheduler failed", ("tsfw unknown error", "task bus error")),
        (507010, "its task scheduler has lost the heartbeat", ("lost heartbeat",)),
        (
            507013,
            "error of its DMA",
            ("sys dma transfer failed", "sys dma reset failed", "sdma copy error"),
        ),
        (507033, "it is dead, or another process has it", ("device retain error",)),
        (507051, "messages from the host do not reach it", ("hdc send msg fail",)),
        (507052, "data can't be copied from or to it", ("driver error:copy data fail",)),
        # What the driver says and the runtime has no code for.
        (507899, "error inside the driver", ("driver error:internal error",)),
        (507901, "its connection to the host is lost", ("hdc disconnect",)),
    ),
    *_rows(
        Remedy.LEAVE,
        _EITHER.format("ASCEND"),
        (507011, "running a graph failed", ("model execute failed",)),
        (507014, "an operation did not end (aicore timeout)", ("aicore timeout",)),
        (507015, "an operation failed (aicore exception)", ("aicore exception",)),
        (507016, "an operation failed (aicore trap)", ("aicore trap exception",)),
        (507017, "an operation did not end (aicpu timeout)", ("aicpu timeout",)),
        (507018, "an operation failed (aicpu exception)", ("aicpu exception",)),
        (507034, "an operation did not end (vector core timeout)", ("vector core timeout",)),
        (507035, "an operation failed (vector core exception)", ("vector core exception",)),
        (507036, "an operation failed (vector core trap)", ("vector core trap exception",)),
        (507048, "an operation did not end (FFTS+ timeout)", ("fftsplus timeout",)),
        (507049, "an operation failed (FFTS+ exception)", ("fftsplus exception",)),
        (507050, "an operation failed (FFTS+ trap)", ("fftsplus trap exception",)),
        # torch_npu takes no operation any more after it, whatever the reason was.
        (None, "an operation failed", ("The process exits for this inner error",)),
    ),
)

# Wordings of cudaGetErrorString (CUDA 13, and older ones), cuBLAS and cuDNN. A process can't use a
# CUDA context again that had an error, so nothing here is repaired in place.
CUDA_FAULTS = (
    *_rows(
        Remedy.NODE,
        "no rank is well off on this node; look at `nvidia-smi nvlink -e` there",
        (None, "uncorrectable error of NVLink", ("uncorrectable NVLink error",)),
    ),
    *_rows(
        Remedy.NODE,
        "no rank is well off on this node; look at the driver and at nvidia-fabricmanager there",
        (
            None,
            "the driver does not fit, or is not ready",
            (
                "system not yet initialized",
                "CUDA driver version is insufficient for CUDA runtime version",
                "system has unsupported display driver / cuda driver combination",
            ),
        ),
    ),
    *_rows(
        Remedy.LEAVE,
        _LOOK,
        (None, "uncorrectable memory error (ECC)", ("uncorrectable ECC error encountered",)),
        (None, "error of the hardware's stack", ("hardware stack error",)),
        (None, "access to another device failed", ("Invalid access of peer GPU memory",)),
        (None, "unknown error", ("unknown error",)),
        (None, "its context is destroyed", ("context is destroyed",)),
        (None, "the MPS server ended it", ("the MPS client has been terminated by the server",)),
        (
            None,
            "it is busy or unavailable",
            (
                "CUDA-capable device(s) is/are busy or unavailable",
                "all CUDA-capable devices are busy or unavailable",
            ),
        ),
        (None, "there is none (any more)", ("no CUDA-capable device is detected",)),
    ),
    *_rows(
        Remedy.LEAVE,
        _EITHER.format("CUDA"),
        (None, "illegal memory access", ("an illegal memory access was encountered",)),
        (None, "an operation failed", ("unspecified launch failure",)),
        (None, "an assertion in an operation failed", ("device-side assert triggered",)),
        (None, "an operation did not end", ("the launch timed out and was terminated",)),
        (None, "illegal instruction", ("an illegal instruction was encountered",)),
        (None, "misaligned address", ("misaligned address",)),
        (None, "invalid program counter", ("invalid program counter",)),
        (
            None,
            "invalid address space",
            ("operation not supported on global/shared address space",),
        ),
        (
            None,
            "an operation of a library failed",
            ("CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED"),
        ),
    ),
)

# Wordings of NVML and of torch, which stand alone.
NVIDIA_FAULTS = (
    *_rows(
        Remedy.LEAVE, _LOOK, (None, "it is lost (Xid 79)", ("GPU is lost", "fallen off the bus"))
    ),
    *_rows(
        Remedy.LEAVE, _LOOK, (None, "there is none (any more)", ("No CUDA GPUs are available",))
    ),
    *_rows(
        Remedy.NODE,
        "no rank is well off on this node; restart it, or reload its driver",
        (None, "the driver was exchanged under it", ("Driver/library version mismatch",)),
    ),
)

_OTHER_NPU = KnownFault(
    Remedy.LEAVE, "error of the Ascend runtime", _EITHER.format("ASCEND"), texts=()
)
_OTHER_CODES = range(507000, 508000)  # errors in the execution, by Huawei's numbering

# Of the Ascend runtime.
OUT_OF_MEMORY_CODES = frozenset({207001, 207018})
_OUT_OF_MEMORY = re.compile(
    r"\b(?:CUDA|NPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)

# A text is from the Ascend runtime only if it names it: a script's own may hold any number.
_ASCEND = re.compile(
    r"\bNPU|\bACL\b|\b[Aa]cl(?:rt|nn|mdl|op)|\bHCC[LS]\b"
    r"|\bERR[0-9]{5} |E[A-Z0-9][0-9]{4}(?:: |\[PID)"  # codes of torch_npu, and of CANN's parts
)
_CODE = re.compile(
    r"\b(?:error code(?: is)?|retCode(?: is)?|runtime result|ret|failed)"
    r"\s{0,2}[:=]?\s{0,2}([0-9]{6})\b"
)
# What CUDA says is the rest of the line.
_CUDA = re.compile(
    r"(?:\bCUDA (?:driver |runtime )?error|\bcuDNN error|\b[Ee]rror \(?[0-9]+\)?) ?: ([^\n]*)"
)
_DEVICE = re.compile(r"\bDevice:([0-9]{1,4})\b|\bNPU ([0-9]{1,4})\b|\bdevice id is ([0-9]{1,4})\b")


def classify(error: BaseException) -> DeviceFault | None:
    """The fault of a device that ``error`` tells of; None if it is none.

    Errors of mpift count by their cause: the chain of ``__cause__`` is followed. Memory that is
    full is no fault of a device (see ``is_out_of_memory``).
    """
    for link, text in _texts(error):
        if _is_full(link, text):
            return None
        fault = _npu_fault(text) or _cuda_fault(text)
        if fault is not None:
            return fault
    return None


def words_of(error: BaseException) -> str:
    """What fault of a device ``error`` tells of, in one line; empty if it is none."""
    fault = classify(error)
    return fault.words if fault is not None else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from, says that a device's memory is full."""
    return any(_is_full(link, text) for link, text in _texts(error))


def _texts(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The errors along the chain of causes that a device may have raised, with their texts."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        raised_by_library = isinstance(link, RuntimeError) or _has_base(link, "NVMLError")
        if raised_by_library and not isinstance(link, MpiftError):
            yield link, str(link)
        link = link.__cause__


def _has_base(error: BaseException, name: str) -> bool:
    """Whether a class of that name is among its classes, from whichever package."""
    return any(base.__name__ == name for base in type(error).__mro__)


def _is_full(error: BaseException, text: str) -> bool:
    if _has_base(error, "OutOfMemoryError") or _OUT_OF_MEMORY.search(text):
        return True
    return next(_codes(text), None) in OUT_OF_MEMORY_CODES


def _codes(text: str) -> Iterator[int]:
    """The error codes in it that are the Ascend runtime's, in their order."""
    if _ASCEND.search(text):
        yield from (int(match[1]) for match in _CODE.finditer(text))


def _npu_fault(text: str) -> DeviceFault | None:
    if not _ASCEND.search(text):
        return None
    for code in _codes(text):
        for known in NPU_FAULTS:
            if known.code == code:
                return _fault("NPU", known, code, text)
        if code in _OTHER_CODES:
            return _fault("NPU", _OTHER_NPU, code, text)
    for known in NPU_FAULTS:
        if any(_is_told(wording, text) for wording in known.texts):
            return _fault("NPU", known, known.code, text)
    return None


def _is_told(wording: str, text: str) -> bool:
    """Whether ``text`` has the words of torch_npu, which begin in a capital, or CANN's reason."""
    if wording[0].isupper():
        return wording in text
    return f"reason={wording}" in text or f"reason=[{wording}]" in text


def _cuda_fault(text: str) -> DeviceFault | None:
    said = "\n".join(match[1] for match in _CUDA.finditer(text))
    for table, told in ((CUDA_FAULTS, said), (NVIDIA_FAULTS, text)):
        for known in table:
            if any(wording in told for wording in known.texts):
                return _fault("CUDA device", known, None, text)
    return None


def _fault(kind: str, known: KnownFault, code: int | None, text: str) -> DeviceFault:
    match = _DEVICE.search(text) if kind == "NPU" else None
    device = int(match[match.lastindex or 0]) if match else None
    name = kind if device is None else f"{kind} {device}"
    number = "" if code is None else f" [{code}]"
    return DeviceFault(code, known.remedy, f"{name}: {known.what}{number}; {known.advice}", device)
