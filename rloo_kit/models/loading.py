"""Loading of models; creation, loading and saving of LoRA adapters.

This is the only module that creates models.
"""

import contextlib
import errno
import functools
import inspect
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
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
from rloo_kit.machine.tensors import check_not_released
from rloo_kit.models.adapters import (
    CONFIG,
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
from rloo_kit.models.shape import auto_class, is_quantised
from rloo_kit.models.shared_engine import EngineSettings, load_shared
from rloo_kit.output_folder import FULL, disk_errors
from rloo_kit.text.chat_templates import end_token_ids
from rloo_kit.text.wording import did_you_mean, first_line, format_errors, format_value
from rloo_kit.types import Model, Tokenizer

# Files of a hub model that are not downloaded: copies of its weights in other formats
OTHER_WEIGHTS = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]
TOKENIZER = "tokenizer_config.json"
# Errors that mean that nothing can be stored in the hub's cache; others concern the network or its
# settings
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
NOT_STORED = (
    "cannot be stored in the hub's cache ({}): free some space there, or set HF_HOME to a folder "
    "that can be written"
)


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
    """Load a model for ``attach_lora``, and its tokenizer or (with ``images``) its processor.

    Args:
        name: A hub name, a folder, a .gguf file, the name of an embedded model
            (``tiny-thinker``, ``tiny-caller``), or the folder of an adapter to train further.
        max_seq_length: Maximum tokens of prompt and completion together.
        load_in_4bit: True to load the weights in 4 bit (bitsandbytes NF4, double quantisation).
        backend: ``unsloth``, ``transformers``, or ``auto`` for Unsloth if it can start and
            transformers otherwise.
        precision: ``bf16``, ``fp16``, ``fp32``, or ``auto`` for the first of them that the device
            supports.
        fast_inference: True to share one copy of the base weights between training and vLLM.
            If Unsloth cannot share the weights of this model, True raises an error and ``auto``
            loads the model without vLLM. Sharing needs a GPU, Unsloth and vLLM. Without them, and
            with ``images``, this argument is ignored.
        images: True to load a vision model and its processor, for prompts with images.
        max_lora_rank: Largest LoRA rank for which the engine of ``fast_inference`` is prepared.
        num_sequences: Completions that the engine of ``fast_inference`` samples at a time.
        trust_remote_code: True to run code that comes with the model; only for a source you trust.
        revision: Branch, tag or commit of the model on the hub; None for the main branch.
        chat_template: A file with a chat template (Jinja), which replaces the model's own.
        vllm: Further ``EngineArgs`` for a vLLM engine that will be started later with its own copy
            of the weights. If ``fast_inference`` shares the weights, they raise a ``ConfigError``.
        **kwargs: Further arguments of ``from_pretrained`` of Unsloth or transformers. The engine of
            ``fast_inference`` also accepts ``gpu_memory_utilization`` and
            ``unsloth_vllm_standby``.

    Returns:
        The model, and its tokenizer or processor.

    Raises:
        ModelError: The model is missing or too large, is not a language model, has no safetensors,
            or needs code that is not trusted. Or ``images`` is true, but the model reads only text.
        ConfigError: A setting does not work on this machine or with this model.
        GenerationError: The shared engine cannot start.
    """
    environment = setup(backend)
    base, source = str(name), find_model(name, revision)
    if adapter := adapter_in(source):
        base, revision = base_of(adapter), revision_of(adapter)
        source = find_model(base, revision)
    with _as_model_errors(str(name)):
        if adapter:
            max_lora_rank = max(lora_settings(adapter, {})["r"], max_lora_rank)
            kwargs = _arguments_of(adapter, source, load_in_4bit, images) | kwargs
        model_class, environment = _choose_class(environment, source, images, trust_remote_code)
    why_not_shared = _why_not_shared(environment, fast_inference, images)
    if kwargs.get("load_in_8bit"):
        raise ConfigError(
            "load_in_8bit is true, but a base can be loaded only in 4 or 16 bit: leave "
            "load_in_8bit out, and set load_in_4bit to true (4 bit) or false (16 bit)"
        )
    extra = {name: kwargs.pop(name) for name in sorted(SHARED_ENGINE_NAMES & kwargs.keys())}
    if extra and why_not_shared:
        raise ConfigError(
            f"unsloth.{next(iter(extra))} is for weights that Unsloth shares with vLLM, but "
            f"{why_not_shared}: leave this setting out"
        )
    engine = EngineSettings(
        max_seq_length,
        load_in_4bit,
        reserved_rank(max_lora_rank),
        num_sequences,
        share=kwargs.pop("gpu_memory_utilization", None),
        sleeps=kwargs.pop("unsloth_vllm_standby", True),
        required=fast_inference != "auto" or bool(extra),
        extra=extra,
        not_shared=tuple(vllm or ()),
    )
    kwargs = {
        "dtype": _dtype(precision, environment),
        **kwargs,
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
        "max_seq_length": max_seq_length,
        "load_in_4bit": load_in_4bit,
    }
    load: Any = _load_unsloth if environment.backend == "unsloth" else _load_transformers
    load = functools.partial(load, source, model_class, images, **kwargs)
    if why_not_shared is None:
        load = functools.partial(load_shared, load, source, engine, trust_remote_code)
    with (
        _as_model_errors(str(name), given=kwargs.keys()),
        _progress_bars(shown=not Path(source).is_dir()),
        quiet(),
    ):
        model, processor = load()
        tokenizer = _prepare(model, processor, chat_template)
    processor = processor if images else tokenizer
    vars(notes_of(model)).update(
        backend=environment.backend,
        vllm=vllm or {},
        max_seq_length=max_seq_length,
        trust_remote_code=trust_remote_code,
        processor=processor,
        hub=None if revision is None else (base, revision),
    )
    add_to_session(model)
    return _with_adapter(model, adapter) if adapter else model, processor


def _arguments_of(adapter: Path, source: str, load_in_4bit: bool, images: bool) -> dict[str, Any]:
    """Return the arguments that load an adapter's base as it was loaded to train the adapter.

    Args:
        adapter: The adapter's folder.
        source: The hub name or folder of the base.
        load_in_4bit: True to load the base in 4 bit.
        images: True to load a processor, not only a tokenizer. An adapter that was trained on text
            has only a tokenizer in its folder; the processor then comes from the base.
    """
    found: dict[str, Any] = {}
    if any(adapter.glob("*processor_config.json" if images else TOKENIZER)):
        found["tokenizer_name"] = str(adapter)  # with its chat template
    # Unsloth must load exactly this base, not its own copy of it. The exception is a 4-bit base
    # that is wanted in 16 bit: Unsloth then loads the 16-bit original
    if load_in_4bit or not is_quantised(source):
        found["use_exact_model_name"] = True
    return found


def _set_template(file: str | Path | None, *processors: Any) -> None:
    """Set the chat template of a tokenizer and its processor to the text of a file.

    Args:
        file: The file; None keeps their chat templates.
        *processors: The tokenizer and the processor.

    Raises:
        ConfigError: The file cannot be read.
    """
    if file is None:
        return
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as exc:
        raise ConfigError(
            f"chat_template {format_value(str(file))} cannot be read ({first_line(exc)}): give a "
            "file that contains a Jinja template"
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
    """Load the tokenizer of a model without its weights.

    The arguments have the same meaning as for ``load_model``.

    Raises:
        ModelError: The model is missing, or its tokenizer cannot be loaded.
        ConfigError: ``chat_template`` cannot be read, or a revision is given for a model that is
            not on the hub.
    """
    from transformers import AutoTokenizer

    with _as_model_errors(str(name)), quiet():
        if str(name).endswith(".gguf"):
            from rloo_kit.models.gguf import read_tokenizer

            check_path(str(name))
            tokenizer = read_tokenizer(Path(name))
        else:
            source = find_model(name, revision)
            adapter = adapter_in(source)
            if adapter and not (adapter / TOKENIZER).is_file():
                source = find_model(base_of(adapter), revision_of(adapter))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    _set_template(chat_template, tokenizer)
    return tokenizer


def _why_not_shared(
    environment: Environment, fast_inference: bool | str, images: bool
) -> str | None:
    """Return the reason why the weights are not shared with vLLM; None if they will be shared."""
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
    """Add a new LoRA adapter named ``default`` to a model, and return the PEFT model.

    Only the adapter is trained. If the model was loaded from an adapter's folder, it keeps that
    adapter and its settings.

    Args:
        model: The model that ``load_model`` returned.
        r: The rank; None for 16.
        lora_alpha: The adapter's output is scaled by ``lora_alpha / r``; None for 16.
        lora_dropout: Dropout on the adapter's input, in [0, 1); None for 0.
        target_modules: Names of linear layers, or a regular expression for their full dotted names.
            None selects the layers of attention and MLP. ``all-linear`` selects all linear layers
            that PEFT finds, except the LM head.
        use_gradient_checkpointing: True, False, or ``unsloth`` for Unsloth's own variant. If
            Unsloth did not load the model, ``unsloth`` means True. None means ``unsloth`` on a GPU
            and False on a CPU, where there is enough memory and recomputing takes time.
        seed: Seed for the initial weights of a new adapter.
        **others: Further fields of PEFT's ``LoraConfig``.

    Raises:
        ConfigError: The model has none of the ``target_modules``. Or ``attach_lora`` has already
            added an adapter to it. Or it was loaded from an adapter with other settings. Or a field
            is unknown or not supported.
        ModelError: The memory of the model was released.
    """
    check_not_released(model)
    others |= {
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "target_modules": target_modules,
    }
    given = {name: value for name, value in others.items() if value is not None}
    check_lora_config(given)
    notes = notes_of(model)
    if use_gradient_checkpointing is not None:
        notes.gradient_checkpointing = use_gradient_checkpointing
    if hasattr(model, "peft_config"):
        if notes.adapter is None:
            raise ConfigError(
                "the model has an adapter already: use the model that attach_lora returned, or "
                "call load_model again"
            )
        lora_settings(Path(notes.adapter), given)
        if use_gradient_checkpointing is not None:
            _recompute(model, use_gradient_checkpointing)
        return model
    # the defaults are the same as those of `lora:` in a run file
    settings = LoraSection().as_dict() | given
    settings["target_modules"] = _existing_layers(model, settings["target_modules"])
    try:
        return _new_adapter(model, settings, use_gradient_checkpointing, seed)
    except (TypeError, ValueError, LookupError, AttributeError) as exc:  # differs by setting
        raise ConfigError(
            f"PEFT refuses the LoRA settings ({type(exc).__name__}: {first_line(exc)}): correct "
            "the setting that caused this error"
        ) from exc


def check_lora_config(settings: dict[str, Any], section: str = "") -> None:
    """Check that PEFT accepts LoRA settings and that the kit supports them.

    Args:
        settings: Fields of ``LoraConfig``; None for a field that is not given.
        section: The prefix of these settings in error messages, such as ``lora.``.

    Raises:
        ConfigError: A field is unknown, or its value is not accepted.
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


def _existing_layers(model: Model, target_modules: Iterable[str] | str) -> list[str] | str:
    """Return the names in ``target_modules`` that the model has; return a pattern unchanged.

    In a vision model, names are looked up in its language model only, and a pattern in all layers.

    Raises:
        ConfigError: The pattern matches no layer of the model, or the model has none of the names.
            Or a name that is not among the default ``target_modules`` is missing in the model.
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
    targets = [name for name in target_modules if name in leaves]
    missing = sorted({*target_modules} - leaves - {*LoraSection().target_modules})
    if missing or not targets:
        linear = sorted(name for name in leaves if "proj" in name or "fc" in name)
        raise ConfigError(
            f"none of target_modules {missing or sorted(target_modules)} is a layer of this model; "
            f"its linear layers are {', '.join(linear or sorted(leaves))}"
        )
    return targets


def _new_adapter(
    model: Any, settings: dict[str, Any], checkpointing: bool | str | None = None, seed: int = 0
) -> Any:
    """Add a new adapter to a model, and return the PEFT model.

    Args:
        model: The base model.
        settings: Fields of PEFT's ``LoraConfig``.
        checkpointing: As ``use_gradient_checkpointing`` of ``attach_lora``.
        seed: Seed for the initial weights of the adapter.
    """
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
    head = peft_model.get_output_embeddings()
    # PEFT's wrapper of a tied head, for `trainable_token_indices`, has no bias
    if head is not None and not hasattr(head, "bias"):
        head.bias = None  # TRL's forward reads it
    if hub := notes_of(model).hub:  # the base was loaded from a downloaded copy of this revision
        config = peft_model.peft_config["default"]
        config.base_model_name_or_path, config.revision = hub
    return peft_model


def _outside_language(model: Model) -> str | None:
    """Return a regular expression for the layers of a vision model outside its language model.

    The expression is for full names of layers (``re.fullmatch``). As PEFT's ``exclude_modules``, it
    restricts the adapter to the language model, which is also Unsloth's default. The result is None
    for a model that reads only text.
    """
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(prefix)}\.).*"


def _recompute(model: Model, checkpointing: bool | str) -> None:
    """Turn gradient checkpointing on or off; ``unsloth`` selects Unsloth's variant."""
    if notes_of(model).backend == "unsloth":
        model._unsloth_gradient_checkpointing = checkpointing  # Unsloth's training step reads this
    elif checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def _with_adapter(model: Model, folder: Path) -> Any:
    """Load an adapter from a folder onto its base model, to train it further.

    Returns:
        The PEFT model.

    Raises:
        ModelError: The adapter does not fit the model.
    """
    from peft import LoraConfig, PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    # The weights are loaded into a new adapter, so that Unsloth patches its layers and its config
    # names the loaded base
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
        # a tied parameter has one name here, and two among the missing keys
        names = {name for name, _ in peft_model.named_parameters()}
        lost = [name for name in found.missing_keys if ".default" in name and name in names]
        if wrong := [*found.unexpected_keys, *lost]:
            where = "the base" if found.unexpected_keys else "the adapter's file"
            raise ValueError(f"the weight {wrong[0]} is missing in {where}")
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
    """Write the trained adapter and the tokenizer to a folder in PEFT's format; return the folder.

    The write is atomic: after a crash the folder has either all old weights or all new ones. If the
    LoRA settings have changed, the old adapter is kept as ``.NAME.old`` next to the folder until
    the new one is in place. TRL's frozen copy of the adapter (``ref``) is not written.

    Args:
        model: The PEFT model.
        tokenizer: The tokenizer or processor, which is written to the same folder.
        folder: A new folder, or a folder with an adapter; that adapter is replaced.
        state: The model's tensors by name, needed if the weights are divided among processes. None
            uses the tensors of ``model``.

    Raises:
        ModelError: The folder cannot be written, or it contains files but no adapter.
    """
    folder = Path(folder).expanduser()
    partial = folder.with_name(f".{folder.name}.partial")
    what = f"the adapter cannot be written to {str(folder)!r}"
    with disk_errors(ModelError, what, "free some space or choose another output_dir"):
        if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG).exists():
            raise ModelError(
                f"{str(folder)!r} contains files that do not belong to an adapter: give a new "
                f"folder, such as {str(folder / 'adapter')!r}"
            )
        shutil.rmtree(partial, ignore_errors=True)
        given = {} if state is None else {"state_dict": state}
        model.save_pretrained(str(partial), selected_adapters=["default"], **given)
        tokenizer.save_pretrained(str(partial))
        _replace_adapter(folder, partial)
    return folder


def _replace_adapter(folder: Path, partial: Path) -> None:
    """Replace an adapter's folder by a new one so that a complete adapter exists at any time.

    Args:
        folder: The folder to replace.
        partial: The folder with the new adapter, which is moved.
    """
    from peft import PeftConfig

    old = folder.with_name(f".{folder.name}.old")
    config_in = PeftConfig.from_pretrained
    if (folder / WEIGHTS).is_file() and config_in(str(folder)) == config_in(str(partial)):
        for file in sorted(partial.iterdir()):  # of the adapter's files only the weights differ
            file.replace(folder / file.name)
        partial.rmdir()
        return
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def keep_trainable_layout(model: Model) -> None:
    """Prevent bitsandbytes from repacking 4-bit layers into a layout without a backward pass."""
    # On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a Linear4bit at the first forward in eval
    # mode, and every later backward uses a kernel without autograd.
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


# --- sources -------------------------------------------------------------------------------------


def find_model(name: str | Path, revision: str | None = None) -> str:
    """Return the hub name or the folder of a model or adapter.

    A .gguf file is converted into a folder first. If a ``revision`` is given, it is downloaded and
    its folder is returned, because Unsloth and vLLM can load only the main branch by name.

    Args:
        name: As for ``load_model``.
        revision: Branch, tag or commit of a model on the hub; None for the main branch.

    Raises:
        ModelError: The model does not exist or cannot be read.
        ConfigError: A revision is given for a model that is not on the hub.
    """
    name = str(name)
    path = EMBEDDED.get(name, Path(os.path.expanduser(name)))
    is_here = os.path.exists(path)
    if revision is not None and is_here:
        raise ConfigError(
            f"revision is {format_value(revision)}, but {format_value(name)} is a model on this "
            "machine: leave revision out, or give a hub name"
        )
    check_path(name)
    if path.suffix == ".gguf":
        from rloo_kit.models.gguf import convert

        return str(convert(path))
    if os.path.isfile(path / "config.json") or adapter_in(path) is not None:
        return str(path)
    if is_here:
        raise ModelError(f"{name!r} holds no config.json, so it is not a model: {TO_GIVE}")
    return _ask_hub(name, revision)


def _ask_hub(name: str, revision: str | None) -> str:
    """Check with one short request that a hub name exists, and download a revision if one is given.

    Without this check, loading would retry for minutes before it failed.

    Returns:
        The name, or the folder of the downloaded revision.

    Raises:
        ModelError: The name does not exist on the hub, or the model cannot be downloaded.
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    # the first match counts, because GatedRepoError is a subclass of RepositoryNotFoundError
    reasons = {
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
    except Exception as exc:  # a proxy that refuses or cannot be used raises errors of all classes
        other = (
            f"cannot be looked up on the hub ({type(exc).__name__}: {first_line(exc)}): check the "
            "network, the proxy (ALL_PROXY, HTTPS_PROXY) and the certificates (SSL_CERT_FILE), or "
            "give a local folder"
        )
        reason = next((text for kind, text in reasons.items() if isinstance(exc, kind)), other)
        if number := getattr(exc, "errno", None):  # from the operating system, not the hub
            reason = other
        if number in UNWRITABLE or any(text in str(exc) for text in FULL):
            reason = NOT_STORED.format(first_line(exc))
        raise ModelError(f"model {format_value(name)} {reason}") from exc


@contextlib.contextmanager
def _as_model_errors(name: str, given: Collection[str] = ()) -> Iterator[None]:
    """Turn any error of a ``with`` block that loads a model into a ModelError with advice.

    Args:
        name: Name of the model, for the message.
        given: Names of the arguments with which the block calls ``from_pretrained``.

    Raises:
        ConfigError: One of these arguments is unknown to ``from_pretrained``, or the kit itself
            sets it.
        ModelError: The block raised any other error. Only a ``KitError`` is raised unchanged.
    """
    try:
        yield
    except KitError:
        raise
    except Exception as exc:  # the classes differ by library and version
        unknown = re.search(r"(?:unexpected|values for) keyword argument '(\w+)'", str(exc))
        if unknown is not None and unknown[1] in given:
            hint = did_you_mean(unknown[1], inspect.signature(load_model).parameters)
            raise ConfigError(
                f"{unknown[1]!r} is not an argument of from_pretrained, or the kit sets it itself: "
                f"correct its name, or remove it (in a run file, from the section `unsloth`){hint}"
            ) from exc
        if "trust_remote_code" in str(exc):
            reason = (
                "needs its own Python code, which is not run by default: allow it with "
                "model.trust_remote_code: true, only for a source you trust"
            )
        elif "use_safetensors=True" in str(exc):
            reason = (
                "has no safetensors: if you trust it, load it with transformers and save it again "
                "with save_pretrained"
            )
        elif any(text in str(exc) for text in FULL):
            local = "cannot be loaded, because the disk is full ({}): free some space"
            reason = (local if os.path.exists(name) else NOT_STORED).format(first_line(exc))
        elif is_out_of_memory(exc):
            reason = (
                "does not fit into memory: close other programs, use a smaller model or, for "
                "training, set model.load_in_4bit: true"
            )
        else:
            reason = (
                f"cannot be loaded ({type(exc).__name__}: {first_line(exc)}): download it again, "
                "or try backend: transformers"
            )
        raise ModelError(f"model {name!r} {reason}") from exc


# --- backends ------------------------------------------------------------------------------------


def _dtype(precision: str, environment: Environment) -> Any:
    """Return the torch dtype of a precision; None if Unsloth chooses it.

    Raises:
        ConfigError: The precision is unknown.
    """
    import torch

    kinds: dict[str, Any] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    best = kinds.get(environment.hardware.mixed_precision, torch.float32)
    kinds["auto"] = None if environment.backend == "unsloth" else best
    if precision not in kinds:
        raise ConfigError(
            f"precision is {format_value(precision)}, must be one of {', '.join(kinds)}"
        )
    return kinds[precision]


def _choose_class(
    environment: Environment, source: str, images: bool, trust_remote_code: bool
) -> tuple[Any, Environment]:
    """Choose the transformers class and the backend that load a model.

    Returns:
        The class, and the environment. Its backend is changed to ``transformers`` for a vision
        model on a CPU, which Unsloth cannot load.

    Raises:
        ModelError: ``images`` is true, but the model reads only text.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if images and config.get_text_config() is config:
        raise ModelError(
            f"model {source!r} cannot read images, but the prompts have images: use a vision "
            "model, such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    model_class = auto_class(config, images=images)
    if model_class is AutoModelForImageTextToText and environment.hardware.device == "cpu":
        environment = replace(environment, backend="transformers")  # Unsloth needs a GPU for it
    return model_class, environment


def _load_unsloth(source: str, _: Any, images: bool, **kwargs: Any) -> tuple[Any, Any]:
    """Load a model and its tokenizer or processor with Unsloth; see ``load_model``."""
    from unsloth import FastLanguageModel, FastVisionModel

    loader = FastVisionModel if images else FastLanguageModel
    exact = _is_here(source, kwargs.get("load_in_4bit", True))
    return loader.from_pretrained(source, **{"use_exact_model_name": exact} | kwargs)


def _is_here(source: str, load_in_4bit: bool) -> bool:
    """Return True if the weights of a model are on this machine and must be loaded from here.

    Unsloth replaces many hub names by the names of its own copies, even if a folder here has the
    same name, such as ``Qwen/Qwen3-4B``. In offline mode Unsloth cannot load a copy that was never
    downloaded. If the copy of a hub model was downloaded, the result is False, so that Unsloth uses
    the copy: an adapter may have been trained on it.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    def in_cache(name: str) -> bool:
        weights = ("model.safetensors", "model.safetensors.index.json")
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in weights)

    if Path(source).is_dir():
        return True
    if not constants.HF_HUB_OFFLINE or not in_cache(source):
        return False
    # Unsloth's table of copies; it is not imported on a CPU, where no name is replaced
    table = sys.modules.get("unsloth.models.loader_utils")
    return table is None or not in_cache(table.get_model_name(source, load_in_4bit))


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
    """Load a model and its tokenizer or processor with transformers; see ``load_model``."""
    from transformers import AutoProcessor, AutoTokenizer, BitsAndBytesConfig

    packed = is_quantised(source)
    quantised = {}
    if load_in_4bit and not packed:
        quantised["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype if _is_divided() else None,  # FSDP needs a single dtype
        )
    tokenizer_name = kwargs.pop("tokenizer_name", source)
    kwargs.pop("use_exact_model_name", None)  # of Unsloth; transformers replaces no names
    model = model_class.from_pretrained(
        source, dtype=dtype, device_map=_place(), **quantised, **kwargs
    )
    if packed:  # the checkpoint requests bf16 for its 4-bit layers, which old GPUs only emulate
        for layer in model.modules():
            if hasattr(layer, "compute_type_is_set"):
                layer.compute_dtype = model.dtype
    model.config.use_cache = False  # training needs no KV cache; generate enables it itself
    loader = AutoProcessor if images else AutoTokenizer
    return model, loader.from_pretrained(
        tokenizer_name,
        model_max_length=max_seq_length,
        trust_remote_code=kwargs["trust_remote_code"],
    )


def _is_divided() -> bool:
    """Return True if FSDP or DeepSpeed ZeRO-3 divides the weights among processes."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return uses_fsdp() or is_deepspeed_zero3_enabled()


def _place() -> dict[str, Any] | None:
    """Return a device map that puts the whole model on one device.

    It is None if DeepSpeed or FSDP divides the model among processes.
    """
    if _is_divided():
        return None
    if num_processes() == 1:
        return {"": setup().hardware.device}
    from accelerate import PartialState

    return {"": PartialState().device}


@contextlib.contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Hide transformers' progress bars during a ``with`` block unless ``shown`` is true."""
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
    """Make the EOS token the padding token if the tokenizer has no usable padding token.

    A padding token is usable if the model can embed it, that is, if its id is smaller than the
    model's vocabulary size.
    """
    size = model.config.get_text_config().vocab_size
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= size:
        tokenizer.pad_token = tokenizer.eos_token


def _prepare(model: Model, processor: Any, chat_template: str | Path | None) -> Tokenizer:
    """Prepare a loaded model and its tokenizer for sampling and training; return the tokenizer.

    This sets the chat template, left padding, the padding token and the tokens that end a
    completion.

    Args:
        model: The model.
        processor: The tokenizer, or a processor that has one.
        chat_template: A file with a chat template; None keeps the tokenizer's.

    Raises:
        ConfigError: ``chat_template`` cannot be read.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    _set_template(chat_template, tokenizer, processor)  # may change the end of a turn
    keep_trainable_layout(model)
    set_padding(model, tokenizer)
    tokenizer.padding_side = "left"
    settings = model.generation_config
    settings.eos_token_id = end_token_ids(settings.eos_token_id, tokenizer)
    settings.pad_token_id = tokenizer.pad_token_id
    image_token = getattr(model.config, "image_token_id", None)
    if image_token is not None:  # after a sampled image token, the model would expect an image
        settings.suppress_tokens = [image_token]
    return tokenizer
