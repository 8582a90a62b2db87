# `make quickstart` and `make test` are all a fresh machine needs; both make .venv first.
SHELL := bash
PYTHON ?= python3
PY := .venv/bin/python
UV := $(shell command -v uv || echo .cache/uv/bin/uv)

.PHONY: quickstart test setup lock lint clean

quickstart: setup
	.venv/bin/rloo-kit quickstart

test: setup
	$(PY) -m pytest -q -m "not slow and not gpu"

setup: .venv/made

.venv/made: requirements.lock pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.13" .venv
	$(UV) pip sync --quiet --python $(PY) --require-hashes requirements.lock
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

# Where uv is missing, it is put into a folder of its own.
.cache/uv/bin/uv:
	$(PYTHON) -m venv .cache/uv
	.cache/uv/bin/python -m pip install --quiet uv

# Every package and hash of the tested set, for Python 3.11 and 3.12; no download address.
lock: | $(UV)
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" --extra unsloth --extra dev \
	  pyproject.toml -o requirements.lock

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf .venv .cache build dist *.egg-info
