"""The kit's own engine beside a loaded model: its settings arrive, and vLLM's memory check."""

import dataclasses

import pytest

from rloo_kit.errors import GenerationError
from rloo_kit.sampling.engine import Begun, Sampling

pytestmark = pytest.mark.gpu_contract
# Argument of vllm.LLM -> where its value is, where it has another name there
ELSEWHERE = {
    "enable_lora": lambda engine: engine.vllm_config.lora_config is not None,
    "disable_log_stats": lambda engine: not engine.log_stats,
    "lora_target_modules": lambda engine: engine.vllm_config.lora_config.target_modules,
    "dtype": lambda engine: str(engine.model_config.dtype).removeprefix("torch."),
}


def found_in(config, name):
    """Return the values of a name in a configuration and the configurations it is made of."""
    parts = [getattr(config, field.name) for field in dataclasses.fields(config)]
    parts = [part for part in parts if dataclasses.is_dataclass(part)]
    return [getattr(part, name) for part in parts if name in vars(part)]


def test_guessing_tokens_goes_with_lora_sleep_and_log_probs(
    large_policy, vllm_starts, engine_of, suffix_decoding
):
    model = large_policy("qwen3-0.6b")
    vllm_starts(141)
    speculative = {"method": "suffix", "num_speculative_tokens": 4}
    engine = engine_of(model, num_sequences=255, extra={"speculative_config": speculative})
    config = engine._llm.llm_engine.vllm_config
    assert config.speculative_config.method == "suffix"
    assert config.speculative_config.num_speculative_tokens == 4
    assert config.lora_config is not None
    assert config.model_config.enable_sleep_mode
    assert config.model_config.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize("share", [None, 0.25], ids=["computed", "given"])
def test_every_argument_is_in_the_configuration(
    large_policy, vllm_starts, engine_of, share, monkeypatch
):
    import vllm

    asked = {}

    class Recorded(vllm.LLM):
        def __init__(self, **arguments):
            asked.update(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr(vllm, "LLM", Recorded)
    model = large_policy("qwen3-0.6b")
    vllm_starts(141)
    built = engine_of(model, memory_share=share, seed=3)._llm.llm_engine
    for name, value in asked.items():
        if name in ELSEWHERE:
            assert ELSEWHERE[name](built) == value, name
        else:
            assert value in found_in(built.vllm_config, name), name
    assert {"quantization", "enable_sleep_mode", "logprobs_mode", "seed"} <= set(asked)
    assert built.vllm_config.model_config.quantization == "bitsandbytes"
    assert (asked.get("gpu_memory_utilization") == 0.25) is (share is not None)


def test_a_whole_life_of_calls_reaches_the_worker(model, engine):
    worker = engine._llm.llm_engine.model_executor
    for _ in range(2):
        engine.sync(model)
        drawn = engine.generate([[1, 2, 3]], Sampling(10, (258,)), seed=0)
        assert drawn.completion_ids == [[1, 1, 1, 258]]
        grown = engine.grow(Begun([[1, 2, 3]], [[1]]), Sampling(10, (258,)), seed=0)
        assert grown == drawn
        engine.sleep()
    asked = [method for method, _ in worker.calls]
    names = ("add_lora", "remove_lora", "sleep", "wake_up", "shutdown")
    assert [asked.count(name) for name in names] == [2, 1, 2, 1, 0]
    assert ("sleep", (1,)) in worker.calls
    engine.close()
    assert worker.calls[-1][0] == "shutdown"


FITS = [  # card, used by the trainer's copy of the weights and by CUDA, in GiB
    ("qwen3-0.6b", 8, 1.2, 1024, 32),
    ("qwen3-8b", 24, 6.5, 2048, 16),
]


@pytest.mark.parametrize(("name", "gib", "used", "length", "sequences"), FITS)
def test_it_starts_beside_a_loaded_model(
    large_policy, vllm_starts, engine_of, name, gib, used, length, sequences
):
    model = large_policy(name)
    vllm_starts(gib, used_gib=used)
    engine = engine_of(model, max_length=length, num_sequences=sequences)
    config = engine._llm.llm_engine.vllm_config.cache_config
    assert config.num_gpu_blocks * config.block_size >= length


def test_what_does_not_fit_is_refused(large_policy, vllm_starts, engine_of):
    model = large_policy("qwen3-8b")
    vllm_starts(8, used_gib=6.5)
    with pytest.raises(GenerationError, match="does not fit"):
        engine_of(model)


def test_its_weights_leave_the_card_after_unsloth_has_patched_vllm(model, vllm_starts, engine_of):
    from unsloth_zoo.vllm_utils import patch_vllm_enable_sleep_mode
    from vllm.device_allocator import cumem

    vllm_starts(141)
    patch_vllm_enable_sleep_mode()
    assert {cumem.CuMemAllocator.sleep.__module__} != {cumem.__name__}
    engine_of(model)
    for method in (cumem.CuMemAllocator.sleep, cumem.CuMemAllocator.wake_up):
        assert method.__module__ == cumem.__name__
        assert "is_asleep" in method.__code__.co_names
