"""Check the less common fields of ``lora:`` in a run file.

Every field of ``LoraConfig`` in the installed PEFT is allowed, unless sampling, the reference model
or an export cannot support it. PEFT is not imported.
"""

import re
from collections.abc import Mapping, Set
from typing import Any

from rloo_kit.config.sources import fields_of
from rloo_kit.text.wording import format_value

_OTHER_BASE = "but sampler, reference and export do not support it: leave it out"
_NO_START = "for an initialisation that would change the base weights: leave it out"
_NO_ENGINE = "for a kind of training or an engine that rloo-kit does not use: leave it out"
# Field that the kit cannot support -> the end of the message that refuses it
REFUSED: dict[str, str] = {
    "alora_invocation_tokens": f"for an adapter that becomes active in the prompt, {_OTHER_BASE}",
    "layer_replication": f"for layers that are used more than once, {_OTHER_BASE}",
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config", "loftq_config"), _NO_START),
    **dict.fromkeys(
        ("arrow_config", "megatron_config", "megatron_core", "runtime_config", "use_bdlora"),
        _NO_ENGINE,
    ),
}
# Values of `init_lora_weights` that leave the base weights unchanged
STARTS = (True, False, "gaussian", "orthogonal")
# Fields of adapters that vLLM cannot load
NOT_BY_VLLM = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias",
    "trainable_token_indices", "target_parameters",
)  # fmt: skip


def lora_fields() -> Set[str]:
    """Return the names of the fields that PEFT's ``LoraConfig`` itself defines."""
    return fields_of("peft", "tuners/lora/config.py", "LoraConfig").keys()


def check_lora(settings: Mapping[str, Any], section: str = "") -> list[str]:
    """Return one error message for each field of ``LoraConfig`` that the kit cannot support.

    Args:
        settings: Fields of ``LoraConfig``, by name.
        section: Prefix for the field names in the messages, such as ``lora.``.
    """
    errors = [f"{section}{name} is {REFUSED[name]}" for name in settings if name in REFUSED]
    start = settings.get("init_lora_weights", True)
    if start not in STARTS:
        names = ", ".join(str(one).lower() for one in STARTS)
        errors.append(
            f"{section}init_lora_weights is {format_value(start)}, which changes the base weights, "
            f"but sampler, reference and export use the unchanged base: choose one of {names}"
        )
    for name in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        given = settings.get(name)
        patterns = given if isinstance(given, Mapping) else [given]
        for text in [one for one in patterns if isinstance(one, str)]:
            try:
                re.compile(text)
            except (re.error, OverflowError, RecursionError) as exc:
                errors.append(
                    f"{section}{name} is {format_value(text)}, which is not a valid regular "
                    f"expression ({exc}): write one such as .*_proj, or a name"
                )
    # PEFT accepts `bias` only if the model has a single adapter, but TRL adds the adapter `ref`
    if settings.get("bias", "none") != "none":
        errors.append(f"{section}bias is for training biases of the base model, {_OTHER_BASE}")
    return errors


def why_not_vllm_takes(settings: Mapping[str, Any]) -> str | None:
    """Return why vLLM cannot load an adapter with these fields of ``LoraConfig``.

    Return None if vLLM can load it.
    """
    name = next((name for name in NOT_BY_VLLM if settings.get(name)), None)
    if name is None and settings.get("bias", "none") != "none":
        name = "bias"
    return name and f"vLLM does not accept adapters with {name}"
