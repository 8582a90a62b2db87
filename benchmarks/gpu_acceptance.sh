#!/usr/bin/env bash
# Everything that only a card can show, in about ten minutes: bash benchmarks/gpu_acceptance.sh
# The options are those of benchmarks/gpu_acceptance.py (--help lists them). PYTHON names the
# interpreter; without it .venv is taken where there is one, else python3.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON="$root/.venv/bin/python"
  [[ -x "$PYTHON" ]] || PYTHON=python3
fi
exec "$PYTHON" "$root/benchmarks/gpu_acceptance.py" "$@"
