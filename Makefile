# make demo   the whole pipeline on a synthetic corpus, in ./demo
# make test   fast tests (a few minutes)
# make test-slow   tests marked slow
# make test-all   fast and slow tests, except those on a real SLURM or Ray cluster
# make test-cluster   tests on a real SLURM and a real Ray cluster
# make test-lhotse2   tests that use lhotse, on the pre-release of lhotse 2 that NeMo's main branch needs
# make test-gpu   models and stages on a GPU compared with the CPU, faults and memory; skipped without a GPU
# make torture   power failures in small runs, with SEED=, and for each run STATES= and MINUTES=
# make coverage   share of the statements that `make test` runs, by module in build/coverage-report.txt
# make wheel   the wheel, in dist
# make bench   speed compared with direct use of the libraries; GROUP= (further, scale, all), JSON= (file for results)
# make bench-gpu   models, stages and the choice of contexts on a GPU, in nine minutes; DEVICE=cpu for a trial, SECONDS=
#                  ROWS="tune-batch encode" runs the rows whose names start so, in five minutes
# make docs   the pages of docs as a site with a reference of the Python API, in build/site; refreshes the picture in
#             the README if Chromium and ./demo exist
# Each target first creates .venv if it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from
# This value changes with the interpreter and the list of packages.
WANTED := $(shell $(PYTHON) -VV 2>/dev/null | tr -d '\n'; cat pyproject.toml constraints.txt Makefile .ci/python-packages | cksum)

# Further pytest options or paths, as in `make test PYTEST="-x --durations=30"` or `make coverage PYTEST=tests/shar`.
PYTEST :=

.PHONY: demo test test-slow test-all test-lhotse2 test-cluster test-slurm test-ray test-gpu torture lint coverage wheel bench bench-gpu docs venv clean

demo: venv
	$(BIN)/sharmill demo demo

# Tests run on all cores. The tests of a module share a process, and thus its fixtures.
test: venv
	EXAMPLES=quick $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not slurm and not ray" $(PYTEST)

test-slow: venv
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "slow and not slurm and not ray" $(PYTEST)

test-all: venv
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slurm and not ray" $(PYTEST)

# A separate folder, which PYTHONPATH puts before the installed lhotse.
LHOTSE_2 := $(CURDIR)/build/lhotse-2
test-lhotse2: venv
	rm -rf $(LHOTSE_2)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LHOTSE_2) lhotse==2.0.0a7
	EXAMPLES=quick PYTHONPATH=$(LHOTSE_2) $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
	  -m "not slow and not slurm and not ray" tests/shar tests/training tests/sources $(PYTEST)

test-cluster: test-slurm test-ray

# Skipped (with a message) if no SLURM controller is running.
test-slurm: venv
	$(BIN)/python -m pytest -m slurm $(PYTEST)

test-ray: venv
	$(BIN)/python -m pytest -m "ray and not slurm" $(PYTEST)

# All tests that need a GPU; they take minutes, need no network, and are skipped without a GPU.
test-gpu: venv
	GPU_REPORT=build/test-gpu.json $(BIN)/python -m pytest tests/gpu -m gpu -rs $(PYTEST)

torture: venv
	SEED=$(or $(SEED),$(shell date +%s)) STATES=$(or $(STATES),1500) MINUTES=$(or $(MINUTES),4) \
	  $(BIN)/pytest -v tests/faults/test_power.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python .ci/prose.py check
	$(BIN)/python .ci/prose.py width

# Killed processes record nothing, so the result is slightly too low. coverage would take build/coverage.* for its data.
coverage: venv
	rm -f build/coverage build/coverage.*
	mkdir -p build
	EXAMPLES=quick $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not slurm and not ray" \
	  --cov --cov-report= $(PYTEST)
	$(BIN)/coverage report --sort=cover > build/coverage-report.txt
	@echo "coverage: $$($(BIN)/coverage report --format=total) %"

# setuptools would also pack modules that it has copied to build/lib before and that no longer exist.
wheel: venv
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The rows of a group, by default those in docs/performance.md; they take some minutes.
bench: venv
	$(BIN)/python tests/bench $(if $(GROUP),--group $(GROUP)) $(if $(JSON),--json $(JSON))

# All rows on one GPU in nine minutes, or ROWS in five; DEVICE=cpu is a trial.
bench-gpu: venv
	$(BIN)/python tests/bench_gpu --json build/bench-gpu.json $(if $(DEVICE),--device $(DEVICE)) \
	  $(if $(or $(SECONDS),$(ROWS)),--seconds $(or $(SECONDS),280)) $(if $(ROWS),--rows $(ROWS))

# The site must work offline, so it may load nothing from other hosts. The extra `docs` has the packages that build it.
docs: venv
	@if [ "$$(cat $(VENV)/.docs-made-from 2>/dev/null)" != "$(WANTED)" ]; then \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]' && \
	  echo "$(WANTED)" > $(VENV)/.docs-made-from; fi
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/picture.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@! grep -rEn '<(script|link|img)[^>]*(src|href)="?https?://' build/site --include='*.html'
	@echo "the site is in build/site: open build/site/index.html, or run $(BIN)/python -m http.server -d build/site"

venv:
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(WANTED)" ]; then $(MAKE) --no-print-directory install; fi

# One package (webrtcvad, for the extra resemblyzer) is C source, so this needs a compiler and Python's headers.
.PHONY: install
install:
	@PYTHON="$(PYTHON)" sh .ci/system-packages
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_BUILD="$(TORCH_BUILD)" sh .ci/python-packages
	@echo "$(WANTED)" > $(STAMP)

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
