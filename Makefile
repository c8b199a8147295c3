# Every target makes .venv on first use. Another PyTorch: `make demo TORCH="torch>=2.6"`, in a clone without .venv.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINT := $(if $(TORCH),,-c constraints-cpu.txt)
# One intra-op thread: two on a busy machine can be thirty times slower.
export OMP_NUM_THREADS = 1
export MKL_NUM_THREADS = 1

.PHONY: demo test test-slow test-fast coverage lint docs bench clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedprism needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints-cpu.txt
	$(PIP) install -q $(CONSTRAINT) $(if $(TORCH),'$(TORCH)') -e '.[report]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q $(CONSTRAINT) $(if $(TORCH),'$(TORCH)') -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed  ## train six methods on five domains, print a table, write demo/report.html
	$(BIN)/fedprism demo

test-fast: $(VENV)/.installed-dev lint  ## about 90 s: lint, types, units, six methods through the conformance suite
	$(BIN)/python -m pytest -n 2 -x -m "not slow and not full"

test: $(VENV)/.installed-dev lint  ## at most 4 minutes on 2 cores: all that must pass before a change lands
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.installed-dev  ## all methods times all settings, all faults, long kills, real data where FEDPRISM_DATA says
	$(BIN)/python -m pytest -n 2 -m slow

coverage: $(VENV)/.installed-dev  ## the tests of `make test`, with the lines that they miss
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed  ## some minutes: engines beside a plain loop, into benchmarks/results
	$(BIN)/fedprism bench --quick
	$(BIN)/python benchmarks/subspace_update.py

clean:
	rm -rf $(VENV) build dist site demo .coverage* .mypy_cache .pytest_cache .ruff_cache
