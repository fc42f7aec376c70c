# make demo         compares natgrad with other optimizers on real digits; writes demo/index.html
# make test         ruff, mypy and all tests
# make exhaustive   make test with all combinations of parameters that make test takes in pairs
# make quick        a look at all parts within two minutes: ruff, mypy, and a sample of the tests in one process
# make check        ruff and mypy alone
# make docs         builds the documentation into site/, which needs no network; make serve-docs shows it as it changes
# make notebooks    runs the pages of docs/gallery again, and writes their output and pictures
# make package      builds wheel and source distribution into dist/, and tests them as they are installed
# make test-vision  the tests of Mask R-CNN, with torchvision in an environment of its own
# make fuzz         random networks, worlds and training loops, beside oracles; MINUTES=60 or EXAMPLES=10000
# make faults       a thousand injected faults (messages, files, full disks), and how each ended
# make mutation     small wrong changes of the library, and which of them the tests of their room notice
# make bench        the benchmarks: the better part of an hour, on a machine that does nothing else
# make clean        removes both environments, caches and the demo's output

PYTHON ?= python3
VENV   ?= .venv
VISION ?= .venv-vision
# Ranks wait for each other and commands for disks, so that four keep two cores busy.
WORKERS ?= 4
# Of a test with many parameters, make quick runs each SAMPLE-th.
SAMPLE ?= 16
BENCHMARKS ?= step_cost correlation quality distributed curvature
DEMO   ?= demo
# How long make fuzz runs: so many minutes, or, if that is 0, so many cases of each kind.
MINUTES ?= 0
EXAMPLES ?= 1000
KIND   ?= all
SEED   ?= 0
# Of which rooms (a,b) make mutation takes mutants, and how many of each.
ROOM   ?= all
COUNT  ?= 25
# Matrices this small gain nothing from a second thread. A demo that was interrupted goes on.
COMPARED := --optimizers sgd,adamw,muon,soap,kfac,naturalmuon-mc --trials 4 --threads 1 --resume
BIN    := $(VENV)/bin
# Tests start hundreds of Pythons. Where the environment forbids to keep bytecode, each of them would compile
# torch again, and each worker all tests. (make clean removes what is kept.)
unexport PYTHONDONTWRITEBYTECODE
# Compiling all of torch, transformers and scikit-learn takes longer than compiling what is imported of them.
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test exhaustive quick docs serve-docs notebooks package test-vision check fuzz faults mutation bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/demo.stamp
	@$(BIN)/python -m natgrad compare --preset digits-autoencoder $(COMPARED) --out $(DEMO)/autoencoder $(ARGS)
	@$(BIN)/python -m natgrad compare --preset digits-cnn $(COMPARED) --out $(DEMO)/classifier $(ARGS)
	@$(BIN)/python -m natgrad report $(DEMO)/autoencoder $(DEMO)/classifier --out $(DEMO)/index.html

# Every worker collects all tests. In a new clone each would rewrite their assertions first, so that is done
# once. (What is wrong with a test is said by the run that follows.) ruff and mypy have one thread and go on beside the tests.
CHECKED := $(VENV)/checked
test: $(VENV)/dev.stamp
	@rm -f $(CHECKED); \
	{ $(MAKE) --no-print-directory check >$(CHECKED).log 2>&1; echo $$? >$(CHECKED); cat $(CHECKED).log; } & \
	$(BIN)/python -m pytest --collect-only -qq $(ARGS) >/dev/null 2>&1; \
	echo "tests: pytest with $(WORKERS) workers"; \
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS); found=$$?; \
	wait; [ "$$(cat $(CHECKED))" = 0 ] || { echo "make test: ruff or mypy has failed, see above"; exit 1; }; exit $$found

exhaustive:
	@$(MAKE) --no-print-directory test ARGS="--all-combinations $(ARGS)"

quick: check
	@echo "tests: pytest with $(WORKERS) workers, each $(SAMPLE)th parameter"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --sample $(SAMPLE) \
		-m "not slow and not distributed and not peers" $(ARGS)

test-vision: $(VISION)/vision.stamp
	@echo "tests: Mask R-CNN"
	@$(VISION)/bin/python -m pytest -q tests/integrations/test_mask_rcnn.py \
		tests/unit/lab/models/test_vision.py tests/unit/lab/train/test_instances.py $(ARGS)

# The theme's authors would have everybody read of another program at each run.
docs serve-docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/dev.stamp
	@$(BIN)/python -m mkdocs build --quiet && echo "docs: site/index.html"

serve-docs: $(VENV)/dev.stamp
	@$(BIN)/python -m mkdocs serve

notebooks: $(VENV)/dev.stamp
	@OMP_NUM_THREADS=1 $(BIN)/python website/notebooks.py $(ARGS)

package: $(VENV)/dev.stamp
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist
	@echo "tests: the package in an environment of its own"
	@$(BIN)/python -m pytest -q tests/test_package.py $(ARGS)

check: $(VENV)/dev.stamp
	@echo "check: ruff" && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet --diff .
	@echo "check: mypy" && $(BIN)/mypy --no-error-summary

fuzz: $(VENV)/dev.stamp
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --kind $(KIND) --seed $(SEED) \
		--minutes $(MINUTES) --examples $(EXAMPLES)

faults: $(VENV)/dev.stamp
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz.faults --seed $(SEED)

mutation: $(VENV)/dev.stamp
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m mutation --room $(ROOM) --count $(COUNT) \
		--seed $(SEED)

bench: $(VENV)/dev.stamp
	@set -e; for name in $(BENCHMARKS); do \
		echo "bench: $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS); \
	done

clean:
	@rm -rf $(VENV) $(VISION) build dist site $(DEMO) .mypy_cache .pytest_cache .ruff_cache
	@find src tests examples benchmarks website -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is made again only when its stamp is older than what was asked for.
$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "natgrad needs Python 3.11 or newer and '$(PYTHON)' is not: run make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setup: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "setup: installing natgrad with what the demo needs (once only; a minute or more, torch is large)"
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "setup: installing natgrad with what the tests need (once only; a minute or more, torch is large)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp

# Where torchvision cannot load what it was compiled with (its wheels are for a torch with CUDA), the
# libraries around it fail; so nothing else is here.
$(VISION)/vision.stamp: pyproject.toml constraints.txt
	@echo "setup: a virtual environment with torchvision in $(VISION) (once only)"
	@$(PYTHON) -m venv $(VISION)
	@$(VISION)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt \
		-e '.[data,vision]' 'pytest>=8.2' 'pytest-timeout>=2.3'
	@touch $@
