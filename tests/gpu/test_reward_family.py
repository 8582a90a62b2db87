"""A reward model of the policy's own architecture, whose classes Unsloth has patched."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
SCORE = """
import json, sys
import rloo_kit as rk
rk.setup(sys.argv[2])
if sys.argv[2] == "auto":  # Unsloth patches the classes of the policy
    model, _ = rk.load_model("tiny-thinker", max_seq_length=128)
from rloo_kit.rewards import RewardModel
reward = RewardModel(sys.argv[1])
texts = ["a", "7+5=12 </think> 12", "1+1=2", "a much longer completion than the others are"]
print(json.dumps(reward(prompts=["What is 7 + 5?"] * 4, completions=texts)))
"""


def scores(folder, backend):
    done = subprocess.run(
        [sys.executable, "-c", SCORE, str(folder), backend],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_scores_are_those_of_a_process_without_unsloth(device, tmp_path, record_property):
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    from rloo_kit.models.shape import TINY_THINKER

    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(TINY_THINKER, num_labels=1)
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(tmp_path)
    patched = scores(tmp_path, "auto")
    plain = scores(tmp_path, "transformers")
    record_property("scores", f"{patched} and {plain}")
    assert patched == pytest.approx(plain, abs=0.02)
    assert max(plain) - min(plain) > 0.1
