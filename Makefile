# Two commands on a fresh machine: `make demo` and `make test`. Each makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check sweep soak bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	scripts/check
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

check: $(STAMP)
	scripts/check

# The long tiers: hundreds of kills of every process of a job, deeper bounds of the protocol's model.
sweep: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800 -n 2 --dist worksteal

# One job through 2,000 kills, stops, joins and leaves in an hour: nothing leaks, no sample is lost or repeated.
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak

bench: $(STAMP)
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.cost

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (the largest part, a minute or two) …"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	@echo "installing shoal and its tools …"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
