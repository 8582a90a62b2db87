"""Choice and start of the engine that samples: vLLM in this process, a vLLM server, or none."""

from typing import Any

from rloo_kit.config.engine_settings import (
    ENGINES,
    check_generation_kwargs,
    check_settings,
    requested_engine,
)
from rloo_kit.config.lora import why_not_vllm_takes
from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.machine.cleanup import add_to_session
from rloo_kit.machine.hardware import detect_hardware, why_not_vllm
from rloo_kit.models.adapters import adapter_in, base_of, revision_of
from rloo_kit.models.engine_memory import MAX_SEQUENCES
from rloo_kit.models.loading import find_model
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shared_engine import EngineSettings
from rloo_kit.sampling.engine import (
    Choice,
    Engine,
    Sampling,
    ThoughtLimit,
    choose,
    reserved_rank_of,
    why_no_hot_swap,
)
from rloo_kit.text.thoughts import thought_marks
from rloo_kit.types import Model, Tokenizer


def start_engine(
    model: Model, args: Any, *, why_not: str | None = None, trains: bool = True
) -> tuple[Engine | None, Choice]:
    """Start the engine that ``args.generation`` asks for.

    Args:
        model: The policy, from ``attach_lora``.
        args: A ``LeaveOneOutConfig``.
        why_not: The caller's reason why vLLM cannot sample here; None if there is none.
        trains: True for a training, which rejects settings that have no effect on the engine. False
            for an evaluation, which only rejects ``generation_kwargs`` that the engine does not
            accept.

    Returns:
        The engine, or None if transformers samples; and the choice, with the reason if a faster
        engine cannot be used.

    Raises:
        GenerationError: The engine was requested by name and cannot be used, or does not start.
        ConfigError: Two settings contradict each other.
    """
    check = check_settings if trains else check_generation_kwargs
    asked = requested_engine(args)
    if asked != "server":  # a server has its own vLLM
        why_not = why_not or why_not_vllm()
    if asked == "auto":  # if vLLM is requested by name, it gets its own copy of the weights
        why_not = why_not or notes_of(model).why_not_shared
    why_not = why_not or why_no_hot_swap(model)
    choice = choose(asked, on_gpu=model.device.type != "cpu", why_not=why_not)
    if choice.engine == "vllm":
        check(args, "vllm")
        try:
            return _in_process(model, args), choice
        except GenerationError as exc:
            if asked != "auto" or notes_of(model).vllm:
                raise
            choice = Choice("transformers", str(exc))
    check(args, choice.engine)
    _check_vllm_table(model, choice)
    _put_to_sleep(model)
    return (_on_server(model, args) if choice.engine == "server" else None), choice


def _check_vllm_table(model: Model, choice: Choice) -> None:
    """Raise ConfigError if the run file has settings under ``vllm:`` but another engine samples."""
    for name in notes_of(model).vllm:
        reason = f" ({choice.reason})" if choice.reason else ""
        raise ConfigError(
            f"vllm.{name} applies only to vLLM in this process, but {ENGINES[choice.engine]} "
            f"samples{reason}: leave it out, or set trainer.generation to vllm"
        )


def _check_shared(args: Any, shared: EngineSettings) -> None:
    """Raise ConfigError if settings differ from those of the engine that Unsloth started.

    Args:
        args: A ``LeaveOneOutConfig``.
        shared: The settings of the engine, which shares its weights with the model.
    """
    share = args.vllm_gpu_memory_utilization
    length = args.vllm_max_model_length
    if args.memory_share_given and share != shared.share:
        raise ConfigError(
            f"trainer.vllm_gpu_memory_utilization is {share:g}, but vLLM was already started when "
            f"the model was loaded: pass it to load_model as gpu_memory_utilization"
        )
    if length and length != shared.max_seq_length:
        raise ConfigError(
            f"trainer.vllm_max_model_length is {length}, but vLLM was already started with the "
            f"model, for {shared.max_seq_length} tokens: leave it out, or set "
            f"model.max_seq_length to the same number"
        )


def _put_to_sleep(model: Model) -> None:
    """Free the memory of the unused vLLM engine that Unsloth loaded with a model, if it exists."""
    llm = getattr(model, "vllm_engine", None)
    if (
        llm is not None
        and llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        and not llm.llm_engine.is_sleeping()
    ):
        llm.sleep(level=1)


def _in_process(model: Model, args: Any) -> Engine:
    from rloo_kit.sampling.vllm_inprocess import VllmEngine

    notes = notes_of(model)
    if notes.shared_engine is not None:
        _check_shared(args, notes.shared_engine)
    how = {
        "max_length": _max_length(model, args),
        "num_sequences": min(MAX_SEQUENCES, batch_plan(vars(args)).in_flight),
        "sleeps": args.vllm_enable_sleep_mode,
        "memory_share": args.vllm_gpu_memory_utilization if args.memory_share_given else None,
        "seed": args.seed,
        "extra": notes.vllm,
    }
    if notes.engine is not None:  # an earlier trainer has started it for this model
        engine, had = notes.engine
        may_differ = {name: how[name] for name in ("max_length", "num_sequences", "seed")}
        fits = (had | may_differ) == how and how["max_length"] <= had["max_length"]
        if fits and not engine.is_closed:
            return engine
    engine = VllmEngine(model, **how)
    notes.engine = engine, how
    add_to_session(engine)
    return engine


def _max_length(model: Model, args: Any) -> int:
    """Return the maximum length of prompt and completion together, in tokens."""
    return (
        args.vllm_max_model_length
        or notes_of(model).max_seq_length
        or model.config.get_text_config().max_position_embeddings
    )


def _on_server(model: Model, args: Any) -> Engine:
    from rloo_kit.sampling.vllm_inprocess import compute_dtype, is_4bit
    from rloo_kit.sampling.vllm_server import Needs, VllmServer

    notes = notes_of(model)
    name, revision = notes.hub or (model.get_base_model().config.name_or_path, None)
    length = _max_length(model, args)
    rank, remote_code = reserved_rank_of(model), notes.trust_remote_code
    needs = Needs(name, length, rank, is_4bit(model), revision, remote_code)
    server = VllmServer(args, needs, compute_dtype(model))
    add_to_session(server)
    return server


def check_engine(args: Any, run: RunConfig | None = None, *, trains: bool = True) -> None:
    """Check that the engine of a run can be used, before a model is loaded.

    Args:
        args: A ``LeaveOneOutConfig``.
        run: The settings of the run file, with absolute paths. With them, the LoRA settings and
            the server are checked too; None skips these two checks.
        trains: True for a training, False for an evaluation.

    Raises:
        GenerationError: The engine was requested by name and is not installed, or its server cannot
            be reached or serves another model.
        ConfigError: A setting has no effect on the engine, or vLLM does not support a LoRA setting.
        ModelError: The base model does not exist or cannot be read, so its name cannot be compared
            with the name of the server's model.
    """
    asked = requested_engine(args)
    why_not = None if asked == "server" else why_not_vllm()  # a server has its own vLLM
    choice = choose(asked, on_gpu=detect_hardware().on_gpu, why_not=why_not)
    why = run and asked in ("vllm", "server") and why_not_vllm_takes(run.lora.others)
    if why:
        raise ConfigError(f"{why}: leave it out of lora, or set trainer.generation: transformers")
    if trains:  # with auto, it may still turn out that vLLM cannot sample from the model
        check_settings(args, asked if choice.engine != "transformers" else "transformers")
    if run is not None and asked == "server":
        from rloo_kit.sampling.vllm_server import Needs, VllmServer

        model = run.model
        adapter = adapter_in(model.name)
        name, revision = (
            (base_of(adapter), revision_of(adapter)) if adapter else (model.name, model.revision)
        )
        length = args.vllm_max_model_length or model.max_seq_length
        base, remote_code = find_model(name), model.trust_remote_code
        needs = Needs(base, length, run.lora.r, model.load_in_4bit, revision, remote_code)
        VllmServer(args, needs).close()


def check_partial(engine: Engine | None, model: Model) -> None:
    """Check that sampling can stop before all completions have ended, as partial rollouts need.

    Args:
        engine: The engine; None if the model itself samples.
        model: The policy.

    Raises:
        ConfigError: The engine or the model cannot do this.
    """
    from rloo_kit.sampling.decoding import can_grow

    if not (can_grow(model) if engine is None else hasattr(engine, "grow")):
        name = "this model's own sampling" if engine is None else engine.name
        raise ConfigError(
            f"trainer.partial_rollouts is on, but {name} cannot stop before all completions have "
            "ended: leave it out, or set trainer.generation to vllm"
        )


def thought_limit(tokenizer: Tokenizer, tokens: int | None) -> ThoughtLimit | None:
    """Return the limit on the length of a thought that ``trainer.thinking_budget`` sets.

    Args:
        tokenizer: The tokenizer; its marks show where a thought begins and ends.
        tokens: The value of ``trainer.thinking_budget``. If it is None, the result is None.

    Raises:
        ConfigError: The tokenizer has no known marks of a thought.
    """
    if tokens is None:
        return None
    marks = thought_marks(tokenizer)
    if marks is None:
        raise ConfigError(
            f"trainer.thinking_budget is {tokens}, but the marks around this model's thoughts are "
            "not known: leave it out, use a thinking model, or set thinking.start and thinking.end"
        )
    return ThoughtLimit(tokens, marks)


def make_sampling(
    args: Any, stop_token_ids: list[int], thought: ThoughtLimit | None = None
) -> Sampling:
    """Return the sampling settings of a ``LeaveOneOutConfig``."""
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
