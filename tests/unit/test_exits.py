"""The last words of a process that ends by an exception, whoever else has a hook for it."""

from __future__ import annotations

import subprocess
import sys

# As torch.distributed does: what the hook before it writes is held back, and written with a prefix.
ENDS_IN_A_HOOK = """
import io, sys
from mpift.transport.exits import Exits

def last_words(code, reason, trace):
    print("last words:", reason, file=sys.stderr)
    return False

exits = Exits(last_words, lambda error: "")
exits.install()
inner = sys.excepthook

def hook(*raised):
    before, sys.stderr = sys.stderr, io.StringIO()
    inner(*raised)
    held, sys.stderr = sys.stderr.getvalue(), before
    print("[rank0]: " + held, file=sys.stderr)

sys.excepthook = hook
raise ValueError("a fault of the script")
"""


def test_a_hook_that_holds_words_back_keeps_none_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_IN_A_HOOK],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.count("ValueError: a fault of the script") == 2
    assert "last words: ValueError" in done.stderr
