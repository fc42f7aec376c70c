# make demo    K-FAC beside SGD and AdamW on real digits; writes demo/index.html
# make test    ruff, mypy and all tests
# make check   ruff and mypy alone
# make bench   the benchmarks: the better part of an hour, on a machine that does nothing else
# make clean   removes .venv, caches and the demo's output

PYTHON ?= python3
VENV   ?= .venv
WORKERS ?= 2
BENCHMARKS ?= step_cost correlation quality distributed curvature
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/demo.stamp
	@$(BIN)/python examples/digits.py $(ARGS)

test: check
	@echo "tests: pytest with $(WORKERS) workers"
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

check: $(VENV)/dev.stamp
	@echo "check: ruff" && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet --diff .
	@echo "check: mypy" && $(BIN)/mypy --no-error-summary

bench: $(VENV)/dev.stamp
	@set -e; for name in $(BENCHMARKS); do \
		echo "bench: $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS); \
	done

clean:
	@rm -rf $(VENV) build dist demo .mypy_cache .pytest_cache .ruff_cache
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

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
