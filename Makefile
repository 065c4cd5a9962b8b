# make run    set up what is missing, then serve the default model at http://127.0.0.1:8000
# make test   set up what is missing, then run every check and test
# make check  the checks alone: format, lint, types, architecture, generated docs
# make sanitize  build the kernels with address and undefined-behaviour checks and run their checks on all instruction sets
# make clean  remove the environment and the caches of tools
#
# PYTHON=python3.12 picks the interpreter; ARGS="--port 9000" is passed to `hardpoint serve`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=
# Most of a run is waiting for processes to start. A file stays with one worker, which shares its servers.
# What is made from sets must have the same order in both, and tests rewrite modules faster than their dates tell.
PYTEST_WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: run test check sanitize clean

run: $(VENV)/run.stamp
	$(BIN)/hardpoint serve $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python tools/check.py
	PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 $(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

check: $(VENV)/test.stamp
	$(BIN)/python tools/check.py

sanitize:
	$(PYTHON) csrc/build.py build/check-kernels --check --sanitize --run

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Hardpoint needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Choose one with: make $(MAKECMDGOALS) PYTHON=python3.12" if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/run.stamp: pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*) | $(BIN)/python
	@echo "Installing Hardpoint and its dependencies into $(VENV) ..."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

# All at once: an installation of its own before would compile the kernels twice. Modules are compiled afterwards,
# since pip does that with one core.
$(VENV)/test.stamp: pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*) | $(BIN)/python
	@echo "Installing Hardpoint with the dependencies of its tests into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test]'
	-@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib src > /dev/null 2>&1
	@touch $(VENV)/run.stamp $@

clean:
	rm -f src/hardpoint/worker/kernels/*.so
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
