"""Facts that determine the memory of a run: the model's shape, the longest prompt, the engine.

This module reads configs and prompts, never weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.config.trainer_settings import batch_plan, trl_defaults
from rloo_kit.errors import KitError
from rloo_kit.job import beside, read_prompts, template_settings
from rloo_kit.machine.hardware import Hardware, installed_version, why_not_unsloth
from rloo_kit.models.adapters import EMBEDDED, adapter_in, base_name, is_hub_4bit
from rloo_kit.models.engine_memory import BATCHED_TOKENS
from rloo_kit.models.loading import TOKENIZER, load_tokenizer
from rloo_kit.models.shape import ModelShape, read_shape
from rloo_kit.models.shared_engine import why_not_shared
from rloo_kit.planning.memory import Job
from rloo_kit.sampling.engine import choose

_shape = cache(read_shape)


@dataclass(frozen=True)
class Facts:
    """Facts on model, prompts, machine and libraries that a plan needs besides the settings."""

    shape: ModelShape
    longest: int | None  # tokens of the longest prompt; None if it cannot be counted here
    card: Hardware
    room: int  # bytes of memory that this process may use
    unsloth: bool  # True if Unsloth trains, on a GPU
    vllm: bool  # True if vLLM is installed
    continues: bool  # True if the run trains an existing adapter, whose rank cannot change


def read_facts(config: RunConfig, base: Path, card: Hardware, room: int) -> Facts:
    """Read the facts on model, prompts and machine that the plan of a run needs.

    Args:
        config: Settings of the run.
        base: Folder that the relative paths of model and prompts start from.
        card: The GPU or machine to plan for.
        room: Memory that this process may use, in bytes: GPU memory, or main memory without a GPU.

    Raises:
        ModelError: The config of a model cannot be read.
    """
    name = beside(config.model.name, base)
    trusts = config.model.trust_remote_code
    return Facts(
        shape=_shape(name, revision=config.model.revision, trust_remote_code=trusts),
        longest=_longest_prompt(config, name, base),
        card=card,
        room=room,
        unsloth=card.on_gpu
        and config.model.backend != "transformers"
        and not why_not_unsloth(card.device),
        vllm=installed_version("vllm") is not None,
        continues=adapter_in(name) is not None,
    )


def make_job(config: RunConfig, facts: Facts) -> Job:
    """Combine a run's settings and facts into the ``Job`` from which its memory is computed."""
    trainer = DEFAULTS | config.trainer
    batch = batch_plan(trainer)
    others = config.lora.others
    layers = others.get("layers_to_transform")
    num_layers = facts.shape.num_layers if layers is None else 1
    if isinstance(layers, list):
        num_layers = len(layers)
    shape = facts.shape.with_packed_experts if facts.unsloth else facts.shape
    left = max(1, config.model.max_seq_length - trainer["max_completion_length"])
    checkpointing = "unsloth" if facts.unsloth else "plain"
    if not trainer.get("gradient_checkpointing", facts.card.on_gpu):
        checkpointing = "none"
    engine = _engine(config, facts)
    # If 16 bit is requested for a 4-bit copy on the hub, Unsloth loads the 16-bit original
    loads_original = facts.unsloth and is_hub_4bit(base_name(config.model.name))
    return Job(
        shape=shape,
        on_gpu=facts.card.on_gpu,
        room=facts.room,
        card=facts.card.usable,
        in_4bit=config.model.load_in_4bit or (facts.shape.packed and not loads_original),
        value_bytes=2 if facts.card.on_gpu or facts.card.bf16 else 4,
        rank=config.lora.r,
        targets=tuple(_targets(config, facts)),
        adapted_layers=num_layers,
        whole=len({"embed_tokens", "lm_head"} & set(others.get("modules_to_save") or ())),
        optimizer=str(trainer.get("optim") or "adamw_torch"),
        checkpointing=checkpointing,
        rows=batch.num_completions,
        at_once=batch.in_flight,
        step_rows=batch.step_rows,
        group=batch.num_generations,
        prompt=min(facts.longest or config.data.max_prompt_tokens or left, left),
        completion=trainer["max_completion_length"],
        max_length=config.model.max_seq_length,
        budget=trainer["tokens_per_micro_batch"],
        scores=bool(trainer["beta"]) or not batch.is_on_policy,
        keeps_graphs=bool(trainer["beta"]) and batch.is_on_policy,
        engine=engine,
        # Unsloth's engine of a model with a vision part does not sleep
        sleeps=bool(trainer.get("vllm_enable_sleep_mode", facts.card.on_gpu))
        and not (engine == "shared" and facts.shape.has_vision),
        share=trainer.get("vllm_gpu_memory_utilization"),
        batched_tokens=(config.vllm | config.unsloth).get("max_num_batched_tokens", BATCHED_TOKENS),
        draft_tokens=(config.vllm.get("speculative_config") or {}).get("num_speculative_tokens", 0),
    )


def _targets(config: RunConfig, facts: Facts) -> Iterator[str]:
    """Yield the names of the linear layers that get an adapter."""
    targets = config.lora.target_modules
    parameters = config.lora.others.get("target_parameters")
    dense = [one.name for one in facts.shape.linears if not one.is_expert]
    if not isinstance(targets, str):
        yield from targets
    elif targets == "all-linear":
        yield from dense
    else:  # a pattern for full names: adapt the layers whose short names occur in its text
        yield from [name for name in dense if name in targets] or dense
    for one in facts.shape.linears:
        leaf = one.name.rpartition(".")[2]
        named = any(name.endswith(leaf) for name in parameters or ())
        # Unsloth also gives the experts of a targeted MLP an adapter. But names in a list that no
        # dense layer has are dropped by `attach_lora`
        is_layer = isinstance(targets, str) or "down_proj" in dense
        by_unsloth = parameters is None and facts.unsloth and "down_proj" in targets and is_layer
        if one.is_expert and (named or by_unsloth):
            yield one.name


def assumptions(config: RunConfig, facts: Facts, job: Job) -> Iterator[str]:
    """Yield a sentence for each assumption that the plan makes."""
    if facts.longest is None and config.data.max_prompt_tokens is None:
        yield (
            f"prompts are assumed to have {job.prompt:,} tokens, the most that "
            f"model.max_seq_length allows; set data.max_prompt_tokens to lower this number"
        )
    if facts.shape.in_16bit:
        yield (
            f"about {facts.shape.in_16bit:.0%} of the layers are assumed to stay in 16 bit in "
            f"{config.model.name}, since its config is not on this machine"
        )
    if job.on_gpu and not facts.vllm and config.trainer.get("generation", "auto") == "auto":
        yield "completions are sampled by transformers, since vLLM is not installed here"
    if any(isinstance(one, dict) and one.get("name") == "reward_model" for one in config.rewards):
        yield "the memory that the run's reward models need is not counted"


def _longest_prompt(config: RunConfig, name: str, base: Path) -> int | None:
    """Return the number of tokens of the run's longest prompt.

    It is None if the model's tokenizer is not in a folder on this machine, or if the prompts cannot
    be read.
    """
    if not (EMBEDDED.get(name, Path(name)) / TOKENIZER).is_file():
        return None
    from rloo_kit.data.lengths import longest_prompt

    template = config.model.chat_template
    try:
        tokenizer = load_tokenizer(name, chat_template=template and beside(template, base))
        prompts, _ = read_prompts(config, base)
        longest = len(longest_prompt(prompts, tokenizer, template_settings(config)))
    except (KitError, OSError, ValueError):  # the run itself reports errors in the prompts
        return None
    return min(longest, config.data.max_prompt_tokens or longest)


def _engine(config: RunConfig, facts: Facts) -> str:
    """Return the name of the sampling engine that the run would use.

    It is one of ``ENGINES``, or ``shared`` if vLLM uses Unsloth's copy of the weights.
    """
    asked = requested_engine(SimpleNamespace(**trl_defaults() | DEFAULTS | config.trainer))
    is_shared = facts.unsloth and not why_not_shared(
        facts.shape, trust_remote_code=config.model.trust_remote_code
    )
    can_sample = facts.vllm and (is_shared or not facts.unsloth)
    # If vLLM was requested by name, the plan assumes that it can run
    why_not = "it cannot here" if asked == "auto" and not can_sample else None
    engine = choose(asked, on_gpu=facts.card.on_gpu, why_not=why_not).engine
    return "shared" if engine == "vllm" and is_shared else engine
