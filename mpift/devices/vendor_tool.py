"""Asking a vendor's command-line tool, which may hang while a device's driver is stuck.

Every call has a time limit, after which the tool is killed with all that it started, and a limit
on what it may print. A tool that can't even be killed (it waits in the kernel) is left, and not
started again before that one has ended: there is never more than one of them.

Bytes that are no text become replacement characters. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

OUTPUT_BYTES_MAX = 256 * 1024
_READ_BYTES = 64 * 1024
_KILL_SECONDS = 1.0
_WORDS_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool printed; ``problem`` says in words why that is not to be used, "" if it is."""

    text: str
    problem: str = ""
    timed_out: bool = False


class VendorTool:
    """One tool, by its path; ``limit_seconds`` is for one call."""

    def __init__(self, path: str, limit_seconds: float) -> None:
        self.name = Path(path).name
        self.limit_seconds = limit_seconds
        self._path = path
        self._stuck: subprocess.Popen[bytes] | None = None

    def ask(self, *arguments: str) -> Answer:
        """What the tool prints, on both of its outputs, when it is called with ``arguments``."""
        called = " ".join((self.name, *arguments))
        if self._stuck is not None and self._stuck.poll() is None:
            return Answer("", f"{self.name} hangs in the kernel and can't be killed", True)
        self._stuck = None
        try:
            process = subprocess.Popen(
                [self._path, *arguments],
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to be killed with whatever it has started
            )
        except OSError as error:
            return Answer("", f"{called} can't be started: {error.strerror or error}")
        deadline = time.monotonic() + self.limit_seconds
        printed, ended = _read(process, deadline)
        exit_code = None
        if ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(max(0.0, deadline - time.monotonic()))
        if exit_code is None:
            self._kill(process)
        if process.stdout is not None:
            process.stdout.close()
        text = printed.decode(errors="replace")
        if len(printed) >= OUTPUT_BYTES_MAX:
            return Answer("", f"{called} printed more than {OUTPUT_BYTES_MAX // 1024} KiB")
        if exit_code is None:
            words = f"{called} did not answer within {self.limit_seconds:g} s"
            return Answer(text, words, timed_out=True)
        if exit_code != 0:
            return Answer(text, f"{called} failed ({_exit_words(exit_code)}){_last_line(text)}")
        return Answer(text)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """With all that it has started. It was not waited for, so its number is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._stuck = process


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """What it prints until ``deadline``, and whether that came to its end."""
    printed = bytearray()
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(printed) < OUTPUT_BYTES_MAX:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return bytes(printed), False
            piece = os.read(process.stdout.fileno(), _READ_BYTES)
            if not piece:
                return bytes(printed), True
            printed += piece
    return bytes(printed), False


def _exit_words(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code > 0 else f"signal {-exit_code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1].strip()[:_WORDS_CHARS_MAX]}" if lines else ""
