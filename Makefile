# make demo   the whole pipeline on a synthetic corpus, in ./demo
# make test   the tests of a few minutes, which leave out those marked slow
# make test-slow   those marked slow
# make test-all   both, but for those on a real SLURM and a real Ray, which `make test-cluster` has
# make test-lhotse2   the tests of what touches lhotse, on the pre-release of lhotse 2 that NeMo's main branch needs
# make test-gpu   models and stages on a GPU against the CPU, faults and memory, where there is a GPU
# make torture   losses of power in small runs, and what is left of them: SEED=, and for each run STATES=, MINUTES=
# make coverage   the share of the statements that the tests of `make test` run, as one number; by module in build/coverage.txt
# make wheel   the wheel, in dist
# make bench   what takes how long, beside the libraries used directly; GROUP= (further, scale, all), JSON= (a file for all figures)
# make bench-gpu   models, stages and the choice of contexts on a GPU, in nine minutes; DEVICE=cpu tries it out, SECONDS=
#                  ROWS="tune-batch encode" those whose names begin so, in five minutes
# make docs   the pages of docs as a site with a reference of the Python API, in build/site; refreshes the
#             picture in the README if Chromium and ./demo exist
# All make .venv first if it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from
# Changes when the interpreter or the list of packages does.
WANTED := $(shell $(PYTHON) -VV 2>/dev/null | tr -d '\n'; cat pyproject.toml constraints.txt Makefile .ci/python-packages | cksum)

# Further options of pytest, as in `make test PYTEST="-x --durations=30"`.
PYTEST :=

.PHONY: demo test test-slow test-all test-lhotse2 test-cluster test-slurm test-ray test-gpu torture lint coverage wheel bench bench-gpu docs venv clean

demo: venv
	$(BIN)/sharmill demo demo

# On all cores; the tests of a module share a process, and so its fixtures.
test: venv
	EXAMPLES=quick $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not slurm and not ray" $(PYTEST)

test-slow: venv
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "slow and not slurm and not ray" $(PYTEST)

test-all: venv
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slurm and not ray" $(PYTEST)

# Put before the installed one, in a folder of its own.
LHOTSE_2 := $(CURDIR)/build/lhotse-2
test-lhotse2: venv
	rm -rf $(LHOTSE_2)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LHOTSE_2) lhotse==2.0.0a7
	EXAMPLES=quick PYTHONPATH=$(LHOTSE_2) $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
	  -m "not slow and not slurm and not ray" tests/shar tests/training tests/sources $(PYTEST)

test-cluster: test-slurm test-ray

# They skip, and say so, where no controller answers.
test-slurm: venv
	$(BIN)/python -m pytest -m slurm $(PYTEST)

test-ray: venv
	$(BIN)/python -m pytest -m "ray and not slurm" $(PYTEST)

# All that needs a GPU, in minutes and without network, with a report as text and in build/test-gpu.json. Skips without.
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

# Processes that are killed write nothing down, so that it is somewhat less than what runs.
coverage: venv
	rm -f build/coverage build/coverage.*
	mkdir -p build
	EXAMPLES=quick $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not slurm and not ray" \
	  --cov --cov-report= $(PYTEST)
	$(BIN)/coverage report --sort=cover > build/coverage.txt
	@echo "coverage: $$($(BIN)/coverage report --format=total) %"

# setuptools would also pack modules that it has copied to build/lib before and that no longer exist.
wheel: venv
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The rows of a group, by default those of docs/performance.md, in some minutes.
bench: venv
	$(BIN)/python tests/bench $(if $(GROUP),--group $(GROUP)) $(if $(JSON),--json $(JSON))

# All on one GPU in nine minutes, or ROWS in five, or tried out by DEVICE=cpu.
bench-gpu: venv
	$(BIN)/python tests/bench_gpu --json build/bench-gpu.json $(if $(DEVICE),--device $(DEVICE)) \
	  $(if $(or $(SECONDS),$(ROWS)),--seconds $(or $(SECONDS),280)) $(if $(ROWS),--rows $(ROWS))

# The site loads nothing from elsewhere, so that it works offline. What builds it comes with the extra `docs`.
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

# One package (webrtcvad, of the extra resemblyzer) comes as C source, so a compiler and Python's headers are needed once.
.PHONY: install
install:
	@PYTHON="$(PYTHON)" sh .ci/system-packages
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_BUILD="$(TORCH_BUILD)" sh .ci/python-packages
	@echo "$(WANTED)" > $(STAMP)

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
