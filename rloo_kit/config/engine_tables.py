"""Keys that the sections ``trainer:``, ``unsloth:`` and ``vllm:`` of a run file must not have.

Either another key of the run file sets the same value, or the kit sets the value itself. This
module does not import Unsloth or vLLM. When they load, they report keys that they do not know.
"""

from collections.abc import Iterable

# Arguments of load_vllm in unsloth_zoo that Unsloth's own loaders do not have. They have an effect
# only if vLLM shares the weights with Unsloth's model
SHARED_ENGINE_NAMES = frozenset(
    {
        "compilation_config", "conservativeness", "enable_prefix_caching", "enforce_eager",
        "max_logprobs", "max_num_batched_tokens",
    }
)  # fmt: skip
# Section -> key that it must not have -> what to use instead
SET_ELSEWHERE: dict[str, dict[str, str]] = {
    "trainer": {
        "output_dir": "output_dir",
        "seed": "seed",
        "trust_remote_code": "model.trust_remote_code",
        "eval_strategy": "data.held_out_every",
        "eval_steps": "data.held_out_every",
        "load_best_model_at_end": "trainer.keep_best",
        "model_init_kwargs": "unsloth",
        "resume_from_checkpoint": "rloo-kit train FOLDER --resume",
    },
    "unsloth": {
        "backend": "model.backend",
        "chat_template": "model.chat_template",
        "fast_inference": "trainer.generation",
        "gpu_memory_utilization": "trainer.vllm_gpu_memory_utilization",
        "load_in_4bit": "model.load_in_4bit",
        "load_in_8bit": "model.load_in_4bit",
        "max_lora_rank": "lora.r",
        "max_num_seqs": "trainer.generation_batch_size",
        "max_seq_length": "model.max_seq_length",
        "model_name": "model.name",
        "name": "model.name",
        "random_state": "seed",
        "revision": "model.revision",
        "trust_remote_code": "model.trust_remote_code",
        "unsloth_vllm_standby": "trainer.vllm_enable_sleep_mode",
        "use_bitsandbytes": "model.load_in_4bit",
        "use_gradient_checkpointing": "trainer.gradient_checkpointing",
        "vllm": "vllm",
    },
    "vllm": {
        "enable_sleep_mode": "trainer.vllm_enable_sleep_mode",
        "gpu_memory_utilization": "trainer.vllm_gpu_memory_utilization",
        "kv_cache_memory_bytes": "trainer.vllm_gpu_memory_utilization",
        "lora_target_modules": "lora.target_modules",
        "max_lora_rank": "lora.r",
        "max_model_len": "trainer.vllm_max_model_length",
        "max_num_seqs": "trainer.generation_batch_size",
        "model": "model.name",
        "quantization": "model.load_in_4bit",
        "seed": "seed",
        "trust_remote_code": "model.trust_remote_code",
    },
}
# Section -> keys that the kit always sets itself
FIXED = {
    "unsloth": {
        "config", "enable_lora", "full_finetuning", "gguf_file", "images", "is_vision_model",
        "num_labels", "precision", "use_async",
    },
    "vllm": {
        "dtype", "enable_lora", "generation_config", "logprobs_mode", "max_loras",
        "skip_tokenizer_init", "tensor_parallel_size",
    },
}  # fmt: skip
TABLES = tuple(SET_ELSEWHERE)


def check_table(table: str, names: Iterable[object]) -> list[str]:
    """Return an error message for each key that is not allowed in a section of a run file.

    A key is not allowed if rloo-kit sets the value itself, or if another key of the run file sets
    the value. Unknown keys are reported elsewhere: in the section ``trainer`` by
    ``translate_trainer_arguments``, in ``unsloth`` and ``vllm`` by the library when it loads.

    Args:
        table: The section: ``trainer``, ``unsloth`` or ``vllm``.
        names: The keys in that section.
    """
    errors = []
    for key in map(str, names):
        if place := SET_ELSEWHERE[table].get(key):
            errors.append(f"{table}.{key} cannot be set in a run file: use {place} instead")
        elif key in FIXED.get(table, ()):
            errors.append(f"{table}.{key} is set by rloo-kit itself: leave it out")
    return errors
