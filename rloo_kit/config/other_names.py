"""Settings of other trainers: TRL before 0.22, TRL's GRPO, Unsloth, older transformers.

Python, run files, TRL's parser, ``rloo-kit legacy`` and the docs read these tables; a name is in
one of RENAMED, MOVED, NEEDLESS and REFUSED. The older names are those of TRL v0.21.0:
``RLOOConfig``, ``OnPolicyConfig`` and the classes that its scripts parse.
"""

from collections.abc import Mapping
from typing import Any


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Return name -> text of text -> names."""
    return {name: text for text, names in groups.items() for name in names.split()}


# Name -> the trainer setting that takes its value
RENAMED = {
    "cliprange": "epsilon",
    "exp_name": "run_name",
    "kl_coef": "beta",
    "kl_coeff": "beta",
    "multi_objective_aggregation": "combine",
    "normalize_advantage": "normalize_advantages",
    "num_mini_batches": "steps_per_generation",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "rloo_k": "num_generations",
    "total_episodes": "max_steps",
    "vllm_importance_sampling_cap": "rollout_correction_cap",
    "vllm_importance_sampling_clip_max": "rollout_correction_cap",
    "warmup_ratio": "warmup_steps",
}
# Name -> the key of the run file, and the place in Python, that take its value
MOVED = {
    "dataset_name": ("data.prompts", "the trainer's train_dataset"),
    "dataset_train_split": ("data.split", "rk.load_prompts"),
    "load_in_4bit": ("model.load_in_4bit", "rk.load_model"),
    "lora_alpha": ("lora.lora_alpha", "rk.attach_lora"),
    "lora_dropout": ("lora.lora_dropout", "rk.attach_lora"),
    "lora_r": ("lora.r", "rk.attach_lora"),
    "lora_target_modules": ("lora.target_modules", "rk.attach_lora"),
    "max_prompt_length": ("data.max_prompt_tokens", "a filter of train_dataset"),
    "max_seq_length": ("model.max_seq_length", "rk.load_model"),
    "model_name_or_path": ("model.name", "rk.load_model"),
    "reward_model_path": ("rewards", "the trainer's reward_funcs"),
    "sft_model_path": ("model.name", "rk.load_model"),
}
# Left out with a warning: it changes nothing that is learned
NEEDLESS = _by_name(
    {
        "a pass takes what fits into memory, or tokens_per_micro_batch": (
            "local_rollout_forward_batch_size unsloth_grpo_mini_batch "
            "unsloth_logit_chunk_multiplier unsloth_num_chunks use_liger_loss"
        ),
        "completions.jsonl holds all of them": "num_sample_generations",
        "prompts are tokenized as they are drawn": "dataset_num_proc",
        "data.held_out keeps the last prompts out of the training": "dataset_test_split",
        "the device decides it": "dtype torch_dtype",
        "TRL's script for RLOO never read it": "dataset_streaming ignore_bias_buffers",
        "a number is added to the name of a folder that exists": "overwrite_output_dir",
    }
)
# Refused, with what to do
REFUSED = _by_name(
    {
        "leave it out, the loss is RLOO's over whole completions (docs/how-to/change_the_step.md "
        "adds another)": (
            "cast_lm_head_to_fp32 delta entropy_coef entropy_coef_delta entropy_coef_max "
            "entropy_coef_min entropy_target importance_sampling_level loss_type "
            "off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos "
            "top_entropy_quantile use_adaptive_entropy use_bias_correction_kl vespo_k_neg "
            "vespo_k_pos vespo_lambda_neg vespo_lambda_pos"
        ),
        "leave it out, or set normalize_advantages: true for the spread of the batch": (
            "scale_rewards"
        ),
        "set rollout_correction: token or sequence": (
            "vllm_importance_sampling_clip_min vllm_importance_sampling_correction "
            "vllm_importance_sampling_mode"
        ),
        "write temperature, top_p, top_k and min_p, and others under generation_kwargs": (
            "vllm_sampling_params"
        ),
        "leave it out, completions end at the EOS token": "stop_token stop_token_id",
        "leave it out, or set normalize_reward: TRL's RLOO never read it": "whiten_rewards",
        "set per_device_train_batch_size, gradient_accumulation_steps and steps_per_generation": (
            "batch_size local_batch_size local_mini_batch_size micro_batch_size mini_batch_size "
            "num_total_batches"
        ),
        "leave it out, torchrun or accelerate launch sets it": "world_size",
        "leave it out, weights are safetensors": "save_safetensors",
        "leave it out, a batch holds whole groups": "group_by_length",
        "leave it out, completions.jsonl holds them": "log_completions_hub_repo",
        "leave it out, no tools are called": "max_tool_calling_iterations",
        "leave it out, the model's own is used": "attn_implementation",
        "save it as a .jsonl file and name that": "dataset_config",
        "download it and give its folder": "model_revision",
        "leave it out, a run file trains an adapter": "use_peft",
        # settings that the kit had
        "set a smaller trainer.num_generations": "learn_from",
        "set trainer.dynamic_sampling: true, or choose prompts by rloo-kit calibrate": (
            "prompt_retire_at prompt_selection"
        ),
        "write vllm.speculative_config: {method: suffix, num_speculative_tokens: 4}": (
            "speculative_decoding"
        ),
    }
)
# Values of refused and moved names that are left out with a warning: they say what holds anyway
SAME: dict[str, tuple[Any, ...]] = {
    "group_by_length": (False,),
    "max_prompt_length": (None,),
    "max_seq_length": (None,),
    "model_revision": ("main",),
    "save_safetensors": (True,),
    "scale_rewards": (False, "none"),
    "stop_token": ("eos", None),
    "use_peft": (True,),
    "vllm_importance_sampling_correction": (False,),
    "vllm_sampling_params": (None,),
    "whiten_rewards": (False,),
}
OTHER_NAMES = (*RENAMED, *MOVED, *NEEDLESS, *REFUSED)
# No flags of TRL's parser: a script parses these for itself, as TRL's own do, or well may
OF_SCRIPTS = {
    *MOVED,
    *("attn_implementation", "batch_size", "dataset_config", "dataset_num_proc", "dtype"),
    *("dataset_streaming", "dataset_test_split", "exp_name", "ignore_bias_buffers", "world_size"),
    *("micro_batch_size", "mini_batch_size", "model_revision", "torch_dtype", "use_peft"),
}


def why_left_out(name: str, value: object) -> str | None:
    """Return why a setting of another trainer is not needed; None: it is."""
    if value in SAME.get(name, ()):
        return "it holds anyway"
    return NEEDLESS.get(name)


def what_instead(name: str) -> str | None:
    """Return what to write instead of a setting that is not translated; None: it is not known."""
    if name in MOVED:
        key, in_python = MOVED[name]
        return f"it is {key} in a run file, and in Python {in_python} takes it"
    return REFUSED.get(name)
