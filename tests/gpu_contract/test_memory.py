"""vLLM's share of the card: the plan, Unsloth and vLLM's own check use one number."""

import pytest

from rloo_kit.errors import GenerationError
from rloo_kit.models.engine_memory import reserved_rank
from rloo_kit.models.shared_engine import STANDBY, EngineSettings
from rloo_kit.planning.memory import CONTEXT
from rloo_kit.planning.planner import plan

pytestmark = pytest.mark.gpu_contract
# All of examples/ but smollm2, which samples by transformers, and pythia-1b-tldr, whose config is
# on the hub alone and whose layers Unsloth does not share
FILES = (
    "qwen3-0.6b-8gb", "qwen3-1.7b-8gb", "qwen3-4b-thinking", "qwen3-4b-thinking-12gb",
    "qwen3-4b-thinking-24gb", "qwen3-8b-16gb", "qwen3-14b-24gb", "quickstart",
)  # fmt: skip
CARDS = (8, 12, 16, 24)
TOO_SMALL = {
    ("qwen3-4b-thinking-24gb", 8),
    ("qwen3-8b-16gb", 8), ("qwen3-8b-16gb", 12),
    ("qwen3-14b-24gb", 8), ("qwen3-14b-24gb", 12), ("qwen3-14b-24gb", 16),
}  # fmt: skip


@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("name", FILES)
def test_the_plan_unsloth_and_vllm_agree_for_every_run_file(name, gib, card, tmp_path, monkeypatch):
    from published import published_config
    from unsloth_zoo import vllm_utils
    from vllm import EngineArgs

    made = plan(name, gpu=f"{gib}GB", overrides=["trainer.generation=auto"])
    job = made.job
    here = card(gib, used_gib=CONTEXT / 2**30)
    here.total = made.facts.card.usable
    settings = EngineSettings(
        job.max_length, job.in_4bit, reserved_rank(job.rank), job.rows, sleeps=job.sleeps
    )
    if (name, gib) in TOO_SMALL:
        assert not made.fits
        with pytest.raises(GenerationError, match="vLLM does not fit"):
            settings.arguments(made.facts.shape, here.free, here.total)
        return
    asked = settings.arguments(made.facts.shape, here.free, here.total)
    asked.pop("fast_inference")
    config = published_config(made.config.model.name)
    config.save_pretrained(tmp_path)
    monkeypatch.setenv("UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE", "1")  # environment.VLLM
    monkeypatch.setenv(STANDBY, "1" if settings.sleeps else "0")
    found = vllm_utils.load_vllm(
        str(tmp_path),
        config,
        max_seq_length=settings.max_seq_length,
        use_bitsandbytes=settings.load_in_4bit,
        return_args=True,
        **asked,
    )
    assert found["gpu_memory_utilization"] == pytest.approx(made.vllm_share, abs=0.002)
    assert found["max_num_seqs"] == min(255, job.rows)
    assert found["max_model_len"] == job.max_length
    assert found["enable_sleep_mode"] == job.sleeps
    found = {key: value for key, value in found.items() if key in ARGUMENTS}
    made_of = EngineArgs(**found).create_engine_config()
    taken = here.request_memory(made_of.cache_config)  # it raises where it does not fit
    assert taken == pytest.approx(made.vllm_share * here.total, rel=0.01)


# What decides the memory; LoRA and compilation do not change vLLM's check
ARGUMENTS = {
    "model", "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "kv_cache_dtype", "enable_sleep_mode", "quantization", "load_format", "dtype",
}  # fmt: skip
