"""Which errors count as faults of a device, by the texts that torch, torch_npu and CUDA raise."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.devices import faults
from mpift.devices.faults import (
    CUDA_FAULTS,
    NPU_FAULTS,
    NVIDIA_FAULTS,
    KnownFault,
    Remedy,
    classify,
    is_out_of_memory,
)
from mpift.errors import DeviceError

TRAILER = (
    "\n[ERROR] 2026-07-07-07:20:43 (PID:163686, Device:3, RankID:-1) ERR00100 PTA call acl api"
    " failed.\n[Error]: The aicore execution is abnormal.\n        Rectify the fault based on the"
    " error information in the ascend log.\nEZ9999: Inner Error!\nEZ9999[PID: 163686]"
    " 2026-07-07-07:20:43.817.613 (EZ9999):  Kernel task happen error, retCode=0x25.\n"
    "        TraceBack (most recent call last):\n"
)
# All codes of theirs and texts around them are what torch_npu 2.13 puts together.
NPU_MESSAGES = (
    "synchronize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:361 NPU function error:"
    " c10_npu::acl::AclrtSynchronizeStreamWithTimeout(stream()), error code is {code}" + TRAILER,
    "ACL stream synchronize failed, error code:{code}",
    "copy_between_host_and_device_opapi:build/x.ts:57 NPU error,NPU error code is:{code}" + TRAILER,
    "The Inner error is reported as above. The process exits for this inner error, and the current"
    " working operator name is Identity." + TRAILER + "       [Call][Rts]call rts api"
    " [rtMemcpyAsync] failed, retCode is {code}[FUNC:ReportCallError][FILE:log_inner.cpp]",
    (
        "Worker failed: EE9999: Inner Error!\n        wait for compute device to finish failed,"
        " runtime result = {code}.[FUNC:ReportCallError][FILE:log_inner.cpp][LINE:161]"
    ),
    "AclNN_Runtime_Error(EZ9903): aclrtLaunchKernelWithHostArgs failed: {code}",
)
NPU_REASON = (
    "EZ9999: Inner Error!\n       rtStreamSynchronize execution failed, reason={reason}"
    "[FUNC:FuncErrorReason][FILE:error_message_manage.cc][LINE:61]"
)
CUDA_MESSAGE = (
    "CUDA error: {said}\nSearch for `cudaErrorX' in https://docs.nvidia.com/ for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the"
    " stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)


class OutOfMemoryError(RuntimeError):
    """As ``torch.OutOfMemoryError``."""


class NVMLError(Exception):
    """As in pynvml."""


def coded(code: int) -> KnownFault:
    return next(row for row in NPU_FAULTS if row.code == code)


@pytest.mark.parametrize("message", NPU_MESSAGES)
@pytest.mark.parametrize("code", [row.code for row in NPU_FAULTS if row.code])
def test_every_code_is_found_in_every_form_of_message(code: int, message: str) -> None:
    fault = classify(RuntimeError(message.format(code=code)))
    assert fault is not None
    assert (fault.code, fault.remedy) == (code, coded(code).remedy)
    assert coded(code).what in fault.words
    assert "\n" not in fault.words


@pytest.mark.parametrize(
    ("row", "wording"), [(row, wording) for row in NPU_FAULTS for wording in row.texts]
)
def test_every_text_is_found_where_there_is_no_code(row: KnownFault, wording: str) -> None:
    if wording[0].isupper():
        messages = [f"{wording}{TRAILER}", f"{wording}EZ9999: Inner Error!\n"]
    else:
        messages = [NPU_REASON.format(reason=form) for form in (f"[{wording}]", wording)]
    for message in messages:
        fault = classify(RuntimeError(message))
        assert fault is not None, message
        assert (fault.code, fault.remedy) == (row.code, row.remedy)


@pytest.mark.parametrize(
    ("row", "wording"), [(row, wording) for row in CUDA_FAULTS for wording in row.texts]
)
def test_every_error_of_cuda_is_found(row: KnownFault, wording: str) -> None:
    messages = [
        CUDA_MESSAGE.format(said=wording),
        f"CUDA driver error: {wording}",
        f"Unexpected error from cudaGetDeviceCount(). Error 802: {wording}",
        f"cuda runtime error (38) : {wording} at THCGeneral.cpp:32",
    ]
    for message in messages:
        fault = classify(RuntimeError(message))
        assert fault is not None, message
        assert fault.remedy is row.remedy
        assert fault.words.startswith(f"CUDA device: {row.what}")
        assert fault.code is fault.device is None


@pytest.mark.parametrize(
    ("row", "wording"), [(row, wording) for row in NVIDIA_FAULTS for wording in row.texts]
)
def test_a_lost_gpu_is_found_in_the_words_of_others(row: KnownFault, wording: str) -> None:
    for error in (NVMLError(wording), RuntimeError(f"NVML: {wording}")):
        fault = classify(error)
        assert fault is not None
        assert fault.remedy is row.remedy


def test_nothing_of_cuda_is_repaired_in_place() -> None:
    remedies = {row.remedy for row in (*CUDA_FAULTS, *NVIDIA_FAULTS)}
    assert remedies == {Remedy.LEAVE, Remedy.NODE}


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (507046, Remedy.RETRY),
        (107022, Remedy.REPAIR),
        (507053, Remedy.REPAIR),
        (507054, Remedy.REPAIR),
        (507010, Remedy.LEAVE),
        (507015, Remedy.LEAVE),
        (507899, Remedy.LEAVE),
        (507904, Remedy.LEAVE),
        (507056, Remedy.NODE),
    ],
)
def test_what_helps_against_the_faults_that_are_met_most(code: int, remedy: Remedy) -> None:
    assert coded(code).remedy is remedy


def test_an_error_of_the_execution_that_is_not_in_the_table_makes_the_rank_leave() -> None:
    fault = classify(RuntimeError(NPU_MESSAGES[0].format(code=507666)))
    assert fault is not None
    assert (fault.code, fault.remedy) == (507666, Remedy.LEAVE)


def test_the_code_decides_where_a_string_says_something_else() -> None:
    message = "NPU function error: HCCS LINK ERROR, error code is 507053" + TRAILER
    fault = classify(RuntimeError(message))
    assert fault is not None
    assert (fault.code, fault.remedy) == (507053, Remedy.REPAIR)


def test_a_code_of_an_operator_does_not_hide_the_fault_behind_it() -> None:
    message = (
        "NPU function error: call aclnnMatmul failed, error code is 361001" + TRAILER + "    wait"
        " for compute device to finish failed, runtime result = 507010."
    )
    fault = classify(RuntimeError(message))
    assert fault is not None
    assert fault.code == 507010


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (NPU_MESSAGES[0].format(code=507053), 3),
        ("NPU 5: ACL stream synchronize failed, error code:507010", 5),
        ("ACL stream synchronize failed, error code:507010", None),
        (NPU_MESSAGES[0].format(code=507053).replace("Device:3", "Device:-1"), None),
    ],
)
def test_the_device_is_named_where_the_text_tells(text: str, device: int | None) -> None:
    fault = classify(RuntimeError(text))
    assert fault is not None
    assert fault.device == device
    assert fault.words.startswith("NPU: " if device is None else f"NPU {device}: ")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("Expected all tensors to be on the same device, but found npu:0 and cpu!"),
        RuntimeError("batch 507053 of 600000 has no label"),
        RuntimeError("the service said: error code is 507053"),  # of which service?
        RuntimeError("NPU run 507053 of the sweep diverged"),
        RuntimeError("FORCE STOP was pressed"),
        RuntimeError("unknown error in the GPU sampler"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError("NPU function error: aclrtSetDevice, error code is 107001" + TRAILER),
        RuntimeError("NPU function error: call aclnnMatmul failed, error code is 161002"),
        ValueError(NPU_MESSAGES[0].format(code=507053)),  # none of a device's
        KeyError("CUDA error: uncorrectable ECC error encountered"),
        DeviceError("torch_npu is installed, but the libraries of CANN are not found"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:40],
)
def test_mistakes_of_the_script_are_no_faults(error: BaseException) -> None:
    assert classify(error) is None
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; ...)" + TRAILER),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("NPU function error: aclrtMalloc, error code is 207001" + TRAILER),
        RuntimeError("NPU function error: aclrtMalloc, error code is 207018" + TRAILER),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_memory_that_is_full_is_told_apart_from_faults(error: BaseException) -> None:
    assert classify(error) is None
    assert is_out_of_memory(error)


def raised_from(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_an_error_of_ours_counts_by_its_cause() -> None:
    uce = RuntimeError(NPU_MESSAGES[0].format(code=507053))
    ours = DeviceError("rank 3 lost its device: ACL error code is 507010")
    assert classify(ours) is None
    fault = classify(raised_from(ours, uce))
    assert fault is not None
    assert fault.code == 507053
    full = raised_from(DeviceError("no room"), OutOfMemoryError("NPU out of memory"))
    assert is_out_of_memory(full)
    assert classify(full) is None


def test_an_error_that_came_up_in_handling_another_is_not_that_other() -> None:
    error = ValueError("bad label")
    error.__context__ = RuntimeError(NPU_MESSAGES[0].format(code=507053))
    assert classify(error) is None


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is None
    assert not is_out_of_memory(first)


PIECES = (
    "NPU",
    "ACL",
    "error code is ",
    "507053",
    "507",
    "reason=[",
    "CUDA error: ",
    "Device:",
    "UCE ERROR",
    "\n",
    "\N{ARABIC-INDIC DIGIT FIVE}" * 6,
)


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=20))
def test_no_text_breaks_it_and_what_it_says_is_one_line(pieces: list[str]) -> None:
    error = RuntimeError("".join(pieces))
    fault = classify(error)
    if fault is not None:
        assert fault.remedy in Remedy
        assert fault.words.isprintable()
        assert not is_out_of_memory(error)


@given(st.integers(0, 999_999))
def test_a_number_without_the_wording_is_never_a_fault(number: int) -> None:
    assert classify(RuntimeError(f"NPU step {number:06} took too long")) is None
    assert classify(RuntimeError(f"error code is {number:06}")) is None


def test_a_very_long_text_is_no_burden() -> None:
    text = "NPU error code " * 50_000 + "ret = " * 50_000
    assert classify(RuntimeError(text)) is None


def test_no_code_and_no_text_is_in_two_rows() -> None:
    codes = [row.code for row in NPU_FAULTS if row.code]
    texts = [text for row in (*NPU_FAULTS, *CUDA_FAULTS, *NVIDIA_FAULTS) for text in row.texts]
    assert len(codes) == len(set(codes))
    assert len(texts) == len(set(texts))
    assert not faults.OUT_OF_MEMORY_CODES & set(codes)


def test_it_does_not_load_torch() -> None:
    code = "import sys, mpift.devices.faults; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
