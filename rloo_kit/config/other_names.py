"""Setting names of other trainers: TRL before 0.22, TRL's GRPO, Unsloth, older transformers.

The tables translate or refuse such names in Python code, in run files, in TRL's argument parser and
in ``rloo-kit legacy``; the docs list them. Each name is in exactly one of RENAMED, MOVED, NEEDLESS
and REFUSED. The older names are from TRL v0.21.0: the fields of ``RLOOConfig`` and
``OnPolicyConfig``, and the flags of its scripts.
"""

from collections.abc import Mapping


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Return a dict from name to text, from a dict from text to names separated by spaces."""
    return {name: text for text, names in groups.items() for name in names.split()}


# Name -> name of the same trainer setting in the kit
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
# Name of a setting that does not belong to the trainer here -> its key in a run file, and the
# function or argument that accepts its value in Python
MOVED = {
    "dataset_name": ("data.prompts", "the trainer's train_dataset"),
    "dataset_train_split": ("data.split", "rk.load_prompts"),
    "max_prompt_length": ("data.max_prompt_tokens", "a filter of train_dataset"),
    "max_seq_length": ("model.max_seq_length", "rk.load_model"),
    "model_name_or_path": ("model.name", "rk.load_model"),
    "reward_model_path": ("rewards", "the trainer's reward_funcs"),
    "sft_model_path": ("model.name", "rk.load_model"),
}
# Names that are ignored with a warning, because learning does not depend on them: reason -> names
NEEDLESS = _by_name(
    {
        "the kit sizes micro-batches by the free memory, or by tokens_per_micro_batch": (
            "local_rollout_forward_batch_size unsloth_grpo_mini_batch "
            "unsloth_logit_chunk_multiplier unsloth_num_chunks use_liger_loss"
        ),
        "completions.jsonl has all completions": "num_sample_generations",
        "weights are saved as safetensors": "save_safetensors",
        "prompts are tokenized when they are needed": "dataset_num_proc",
        "data.held_out sets the number of prompts that are not trained on": "dataset_test_split",
        "torchrun or accelerate launch sets the number of processes": "config_file world_size",
    }
)
# Names that are refused: remedy -> names
REFUSED = _by_name(
    {
        "leave it out, completions end at the EOS token": "stop_token stop_token_id",
        "leave it out, or set normalize_reward (TRL's RLOO never used it)": "whiten_rewards",
        "leave it out, or set normalize_advantages: true to divide the advantages by their "
        "standard deviation over the batch": "scale_rewards",
        "set rollout_correction: token or sequence": "vllm_importance_sampling_correction",
        "leave it out, RLOO has one loss": "delta importance_sampling_level loss_type",
        "set temperature, top_p, top_k and min_p instead, and other parameters in "
        "generation_kwargs": "vllm_sampling_params",
        "leave it out, because batches consist of whole groups": "group_by_length",
    }
)
# Remedy for a field of TRL's GRPOConfig that is not in these tables
OF_GRPO = "leave it out, only TRL's GRPO has it"
OTHER_NAMES = {*RENAMED, *MOVED, *NEEDLESS, *REFUSED}
# Flags that TRL's scripts define themselves, so that TRL's argument parser does not know them
OF_SCRIPTS = {*MOVED, "config_file", "dataset_num_proc", "dataset_test_split", "exp_name"}


def why_not_needed(name: str, value: object) -> str | None:
    """Return the reason why a setting of another trainer has no effect and can be ignored.

    A setting in ``MOVED`` or ``REFUSED`` can be ignored too, if its value (False, None, ``none`` or
    ``eos``) asks for what the kit does anyway.

    Args:
        name: Name of the setting in the other trainer.
        value: Its value.

    Returns:
        The reason; None if the setting must not be ignored, or the kit does not know the name.
    """
    says_no = value is False or value in (None, "none", "eos")
    return NEEDLESS.get(
        name,
        "rloo-kit works this way without it" if says_no and name in {*MOVED, *REFUSED} else None,
    )
