"""Settings that meet: every mix trains or is refused, and resumes as if it had never ended.

Hypothesis draws the mixes and shrinks one that fails to the settings that matter. By hand, with
more of them: RLOO_KIT_MIXES=300 pytest tests/training/test_setting_pairs.py
"""

import os
import shutil

import pytest
import torch
import transformers
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import rloo_kit as rk
from rloo_kit.models.loading import TINY_THINKER

# What is sampled and learned
CHOICES = {
    "beta": [0.0, 0.5],
    "combine": ["normalize_then_sum"],
    "dynamic_sampling": [True],
    "epsilon_high": [0.3],
    "generation_kwargs": [{"min_new_tokens": 2}],
    "gradient_accumulation_steps": [2],
    "kl_estimator": ["k3"],
    "mask_truncated_completions": [True],
    "max_grad_norm": [0.0, 0.1],
    "min_p": [0.01],
    "missing_eos_penalty": [0.5],
    "normalize_advantages": [True],
    "normalize_reward": ["batch", "moving"],
    "num_generations": [2, 8],
    "num_iterations": [2],
    "on_reward_error": ["skip"],
    "repetition_penalty": [1.1],
    "reward_clip_range": [[-0.3, 0.3]],
    "rollout_correction": ["token"],
    "shuffle_dataset": [False],
    "steps_per_generation": [2],
    "temperature": [0.8],
    "thinking_budget": [5],
    "token_level_kl": [True],
    "top_k": [100],
    "top_p": [0.9],
    "warmup_steps": [2],
    "weight_decay": [0.1],
}
# How it is computed, which must not change the result
NEUTRAL = {
    "dry_run": [True],
    "gradient_checkpointing": [True],
    "gradient_checkpointing_kwargs": [{"use_reentrant": False, "every_n_layers": 2}],
    "keep_last": [1],
    "pad_to_multiple_of": [8],
    "tokens_per_micro_batch": [40, 150],
}


def mixes(choices):
    one_of = {name: st.sampled_from(values) for name, values in choices.items()}
    return st.fixed_dictionaries({}, optional=one_of)


def letters(completions, **_):
    return [sum(map(ord, one[-1]["content"])) % 3 / 2 for one in completions]


def even_length(completion_ids, **_):
    return [None if len(ids) == 3 else len(ids) % 2 for ids in completion_ids]


def trainer_of(folder, **more):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    lora = LoraConfig(r=4, target_modules="all-linear")
    # Adam would turn a gradient of rounding alone into a step
    fixed = {
        "bf16": False, "use_cpu": True, "optim": "sgd", "learning_rate": 0.3, "max_steps": 6,
        "save_steps": 3, "keep_best": 0, "max_completion_length": 10,
        "per_device_train_batch_size": 8, "lr_scheduler_type": "constant", "seed": 3,
    }  # fmt: skip
    args = rk.LeaveOneOutConfig(str(folder), **fixed | more)
    return rk.LeaveOneOutTrainer(
        model=get_peft_model(model, lora),
        reward_funcs=[letters, even_length],
        args=args,
        train_dataset=rk.load_prompts("arithmetic", num_prompts=8),
        processing_class=AutoTokenizer.from_pretrained(TINY_THINKER),
    )


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.trained_parameters().values()])


@pytest.mark.long
@settings(
    max_examples=int(os.environ.get("RLOO_KIT_MIXES", "10")), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(meaning=mixes(CHOICES), computing=mixes(NEUTRAL))
def test_a_mix_of_settings_trains_and_resumes_or_is_refused(tmp_path, meaning, computing):
    shutil.rmtree(tmp_path, ignore_errors=True)  # of the example before
    try:
        whole = trainer_of(tmp_path / "whole", **meaning)
        trainer_of(tmp_path / "other", **meaning, **computing)
    except rk.ConfigError as refused:
        event(f"refused: {refused}")  # for --hypothesis-show-statistics
        return
    start = weights_of(whole)
    whole.train()
    end = weights_of(whole)
    assert end.isfinite().all()
    second = trainer_of(tmp_path / "second", **meaning, **computing)
    torch.manual_seed(9)
    second.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    moved = (end - start).norm()
    assert (weights_of(second) - end).norm() <= 1e-3 * moved + 1e-6
