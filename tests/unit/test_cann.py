"""A torch_npu without CANN keeps nobody from using torch; and what is found out about CANN.

torch_npu is a stand-in here that fails as the real one does: as a plugin of torch, on its import.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpift.devices import cann

ROOT = Path(__file__).resolve().parents[2]
FAILURE = "libhccl.so: cannot open shared object file: No such file or directory"
USES_TORCH = "import torch; print(int(torch.ones(3).sum()))"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed torch_npu that finds no CANN."""
    folder = tmp_path / "site"
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text(f"raise ImportError({FAILURE!r})\n")
    metadata = folder / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )
    return folder


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A folder with libraries of CANN's names that can be loaded."""
    folder = tmp_path / "lib64"
    folder.mkdir()
    ctypes.CDLL("libm.so.6")
    maps = Path("/proc/self/maps").read_text().split()
    some_library = next(word for word in maps if "/libm.so" in word or "/libm-" in word)
    for name in cann.LIBRARIES:
        shutil.copy(some_library, folder / name)
    return folder


def environment(site: Path, **variables: str) -> dict[str, str]:
    removed = {"LD_LIBRARY_PATH", cann.AUTOLOAD_VARIABLE}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), **variables}


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_torch_alone_fails_where_cann_is_missing(site: Path) -> None:
    done = python(USES_TORCH, environment(site))
    assert done.returncode != 0
    assert FAILURE in done.stderr  # so the other tests here test something


def test_mpift_torch_lets_torch_load_and_says_in_one_line_what_is_missing(site: Path) -> None:
    done = python(f"import mpift.torch; {USES_TORCH}", environment(site))
    assert (done.returncode, done.stdout) == (0, "3\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpift: warning: torch_npu is installed, but CANN can't be loaded (lib")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in line
    assert "set_env.sh" in line


def test_who_keeps_torch_from_it_already_is_told_nothing(site: Path) -> None:
    code = f"import mpift.torch; {USES_TORCH}"
    done = python(code, environment(site, **{cann.AUTOLOAD_VARIABLE: "0"}))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


SHOWS_VARIABLE = (
    "import os; from mpift.devices import cann; cann.let_torch_load();"
    "print(os.environ.get(cann.AUTOLOAD_VARIABLE))"
)


def test_nothing_is_changed_where_cann_can_be_loaded(site: Path, libraries: Path) -> None:
    missing = python(SHOWS_VARIABLE, environment(site))
    assert missing.stdout == "0\n"
    there = python(SHOWS_VARIABLE, environment(site, LD_LIBRARY_PATH=str(libraries)))
    assert (there.stdout, there.stderr) == ("None\n", "")


def test_nothing_is_changed_where_torch_is_loaded_or_torch_npu_is_not_installed(
    site: Path, tmp_path: Path
) -> None:
    loaded = python("import sys; sys.modules['torch'] = sys; " + SHOWS_VARIABLE, environment(site))
    assert (loaded.stdout, loaded.stderr) == ("None\n", "")
    without = python(SHOWS_VARIABLE, environment(tmp_path))
    assert (without.stdout, without.stderr) == ("None\n", "")


def test_a_process_apart_tells_what_cannot_be_loaded(libraries: Path) -> None:
    bare = environment(libraries)
    assert "libascendcl.so: cannot open" in (cann.loading_error_apart(bare) or "")
    good = {**bare, "LD_LIBRARY_PATH": str(libraries)}
    assert cann.loading_error_apart(good) is None
    (libraries / "libhccl.so").write_bytes(b"no library")
    error = cann.loading_error_apart(good)
    assert error is not None
    assert "libhccl.so" in error
    assert "\n" not in error


def test_ranks_of_mpift_run_can_load_torch(site: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USES_TORCH)
    done = subprocess.run(
        [sys.executable, "-m", "mpift", "run", "-np", "1", str(script)],
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert shown.count("CANN can't be loaded") == 1
    assert "Traceback" not in shown


# -- versions --------------------------------------------------------------------------------------


def test_the_version_of_cann_is_read_wherever_a_release_keeps_it(tmp_path: Path) -> None:
    assert cann.cann_version(tmp_path) is None
    (tmp_path / "version.cfg").write_text(
        "# version: 1.0\nruntime_running_version=[7.0.0.5.242:8.0.RC1]\n"
        "compiler_running_version=[7.0.0.5.242:8.0.RC1]\n"
    )
    assert cann.cann_version(tmp_path) == "8.0.RC1"
    folder = tmp_path / f"{platform.machine()}-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100R001\narch=x86_64\n"
    )
    assert cann.cann_version(tmp_path) == "8.5.0"


def test_the_cann_that_was_sourced_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cann, "_ROOT", tmp_path)
    assert cann.cann_folder({}) is None
    assert "install CANN" in cann.sourcing_advice()
    installed, sourced = tmp_path / "ascend-toolkit", tmp_path / "mine"
    for folder in (installed, sourced):
        folder.mkdir()
    (installed / "set_env.sh").touch()
    assert cann.cann_folder({"ASCEND_HOME_PATH": ""}) == installed
    assert cann.cann_folder({"ASCEND_HOME_PATH": str(sourced)}) == sourced
    assert cann.cann_folder({"ASCEND_HOME_PATH": str(tmp_path / "gone")}) == installed
    assert cann.sourcing_advice() == f"source {installed / 'set_env.sh'} first"


def test_the_version_of_the_driver_is_read(tmp_path: Path) -> None:
    assert cann.driver_version(tmp_path) is None
    (tmp_path / "version.info").write_text("Version=25.2.1\nascendhal_version=7.35.23\n")
    assert cann.driver_version(tmp_path) == "25.2.1"
