"""Check that the chosen sampling engine supports the settings and ``generation_kwargs``.

vLLM and transformers are imported only to check ``generation_kwargs``.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rloo_kit.errors import ConfigError, KitError
from rloo_kit.text.wording import first_line, format_value

ENGINES = {
    "vllm": "vLLM in this process",
    "server": "vLLM's server",
    "transformers": "transformers",
}
# Setting -> the only engine that uses it, or "" if none does
OBEYED_BY = {
    "cache_implementation": "transformers",
    "transformers_continuous_batching_config": "transformers",
    "use_transformers_continuous_batching": "transformers",
    "use_transformers_paged": "transformers",
    "vllm_adapter_dir": "server",
    "vllm_mode": "server",
    "vllm_server_base_url": "server",
    "vllm_server_host": "server",
    "vllm_server_port": "server",
    "vllm_server_timeout": "server",
    "vllm_group_port": "",  # for NCCL, but the server loads adapters from files
    "vllm_model_impl": "",
    "vllm_tensor_parallel_size": "",
    "vllm_structured_outputs_regex": "",
}
# Parameters that `generation_kwargs` may have with vLLM. They need no tokenizer, and do not affect
# what the kit itself sets: number and length of completions, stop tokens, and log-probabilities
TOKEN_SAMPLING = {
    "allowed_token_ids", "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens",
    "presence_penalty", "repetition_penalty", "top_k", "top_p",
}  # fmt: skip
# Parameters of transformers' `generate` that only TRL and the kit may set
FIXED = {
    "disable_compile", "eos_token_id", "num_return_sequences", "pad_token_id",
    "return_dict_in_generate",
}  # fmt: skip
# Parameter -> the trainer setting to use instead, because other parts of the kit read it too
OWN_SETTINGS = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
}
# Parameters that depend on all tokens of a completion so far. With a thinking budget, vLLM samples
# completions in two parts, and would see only the tokens of the second part
COUNTING = ("min_tokens", "presence_penalty", "frequency_penalty")


def requested_engine(args: Any) -> str:
    """Return the sampling engine that the settings request: ``auto``, or a key of ``ENGINES``.

    With TRL's ``use_vllm: true`` the engine is ``server`` if ``vllm_mode`` or ``generation`` is
    ``server``, and ``vllm`` otherwise. Without ``use_vllm`` it is the setting ``generation``.

    Args:
        args: A ``LeaveOneOutConfig``.

    Raises:
        ConfigError: ``use_vllm`` and ``generation`` contradict each other.
    """
    if not args.use_vllm:
        return args.generation
    by_mode = "server" if args.vllm_mode == "server" else "vllm"
    if args.generation not in ("auto", "server", by_mode):
        raise ConfigError(
            f"use_vllm: true with vllm_mode {args.vllm_mode!r} asks for {ENGINES[by_mode]}, but "
            f"generation is {args.generation!r}: keep generation, and leave use_vllm and vllm_mode "
            f"out"
        )
    return by_mode if args.generation == "auto" else args.generation


def check_settings(args: Any, engine: str) -> None:
    """Check that the sampling engine supports the settings.

    Args:
        args: A ``LeaveOneOutConfig``.
        engine: ``vllm``, ``server`` or ``transformers``; nothing is checked for ``auto``.

    Raises:
        ConfigError: The engine would ignore a setting, or ``generation_kwargs`` are wrong for it.
    """
    if engine not in ENGINES:
        return
    for field in dataclasses.fields(args):
        other = OBEYED_BY.get(field.name, engine)
        if other != engine and (value := getattr(args, field.name)) != field.default:
            by_other = f", or set trainer.generation to {other}" if other else ""
            raise ConfigError(
                f"trainer.{field.name} is {format_value(value)}, but {ENGINES[engine]} ignores "
                f"this setting: leave it out{by_other}"
            )
    check_generation_kwargs(args, engine)


def check_generation_kwargs(args: Any, engine: str) -> None:
    """Check that an engine accepts the ``generation_kwargs``.

    Args:
        args: A ``LeaveOneOutConfig``.
        engine: ``vllm``, ``server`` or ``transformers``.

    Raises:
        ConfigError: The engine does not accept a parameter or its value, or the kit sets the
            parameter itself.
    """
    others = args.generation_kwargs or {}
    for name in OWN_SETTINGS.keys() & others:
        raise ConfigError(
            f"trainer.generation_kwargs has {name!r}, but the kit reads it from "
            f"trainer.{OWN_SETTINGS[name]}: set it there"
        )
    if engine == "transformers":
        _check_generate(others)
    elif others:
        _check_vllm(others, args, engine)


def _check_vllm(others: Mapping[str, Any], args: Any, engine: str) -> None:
    """Check ``generation_kwargs`` for vLLM.

    Args:
        others: The ``generation_kwargs``.
        args: A ``LeaveOneOutConfig``.
        engine: ``vllm`` or ``server``. With ``vllm``, vLLM's ``SamplingParams`` also checks the
            values.

    Raises:
        ConfigError: vLLM cannot use one of the parameters or its value.
    """
    for name in others.keys() - TOKEN_SAMPLING:
        raise ConfigError(
            f"trainer.generation_kwargs has {name!r}, which cannot be used with vLLM: leave it "
            "out, set generation: transformers, or use only these parameters: "
            f"{', '.join(sorted(TOKEN_SAMPLING))}"
        )
    for name in COUNTING:
        if args.thinking_budget and name in others:
            raise ConfigError(
                f"trainer.generation_kwargs has {name!r}, which vLLM cannot combine with "
                "trainer.thinking_budget: leave one of them out, or set generation: transformers"
            )
    if engine == "server":  # the server itself reports a value that it does not accept
        return
    from vllm import SamplingParams

    try:
        SamplingParams(max_tokens=args.max_completion_length, **others)
    except Exception as exc:  # what vLLM raises differs by version
        raise _refused(others, exc) from exc


def _check_generate(others: Mapping[str, Any]) -> None:
    """Check ``generation_kwargs`` for ``generate`` of transformers.

    Raises:
        ConfigError: ``generate`` does not accept a parameter or its value, the kit sets the
            parameter itself, or the completions would not be sampled (beam search, greedy).
    """
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
            f"trainer.generation_kwargs {format_value(dict(others))} selects {mode.value}, but "
            "completions must be sampled one token at a time: leave out the arguments that "
            "select this mode"
        )
    for name in (*unknown, *FIXED.intersection(others)):
        raise ConfigError(
            f"trainer.generation_kwargs has {name!r}, which cannot be passed to generate() of "
            f"transformers: leave it out"
        )


@contextlib.contextmanager
def blame_generation_kwargs(others: Any) -> Iterator[None]:
    """Context manager that turns a TypeError or ValueError in its block into a ConfigError.

    ``generate`` of transformers raises these errors if it does not accept an argument. The message
    of the ConfigError shows the ``generation_kwargs``.

    Args:
        others: The ``generation_kwargs``, a dict. If they are None or empty, an error passes
            through unchanged.

    Raises:
        ConfigError: A TypeError or ValueError was raised, and ``generation_kwargs`` were given.
    """
    try:
        yield
    except (TypeError, ValueError) as exc:
        if isinstance(exc, KitError) or not others:
            raise
        raise _refused(others, exc) from exc


def _refused(others: Mapping[str, Any], exc: Exception) -> ConfigError:
    """Return the error for ``generation_kwargs`` that an engine refused with ``exc``."""
    return ConfigError(
        f"trainer.generation_kwargs {format_value(dict(others))} were refused "
        f"({first_line(exc)}): correct the values"
    )
