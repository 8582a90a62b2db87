"""What the tables ``unsloth:`` and ``vllm:`` of a run file may hold.

Names are read from the installed sources; neither library is imported.
"""

import ast
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloo_kit.config.values import check_keys

TABLES = ("unsloth", "vllm")
LOADERS = (
    ("unsloth", "models/loader.py", "FastLanguageModel.from_pretrained"),
    ("unsloth", "models/llama.py", "FastLlamaModel.from_pretrained"),
)
SHARED_ENGINE = ("unsloth_zoo", "vllm_utils.py", "load_vllm")
ENGINE_FIELDS = ("vllm", "engine/arg_utils.py", "EngineArgs")

# Names that another key of the run file sets
SET_ELSEWHERE: dict[str, dict[str, str]] = {
    "unsloth": {
        "fast_inference": "trainer.generation",
        "float8_kv_cache": "model.fp8_kv_cache",
        "fp8_mode": "model.load_in_fp8",
        "gpu_memory_utilization": "trainer.vllm_gpu_memory_utilization",
        "load_in_4bit": "model.load_in_4bit",
        "load_in_fp8": "model.load_in_fp8",
        "max_lora_rank": "lora.r",
        "max_num_seqs": "trainer.generation_batch_size",
        "max_seq_length": "model.max_seq_length",
        "model_name": "model.name",
        "random_state": "seed",
        "trust_remote_code": "model.trust_remote_code",
        "unsloth_vllm_standby": "trainer.vllm_enable_sleep_mode",
        "use_bitsandbytes": "model.load_in_4bit",
        "use_gradient_checkpointing": "trainer.gradient_checkpointing",
    },
    "vllm": {
        "enable_sleep_mode": "trainer.vllm_enable_sleep_mode",
        "gpu_memory_utilization": "trainer.vllm_gpu_memory_utilization",
        "kv_cache_dtype": "model.fp8_kv_cache",
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
# Names that the kit sets itself, whatever the run file says
FIXED: dict[str, frozenset[str]] = {
    "unsloth": frozenset(
        {
            "config", "enable_lora", "from_flax", "from_tf", "full_finetuning", "gguf_file",
            "is_vision_model", "model_patcher", "num_labels", "on_model_resolved", "return_args",
            "state_dict", "training", "use_async", "use_engine", "use_safetensors",
        }
    ),
    "vllm": frozenset(
        {
            "dtype", "enable_lora", "generation_config", "logprobs_mode", "max_loras",
            "skip_tokenizer_init", "tensor_parallel_size",
        }
    ),
}  # fmt: skip


def check_table(table: str, names: Iterable[object]) -> list[str]:
    """Return what is wrong with the keys of ``unsloth:`` or ``vllm:``.

    Args:
        table: ``unsloth`` or ``vllm``; its names are checked where the library is installed.
        names: Keys of the run file.
    """
    errors = []
    for key in map(str, names):
        if place := SET_ELSEWHERE[table].get(key):
            errors.append(f"{table}.{key} is {place} in a run file: write it there")
        elif key in FIXED[table]:
            errors.append(f"{table}.{key} is set by rloo-kit itself: leave it out")
        elif known_names(table):
            known = known_names(table) - FIXED[table] - set(SET_ELSEWHERE[table])
            errors += check_keys(table, [key], known)
    return errors


@cache
def known_names(table: str) -> frozenset[str]:
    """Return the names that a table may hold; empty where the library is not installed.

    Args:
        table: ``unsloth`` or ``vllm``.
    """
    if table == "vllm":
        return _names(*ENGINE_FIELDS)
    return frozenset().union(*(_names(*place) for place in (*LOADERS, SHARED_ENGINE)))


@cache
def shared_engine_names() -> frozenset[str]:
    """Return the names that only the start of Unsloth's shared engine takes."""
    return _names(*SHARED_ENGINE).difference(*(_names(*place) for place in LOADERS))


def _names(package: str, file: str, qualified: str) -> frozenset[str]:
    """Return the fields of a class, or a function's parameters and what it takes from kwargs."""
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    source = next((Path(one) / file for one in folders if (Path(one) / file).is_file()), None)
    if source is None:
        return frozenset()
    node: Any = ast.parse(source.read_text("utf-8"))
    for part in qualified.split("."):
        node = next((one for one in node.body if getattr(one, "name", "") == part), None)
        if node is None:  # another version, which has it elsewhere: the load checks the names
            return frozenset()
    if isinstance(node, ast.ClassDef):
        fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
        return frozenset(one.id for one in fields if isinstance(one, ast.Name))
    named = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    return frozenset(named | {name for one in ast.walk(node) if (name := _taken(one))})


def _taken(node: ast.AST) -> str:
    """Return NAME of ``kwargs.get("NAME", ...)`` and ``kwargs.pop("NAME", ...)``, else ""."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get" | "pop"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return name
    return ""
