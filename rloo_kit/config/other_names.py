"""Setting names of other trainers: TRL before 0.22, TRL's GRPO, Unsloth, older transformers.

Python, run files, TRL's parser, ``rloo-kit legacy`` and the docs read these tables. A name is in
one of RENAMED, MOVED, NEEDLESS and REFUSED. The older names are those of TRL v0.21.0:
``RLOOConfig``, ``OnPolicyConfig``, and the flags of its scripts.
"""

from collections.abc import Mapping


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Turn text -> names into name -> text."""
    return {name: text for text, names in groups.items() for name in names.split()}


# Name -> the trainer setting for its value
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
    "warmup_ratio": "warmup_steps",
}
# Name -> the key of the run file, and the place in Python, for its value
MOVED = {
    "dataset_name": ("data.prompts", "the trainer's train_dataset"),
    "dataset_train_split": ("data.split", "rk.load_prompts"),
    "max_prompt_length": ("data.max_prompt_tokens", "a filter of train_dataset"),
    "max_seq_length": ("model.max_seq_length", "rk.load_model"),
    "model_name_or_path": ("model.name", "rk.load_model"),
    "reward_model_path": ("rewards", "the trainer's reward_funcs"),
    "sft_model_path": ("model.name", "rk.load_model"),
}
# Ignored with a warning, since learning does not depend on it
NEEDLESS = _by_name(
    {
        "a pass holds what fits into memory, or tokens_per_micro_batch": (
            "local_rollout_forward_batch_size unsloth_grpo_mini_batch "
            "unsloth_logit_chunk_multiplier unsloth_num_chunks use_liger_loss"
        ),
        "completions.jsonl holds all of them": "num_sample_generations",
        "weights are saved as safetensors": "save_safetensors",
        "prompts are tokenized as they are drawn": "dataset_num_proc",
        "data.held_out keeps the last prompts out of the training": "dataset_test_split",
        "torchrun or accelerate launch sets the number of processes": "config_file world_size",
    }
)
# Refused, with the remedy
REFUSED = _by_name(
    {
        "leave it out, completions end at the EOS token": "stop_token stop_token_id",
        "leave it out, or set normalize_reward: TRL's RLOO never read it": "whiten_rewards",
        "leave it out, or set normalize_advantages: true for the spread of the batch": (
            "scale_rewards"
        ),
        "set rollout_correction: token or sequence": "vllm_importance_sampling_correction",
        "leave it out, RLOO has one loss": "delta importance_sampling_level loss_type",
        "write temperature, top_p, top_k and min_p, and others under generation_kwargs": (
            "vllm_sampling_params"
        ),
        "leave it out, a batch holds whole groups": "group_by_length",
    }
)
# Fields of TRL's GRPOConfig that are in none of the tables
OF_GRPO = "leave it out, only TRL's GRPO has it"
OTHER_NAMES = {*RENAMED, *MOVED, *NEEDLESS, *REFUSED}
# Flags that scripts parse for themselves, and TRL's parser does not
OF_SCRIPTS = {*MOVED, "config_file", "dataset_num_proc", "dataset_test_split", "exp_name"}


def why_not_needed(name: str, value: object) -> str | None:
    """Return why a setting of another trainer can be left out; None if it cannot, or is unknown."""
    says_no = value is False or value in (None, "none", "eos")
    return NEEDLESS.get(name, "it holds anyway" if says_no and name in {*MOVED, *REFUSED} else None)
