"""Load a model, attach a LoRA adapter, save it: the only module that constructs models."""

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloo_kit.config.engine_tables import SHARED_ENGINE_NAMES
from rloo_kit.config.run_file import LoraSection
from rloo_kit.errors import ConfigError, KitError, ModelError
from rloo_kit.machine.environment import Environment, quiet, setup
from rloo_kit.machine.hardware import (
    GIB,
    Hardware,
    check_fp8,
    compute_capability,
    host_memory,
    why_not_vllm,
)
from rloo_kit.machine.memory import add_to_session, is_out_of_memory
from rloo_kit.machine.pickles import REMEDY, WHY, is_pickle, why_not_opened
from rloo_kit.models.adapters import WEIGHTS, adapter_in, base_of, lora_settings
from rloo_kit.models.engine_memory import reserved_rank
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.models.shared_engine import EngineSettings, load_shared, notes_of
from rloo_kit.scoring.contract import OverdueError, within
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.text.wording import first_line, format_value

PREQUANTIZED = ("bnb-4bit", "bnb-8bit", "-awq", "-gptq", "-fp8")
# Limit of rendering a chat template once; usual ones take milliseconds
TEMPLATE_SECONDS = 5.0
# Fields of an adapter's config that are no settings of the adapter
NO_SETTINGS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode",
}  # fmt: skip
# Bytes of NF4 weights with double quantisation over bytes of the bf16 ones, embeddings apart
NF4_SHARE = 0.32


def load_model(
    name: str | Path,
    *,
    max_seq_length: int = 1024,
    load_in_4bit: bool = True,
    backend: str = "auto",
    fast_inference: bool | str = False,
    max_lora_rank: int = 64,
    num_sequences: int = 64,
    trust_remote_code: bool = False,
    vllm: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer, ready for ``attach_lora``.

    Args:
        name: A hub name, a folder, a ``.gguf`` file, ``tiny-thinker`` (embedded), or the folder of
            a LoRA adapter: its base is loaded with this adapter on it, to train further.
        max_seq_length: Longest prompt plus completion, tokens.
        load_in_4bit: NF4 weights (bitsandbytes), double quantisation.
        backend: ``auto`` (Unsloth where it starts), ``unsloth`` or ``transformers``.
        fast_inference: On a GPU with Unsloth and vLLM, one copy of the base for training and vLLM;
            ``auto``: where Unsloth cannot share it, load without vLLM. Ignored elsewhere.
        max_lora_rank: Largest LoRA rank of this shared engine.
        num_sequences: Completions that it samples at a time.
        trust_remote_code: Run code that comes with the model: only for a source you trust.
        vllm: Further ``EngineArgs`` of vLLM for an engine with a copy of the weights of its own.
        **kwargs: For ``from_pretrained`` of Unsloth or transformers, and for vLLM
            ``gpu_memory_utilization``, ``unsloth_vllm_standby``, ``load_in_fp8``,
            ``float8_kv_cache``, ``fp32_lm_head``.

    Raises:
        ModelError: Not found, no model, too large, a pickle, or it needs code of its own.
        ConfigError, GenerationError: A setting cannot be obeyed here.
    """
    environment = setup(backend)
    source, adapter, rank = _find_base(str(name), kwargs)
    _check_memory(source, environment.hardware, load_in_4bit=load_in_4bit)
    sizes = (max_seq_length, load_in_4bit, reserved_rank(max(rank, max_lora_rank)), num_sequences)
    engine = _engine_settings(sizes, kwargs, fast_inference, tuple(vllm or ()))
    why_not_shared = _why_not_shared(environment, fast_inference)
    _check_engine(engine, source, why_not_shared)
    kwargs |= {"trust_remote_code": trust_remote_code, "use_safetensors": True}
    load_base = _load_unsloth if environment.backend == "unsloth" else _load_transformers
    load = functools.partial(load_base, source, max_seq_length, load_in_4bit, **kwargs)
    if why_not_shared is None:
        load = functools.partial(load_shared, load, source, engine, trust_remote_code)
    with (
        _as_model_errors(str(name), trust_remote_code=trust_remote_code),
        _progress_bars(shown=not Path(source).is_dir()),
        quiet(),
    ):
        model, tokenizer = load()
        _prepare_tokenizer(model, tokenizer)
    keep_trainable_layout(model)
    notes = notes_of(model)
    notes.backend, notes.max_seq_length = environment.backend, max_seq_length
    notes.vllm = _own_engine(engine, vllm or {})
    add_to_session(model)
    return (model if adapter is None else _with_adapter(model, adapter)), tokenizer


def _find_base(name: str, kwargs: dict[str, Any]) -> tuple[str, Path | None, int]:
    """Return a model's source, and the folder and rank of the adapter that the name stands for."""
    if kwargs.get("use_safetensors", True) is not True:
        raise ConfigError(
            f"use_safetensors is {kwargs['use_safetensors']!r}, and weights are read from "
            "safetensors files alone: leave it out"
        )
    source = find_model(name)
    adapter = adapter_in(source)
    if adapter is None:
        return source, None, 0
    if (adapter / "tokenizer_config.json").is_file():  # its chat template is trained with it
        kwargs.setdefault("tokenizer_name", str(adapter))
    return find_model(base_of(adapter)), adapter, lora_settings(adapter, {})["r"]


def _engine_settings(
    sizes: tuple[int, bool, int, int],
    kwargs: dict[str, Any],
    fast_inference: bool | str,
    not_shared: tuple[str, ...],
) -> EngineSettings:
    """Return the settings of a shared engine; what is for vLLM alone leaves ``kwargs``."""
    taken = {
        "share": kwargs.pop("gpu_memory_utilization", None),
        "sleeps": kwargs.pop("unsloth_vllm_standby", True),
        "in_fp8": kwargs.pop("load_in_fp8", False),
        "float8_cache": bool(kwargs.pop("float8_kv_cache", False)),
        "fp32_head": bool(kwargs.pop("fp32_lm_head", False)),
    }
    extra = {name: kwargs.pop(name) for name in SHARED_ENGINE_NAMES & set(kwargs)}
    required = fast_inference != "auto" or bool(taken["in_fp8"] or extra)
    return EngineSettings(*sizes, required=required, extra=extra, not_shared=not_shared, **taken)


def _own_engine(engine: EngineSettings, vllm: dict[str, Any]) -> dict[str, Any]:
    """Return the further arguments of an engine with a copy of the weights of its own."""
    settings = dict(vllm)
    if engine.float8_cache:
        settings["kv_cache_dtype"] = "fp8"
    if engine.fp32_head:
        settings["hf_overrides"] = {**settings.get("hf_overrides", {}), "head_dtype": "float32"}
    return settings


def _check_engine(engine: EngineSettings, source: str, why_not_shared: str | None) -> None:
    """Raise ConfigError on settings of vLLM that this machine or this load cannot obey."""
    if engine.in_fp8 and engine.load_in_4bit:
        raise ConfigError(
            "load_in_fp8 and load_in_4bit contradict each other: set load_in_4bit to false"
        )
    if engine.in_fp8 or engine.float8_cache:
        weights_of = source if engine.in_fp8 else None
        check_fp8(compute_capability(), weights_of=weights_of, cache=engine.float8_cache)
    names = ["model.load_in_fp8"] if engine.in_fp8 else [f"unsloth.{one}" for one in engine.extra]
    if names and why_not_shared:
        raise ConfigError(
            f"{names[0]} is for weights that Unsloth shares with vLLM, and {why_not_shared}: leave "
            f"it out"
        )


def _why_not_shared(environment: Environment, fast_inference: bool | str) -> str | None:
    """Return why the weights are not shared with vLLM, or None where Unsloth is asked to."""
    if environment.hardware.device == "cpu":
        return "this machine has no GPU"
    if environment.backend != "unsloth":
        return f"transformers loads the model ({environment.why_not_unsloth})"
    if reason := why_not_vllm():
        return reason
    asked = bool(fast_inference)
    return None if asked else "vLLM was not asked for (trainer.generation, fast_inference)"


def attach_lora(
    model: Any,
    *,
    r: int | None = None,
    lora_alpha: int | None = None,
    lora_dropout: float | None = None,
    target_modules: list[str] | tuple[str, ...] | None = None,
    use_gradient_checkpointing: bool | str | None = None,
    seed: int = 42,
) -> Any:
    """Return the model with a fresh LoRA adapter named ``default``; only the adapter trains.

    A model that was loaded from an adapter's folder keeps that adapter and its settings.

    Args:
        model: As ``load_model`` returned it.
        r: Rank; None: 16.
        lora_alpha: The adapter's output is scaled by ``lora_alpha / r``; None: 16.
        lora_dropout: In [0, 1); None: 0.
        target_modules: Names of linear layers; None: of the attention and of the MLP.
        use_gradient_checkpointing: None: Unsloth's on a GPU, off on a CPU, where recomputing costs
            time and memory is plenty.
        seed: Of a fresh adapter's random start.

    Raises:
        ConfigError: None of ``target_modules`` is in the model, or the model's adapter has other
            settings.
    """
    given = {
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": lora_dropout,
        "target_modules": target_modules,
    }
    folder = notes_of(model).adapter
    if folder is not None and hasattr(model, "peft_config"):
        lora_settings(Path(folder), given)
        if use_gradient_checkpointing is not None:
            _recompute(model, use_gradient_checkpointing)
            notes_of(model).gradient_checkpointing = use_gradient_checkpointing
        return model
    asked = {name: value for name, value in given.items() if value is not None}
    settings = asdict(LoraSection()) | asked
    leaves = {n.rpartition(".")[2] for n, m in model.named_modules() if n and not [*m.children()]}
    targets = [name for name in settings["target_modules"] if name in leaves]
    if not targets:
        linear = sorted(name for name in leaves if "proj" in name or "fc" in name)
        raise ConfigError(
            f"none of target_modules {sorted(settings['target_modules'])} is a layer of this "
            f"model; its linear layers are {', '.join(linear or sorted(leaves))}"
        )
    settings |= {"target_modules": targets, "bias": "none"}
    return _new_adapter(model, settings, use_gradient_checkpointing, seed)


def _new_adapter(
    model: Any, settings: dict[str, Any], use_gradient_checkpointing: bool | str | None, seed: int
) -> Any:
    """Return the model with an adapter made of these settings of ``LoraConfig``."""
    import torch
    from peft import LoraConfig, get_peft_model

    checkpointing = use_gradient_checkpointing
    if checkpointing is None:
        checkpointing = "unsloth" if model.device.type != "cpu" else False
    if notes_of(model).backend == "unsloth":
        from unsloth import FastLanguageModel

        peft_model = FastLanguageModel.get_peft_model(
            model, **settings, use_gradient_checkpointing=checkpointing, random_state=seed
        )
    else:
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        _recompute(peft_model, checkpointing)
    if use_gradient_checkpointing is not None:
        notes_of(peft_model).gradient_checkpointing = use_gradient_checkpointing
    return peft_model


def _recompute(model: Any, checkpointing: bool | str) -> None:
    """Turn gradient checkpointing on or off."""
    if notes_of(model).backend == "unsloth":
        model._unsloth_gradient_checkpointing = checkpointing  # its training step follows this
    elif checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def _with_adapter(model: Any, folder: Path) -> Any:
    """Return the model with the adapter in a folder, ready to train further.

    A fresh adapter gets the folder's weights, so that Unsloth patches its layers and its config
    names the base that is loaded.
    """
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    try:
        config: Any = LoraConfig.from_pretrained(str(folder))
        defaults = vars(LoraConfig())
        settings = {
            name: value
            for name in defaults.keys() - NO_SETTINGS
            if (value := getattr(config, name)) != defaults[name]
        }
        settings |= {"r": config.r, "lora_alpha": config.lora_alpha}  # Unsloth's defaults differ
        if not isinstance(config.target_modules, str):
            settings["target_modules"] = sorted(config.target_modules or ())
        with quiet():
            peft_model = _new_adapter(model, settings, None, seed=0)
        found = set_peft_model_state_dict(peft_model, load_file(folder / WEIGHTS))
        lost = [name for name in found.missing_keys if ".default" in name]
        if wrong := [*found.unexpected_keys, *lost]:
            raise ValueError(f"{wrong[0]} is only in one of them")
    except Exception as exc:  # missing layers, other shapes, unknown settings: each its own
        raise ModelError(
            f"the adapter in {format_value(str(folder))} cannot be put on its base to train "
            f"further ({type(exc).__name__}: {first_line(exc)}): see that it was trained on this "
            "model, or try backend: transformers"
        ) from exc
    notes_of(peft_model).adapter = str(folder)
    return peft_model


def save_adapter(model: Any, tokenizer: Any, folder: str | Path) -> Path:
    """Write the trained adapter and the tokenizer as PEFT reads them; the write is atomic.

    TRL's frozen copy of the adapter (``ref``) is left out.

    Args:
        model: With its adapter.
        tokenizer: Written to the same folder.
        folder: Of an adapter, or one that does not exist yet.

    Raises:
        ModelError: The disk refused, or the folder holds something else than an adapter.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{str(folder)!r} holds other files than an adapter's: give a folder of its own, such "
            f"as {str(folder / 'adapter')!r}"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(str(partial), selected_adapters=["default"])
        tokenizer.save_pretrained(str(partial))
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as exc:
        raise ModelError(
            f"the adapter cannot be written to {str(folder)!r} ({exc}): free some space or choose "
            f"another output_dir"
        ) from exc
    return folder


def keep_trainable_layout(model: Any) -> int:
    """Keep bitsandbytes' 4-bit layers in the layout whose backward is right; return their number.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a ``Linear4bit`` at the first forward in
    eval mode, and every later backward uses a kernel without autograd.
    """
    layers = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    return len(layers)


# --- sources -------------------------------------------------------------------------------------


def find_model(name: str | Path) -> str:
    """Return the hub name, or the folder, that a model's name stands for; .gguf is converted.

    Raises:
        ModelError: There is no such model, or its weights are a pickle.
    """
    if name == "tiny-thinker":
        return str(TINY_THINKER)
    try:
        path = Path(name := str(name)).expanduser()
        path.is_dir()  # raises for a name that is too long
    except (OSError, RuntimeError, ValueError) as exc:
        raise ModelError(
            f"model {format_value(name)} can be no path ({first_line(exc)}): give a model's "
            "folder, a .gguf file or a hub name"
        ) from exc
    if path.suffix == ".gguf":
        from rloo_kit.models.gguf import convert

        return str(convert(path))
    if path.is_dir():
        if not (path / "config.json").exists() and not (path / "adapter_config.json").exists():
            raise ModelError(
                f"folder {name!r} holds no config.json, so it is not a model: give the folder that "
                f"save_pretrained wrote"
            )
        _check_files(name, path)
        return str(path)
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        what = "is a file" if path.is_file() else "does not exist"
        if path.is_file() and is_pickle(path):
            what = f"is {WHY}"
        raise ModelError(
            f"model {name!r} {what}: give a model's folder, a .gguf file or a hub name"
        )
    _ask_hub(name)
    return name


def _check_files(name: str, folder: Path) -> None:
    """Raise ModelError where a folder's weights, or those of an adapter's base, are a pickle."""
    if reason := why_not_opened(folder):
        raise ModelError(f"model {name!r} {reason}")
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        config = json.loads((folder / "adapter_config.json").read_bytes())
        base = Path(str(config.get("base_model_name_or_path") or folder))
        if base.is_dir() and (reason := why_not_opened(base)):
            raise ModelError(f"model {name!r} is an adapter on {str(base)!r}, which {reason}")


def _ask_hub(name: str) -> None:
    """Raise ModelError now, in one short request, where loading would retry for minutes."""
    import huggingface_hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            files = [entry.name for entry in Path(cached).parent.iterdir()]
        else:
            found = huggingface_hub.HfApi().model_info(name, timeout=20)
            files = [file.rfilename for file in found.siblings or []]
    except Exception as exc:  # HTTP clients differ by version; _as_model_error tells them apart
        raise _as_model_error(name, exc) from exc
    if reason := why_not_opened(files):
        raise ModelError(f"model {name!r} {reason}")


def _check_memory(source: str, hardware: Hardware, *, load_in_4bit: bool) -> None:
    """Refuse a local model whose weights alone are larger than the free memory."""
    files = list(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    size = sum(file.stat().st_size for file in files)
    if load_in_4bit and not any(mark in source.lower() for mark in PREQUANTIZED):
        size = int(size * NF4_SHARE)
    free = hardware.free_memory if hardware.device != "cpu" else host_memory()[1]
    if size > free:
        how = "a smaller model" if load_in_4bit else "load_in_4bit: true or a smaller model"
        raise ModelError(
            f"{source!r} needs {size / GIB:.1f} GiB for its weights and {free / GIB:.1f} GiB are "
            f"free on {hardware.name}: close other programs, or use {how}"
        )


def _causes(exc: BaseException) -> list[BaseException]:
    """Return an error and what led to it."""
    chain = [exc]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    return chain


@contextlib.contextmanager
def _as_model_errors(name: str, *, trust_remote_code: bool) -> Iterator[None]:
    """Raise what is raised while a model loads as a ModelError."""
    try:
        yield
    except KitError:
        raise
    except Exception as exc:  # what is raised differs by library, version and network
        if not trust_remote_code and any("trust_remote_code" in str(e) for e in _causes(exc)):
            raise ModelError(
                f"model {name!r} needs code of its own, which is not run: allow it with "
                f"model.trust_remote_code: true, only for a source you trust"
            ) from exc
        raise _as_model_error(name, exc) from exc


def _as_model_error(name: str, exc: Exception) -> ModelError:
    """Return one sentence for what transformers, the hub or torch raised."""
    from huggingface_hub import errors as hub

    chain = _causes(exc)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(e, kinds) for e in chain)

    text = f"{type(exc).__name__}: {first_line(exc)}"
    offline = caused_by(OSError) or any("Connect" in type(e).__name__ for e in chain)
    if any(map(is_out_of_memory, chain)):
        message = (
            f"memory ran out while loading {name!r}: close other programs, use a smaller model or "
            f"load_in_4bit: true"
        )
    elif any("use_safetensors=True" in str(e) for e in chain):
        message = f"model {name!r} has no safetensors: {REMEDY}"
    elif caused_by(hub.GatedRepoError):
        message = (
            f"model {name!r} is gated: accept its licence on its page and put HF_TOKEN into .env"
        )
    elif caused_by(hub.RepositoryNotFoundError):
        message = (
            f"the hub has no model {name!r}: check the spelling, or put HF_TOKEN into .env if it "
            f"is private"
        )
    elif Path(name).exists() or name == "tiny-thinker":
        message = (
            f"model {name!r} cannot be loaded ({text}): its folder is incomplete or not a causal "
            f"language model; download it again"
        )
    elif caused_by(hub.HFValidationError):
        message = (
            f"model {name!r} is neither a folder here nor a hub name (owner/name): check the "
            f"spelling"
        )
    elif offline:
        message = (
            f"model {name!r} is not on this machine and the hub cannot be reached: check the name "
            f"and the network, or give a local folder"
        )
    else:
        message = (
            f"model {name!r} cannot be loaded ({text}): check the name, or try backend: "
            f"transformers"
        )
    return ModelError(message)


# --- backends ------------------------------------------------------------------------------------


def _load_unsloth(
    source: str, max_seq_length: int, load_in_4bit: bool, **kwargs: Any
) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    return FastLanguageModel.from_pretrained(
        source, max_seq_length=max_seq_length, load_in_4bit=load_in_4bit, **kwargs
    )


def _load_transformers(
    source: str, max_seq_length: int, load_in_4bit: bool, **kwargs: Any
) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    hardware = setup().hardware
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        hardware.mixed_precision, torch.float32
    )
    if load_in_4bit and not any(mark in source.lower() for mark in PREQUANTIZED):
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    tokenizer_name = kwargs.pop("tokenizer_name", source)
    place = {"": hardware.device}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=place, **kwargs)
    model.config.use_cache = False  # training forwards keep no KV cache; generate asks for its own
    tokenizer = AutoTokenizer.from_pretrained(
        tokenizer_name,
        model_max_length=max_seq_length,
        trust_remote_code=kwargs["trust_remote_code"],
    )
    return model, tokenizer


@contextlib.contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Show transformers' bars for a download, and not for a second of reading the disk."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _prepare_tokenizer(model: Any, tokenizer: Any) -> None:
    """Pad on the left with a token that is set; stop at every end-of-turn token."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    given = model.generation_config.eos_token_id
    ends = given if isinstance(given, list) else [given]
    try:
        end_of_turn = within(TEMPLATE_SECONDS, lambda: end_of_turn_id(tokenizer))
    except OverdueError as exc:
        raise ModelError(
            f"the chat template of {format_value(tokenizer.name_or_path)} takes more than "
            f"{TEMPLATE_SECONDS:g} s for two short messages: give the tokenizer another one"
        ) from exc
    ends = [*ends, tokenizer.eos_token_id, end_of_turn]
    model.generation_config.eos_token_id = list(
        dict.fromkeys(end for end in ends if end is not None)
    )
    model.generation_config.pad_token_id = tokenizer.pad_token_id
