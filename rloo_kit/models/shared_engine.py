"""Loading of a model whose weights Unsloth shares with vLLM (``fast_inference``), on a GPU.

If Unsloth cannot share the weights of a model, the model is loaded without vLLM. If the engine is
required, an error is raised instead. The kit recognises some of these models by their config, and
the others by a failed attempt to load them with vLLM.
"""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.machine.cleanup import is_out_of_memory
from rloo_kit.machine.engines import leave_process_groups, may_sleep, without_side_effects
from rloo_kit.machine.hardware import detect_hardware
from rloo_kit.models.adapters import is_hub_4bit
from rloo_kit.models.engine_memory import (
    BATCHED_TOKENS,
    MAX_SEQUENCES,
    engine_memory,
    engine_size,
)
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import ModelShape, read_shape
from rloo_kit.text.wording import first_line

# Variable that lets Unsloth's engine free its memory. The kit sets it to 1 (`environment`)
STANDBY = "UNSLOTH_VLLM_STANDBY"
# Linear layers of the models whose weights Unsloth can read from vLLM, separate or fused
SPLIT = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
JOINED = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a vLLM engine that shares its weights with the trainer."""

    max_seq_length: int  # maximum tokens of prompt and completion together
    load_in_4bit: bool
    max_lora_rank: int
    num_sequences: int  # completions that are sampled at the same time
    share: float | None = None  # fraction of the GPU's memory to use; None computes it
    sleeps: bool = True  # True if the KV cache is freed during the learning step
    required: bool = False  # True to raise an error if the engine cannot start
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of Unsloth's load_vllm
    # names of settings under `vllm:`; they raise an error if the weights can be shared
    not_shared: tuple[str, ...] = ()

    def arguments(self, shape: ModelShape, free: int, card: int) -> dict[str, Any]:
        """Return the arguments of Unsloth's ``from_pretrained`` that concern the engine.

        Args:
            shape: The shape of the model.
            free: Free memory of the GPU before the model is loaded, in bytes.
            card: Total memory of the GPU, in bytes.

        Raises:
            GenerationError: The free memory is too small.
        """
        extra = {"max_num_batched_tokens": BATCHED_TOKENS} | self.extra
        size = engine_size(
            shape,
            in_4bit=self.load_in_4bit or shape.packed,
            max_rank=self.max_lora_rank,
            num_sequences=self.num_sequences,
            max_length=self.max_seq_length,
            batched_tokens=extra["max_num_batched_tokens"],
        )
        found = engine_memory(size, free, sleeps=self.sleeps, card=card, share=self.share)
        share = self.share or found.share(card)
        return {
            "fast_inference": True,
            "max_lora_rank": self.max_lora_rank,
            # Unsloth multiplies this by the free memory, but vLLM by the total memory
            "gpu_memory_utilization": min(1.0, share * card / free),
            "max_num_seqs": min(self.num_sequences, MAX_SEQUENCES),
            **extra,
        }


def load_shared(
    load: Callable[..., tuple[Any, Any]],
    source: str,
    engine: EngineSettings,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """Load a model together with a vLLM engine that shares its weights, if Unsloth supports this.

    Args:
        load: Unsloth's ``from_pretrained``. It is called with the arguments of the engine, or
            without arguments to load the model alone.
        source: The model's hub name or folder.
        engine: Settings of the engine.
        trust_remote_code: True to run code that comes with the model; the weights are then not
            shared.

    Returns:
        The model and its tokenizer. If the weights are not shared,
        ``notes_of(model).why_not_shared`` has the reason in one line.

    Raises:
        GenerationError: ``engine.required`` is true, but the weights cannot be shared or the engine
            cannot start.
        ConfigError: The weights can be shared, but ``engine.not_shared`` names settings that only
            an engine with its own weights can use.
        Exception: The hub returned an error, or the network failed.
    """
    import torch

    loaded: Any = None
    shape = read_shape(source, trust_remote_code=trust_remote_code)
    if not engine.load_in_4bit and is_hub_4bit(source):
        shape = replace(shape, packed=False)  # Unsloth loads the 16-bit original
    reason = why_not_shared(shape, trust_remote_code=trust_remote_code)
    if reason is None:
        for name in engine.not_shared:
            raise ConfigError(
                f"vllm.{name} is for an engine with its own copy of the weights, but Unsloth "
                "shares them with vLLM here: write it under `unsloth:` if Unsloth has this "
                "setting, or set model.backend to transformers"
            )
        loaded, reason = _load_with_engine(load, shape, engine)
        if reason is None:
            return loaded
    if engine.required:
        raise GenerationError(reason)
    if loaded is None:
        gc.collect()  # frees the memory of the failed load
        torch.cuda.empty_cache()
        loaded = load()
    notes_of(loaded[0]).why_not_shared = reason
    return loaded


def _load_with_engine(
    load: Callable[..., tuple[Any, Any]], shape: ModelShape, engine: EngineSettings
) -> tuple[Any, str | None]:
    """Load a model together with a vLLM engine.

    Returns:
        A pair. The first element is the model with its tokenizer, or None if loading failed. The
        second element is the reason why no engine shares the weights, or None if an engine shares
        them.
    """
    import torch
    from accelerate.utils import patch_environment

    # True if several processes train, or another engine has started process groups
    has_groups = torch.distributed.is_initialized()
    # An earlier engine of this process may have left memory that vLLM cannot free. For models with
    # a vision part `load_vllm` of unsloth_zoo turns the sleep mode off
    engine = replace(engine, sleeps=engine.sleeps and not shape.has_vision and may_sleep())
    hardware = detect_hardware()
    try:
        arguments = engine.arguments(shape, hardware.free_memory, hardware.total_memory)
        standby = {STANDBY: "1" if engine.sleeps else "0"}
        with patch_environment(**standby), without_side_effects():
            loaded = load(**arguments)
    except Exception as exc:  # Unsloth raises errors of many classes
        if not has_groups:
            leave_process_groups()
        if _is_failed_download(exc):
            raise
        is_ours = isinstance(exc, GenerationError)
        return None, str(exc) if is_ours else f"Unsloth: {why_no_start(exc)}"
    # Unsloth may load without vLLM and only print the reason
    if getattr(loaded[0], "vllm_engine", None) is not None:
        notes_of(loaded[0]).shared_engine = engine
        return loaded, None
    reason = "Unsloth loaded the model without vLLM"
    if engine.required:
        reason += ": set trainer.generation: transformers, or fast_inference to 'auto'"
    return loaded, reason


def why_not_shared(shape: ModelShape, *, trust_remote_code: bool = False) -> str | None:
    """Return the reason why Unsloth cannot share a model's weights with vLLM; None if it can."""
    if trust_remote_code:
        return "Unsloth's fast inference does not run code that comes with a model"
    names = {linear.name for linear in shape.linears}
    if names >= SPLIT or names >= JOINED:
        return None
    return (
        f"Unsloth can share weights with vLLM only for dense models with Llama's layers, but this "
        f"model has the layers {', '.join(sorted(names)[:6])}"
    )


def _is_failed_download(exc: BaseException | None) -> bool:
    """Return True if an error means that the hub or the network failed.

    A file that is missing on the hub does not count, because perhaps only vLLM reads it. Unsloth
    replaces some errors by a RuntimeError with the same text, so the original errors
    (``__cause__``, ``__context__``) are examined too.
    """
    from httpx import TransportError
    from huggingface_hub import errors

    while exc is not None:
        is_missing = isinstance(exc, errors.EntryNotFoundError)
        if isinstance(exc, (errors.HfHubHTTPError, TransportError)) and not is_missing:
            return True
        before = exc.__context__
        exc = exc.__cause__ or (before if str(before) in str(exc) else None)
    return False


def why_no_start(exc: Exception) -> str:
    """Return one sentence that says why vLLM could not start and what to change.

    Args:
        exc: The error that vLLM or Unsloth raised.
    """
    text = str(exc)
    for mark in ("Value error, ", "Original error: "):  # pydantic's and Unsloth's, in a later line
        text = text.partition(mark)[2] or text
    text = first_line(ValueError(text) if text else exc)
    low = text.lower()
    remedy = "set trainer.generation: transformers"
    if "expandable" in low:
        # Unsloth sets the variable when it is imported before `setup` has set the others
        remedy = (
            "restart, call rk.setup() before unsloth is imported, and leave "
            "expandable_segments:True out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )
    elif re.search("vllm-bnb-plugin|(quantization method:|load format) `?bitsandbytes", low):
        remedy = "pip install vllm-bnb-plugin (vLLM 0.28 and later need it for 4-bit weights)"
    elif "error in memory profiling" in low:
        remedy = f"close other programs on the GPU and try again, or {remedy}"
    elif is_out_of_memory(exc) or "memory" in low:  # vLLM's own check is a ValueError
        remedy = f"lower model.max_seq_length or trainer.per_device_train_batch_size, or {remedy}"
    return f"vLLM cannot start ({type(exc).__name__}: {text}): {remedy}"
