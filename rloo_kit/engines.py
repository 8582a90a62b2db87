"""Start the engine that samples for a model: vLLM in this process, a vLLM server, or none."""

from collections.abc import Callable
from typing import Any

from rloo_kit.engine_memory import MAX_SEQUENCES
from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.generation import Choice, Drawn, Engine, Sampling, choose, why_no_hot_swap
from rloo_kit.hardware import why_not_vllm
from rloo_kit.memory import belongs_to_session
from rloo_kit.processes import Team, current_team

WHY_NOT_SEVERAL = "several processes share one vLLM server: start one, and set generation to server"
"""An engine in each process would open a group of processes of its own."""


def start_engine(
    model: Any, args: Any, *, why_not: str | None = None
) -> tuple[Engine | None, Choice]:
    """Start what ``args.generation`` asks for.

    Args:
        model: As ``attach_lora`` returned it.
        args: A ``LeaveOneOutConfig``.
        why_not: Why only TRL's own path can sample here (images, divided weights), or None.

    Returns:
        The engine, None where transformers or TRL samples; and the choice, with its reason. One
        server samples for all processes of a training, and each calls what is returned.

    Raises:
        GenerationError: What was asked for by name cannot be used, or does not start.
        ConfigError: Two settings contradict each other.
    """
    asked, team = asked_for(args), current_team()
    if asked == "trl":
        return None, Choice("trl")
    if asked in ("vllm", "auto"):
        why_not = why_not or (WHY_NOT_SEVERAL if team.size > 1 else None) or why_not_vllm()
    if asked == "auto":  # by name, vLLM gets a copy of its own
        why_not = why_not or getattr(model, "rloo_kit_why_not_shared", None)
    why_not = why_not or why_no_hot_swap(model)
    choice = choose(asked, on_gpu=model.device.type != "cpu", why_not=why_not)
    if choice.engine == "transformers":
        return None, choice
    max_length = args.vllm_max_model_length or getattr(model, "rloo_kit_max_seq_length", None)
    if max_length is None:
        max_length = model.config.get_text_config().max_position_embeddings
    if choice.engine == "server":
        if team.size > 1:
            return SharedEngine(team, lambda: _server(model, args, max_length)), choice
        return _server(model, args, max_length), choice
    try:
        return _in_process(model, args, max_length), choice
    except GenerationError as exc:
        if asked != "auto":
            raise
        return None, Choice("transformers", str(exc))


def _in_process(model: Any, args: Any, max_length: int) -> Engine:
    from rloo_kit.vllm_engine import VllmEngine

    engine = VllmEngine(
        model,
        max_length=max_length,
        num_sequences=min(MAX_SEQUENCES, args.generation_batch_size),
        sleeps=args.vllm_enable_sleep_mode,
        memory_share=args.vllm_gpu_memory_utilization if args.memory_share_given else None,
        seed=args.seed,
    )
    belongs_to_session(engine)
    return engine


def _server(model: Any, args: Any, max_length: int) -> Engine:
    from rloo_kit.vllm_server import VllmServer

    server = VllmServer(
        args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}",
        model,
        max_length=max_length,
        timeout=args.vllm_server_timeout,
        adapter_dir=args.vllm_adapter_dir,
    )
    belongs_to_session(server)
    return server


class SharedEngine:
    """One engine, held by the first process, that samples for all of them.

    Every call is made by all processes together.

    Args:
        team: The processes.
        start: Starts the engine, in the first process.
    """

    def __init__(self, team: Team, start: Callable[[], Engine]) -> None:
        self._team = team
        self._engine: Engine | None = None

        def facts() -> tuple[str, Any]:
            self._engine = start()
            return self._engine.name, self._engine.adapter_dtype

        self.name, self.adapter_dtype = team.lead(facts)
        self.sync_seconds = 0.0

    def sync(self, model: Any) -> None:
        """Send what the first process's model computes; the others' are the same."""

        def send() -> float:
            self._engine.sync(model)
            return self._engine.sync_seconds

        self.sync_seconds = self._team.lead(send)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Drawn:
        """Complete this process's prompts, and the others', in one call."""
        parts = self._team.gather(prompt_ids)
        everything = [ids for part in parts for ids in part]
        drawn = self._team.lead(lambda: self._engine.generate(everything, sampling, seed))
        begin = sum(map(len, parts[: self._team.rank]))
        mine = slice(begin, begin + len(prompt_ids))
        return Drawn(drawn.completion_ids[mine], drawn.log_probs[mine])

    def sleep(self) -> None:
        """Let the engine sleep; ``generate`` wakes it up."""
        if self._engine is not None:
            self._engine.sleep()

    def close(self) -> None:
        """Give the engine back."""
        if self._engine is not None:
            self._engine.close()


def check_engine(args: Any) -> None:
    """Refuse an engine that was asked for by name and is not installed, before a model is loaded.

    Raises:
        GenerationError: It is not.
    """
    if asked_for(args) == "vllm":
        choose("vllm", on_gpu=True, why_not=why_not_vllm())


def asked_for(args: Any) -> str:
    """Return ``auto``, ``vllm``, ``server``, ``transformers``, or ``trl`` for TRL's own client.

    ``use_vllm: true`` means ``generation: vllm``; with ``vllm_mode: server`` it is TRL's client of
    ``trl vllm-serve``.

    Raises:
        ConfigError: ``use_vllm`` and ``generation`` contradict each other.
    """
    if not args.use_vllm:
        return args.generation
    wanted = "trl" if args.vllm_mode == "server" else "vllm"
    if args.generation not in ("auto", wanted):
        raise ConfigError(
            f"use_vllm: true asks for vLLM and generation is {args.generation!r}: keep generation"
        )
    return wanted


def sampling_of(args: Any, stop_token_ids: list[int]) -> Sampling:
    """Return how a trainer's settings draw completions.

    Args:
        args: A ``LeaveOneOutConfig``.
        stop_token_ids: Each ends a completion.
    """
    return Sampling(
        max_tokens=args.max_completion_length,
        stop_token_ids=tuple(stop_token_ids),
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        others=dict(args.generation_kwargs or {}),
    )
