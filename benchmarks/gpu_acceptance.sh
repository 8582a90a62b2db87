#!/usr/bin/env bash
# What only a card can show, in three calls of at most nine minutes each on a large card:
#   bash benchmarks/gpu_acceptance.sh --call 1       (then 2 and 3; without --call all of them)
# The options are those of benchmarks/gpu_acceptance.py (--help lists them). PYTHON names the
# interpreter; without it .venv-gpu is taken where there is one, then .venv, else python3.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  for folder in .venv .venv-gpu; do
    [[ -x "$root/$folder/bin/python" ]] && PYTHON="$root/$folder/bin/python"
  done
fi
exec "$PYTHON" "$root/benchmarks/gpu_acceptance.py" "$@"
