"""LoRA adapters: their folders in PEFT's format, and the adapter of a loaded model."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.config.lora import NOT_BY_VLLM
from rloo_kit.config.run_file import RunConfig
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.output_folder import read_json
from rloo_kit.text.wording import first_line, format_value, where_missing
from rloo_kit.types import Model

if TYPE_CHECKING:
    import torch

TO_GIVE = "give a model's folder, a .gguf file or a hub name"
# Model files that example run files of the kit use -> how to get them
FETCHED = {"SmolLM2-135M-Instruct.Q4_1.gguf": "fetch it with python scripts/fetch_smollm2.py"}
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ASSETS = Path(__file__).parents[1] / "assets"
# Names of the embedded models -> their folders
EMBEDDED = {name: ASSETS / name for name in ("tiny-thinker", "tiny-caller")}


def adapter_in(name: str | Path) -> Path | None:
    """Return the path of a folder if it contains an adapter and no whole model, otherwise None."""
    folder = Path(os.path.expanduser(name))
    # os.path, because it accepts names that are not valid paths
    found = os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / "config.json")
    return folder if found else None


def is_path(name: str) -> bool:
    """Return True if a model's name can only be a path, not a hub name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_path(name: str, base: Path = Path()) -> None:
    """Check that a model exists if its name can only be a path, not a hub name.

    Args:
        name: The name of the model.
        base: A folder from which a relative path may start, besides the working directory.

    Raises:
        ModelError: The path does not exist.
    """
    path = Path(os.path.expanduser(name))
    exists = os.path.exists(path) or os.path.exists(base / path)
    if not exists and (is_path(name) or path.suffix == ".gguf"):
        remedy = FETCHED.get(path.name, TO_GIVE)
        raise ModelError(f"model {name!r} {where_missing(name, base)}; {remedy}")


def base_of(adapter: Path) -> str:
    """Return the base model of an adapter: the name of an embedded model, a path, or a hub name.

    A relative path starts from the working directory, as in PEFT. If it does not exist there, it
    starts from the adapter's folder.

    Raises:
        ModelError: The adapter does not name its base, or the base is missing.
    """
    base = str(_config_of(adapter).get("base_model_name_or_path") or "")
    path = Path(base)
    if path.parts[-3:-1] == ("rloo_kit", "assets") and path.name in EMBEDDED:
        return path.name  # valid in any installation of the kit
    found = next((one for one in (path.expanduser(), adapter / path) if one.exists()), None)
    if not base or (found is None and is_path(base)):
        raise ModelError(
            f"the adapter in {format_value(str(adapter))} is for the base {format_value(base)}, "
            "which is missing: put the path of the base into base_model_name_or_path of its "
            f"{CONFIG}"
        )
    return base if found is None else str(found)


def revision_of(adapter: Path) -> str | None:
    """Return the hub revision of an adapter's base model.

    It is None if the adapter's config names no revision, or if the base is a path on this machine.
    """
    base = base_of(adapter)
    is_here = base in EMBEDDED or os.path.exists(base)
    return None if is_here else _config_of(adapter).get("revision")


def as_recorded(config: RunConfig, adapter: Path) -> RunConfig:
    """Return a run's settings with ``model.name`` set to the hub model that training loaded.

    Unsloth may have replaced the name by that of its own copy, which has different weights. The
    adapter's config records the name that was loaded. The returned settings also turn
    ``use_exact_model_name`` on, unless the user has set it, so that Unsloth does not replace the
    recorded name by that of yet another copy.

    The settings are returned unchanged if either name is not a hub name. They are also unchanged
    with ``load_in_fp8``. Unsloth then finds its FP8 copy by the original name, as in training, and
    does not quantise this copy a second time.
    """
    name = str((read_json(adapter / CONFIG) or {}).get("base_model_name_or_path"))
    in_fp8 = config.unsloth.get("load_in_fp8")
    if in_fp8 or not _is_on_hub(config.model.name) or not _is_on_hub(name):
        return config
    unsloth = {"use_exact_model_name": True} | config.unsloth
    return replace(config, model=replace(config.model, name=name), unsloth=unsloth)


def is_hub_4bit(name: str) -> bool:
    """Return True for a hub name with the ending ``-bnb-4bit``.

    Unsloth also knows the 16-bit original of such a model.
    """
    return _is_on_hub(name) and name.lower().endswith("-bnb-4bit")


def _is_on_hub(name: str) -> bool:
    """Return True if a model's name can only be a hub name (owner/name), not a path."""
    return "/" in name and not is_path(name) and not os.path.exists(name)


def base_name(name: str) -> str:
    """Return the name of the base model if ``name`` is an adapter's folder, otherwise ``name``."""
    adapter = adapter_in(name)
    try:
        return name if adapter is None else base_of(adapter)
    except ModelError:  # loading reports it
        return name


def lora_settings(adapter: Path, given: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings of an adapter that will be trained further, as ``LoraSection`` fields.

    Args:
        adapter: The adapter's folder.
        given: The user's LoRA settings, under PEFT's names; None for a setting that is not given.
        section: The prefix of these settings in error messages, such as ``lora.``.

    Raises:
        ConfigError: A given setting differs from the adapter's.
        ModelError: The folder has no LoRA adapter of a language model, or cannot be read.
    """
    config = _config_of(adapter)
    where = format_value(str(adapter))
    kind = config.get("peft_type")
    task = config.get("task_type")
    if kind != "LORA" or task not in (None, "CAUSAL_LM"):
        raise ModelError(
            f"the adapter in {where} has peft_type {format_value(kind)} and task_type {task}, but "
            "only LoRA adapters for CAUSAL_LM can be trained further: merge the adapter into its "
            "base, and use the merged model"
        )
    found = {
        "r": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "lora_dropout": config.get("lora_dropout", 0.0),
        "target_modules": _sorted_names(config.get("target_modules") or ()),
    }
    has = config | found
    for name, value in given.items():
        both = [value, has.get(name)]
        if name in ("target_modules", "exclude_modules"):  # PEFT stores these lists in any order
            both = [_sorted_names(one or ()) for one in both]
        if value is not None and both[0] != both[1]:
            raise ConfigError(
                f"{section}{name} is {format_value(value)}, but the adapter in {where} has "
                f"{format_value(has.get(name))}: leave {section}{name} out, because the settings "
                "of an adapter cannot change"
            )
    return found | {"others": {name: config[name] for name in NOT_BY_VLLM if config.get(name)}}


def _sorted_names(modules: str | Iterable[str]) -> list[str]:
    """Return the names of layers, sorted; for a pattern, return a list with only the pattern."""
    if isinstance(modules, str) or not isinstance(modules, Iterable):  # the latter is an error
        return [modules]
    return sorted(map(str, modules))


def _config_of(adapter: Path) -> dict[str, Any]:
    """Return PEFT's config from an adapter's folder.

    Raises:
        ModelError: The config cannot be read, or its ``target_modules`` is not valid.
    """
    try:
        config = json.loads((adapter / CONFIG).read_bytes())
        layers = {**config}.get("target_modules")
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise ModelError(
            f"{format_value(str(adapter / CONFIG))} cannot be read ({first_line(exc)}): save the "
            "adapter again"
        ) from exc
    if not isinstance(layers, str | list | None):
        raise ModelError(
            f"target_modules in {format_value(str(adapter / CONFIG))} is {format_value(layers)}: "
            "save the adapter again"
        )
    return config


# --- the adapter of a model ----------------------------------------------------------------------


def drop_old_reference(model: Model) -> None:
    """Delete the reference adapter ``ref`` of an earlier trainer, so that TRL makes a new copy."""
    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")


@contextlib.contextmanager
def without_engine(model: Model) -> Iterator[None]:
    """Hide the vLLM engine that Unsloth loaded with a model, during a ``with`` block.

    TRL's trainer must be created in such a block. If the trainer found the engine, Unsloth's patch
    of TRL would make it sample with the engine, and TRL's code for vLLM would set environment
    variables of torch.distributed and put the engine to sleep.
    """
    modules = model.modules() if hasattr(model, "modules") else ()  # the model may be a name
    held = [(vars(m), vars(m).pop("vllm_engine")) for m in modules if "vllm_engine" in vars(m)]
    try:
        yield
    finally:
        for attributes, engine in held:
            attributes["vllm_engine"] = engine


def adapter_tensors(model: Model, name: str = "default") -> "dict[str, torch.Tensor]":
    """Return the tensors of an adapter without copying them, by their names in PEFT's files.

    Args:
        model: The PEFT model.
        name: The name of the adapter.
    """
    from peft import get_peft_model_state_dict

    mine = {n: p.detach() for n, p in model.named_parameters() if f".{name}." in f"{n}."}
    return get_peft_model_state_dict(model, mine, adapter_name=name, save_embedding_layers=False)


def write_adapter(model: Model, name: str, folder: Path, dtype: Any = None) -> None:
    """Write an adapter to a folder in PEFT's format.

    Args:
        model: The PEFT model.
        name: The name of the adapter.
        folder: The folder to write to.
        dtype: The dtype of the written tensors; None keeps theirs.
    """
    from safetensors.torch import save_file

    tensors = {
        key: tensor.to("cpu", dtype, copy=True).contiguous()
        for key, tensor in adapter_tensors(model, name).items()
    }
    model.peft_config[name].save_pretrained(str(folder))
    save_file(tensors, folder / WEIGHTS)


def trained_parameters(model: Model) -> "dict[str, torch.nn.Parameter]":
    """Return the parameters of a model that require a gradient, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def adapter_values(model: Model) -> "dict[str, torch.Tensor]":
    """Return copies of an adapter's trained parameters; {} for a model without an adapter."""
    if not hasattr(model, "peft_config"):
        return {}
    return {name: one.detach().clone() for name, one in trained_parameters(model).items()}


def restore_adapter(model: Model, adapter: "dict[str, torch.Tensor]") -> None:
    """Restore an adapter in float32 after TRL has cast and rounded it to bf16.

    TRL casts the adapter of a 4-bit model. bf16 has 8 bits of mantissa, so an update smaller than
    1/256 of a weight would be lost. At learning rates of 1e-6 to 1e-5 nearly all updates are
    smaller. Fully trained layers (``modules_to_save``) keep their dtype, because sampling computes
    in the dtype of the base.

    Args:
        model: The model after TRL has prepared it.
        adapter: The result of ``adapter_values``, called before TRL prepared the model.
    """
    import torch

    for name, parameter in model.named_parameters():
        is_lora = parameter.requires_grad and "lora_" in name
        if name in adapter or is_lora:  # an adapter that TRL has just created is not in `adapter`
            values: Any = adapter.get(name, parameter.data)
            parameter.data = values.to(parameter.device, torch.float32 if is_lora else None)


def complete_reference(model: Model) -> None:
    """Complete ``ref``, TRL's frozen copy of an adapter, with the parameters that TRL leaves out.

    TRL copies only the parameters with ``.default.`` in their names. It leaves out trained tokens
    (``trainable_token_indices``) and LoRA matrices of an embedding, because the names of these end
    with ``.default``. If the model has no adapter ``ref``, nothing is done.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith(".ref"):
            parameter.data.copy_(parameters[name.removesuffix("ref") + "default"].data)


def starts_at_base(adapter: "dict[str, torch.Tensor]") -> bool:
    """Return True if an adapter has no effect yet, so that the policy equals its base model.

    That is the case if it consists of LoRA matrices only, and all of its B matrices are 0.

    Args:
        adapter: The result of ``adapter_values``.
    """
    others = {name: values for name, values in adapter.items() if "lora_A" not in name}
    return bool(others) and all("lora_B" in name and not v.any() for name, v in others.items())
