"""Memory, threads, processes and files come back after vLLM, however the training ended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rloo_kit as rk

pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).parents[1] / "scripts" / "release_rounds.py"


@pytest.mark.parametrize(
    ("how", "ended"),
    [
        ("ends", "end"),
        pytest.param("raises", "RewardContractError", marks=pytest.mark.slow),
        pytest.param("interrupted", "KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_behind_round_after_round(how, ended):
    run = subprocess.run(
        [sys.executable, SCRIPT, "3", how], capture_output=True, text=True, timeout=420, check=True
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"round"')]
    assert [row["ended"] for row in found] == [ended] * 3
    held = [row["resident"] for row in found]
    assert max(held) - min(held) <= 50 * 2**20
    for row in found:
        assert not row["children"]


def test_a_child_process_gives_everything_back(tmp_path):
    before = rk.release().after
    lines = []
    result = rk.train(
        "quickstart",
        [
            f"output_dir={tmp_path / 'run'}",
            "trainer.max_steps=2",
            "trainer.generation=vllm",
            "data.held_out=8",
        ],
        lines.append,
        in_subprocess=True,
    )
    assert result.steps == 2
    assert (result.adapter / "adapter_model.safetensors").exists()
    assert any("completions from vLLM in this process" in line for line in lines)
    after = rk.release().after
    assert after.children == ()
    assert after.resident <= before.resident + 64 * 2**20
