"""Loading of models, LoRA adapters and their saving; the only module that constructs models."""

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_kit.config.engine_tables import SHARED_ENGINE_NAMES
from rloo_kit.config.lora import check_lora, lora_fields
from rloo_kit.config.run_file import LoraSection
from rloo_kit.config.values import suggest
from rloo_kit.errors import ConfigError, KitError, ModelError
from rloo_kit.machine.cleanup import add_to_session, is_out_of_memory
from rloo_kit.machine.environment import Environment, quiet, setup
from rloo_kit.machine.hardware import why_not_vllm
from rloo_kit.machine.processes import num_processes, uses_fsdp
from rloo_kit.models.adapters import (
    EMBEDDED,
    TO_GIVE,
    WEIGHTS,
    adapter_in,
    base_of,
    check_path,
    lora_settings,
    revision_of,
)
from rloo_kit.models.engine_memory import reserved_rank
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import auto_class
from rloo_kit.models.shared_engine import EngineSettings, load_shared
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.text.wording import first_line, format_errors, format_value
from rloo_kit.types import Model, Tokenizer

# Files of a hub model that are not downloaded
OTHER_WEIGHTS = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]
PREQUANTIZED = ("bnb-4bit", "bnb-8bit", "-awq", "-gptq", "-fp8")


def load_model(
    name: str | Path,
    *,
    max_seq_length: int = 1024,
    load_in_4bit: bool = True,
    backend: str = "auto",
    precision: str = "auto",
    fast_inference: bool | str = False,
    images: bool = False,
    max_lora_rank: int = 64,
    num_sequences: int = 64,
    trust_remote_code: bool = False,
    revision: str | None = None,
    chat_template: str | Path | None = None,
    vllm: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer, or with ``images`` its processor, for ``attach_lora``.

    Args:
        name: A hub name, a folder, a .gguf file, an embedded model
            (``tiny-thinker``, ``tiny-caller``), or an adapter to train further.
        max_seq_length: Longest prompt plus completion, in tokens.
        load_in_4bit: Load NF4 weights (bitsandbytes) with double quantisation.
        backend: ``auto`` (Unsloth if it can start), ``unsloth`` or ``transformers``.
        precision: ``bf16``, ``fp16``, ``fp32``, or ``auto``: the first that the device computes.
        fast_inference: On a GPU with Unsloth and vLLM, share one copy of the base between training
            and vLLM; ``auto``: load without vLLM if Unsloth cannot share it. Ignored elsewhere.
        images: Load a vision model and its processor, for prompts with images.
        max_lora_rank: Largest LoRA rank that the engine of ``fast_inference`` must serve.
        num_sequences: Completions that the engine of ``fast_inference`` samples at a time.
        trust_remote_code: Run code that comes with the model; only for a source you trust.
        revision: Branch, tag or commit of a hub name.
        chat_template: A file with a chat template (Jinja) to use in place of the model's own.
        vllm: Further ``EngineArgs`` for a vLLM engine that starts later with its own copy of the
            weights; an error if ``fast_inference`` shares the weights.
        **kwargs: Arguments of ``from_pretrained`` of Unsloth or transformers. For the engine of
            ``fast_inference`` also ``gpu_memory_utilization`` and ``unsloth_vllm_standby``.

    Raises:
        ModelError: The model is missing, not a model or not a vision model, too large, without
            safetensors, or needs code that is not trusted.
        ConfigError: A setting cannot be obeyed here.
        GenerationError: The shared engine cannot start.
    """
    environment = setup(backend)
    source, adapter, hub = _source_of(name, revision)
    if adapter is not None:
        if _has_tokenizer(adapter):  # its chat template is trained with it
            kwargs.setdefault("tokenizer_name", str(adapter))
        max_lora_rank = max(lora_settings(adapter, {})["r"], max_lora_rank)
    with _as_model_errors(str(name)):
        model_class, environment = _choose_class(environment, source, images, trust_remote_code)
    why_not_shared = _why_not_shared(environment, fast_inference, images)
    given = _taken_from(kwargs, fast_inference, why_not_shared)
    given["not_shared"] = tuple(vllm or ())
    rank = reserved_rank(max_lora_rank)
    engine = EngineSettings(max_seq_length, load_in_4bit, rank, num_sequences, **given)
    kwargs = {"dtype": _dtype(precision, environment)} | kwargs
    kwargs |= {"trust_remote_code": trust_remote_code, "use_safetensors": True}
    kwargs |= {"max_seq_length": max_seq_length, "load_in_4bit": load_in_4bit}
    load_base = _load_unsloth if environment.backend == "unsloth" else _load_transformers
    load = functools.partial(load_base, source, model_class, images, **kwargs)
    if why_not_shared is None:
        load = functools.partial(load_shared, load, source, engine, trust_remote_code)
    with _as_model_errors(str(name)), _progress_bars(shown=not Path(source).is_dir()), quiet():
        model, processor = load()
        tokenizer = _prepare(model, processor)
    _set_template((tokenizer, processor), chat_template)
    vars(notes_of(model)).update(
        backend=environment.backend,
        vllm=dict(vllm or {}),
        max_seq_length=max_seq_length,
        trust_remote_code=trust_remote_code,
        hub=hub,
    )
    add_to_session(model)
    model = model if adapter is None else _with_adapter(model, adapter)
    return model, processor if images else tokenizer


def _source_of(
    name: str | Path, revision: str | None
) -> tuple[str, Path | None, tuple[str, str] | None]:
    """Return the base (``find_model``), the adapter, and the base's hub name and revision."""
    source = find_model(name, revision)
    adapter = adapter_in(source)
    if adapter is not None:
        name, revision = base_of(adapter), revision_of(adapter)
        source = find_model(name, revision)
    return source, adapter, None if revision is None else (str(name), revision)


def _set_template(processors: Iterable[Any], file: str | Path | None) -> None:
    """Set the chat template in a file for a tokenizer and its processor."""
    if file is None:
        return
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as exc:
        raise ConfigError(
            f"chat_template {format_value(str(file))} cannot be read ({first_line(exc)}): give a "
            "file that holds a Jinja template"
        ) from exc
    for processor in processors:
        processor.chat_template = text


def load_tokenizer(
    name: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    chat_template: str | Path | None = None,
) -> Any:
    """Load the tokenizer of a model without its weights; arguments are those of ``load_model``.

    Raises:
        ModelError: As ``load_model`` does.
    """
    from transformers import AutoTokenizer

    with _as_model_errors(str(name)), quiet():
        if str(name).endswith(".gguf"):
            from rloo_kit.models.gguf import read_tokenizer

            tokenizer = read_tokenizer(Path(name))
        else:
            source = find_model(name, revision)
            adapter = adapter_in(source)
            if adapter is not None and not _has_tokenizer(adapter):
                source = find_model(base_of(adapter), revision_of(adapter))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    _set_template([tokenizer], chat_template)
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def _taken_from(
    kwargs: dict[str, Any], fast_inference: bool | str, why_not_shared: str | None
) -> dict[str, Any]:
    """Move arguments of a shared engine out of ``kwargs``; return fields of ``EngineSettings``."""
    if kwargs.get("load_in_8bit"):
        raise ConfigError(
            "load_in_8bit is true, but a base is in 4 or 16 bit here: leave it out, and set "
            "load_in_4bit"
        )
    extra = {name: kwargs.pop(name) for name in SHARED_ENGINE_NAMES & set(kwargs)}
    if extra and why_not_shared:
        raise ConfigError(
            f"unsloth.{next(iter(extra))} is for weights that Unsloth shares with vLLM, but "
            f"{why_not_shared}: leave it out"
        )
    return {
        "share": kwargs.pop("gpu_memory_utilization", None),
        "sleeps": kwargs.pop("unsloth_vllm_standby", True),
        "required": fast_inference != "auto" or bool(extra),
        "extra": extra,
    }


def _why_not_shared(
    environment: Environment, fast_inference: bool | str, images: bool
) -> str | None:
    """Return why the weights are not shared with vLLM; None if Unsloth shall share them."""
    if environment.hardware.device == "cpu":
        return "this machine has no GPU"
    if environment.backend != "unsloth":
        return f"transformers loads the model ({environment.why_not_unsloth})"
    if not fast_inference:
        return "vLLM was not requested (trainer.generation, fast_inference)"
    return "the prompts have images" if images else why_not_vllm()


def attach_lora(
    model: Model,
    *,
    r: int | None = None,
    lora_alpha: int | None = None,
    lora_dropout: float | None = None,
    target_modules: list[str] | tuple[str, ...] | str | None = None,
    use_gradient_checkpointing: bool | str | None = None,
    seed: int = 42,
    **others: Any,
) -> Any:
    """Return the model with a fresh LoRA adapter named ``default``; only the adapter trains.

    A model that was loaded from an adapter's folder keeps that adapter and its settings.

    Args:
        model: The result of ``load_model``.
        r: Rank; None: 16.
        lora_alpha: The adapter's output is scaled by ``lora_alpha / r``; None: 16.
        lora_dropout: Dropout on the adapter's input, in [0, 1); None: 0.
        target_modules: Names of linear layers, or a regular expression for their full dotted names;
            None: those of the attention and of the MLP; ``all-linear``: all that PEFT finds except
            the LM head.
        use_gradient_checkpointing: True, False, or ``unsloth`` for Unsloth's own variant; None:
            ``unsloth`` on a GPU, and False on a CPU, where recomputing costs time and memory is
            plentiful. Without Unsloth, ``unsloth`` means True.
        seed: Seed of a fresh adapter.
        **others: Further fields of PEFT's ``LoraConfig``.

    Raises:
        ConfigError: No ``target_modules`` are in the model, the model's adapter has other settings,
            or a field is unknown or not supported.
    """
    given = {
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "target_modules": target_modules,
        **others,
    }
    check_lora_config(given)
    notes = notes_of(model)
    if use_gradient_checkpointing is not None:
        notes.gradient_checkpointing = use_gradient_checkpointing
    if notes.adapter is not None and hasattr(model, "peft_config"):
        lora_settings(Path(notes.adapter), given)
        if use_gradient_checkpointing is not None:
            _recompute(model, use_gradient_checkpointing)
        return model
    # defaults are those of a run file's `lora:`
    asked = {name: value for name, value in given.items() if value is not None}
    settings = LoraSection().as_dict() | asked
    settings["target_modules"] = _there(model, settings["target_modules"])
    return _new_adapter(model, settings, use_gradient_checkpointing, seed)


def check_lora_config(settings: dict[str, Any], section: str = "") -> None:
    """Check that PEFT accepts settings of LoRA, and that the kit supports them.

    Args:
        settings: Fields of ``LoraConfig``; None for one that is not given.
        section: Their section of the run file, such as ``lora.``, for errors.

    Raises:
        ConfigError: A field is unknown, or has a value that is refused.
    """
    from peft import LoraConfig

    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in lora_fields():
            raise ConfigError(f"unknown LoRA setting {name!r}{suggest(name, lora_fields())}")
    if errors := check_lora(given, section):
        raise ConfigError(format_errors(errors))
    try:
        LoraConfig(**given)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"PEFT refuses the LoRA settings: {first_line(exc)}") from exc


def _there(model: Model, target_modules: Iterable[str] | str) -> list[str] | str:
    """Return the names that are layers of the model; a pattern is returned as it is.

    Raises:
        ConfigError: No layer has one of the names.
    """
    if target_modules == "all-linear":  # PEFT finds these itself
        return "all-linear"
    names = [name for name, module in model.named_modules() if name and not [*module.children()]]
    if isinstance(target_modules, str):
        if not any(re.fullmatch(target_modules, name) for name in names):
            raise ConfigError(
                f"target_modules {format_value(target_modules)} matches no layer of this model: it "
                f"must match whole names such as {names[0]}"
            )
        return target_modules
    outside = re.compile(_outside_language(model) or "(?!)")
    leaves = {name.rpartition(".")[2] for name in names if not outside.fullmatch(name)}
    if not (targets := [name for name in target_modules if name in leaves]):
        linear = sorted(name for name in leaves if "proj" in name or "fc" in name)
        raise ConfigError(
            f"none of target_modules {sorted(target_modules)} is a layer of this model; its linear "
            f"layers are {', '.join(linear or sorted(leaves))}"
        )
    return targets


def _new_adapter(
    model: Any, settings: dict[str, Any], checkpointing: bool | str | None = None, seed: int = 0
) -> Any:
    """Return the model with a new adapter with these settings of ``LoraConfig``."""
    import torch
    from peft import LoraConfig, get_peft_model

    if checkpointing is None:
        checkpointing = "unsloth" if model.device.type != "cpu" else False
    if notes_of(model).backend == "unsloth":
        from unsloth import FastLanguageModel

        peft_model = FastLanguageModel.get_peft_model(
            model, **settings, use_gradient_checkpointing=checkpointing, random_state=seed
        )
    else:
        torch.manual_seed(seed)
        settings = {"exclude_modules": _outside_language(model)} | settings
        peft_model: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        _recompute(peft_model, checkpointing)
    if hub := notes_of(model).hub:  # the base was loaded from a copy of this revision
        config = peft_model.peft_config["default"]
        config.base_model_name_or_path, config.revision = hub
    return peft_model


def _outside_language(model: Model) -> str | None:
    """Return a pattern of the layers of a vision model outside of its language model.

    PEFT matches it with whole names. Unsloth adapts only the language model by default, too.
    """
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(prefix)}\.).*"


def _recompute(model: Model, checkpointing: bool | str) -> None:
    """Turn gradient checkpointing on or off."""
    if notes_of(model).backend == "unsloth":
        model._unsloth_gradient_checkpointing = checkpointing  # its training step follows this
    elif checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def _with_adapter(model: Model, folder: Path) -> Any:
    """Return the model with the adapter in a folder, ready to train further."""
    from peft import LoraConfig, PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    # The folder's weights go into a fresh adapter, so that Unsloth patches its layers and its
    # config names the loaded base
    try:
        config: Any = LoraConfig.from_pretrained(str(folder))
        defaults = vars(LoraConfig())
        settings = {
            name: value
            for name in defaults.keys() - vars(PeftConfig()).keys()
            if (value := getattr(config, name)) != defaults[name]
        }
        settings |= {"r": config.r, "lora_alpha": config.lora_alpha}  # Unsloth's defaults differ
        if not isinstance(config.target_modules, str):
            settings["target_modules"] = sorted(config.target_modules or ())
        with quiet():
            peft_model = _new_adapter(model, settings)
        found = set_peft_model_state_dict(peft_model, load_file(folder / WEIGHTS))
        lost = [name for name in found.missing_keys if ".default" in name]
        if wrong := [*found.unexpected_keys, *lost]:
            raise ValueError(f"only one of them has {wrong[0]}")
    except Exception as exc:  # missing layers, other shapes and unknown settings raise other errors
        raise ModelError(
            f"the adapter in {format_value(str(folder))} cannot be put on its base to train "
            f"further ({type(exc).__name__}: {first_line(exc)}): check that it was trained on this "
            "model, or try backend: transformers"
        ) from exc
    notes_of(peft_model).adapter = str(folder)
    return peft_model


def save_adapter(
    model: Model,
    tokenizer: Tokenizer,
    folder: str | Path,
    state: dict[str, Any] | None = None,
) -> Path:
    """Write the trained adapter and the tokenizer in PEFT's format, atomically.

    A crash leaves the complete old weights or the complete new ones. If the settings of LoRA have
    changed, the old adapter is kept as ``.NAME.old`` next to the folder until the new one is in
    place. TRL's frozen copy of the adapter (``ref``) is not written.

    Args:
        model: The model with its adapter.
        tokenizer: Its tokenizer, written to the same folder.
        folder: An adapter's folder, or a new one.
        state: The model's tensors by name, if the model itself holds only a part of them.

    Raises:
        ModelError: The folder cannot be written, or holds something other than an adapter.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{str(folder)!r} holds other files than an adapter's: give a new folder, such as "
            f"{str(folder / 'adapter')!r}"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        given = {} if state is None else {"state_dict": state}
        model.save_pretrained(str(partial), selected_adapters=["default"], **given)
        tokenizer.save_pretrained(str(partial))
        _replace_adapter(folder, partial)
    except OSError as exc:
        raise ModelError(
            f"the adapter cannot be written to {str(folder)!r} ({exc}): free some space or choose "
            f"another output_dir"
        ) from exc
    return folder


def _replace_adapter(folder: Path, partial: Path) -> None:
    """Replace an adapter's folder so that a complete adapter exists at any moment."""
    from peft import PeftConfig

    old = folder.with_name(f".{folder.name}.old")
    config_in = PeftConfig.from_pretrained
    if (folder / WEIGHTS).is_file() and config_in(str(folder)) == config_in(str(partial)):
        for file in sorted(partial.iterdir()):  # only one of the adapter's files has changed
            file.replace(folder / file.name)
        partial.rmdir()
        return
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def keep_trainable_layout(model: Model) -> None:
    """Keep bitsandbytes' 4-bit layers in the layout whose backward pass is correct."""
    # On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a Linear4bit at the first forward in eval
    # mode, and every later backward uses a kernel without autograd.
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


# --- sources -------------------------------------------------------------------------------------


def find_model(name: str | Path, revision: str | None = None) -> str:
    """Return the hub name or folder of a model; a .gguf file is converted first.

    With a ``revision`` it is the folder of a downloaded copy, since Unsloth and vLLM load a name
    from its main branch.

    Raises:
        ModelError: There is no such model.
        ConfigError: A revision is given for a model that is not on the hub.
    """
    if revision is not None and (name in EMBEDDED or os.path.exists(os.path.expanduser(name))):
        raise ConfigError(
            f"revision is {format_value(revision)}, but {format_value(str(name))} is on this "
            "machine: leave it out, or give a hub name"
        )
    if name in EMBEDDED:
        return str(EMBEDDED[str(name)])
    check_path(str(name))
    path = Path(os.path.expanduser(name))
    name = str(name)
    if path.suffix == ".gguf":
        from rloo_kit.models.gguf import convert

        return str(convert(path))
    if os.path.isfile(path / "config.json") or adapter_in(path) is not None:
        return str(path)
    if os.path.exists(path):
        raise ModelError(f"{name!r} holds no config.json, so it is not a model: {TO_GIVE}")
    return _ask_hub(name, revision)


def _ask_hub(name: str, revision: str | None) -> str:
    """Check a hub name by one short request; return it, or the folder of a downloaded revision.

    Raises:
        ModelError: It cannot be loaded. Loading would retry for minutes before it failed.
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    # the first match counts, since GatedRepoError is a kind of RepositoryNotFoundError
    reasons: dict[type[Exception], str] = {
        errors.GatedRepoError: "is gated: accept its licence on its page and put HF_TOKEN into "
        ".env",
        errors.RepositoryNotFoundError: "is not on the hub: check the spelling, or put HF_TOKEN "
        "into .env if it is private",
        errors.RevisionNotFoundError: f"has no revision {revision} on the hub: check the spelling",
        errors.RemoteEntryNotFoundError: "holds no config.json on the hub, so it is not a model: "
        "check the name",
        errors.HFValidationError: "is neither a folder here nor a hub name (owner/name): check the "
        "spelling",
        OSError: "is not on this machine and the hub cannot be reached: check the name and the "
        "network, or give a local folder",
    }
    try:
        hf_hub_download(name, "config.json", revision=revision, etag_timeout=20)
        if revision is None:
            return name
        return snapshot_download(name, revision=revision, ignore_patterns=OTHER_WEIGHTS)
    except tuple(reasons) as exc:
        reason = next(text for kind, text in reasons.items() if isinstance(exc, kind))
        raise ModelError(f"model {format_value(name)} {reason}") from exc


@contextlib.contextmanager
def _as_model_errors(name: str) -> Iterator[None]:
    """Turn any error of transformers, Unsloth or torch while a model loads into a ModelError."""
    try:
        yield
    except KitError:
        raise
    except Exception as exc:  # the classes differ by library and version
        if "trust_remote_code" in str(exc):
            reason = (
                "needs code of its own, which is not run: allow it with model.trust_remote_code: "
                "true, only for a source you trust"
            )
        elif "use_safetensors=True" in str(exc):
            reason = (
                "has no safetensors: if you trust it, load it with transformers and save it again "
                "with save_pretrained"
            )
        elif is_out_of_memory(exc):
            reason = (
                "does not fit into the memory: close other programs, use a smaller model or, to "
                "train, model.load_in_4bit: true"
            )
        else:
            reason = (
                f"cannot be loaded ({type(exc).__name__}: {first_line(exc)}): download it again, "
                "or try backend: transformers"
            )
        raise ModelError(f"model {name!r} {reason}") from exc


# --- backends ------------------------------------------------------------------------------------


def _dtype(precision: str, environment: Environment) -> Any:
    """Return torch's type of a precision; None if Unsloth shall choose."""
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if precision == "auto":
        if environment.backend == "unsloth":
            return None
        return kinds.get(environment.hardware.mixed_precision, torch.float32)
    if precision not in kinds:
        known = ", ".join(["auto", *kinds])
        raise ConfigError(f"precision is {format_value(precision)}, must be one of {known}")
    return kinds[precision]


def _choose_class(
    environment: Environment, source: str, images: bool, trust_remote_code: bool
) -> tuple[Any, Environment]:
    """Return transformers' class for a model, and the environment with the backend for it.

    Raises:
        ModelError: ``images`` is true, but the model reads only text.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if images and config.get_text_config() is config:
        raise ModelError(
            f"model {source!r} reads no images, but the prompts have some: use a vision model, "
            "such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    model_class = auto_class(config, images=images)
    if model_class is AutoModelForImageTextToText and environment.hardware.device == "cpu":
        environment = replace(environment, backend="transformers")  # Unsloth's needs a GPU
    return model_class, environment


def _load_unsloth(source: str, _: Any, images: bool, **kwargs: Any) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel, FastVisionModel

    loader = FastVisionModel if images else FastLanguageModel
    return loader.from_pretrained(source, **kwargs)


def _load_transformers(
    source: str,
    model_class: Any,
    images: bool,
    *,
    max_seq_length: int,
    load_in_4bit: bool,
    dtype: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    from transformers import AutoProcessor, AutoTokenizer, BitsAndBytesConfig

    if load_in_4bit and not any(mark in Path(source).name.lower() for mark in PREQUANTIZED):
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype if _is_divided() else None,  # FSDP needs one type
        )
    tokenizer_name = kwargs.pop("tokenizer_name", source)
    model = model_class.from_pretrained(source, dtype=dtype, device_map=_place(), **kwargs)
    model.config.use_cache = False  # training needs no KV cache; generate asks for its own
    loader = AutoProcessor if images else AutoTokenizer
    return model, loader.from_pretrained(
        tokenizer_name,
        model_max_length=max_seq_length,
        trust_remote_code=kwargs["trust_remote_code"],
    )


def _is_divided() -> bool:
    """Return whether each process holds only a part of the weights."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return uses_fsdp() or is_deepspeed_zero3_enabled()


def _place() -> dict[str, Any] | None:
    """Return the device of the whole model; None if DeepSpeed or FSDP divides it."""
    if _is_divided():
        return None
    if num_processes() == 1:
        return {"": setup().hardware.device}
    from accelerate import PartialState

    return {"": PartialState().device}


@contextlib.contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Show transformers' progress bars for a download, but not for reading the disk."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def set_padding(model: Model, tokenizer: Tokenizer) -> None:
    """Pad with the end token if the padding token is missing or has no row in the embedding."""
    size = model.config.get_text_config().vocab_size
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= size:
        tokenizer.pad_token = tokenizer.eos_token


def _prepare(model: Model, processor: Any) -> Tokenizer:
    """Set padding, on the left, and the tokens that end a completion; return the tokenizer."""
    tokenizer = getattr(processor, "tokenizer", processor)
    keep_trainable_layout(model)
    set_padding(model, tokenizer)
    tokenizer.padding_side = "left"
    settings = model.generation_config
    given = settings.eos_token_id
    ends = given if isinstance(given, list) else [given]
    # a turn may end with another token than a text
    ends = [*ends, tokenizer.eos_token_id, end_of_turn_id(tokenizer)]
    settings.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None))
    settings.pad_token_id = tokenizer.pad_token_id
    image_token = getattr(model.config, "image_token_id", None)
    if image_token is not None:  # if sampled, it would stand for a missing image
        settings.suppress_tokens = [image_token]
    return tokenizer
