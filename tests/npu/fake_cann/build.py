"""Builds the fake CANN, once for each version of its source, into the user's folder of caches.

``libascendcl.so`` has all the functions; the other libraries that torch_npu is linked to are empty
and lead to it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.npu.wheels import cache, locked

SOURCE = Path(__file__).with_name("ascendcl.c")
LIBRARY = "ascendcl"
EMPTY_LIBRARIES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC")


def compiler() -> str | None:
    """Path of the C compiler; None where there is none."""
    return shutil.which(os.environ.get("CC") or "cc")


def build() -> Path:
    """The folder that holds the libraries, for ``LD_LIBRARY_PATH``."""
    found = compiler()
    assert found is not None, "there is no C compiler"
    about = [SOURCE.read_text(), found, *FLAGS, *EMPTY_LIBRARIES, os.uname().machine]
    folder = cache() / f"fake-cann-{hashlib.sha256('|'.join(about).encode()).hexdigest()[:16]}"
    with locked(folder.name):
        if not folder.exists():
            _build(found, folder)
    return folder


def _build(compiler: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        place = Path(temporary) / "lib"
        place.mkdir()

        def link(name: str, *arguments: str) -> None:
            file = f"lib{name}.so"
            command = [compiler, *FLAGS, f"-Wl,-soname,{file}", "-o", file, *arguments]
            subprocess.run(command, cwd=place, check=True, timeout=60)

        link(LIBRARY, str(SOURCE))
        for name in EMPTY_LIBRARIES:
            empty = ("-x", "c", "/dev/null", "-x", "none")
            link(name, *empty, "-L.", "-Wl,--no-as-needed", f"-l{LIBRARY}")
        place.rename(folder)
