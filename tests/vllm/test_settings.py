"""What vLLM is given by ``generation_kwargs``, held against the installed vLLM."""

import inspect

import pytest

import rloo_kit as rk
from rloo_kit.config.engine_settings import TOKEN_SAMPLING, check_settings

pytestmark = pytest.mark.vllm


def test_every_name_that_passes_is_one_of_vllm():
    from vllm import SamplingParams

    assert set(inspect.signature(SamplingParams).parameters) >= TOKEN_SAMPLING


def args(tmp_path, **settings):
    few = {"max_steps": 1, "max_completion_length": 8, "save_strategy": "no", "generation": "vllm"}
    return rk.LeaveOneOutConfig(str(tmp_path / "out"), **{**few, **settings})


def test_values_that_vllm_refuses_are_one_sentence(tmp_path):
    for kwargs in ({"presence_penalty": 9}, {"min_tokens": 99}):
        with pytest.raises(rk.ConfigError, match=r"^trainer.generation_kwargs [^\n]*were refused"):
            check_settings(args(tmp_path, generation_kwargs=kwargs), "vllm")
    for kwargs in ({"presence_penalty": 0.5}, {"min_tokens": 2}, {"logit_bias": {3: 1.0}}):
        check_settings(args(tmp_path, generation_kwargs=kwargs), "vllm")


def test_generation_kwargs_are_obeyed(tmp_path):
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
    few = {"allowed_token_ids": [5, 6, 7]}
    trainer = rk.LeaveOneOutTrainer(
        rk.attach_lora(model),
        "accuracy",
        args(tmp_path, generation_kwargs=few, beta=0.0),
        rk.load_prompts("arithmetic", num_prompts=8),
        tokenizer,
    )
    seen = set()
    generate = trainer.engine.generate

    def watched(prompt_ids, sampling, seed):
        drawn = generate(prompt_ids, sampling, seed)
        if sampling.others:  # the canary draws from all tokens
            seen.update(*drawn.completion_ids)
        return drawn

    trainer.engine.generate = watched
    trainer.train()
    assert seen
    assert seen <= {5, 6, 7}
    rk.release(trainer)


def test_a_table_of_the_run_file_reaches_the_engine(tmp_path):
    given = {
        "enforce_eager": True, "max_num_batched_tokens": 1024,
        "hf_overrides": {"head_dtype": "float32"},
    }  # fmt: skip
    model, _ = rk.load_model("tiny-thinker", max_seq_length=128, vllm=given)
    with rk.session():
        engine, _ = rk.start_engine(rk.attach_lora(model), args(tmp_path))
        config = engine._llm.llm_engine.vllm_config
        assert config.model_config.enforce_eager is True
        assert config.scheduler_config.max_num_batched_tokens == 1024
        assert config.model_config.hf_overrides == {"head_dtype": "float32"}
        assert str(config.model_config.head_dtype) == "torch.float32"


def test_a_wrong_value_in_the_table_is_one_sentence(tmp_path):
    model, _ = rk.load_model("tiny-thinker", max_seq_length=128, vllm={"block_size": "many"})
    with pytest.raises(rk.GenerationError, match=r"^vLLM cannot start [^\n]*$"):
        rk.start_engine(rk.attach_lora(model), args(tmp_path))
