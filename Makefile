# `make train` and `make test` do everything on a fresh machine with Python >= 3.11.
#
#   make train DATA=path/to/text ARGS="--steps 500" RANKS=2
#   make bench ARGS="--size medium --ranks 2"
#
# Packages come from pip's own settings, with the versions of .ci/constraints.txt. On Linux the default index
# ships torch with CUDA; for the small CPU wheel set PIP_EXTRA_INDEX_URL to the index of CPU builds that PyTorch names.

PYTHON ?= python3
RANKS ?= 4
ARGS ?=
DATA ?=

VENV := .venv
BIN := $(VENV)/bin
PINS := .ci/constraints.txt
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint $(PINS)

# One thread a process: several ranks, or several test workers, share the cores.
export OMP_NUM_THREADS := 1

.PHONY: train bench test lint format clean
.DELETE_ON_ERROR:

train: $(VENV)/installed
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train.py $(if $(DATA),--data "$(DATA)") $(ARGS)

bench: $(VENV)/installed-bench
	$(BIN)/python examples/benchmarks/bench.py $(ARGS)

test: lint
	$(BIN)/pytest -n 2

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy fx_feather layouts

format: $(VENV)/installed-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# A stamp is written last, so an install that was cut short is done again; an environment that exists is taken over.
# In the editable mode `compat` this folder itself is on the path, so a package added later needs no new install.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fx_feather needs Python 3.11 or newer; this is " \
		+ sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --config-settings editable_mode=compat --editable $(1)
	@touch $@
endef

$(VENV)/installed: pyproject.toml $(PINS)
	$(call install,.)

$(VENV)/installed-dev: pyproject.toml $(PINS)
	$(call install,'.[dev]')
	@touch $(VENV)/installed

$(VENV)/installed-bench: pyproject.toml $(PINS)
	$(call install,'.[bench]')
	@touch $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fx_feather layouts examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
