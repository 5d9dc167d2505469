# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One BLAS thread per test worker: with more, two workers on two cores fight each other.
# Bytecode is kept, whatever the machine says: without it every process compiles all it imports.
ONE_THREAD := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: demo test test-elsewhere gpu-test check format docs notebooks wheel bench drill sweep fixtures clean

# Only what the demo needs: torch and the package.
demo: $(VENV)/.demo-ready
	$(BIN)/curvatlas demo

test: $(VENV)/.ready
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -q

# As on other processors with one thread, and here with two: what trains on the spot or counts coverage.
ELSEWHERE := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2
test-elsewhere: $(VENV)/.ready
	failed=; for setting in $(ELSEWHERE); do \
	  workers="-n 2 --dist worksteal"; \
	  [ $$setting = OMP_NUM_THREADS=2 ] && workers="-n 0" && setting="$$setting MKL_NUM_THREADS=2"; \
	  echo "== $$setting"; \
	  env HF_HUB_OFFLINE=1 $(ONE_THREAD) $$setting $(BIN)/python -m pytest -m machine $$workers -q \
	    || failed="$$failed [$$setting]"; \
	done; [ -z "$$failed" ] || { echo "failed under:$$failed"; exit 1; }

# On a machine with CUDA: the GPU's numbers against the CPU's, and a table to paste.
gpu-test: $(VENV)/.ready
	$(BIN)/python -m pytest -m gpu -q -s tests/test_gpu.py

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site in build/site; generated pages are written anew first, and a warning is an error.
docs: $(VENV)/.ready
	$(BIN)/python scripts/api_page.py
	$(BIN)/python scripts/benchmark_page.py
	$(BIN)/python scripts/theory_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Runs the example notebooks and keeps what they show.
notebooks: $(VENV)/.ready
	$(BIN)/python scripts/notebooks.py

# Builds the wheel and uses it in a new environment with dependencies from the index.
wheel: $(VENV)/.ready
	$(BIN)/python scripts/wheel_smoke.py --venv

# Peers live in their own environment: some of them would pull torchvision into ours.
bench: $(VENV)/.ready
	$(PYTHON) benchmarks/peers.py
	$(ONE_THREAD) .venv-bench/bin/python benchmarks/run.py run
	$(BIN)/python scripts/benchmark_page.py

# Kills, stops, full disks, damaged files, ranks that disagree: nothing lost, nothing wrong.
drill: $(VENV)/.ready
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python scripts/drill.py

# Random combinations of model, loss, batching, budget and operator against an oracle.
sweep: $(VENV)/.ready
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python scripts/sweep.py
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python scripts/sweep.py --labels --cases 200
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python scripts/sweep.py --layers --cases 550

# Independent oracle: JAX in an environment of its own writes tests/fixtures.
fixtures:
	test -x .venv-jax/bin/python || $(PYTHON) -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet jax safetensors
	.venv-jax/bin/python scripts/jax_fixtures.py

$(VENV)/.demo-ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps vit-pytorch  # asks for torchvision, works without
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-jax build dist .pytest_cache .mypy_cache .ruff_cache
