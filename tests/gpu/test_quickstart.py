"""The quickstart as a person types it, and with vLLM: it learns to carry."""

import os

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("more", [[], ["trainer.generation=vllm"]], ids=["typed", "vllm"])
def test_the_quickstart_learns(more, kit, four_bit, device, tmp_path, record_property):
    if more and device == "cpu":
        pytest.skip("vLLM samples on a GPU only")
    steps = int(os.environ.get("RLOO_KIT_GPU_TEST_STEPS", "40"))
    lines = []
    result = kit.train(
        "quickstart",
        [f"output_dir={tmp_path / 'run'}", f"trainer.max_steps={steps}", *more],
        lines.append,
    )
    before, after = (x.rewards["accuracy"] for x in (result.before, result.after))
    record_property("accuracy", f"{before:.3f} to {after:.3f}")
    record_property("steps", result.steps)
    record_property("seconds", round(result.seconds, 1))
    record_property("released", str(result.released))
    shown = [line for line in lines if any(w in line for w in ("vLLM", "dry run", "sample"))]
    record_property("said", "; ".join(shown) or "-")
    assert (result.adapter / "adapter_model.safetensors").exists()
    assert result.steps == steps
    assert result.released.after.children == ()
    if steps >= 40:
        assert before < 0.7
        assert after >= 0.9
