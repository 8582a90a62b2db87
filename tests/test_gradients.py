"""4-bit training on a CPU follows the right gradients, in both backends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SMOLLM2 = HERE.parent / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def cosine(*arguments: str) -> float:
    script = [sys.executable, str(HERE / "scripts" / "lora_gradients.py"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(r"layers (\d+) cosine (\S+)", done.stdout)
    assert found, done.stderr[-2000:]
    assert int(found[1]) > 0, "no 4-bit layer was compared"
    return float(found[2])


@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
def test_gradients_after_generate_are_those_of_the_dequantised_weights(backend):
    assert cosine(backend, "tiny-thinker") >= 0.99


@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"), reason="the fault needs AVX512-BF16"
)
def test_the_comparison_sees_the_fault_that_the_kit_keeps_away():
    assert cosine("transformers", "tiny-thinker", "--packed") < 0.9


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="run scripts/fetch_smollm2.py first")
@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
def test_gradients_of_a_real_model(backend):
    assert cosine(backend, str(SMOLLM2)) >= 0.99
