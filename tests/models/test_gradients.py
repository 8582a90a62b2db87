"""4-bit training on a CPU follows the right gradients, in both backends."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long
HERE = Path(__file__).parents[1]
SMOLLM2 = HERE.parent / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def cosines(backend: str, model: str) -> dict[str, float]:
    """Return the cosine by layout of the weights, "kept" and "packed"."""
    script = [sys.executable, str(HERE / "scripts" / "lora_gradients.py"), backend, model]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    found = re.findall(r"(\w+) layers (\d+) cosine (\S+)", done.stdout)
    assert found, done.stderr[-2000:]
    assert all(int(layers) > 0 for _, layers, _ in found), "no 4-bit layer was compared"
    return {layout: float(value) for layout, _, value in found}


@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
def test_gradients_after_generate_match_the_dequantised_weights(backend):
    assert cosines(backend, "tiny-thinker")["kept"] >= 0.99


@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"), reason="the fault needs AVX512-BF16"
)
def test_the_comparison_sees_the_packed_layout():
    assert cosines("transformers", "tiny-thinker")["packed"] < 0.9


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="run scripts/fetch_smollm2.py first")
@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
def test_gradients_of_a_real_model(backend):
    assert cosines(backend, str(SMOLLM2))["kept"] >= 0.99
