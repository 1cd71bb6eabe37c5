# Everything runs in .venv, which the first command makes. PYTHON picks the interpreter: 3.11, 3.12 or 3.13.
PYTHON ?= python3
BIN := .venv/bin

# Torch is installed before anything that depends on it. This one runs on any CPU;
# with a GPU, install the build for your CUDA version into .venv instead.
TORCH := torch==2.13.0

.PHONY: demo test lint clean

demo: .venv/package
	$(BIN)/liveroll demo

test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build out

.venv/torch:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH)
	touch $@

.venv/package: .venv/torch pyproject.toml
	$(BIN)/python -m pip install --editable .
	touch $@

.venv/dev: .venv/torch pyproject.toml
	$(BIN)/python -m pip install --editable ".[dev]"
	touch $@
