"""Checks of settings that a sampling engine does not obey, and of ``generation_kwargs``.

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
# Settings of TRL that only transformers obeys
OF_TRANSFORMERS = (
    "cache_implementation",
    "transformers_continuous_batching_config",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
)
# Settings that only vLLM's server obeys
OF_SERVER = (
    "vllm_adapter_dir", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout",
)  # fmt: skip
# Settings of TRL that no engine obeys
OF_NO_ENGINE = (
    "vllm_group_port",  # for NCCL, but the server gets adapters, not weights
    "vllm_model_impl",
    "vllm_tensor_parallel_size",
    "vllm_structured_outputs_regex",
)
# Parameters that `generation_kwargs` may hold for vLLM: they need no tokenizer, and leave the
# number of completions, their length, their ends and the log-probabilities to the kit
TOKEN_SAMPLING = {
    "allowed_token_ids", "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens",
    "presence_penalty", "repetition_penalty", "top_k", "top_p",
}  # fmt: skip
# Parameters of transformers' `generate` that TRL and the kit set
FIXED = {
    "disable_compile", "eos_token_id", "num_return_sequences", "pad_token_id",
    "return_dict_in_generate",
}  # fmt: skip
# Parameters with a setting of their own, which log-probabilities, lengths and the plan read
OWN_SETTINGS = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
}
# Settings that count the tokens of a completion, which is sampled in two parts with a thinking
# budget
COUNTING = ("min_tokens", "presence_penalty", "frequency_penalty")


def requested_engine(args: Any) -> str:
    """Return the engine that the settings ask for: ``auto``, or a key of ``ENGINES``.

    ``use_vllm: true`` means ``vllm``, and with ``vllm_mode: server`` it means ``server``.

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
    """Check the settings of the sampling engine.

    Args:
        args: A ``LeaveOneOutConfig``.
        engine: ``vllm``, ``server`` or ``transformers``; nothing is checked for ``auto``.

    Raises:
        ConfigError: The engine does not obey a setting.
    """
    if engine not in ENGINES:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    obeyed_by = dict.fromkeys(OF_NO_ENGINE, "") | dict.fromkeys(OF_SERVER, "server")
    obeyed_by |= dict.fromkeys(OF_TRANSFORMERS, "transformers")
    for name, other in obeyed_by.items():
        if name in defaults and other != engine and getattr(args, name) != defaults[name]:
            by_other = f", or set trainer.generation to {other}" if other else ""
            raise ConfigError(
                f"trainer.{name} is {format_value(getattr(args, name))}, which {ENGINES[engine]} "
                f"does not obey: leave it out{by_other}"
            )
    others = args.generation_kwargs or {}
    for name in OWN_SETTINGS.keys() & others:
        raise ConfigError(
            f"trainer.generation_kwargs gives {name!r}, which trainer.{OWN_SETTINGS[name]} sets: "
            "write it there"
        )
    if engine == "transformers":
        _check_generate(others)
    elif others:
        _check_vllm(others, args, installed=engine == "vllm")


def _check_vllm(others: Mapping[str, Any], args: Any, *, installed: bool) -> None:
    for name in others.keys() - TOKEN_SAMPLING:
        raise ConfigError(
            f"trainer.generation_kwargs gives {name!r}, which cannot be given to vLLM: leave it "
            f"out, set generation: transformers, or give one of {', '.join(sorted(TOKEN_SAMPLING))}"
        )
    for name in COUNTING:
        if args.thinking_budget and name in others:
            raise ConfigError(
                f"trainer.generation_kwargs gives {name!r}, which vLLM cannot obey with "
                "trainer.thinking_budget: leave one of them out, or set generation: transformers"
            )
    if not installed:  # the server reports what it does not accept
        return
    from vllm import SamplingParams

    try:
        SamplingParams(max_tokens=args.max_completion_length, **others)
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
            f"trainer.generation_kwargs {format_value(dict(others))} asks for {mode.value}, but "
            "completions must be sampled one token at a time: leave it out"
        )
    for name in (*unknown, *FIXED.intersection(others)):
        raise ConfigError(
            f"trainer.generation_kwargs gives {name!r}, which cannot be given to generate of "
            f"transformers: leave it out"
        )


@contextlib.contextmanager
def blame_generation_kwargs(args: Any) -> Iterator[None]:
    """Turn an error that ``generate`` raises in the body into one about ``generation_kwargs``.

    Args:
        args: A ``LeaveOneOutConfig``. Without ``generation_kwargs`` errors are not changed.

    Raises:
        ConfigError: ``generate`` refused ``generation_kwargs``.
    """
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
