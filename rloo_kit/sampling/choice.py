"""Start the engine that samples for a model: vLLM in this process, or none."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rloo_kit.errors import ConfigError, GenerationError, KitError
from rloo_kit.machine.hardware import detect_hardware, why_not_vllm
from rloo_kit.machine.memory import add_to_session
from rloo_kit.models.engine_memory import MAX_SEQUENCES
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shared_engine import EngineSettings
from rloo_kit.sampling.engine import (
    Choice,
    Engine,
    Sampling,
    ThoughtLimit,
    choose,
    why_no_hot_swap,
)
from rloo_kit.text.thoughts import THOUGHT_ENDS, token_id
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model, Tokenizer

VLLM, TRANSFORMERS = "vllm", "transformers"
ENGINES = {VLLM: "vLLM in this process", TRANSFORMERS: "transformers"}
# TRL's settings of who samples, and the engines that obey each
BOTH, NEITHER = (VLLM, TRANSFORMERS), ()
SETTINGS: dict[str, tuple[str, ...]] = {
    "use_vllm": BOTH,
    "vllm_enable_sleep_mode": BOTH,
    "vllm_max_model_length": BOTH,
    "vllm_gpu_memory_utilization": BOTH,
    "cache_implementation": (TRANSFORMERS,),
    "transformers_continuous_batching_config": (TRANSFORMERS,),
    "use_transformers_continuous_batching": (TRANSFORMERS,),
    "use_transformers_paged": (TRANSFORMERS,),
    "vllm_group_port": NEITHER,
    "vllm_model_impl": NEITHER,
    "vllm_tensor_parallel_size": NEITHER,
    "vllm_mode": NEITHER,  # vLLM samples in this process, TRL's default
    "vllm_server_base_url": NEITHER,
    "vllm_server_host": NEITHER,
    "vllm_server_port": NEITHER,
    "vllm_server_timeout": NEITHER,
    "vllm_structured_outputs_regex": NEITHER,
    "vllm_sampling_params": NEITHER,  # an object of Unsloth's patched class: see generation_kwargs
}
# What `generation_kwargs` may hold for vLLM: it needs no tokenizer, and leaves the number of
# completions, their length, their ends and the log-probabilities to the kit
TOKEN_SAMPLING = {
    "allowed_token_ids", "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens",
    "presence_penalty", "repetition_penalty", "top_k", "top_p",
}  # fmt: skip
# Parameters of transformers' `generate` that TRL and the kit set
FIXED = {
    "disable_compile", "eos_token_id", "num_return_sequences", "pad_token_id",
    "return_dict_in_generate",
}  # fmt: skip
# What log-probabilities, lengths and the plan read from a setting of their own
OWN_SETTINGS = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
}
# Settings that count the tokens of a completion, which a thinking budget draws in two parts
COUNTING = ("min_tokens", "presence_penalty", "frequency_penalty")


def start_engine(
    model: Model, args: Any, *, why_not: str | None = None, trains: bool = True
) -> tuple[Engine | None, Choice]:
    """Start what ``args.generation`` asks for.

    Args:
        model: As ``attach_lora`` returned it.
        args: A ``LeaveOneOutConfig``.
        why_not: Why vLLM cannot sample here, or None.
        trains: Whether a training samples, and not an evaluation, which draws otherwise.

    Returns:
        The engine, None where transformers samples; and the choice, with its reason.

    Raises:
        GenerationError: What was asked for by name cannot be used, or does not start.
        ConfigError: Two settings contradict each other.
    """
    asked = requested_engine(args)
    why_not = why_not or _why_not_here(asked, model)
    choice = choose(asked, on_gpu=model.device.type != "cpu", why_not=why_not)
    if trains:
        check_settings(args, choice.engine)
    _check_vllm_table(model, choice)
    if choice.engine == "transformers":
        _put_to_sleep(model)
        return None, choice
    # vLLM reserves for the longest row that the model was loaded for
    notes = notes_of(model)
    max_length = (
        args.vllm_max_model_length
        or notes.max_seq_length
        or model.config.get_text_config().max_position_embeddings
    )
    try:
        return _in_process(model, args, max_length), choice
    except GenerationError as exc:
        if asked != "auto" or notes.vllm:
            raise
        if trains:
            check_settings(args, TRANSFORMERS)
        _put_to_sleep(model)
        return None, Choice("transformers", str(exc))


def _why_not_here(asked: str, model: Model) -> str | None:
    """Return why vLLM cannot sample from this model in this process, or None."""
    reason = why_not_vllm() if asked in ("vllm", "auto") else None
    if asked == "auto":  # by name, vLLM gets a copy of its own
        reason = reason or notes_of(model).why_not_shared
    return reason or why_no_hot_swap(model)


def _check_vllm_table(model: Model, choice: Choice) -> None:
    """Raise ConfigError where the run file's ``vllm:`` is set and another engine samples."""
    names = () if choice.engine == VLLM else notes_of(model).vllm
    for name in names:
        reason = f" ({choice.reason})" if choice.reason else ""
        raise ConfigError(
            f"vllm.{name} is for vLLM, and transformers samples{reason}: leave it out, or set "
            f"trainer.generation to vllm"
        )


def _check_shared(args: Any, shared: EngineSettings) -> None:
    """Raise ConfigError on settings that an engine which started with the model does not have."""
    share, length = args.vllm_gpu_memory_utilization, args.vllm_max_model_length
    if args.memory_share_given and share != shared.share:
        raise ConfigError(
            f"trainer.vllm_gpu_memory_utilization is {share:g}, and vLLM started with the model: "
            f"give it to load_model as gpu_memory_utilization"
        )
    if length and length != shared.max_seq_length:
        raise ConfigError(
            f"trainer.vllm_max_model_length is {length}, and vLLM started with the model for "
            f"{shared.max_seq_length} tokens: set model.max_seq_length"
        )


def _put_to_sleep(model: Model) -> None:
    """Let an engine sleep that a model carries and nobody samples with."""
    llm = getattr(model, "vllm_engine", None)
    if llm is None or not llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
        return
    if not llm.llm_engine.is_sleeping():
        llm.sleep(level=1)


def _in_process(model: Model, args: Any, max_length: int) -> Engine:
    from rloo_kit.sampling.vllm_inprocess import VllmEngine

    notes = notes_of(model)
    if notes.shared_engine is not None:
        _check_shared(args, notes.shared_engine)
    engine = VllmEngine(
        model,
        max_length=max_length,
        num_sequences=min(MAX_SEQUENCES, args.generation_batch_size),
        sleeps=args.vllm_enable_sleep_mode,
        memory_share=args.vllm_gpu_memory_utilization if args.memory_share_given else None,
        seed=args.seed,
        extra=notes.vllm,
    )
    add_to_session(engine)
    return engine


def check_engine(args: Any, *, trains: bool = True) -> None:
    """Check what can be checked before a model is loaded; ``trains``: not an evaluation.

    Raises:
        GenerationError: An engine was asked for by name and is not installed.
        ConfigError: The engine does not obey a setting.
    """
    asked = requested_engine(args)
    if asked == "vllm":
        choose("vllm", on_gpu=True, why_not=why_not_vllm())
    if asked == "auto" and (detect_hardware().device == "cpu" or why_not_vllm()):
        asked = "transformers"
    if trains:
        check_settings(args, asked)


def check_settings(args: Any, engine: str) -> None:
    """Raise ConfigError on a setting of TRL that one of ``ENGINES`` does not obey."""
    if engine not in ENGINES:
        return
    for name, obeyed in SETTINGS.items():
        if engine not in obeyed and _is_given(args, name):
            by_kit = " or ".join(obeyed)
            remedy = f", or set trainer.generation to {by_kit}" if by_kit else ""
            raise ConfigError(
                f"trainer.{name} is {format_value(getattr(args, name))}, which {ENGINES[engine]} "
                f"does not obey: leave it out{remedy}"
            )
    others = getattr(args, "generation_kwargs", None) or {}
    if twice := OWN_SETTINGS.keys() & others:
        name = min(twice)
        raise ConfigError(
            f"trainer.generation_kwargs gives {name!r}, which trainer.{OWN_SETTINGS[name]} sets: "
            "write it there"
        )
    if engine == "transformers":
        _check_generate(others)
    else:
        _check_vllm(others, args)


def _is_given(args: Any, name: str) -> bool:
    """Return whether a setting has another value than TRL's default."""
    if name == "vllm_gpu_memory_utilization":
        return bool(getattr(args, "memory_share_given", False))
    import trl

    config: Any = trl.RLOOConfig  # pyright: ignore[reportPrivateImportUsage]  # a lazy module
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return name in defaults and getattr(args, name, defaults[name]) != defaults[name]


def _check_vllm(others: Mapping[str, Any], args: Any) -> None:
    if unknown := [name for name in others if name not in TOKEN_SAMPLING]:
        raise ConfigError(
            f"trainer.generation_kwargs gives {unknown[0]!r}, which cannot be given to vLLM: leave "
            f"it out, set generation: transformers, or give one of "
            f"{', '.join(sorted(TOKEN_SAMPLING))}"
        )
    if args.thinking_budget and (counting := [name for name in COUNTING if name in others]):
        raise ConfigError(
            f"trainer.generation_kwargs gives {counting[0]!r}, which vLLM cannot obey with "
            "trainer.thinking_budget: leave one of them out, or set generation: transformers"
        )
    if others:
        from vllm import SamplingParams

        try:
            SamplingParams(**make_sampling(args, []).as_vllm())
        except Exception as exc:  # what vLLM raises differs by version
            raise _refused(others, exc) from exc


def _check_generate(others: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import GenerationMode

    config = GenerationConfig(do_sample=True)
    try:
        unknown = config.update(**others)
        mode = config.get_generation_mode()
    except (TypeError, ValueError) as exc:
        raise _refused(others, exc) from exc
    if mode is not GenerationMode.SAMPLE:
        raise ConfigError(
            f"trainer.generation_kwargs {format_value(dict(others))} asks for {mode.value}, and "
            "completions must be sampled one token at a time: leave it out"
        )
    for name in (*unknown, *FIXED.intersection(others)):
        raise ConfigError(
            f"trainer.generation_kwargs gives {name!r}, which cannot be given to generate of "
            f"transformers: leave it out"
        )


@contextlib.contextmanager
def blame_generation_kwargs(args: Any) -> Iterator[None]:
    """Raise what ``generate`` of transformers refuses as a ConfigError on ``generation_kwargs``."""
    try:
        yield
    except (TypeError, ValueError) as exc:
        if isinstance(exc, KitError) or not args.generation_kwargs:
            raise
        raise _refused(args.generation_kwargs, exc) from exc


def _refused(others: Mapping[str, Any], exc: Exception) -> ConfigError:
    return ConfigError(
        f"trainer.generation_kwargs {format_value(dict(others))} cannot be obeyed "
        f"({first_line(exc)}): correct its values"
    )


def requested_engine(args: Any) -> str:
    """Return ``auto``, ``vllm`` or ``transformers``; ``use_vllm: true`` means ``vllm``.

    Raises:
        ConfigError: ``use_vllm`` and ``generation`` contradict each other, or TRL's server is
            asked for.
    """
    if not args.use_vllm:
        return args.generation
    if args.vllm_mode != "colocate":
        raise ConfigError(
            f"trainer.vllm_mode is {args.vllm_mode!r}, and vLLM samples in this process: leave it "
            f"out, or train with TRL where a second GPU samples"
        )
    if args.generation == "transformers":
        raise ConfigError(
            "use_vllm: true asks for vLLM and generation is 'transformers': keep generation"
        )
    return "vllm"


def thought_limit(tokenizer: Tokenizer, tokens: int | None) -> ThoughtLimit | None:
    """Return the limit that ``trainer.thinking_budget`` sets.

    Raises:
        ConfigError: The tokenizer has no tokens for a thought.
    """
    if tokens is None:
        return None
    start, end = (token_id(tokenizer, one) for one in ("<think>", THOUGHT_ENDS))
    if start is None or end is None:
        raise ConfigError(
            f"trainer.thinking_budget is {tokens}, and this model has no single tokens <think> and "
            "</think>: leave it out, or use a thinking model"
        )
    return ThoughtLimit(tokens, start, end)


def make_sampling(
    args: Any, stop_token_ids: list[int], thought: ThoughtLimit | None = None
) -> Sampling:
    """Return how a ``LeaveOneOutConfig`` draws completions; each stop token ends one."""
    return Sampling(
        max_tokens=args.max_completion_length,
        stop_token_ids=tuple(stop_token_ids),
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        others=dict(args.generation_kwargs or {}),
        thought=thought,
    )
