"""Further fields of ``lora:`` in a run file, in addition to the four usual ones.

Allowed is every field of the installed PEFT's ``LoraConfig`` that the base, the samplers and an
export can follow. PEFT is not imported.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_kit.text.wording import format_value

_OTHER_BASE = "but sampler, reference and export use the base without it: leave it out"
_NO_START = "for a start of the adapter that changes the base: leave it out"
_NO_ENGINE = "for a training or an engine that is not used here: leave it out"
# Fields that a part of the kit cannot follow -> why
REFUSED: dict[str, str] = {
    "alora_invocation_tokens": f"for an adapter that starts within a prompt, {_OTHER_BASE}",
    "layer_replication": f"for layers that are repeated, {_OTHER_BASE}",
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config", "loftq_config"), _NO_START),
    **dict.fromkeys(
        ("arrow_config", "megatron_config", "megatron_core", "runtime_config", "use_bdlora"),
        _NO_ENGINE,
    ),
}
# Initialisations of an adapter that leave the base unchanged
STARTS = (True, False, "gaussian", "orthogonal")
# Fields of adapters that vLLM cannot load
NOT_BY_VLLM = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias",
    "trainable_token_indices", "target_parameters",
)  # fmt: skip


@functools.cache
def lora_fields() -> frozenset[str]:
    """Return the names of the fields of ``LoraConfig``, read from its source."""
    package = importlib.util.find_spec("peft")
    places = (package and package.submodule_search_locations) or ()
    for place in places:
        text = (Path(place) / "tuners" / "lora" / "config.py").read_text(encoding="utf-8")
        for kind in ast.parse(text).body:
            if isinstance(kind, ast.ClassDef) and kind.name == "LoraConfig":
                named = (one.target for one in kind.body if isinstance(one, ast.AnnAssign))
                return frozenset(one.id for one in named if isinstance(one, ast.Name))
    return frozenset()


def check_lora(settings: Mapping[str, Any], section: str = "") -> list[str]:
    """Return the errors in fields of ``LoraConfig``, a sentence each.

    ``section``, such as ``lora.``, is put before their names.
    """
    errors = [f"{section}{name} is {REFUSED[name]}" for name in settings if name in REFUSED]
    start = settings.get("init_lora_weights", True)
    if start not in STARTS:
        names = ", ".join(str(one).lower() for one in STARTS)
        errors.append(
            f"{section}init_lora_weights is {format_value(start)}, which changes the base, but "
            f"sampler, reference and export use the unchanged base: give one of {names}"
        )
    return errors


def why_not_vllm_takes(settings: Mapping[str, Any]) -> str | None:
    """Return why vLLM cannot load an adapter with these fields of ``LoraConfig``, or None."""
    name = next((name for name in NOT_BY_VLLM if settings.get(name)), None)
    if name is None and settings.get("bias", "none") != "none":
        name = "bias"
    return name and f"vLLM does not accept adapters with {name}"
