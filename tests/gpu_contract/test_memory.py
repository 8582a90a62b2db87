"""vLLM's share of the card: the plan, Unsloth and vLLM's own check use one number."""

import pytest
from accelerate.utils import patch_environment

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


def unsloths_arguments(config, folder, card, settings, shape, monkeypatch, **others):
    """Return what Unsloth's ``load_vllm`` would start vLLM with, as the kit calls it."""
    from unsloth_zoo import vllm_utils

    monkeypatch.setenv("UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE", "1")  # environment.VLLM
    if hasattr(config, "quantization_config"):
        config.quantization_config = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    config.save_pretrained(folder)
    free = card.total - card.used
    asked = settings.arguments(shape, free, card.total)
    asked.pop("fast_inference")
    with patch_environment(**{STANDBY: "1" if settings.sleeps else "0"}):
        return vllm_utils.load_vllm(
            str(folder),
            config,
            max_seq_length=settings.max_seq_length,
            use_bitsandbytes=settings.load_in_4bit,
            return_args=True,
            **asked,
            **others,
        )


@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("name", FILES)
def test_the_plan_unsloth_and_vllm_agree_for_every_run_file(
    name, gib, card, engine_config, tmp_path, monkeypatch
):
    from published import published_config
    from transformers import AutoConfig

    from rloo_kit.models.shape import TINY_THINKER

    made = plan(name, gpu=f"{gib}GB", overrides=["trainer.generation=auto"])
    job = made.job
    here = card(gib, used_gib=CONTEXT / 2**30)
    here.total = made.facts.card.usable
    settings = EngineSettings(
        job.max_length, job.in_4bit, reserved_rank(job.rank), job.rows, sleeps=job.sleeps
    )
    try:
        found = unsloths_arguments(
            AutoConfig.from_pretrained(TINY_THINKER)
            if name == "quickstart"
            else published_config(made.config.model.name),
            tmp_path,
            here,
            settings,
            made.facts.shape,
            monkeypatch,
        )
    except GenerationError:
        assert not made.fits
        return
    assert found["gpu_memory_utilization"] == pytest.approx(made.vllm_share, abs=0.002)
    assert found["max_num_seqs"] == min(255, job.rows)
    assert found["max_model_len"] == job.max_length
    assert found["enable_sleep_mode"] == job.sleeps
    found = {key: value for key, value in found.items() if key in ARGUMENTS}
    asked = here.start(engine_config(**found))  # vLLM's own check: it raises where it does not fit
    assert asked == pytest.approx(made.vllm_share * here.total, rel=0.01)


# What decides the memory; LoRA and compilation do not change vLLM's check
ARGUMENTS = {
    "model", "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "kv_cache_dtype", "enable_sleep_mode", "quantization", "load_format", "dtype",
}  # fmt: skip
