"""vLLM in this process: it loads the base model once, and the adapter is replaced while it runs.

The engine is either started by Unsloth or by the kit. Unsloth's engine shares the base weights with
the trainer (``load_model(..., fast_inference=True)`` on a GPU). The kit's engine has its own copy.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rloo_kit.errors import GenerationError, MemoryRanOutError
from rloo_kit.machine.cleanup import is_out_of_memory
from rloo_kit.machine.engines import (
    leave_process_groups,
    may_sleep,
    restore_sleep_mode,
    shut_down_engine,
    without_side_effects,
)
from rloo_kit.machine.environment import quiet
from rloo_kit.machine.hardware import detect_hardware
from rloo_kit.models.adapters import adapter_tensors
from rloo_kit.models.engine_memory import (
    BATCHED_TOKENS,
    EngineSize,
    cpu_cache,
    engine_memory,
    engine_size,
)
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shape import shape_of_config
from rloo_kit.models.shared_engine import why_no_start
from rloo_kit.sampling.engine import (
    AdapterFolder,
    Begun,
    Generations,
    Sampling,
    active_adapter,
    reserved_rank_of,
)
from rloo_kit.text.wording import first_line
from rloo_kit.types import Model

# Offset of the kit's adapter ids on a shared engine, because Unsloth numbers its adapters from 1
LIVE_IDS = 1_000_000


class VllmEngine:
    """Engine that runs vLLM in this process.

    If Unsloth started vLLM when it loaded the model, that engine is used, and ``num_sequences``,
    ``memory_share``, ``seed`` and ``extra`` have no effect. Otherwise a new engine is started.

    Args:
        model: The policy, with its LoRA adapter.
        max_length: Maximum tokens of prompt and completion together.
        num_sequences: Number of completions that are sampled at the same time.
        sleeps: If True, ``sleep`` frees GPU memory until the engine is used again. If False,
            ``sleep`` does nothing.
        memory_share: Fraction of the GPU's memory that the engine uses; None computes it
            (``engine_memory``).
        seed: Seed of vLLM.
        extra: Further arguments of ``vllm.LLM``.

    Raises:
        GenerationError: vLLM cannot start, or Unsloth's engine has room for fewer than
            ``max_length`` tokens; the message has the reason in one line.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        *,
        max_length: int,
        num_sequences: int,
        sleeps: bool = False,
        memory_share: float | None = None,
        seed: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._llm: Any = getattr(model, "vllm_engine", None)
        self.shared = self._llm is not None
        self.name = "vLLM, weights shared by Unsloth" if self.shared else "vLLM in this process"
        self.sync_seconds = 0.0  # duration of the last sync
        self.adapter_dtype = compute_dtype(model)
        self._on_gpu = model.device.type != "cpu"
        self._sleeps = sleeps and self._on_gpu
        self._number = 0
        self._request: Any = None
        if self.shared:
            config = self._llm.llm_engine.vllm_config.model_config
            self._sleeps &= config.enable_sleep_mode
            if config.max_model_len < max_length:  # Unsloth lowers it if its cache is too small
                raise GenerationError(
                    f"vLLM, which was started with the model, has room for {config.max_model_len} "
                    f"tokens, but the run needs {max_length}: lower model.max_seq_length to "
                    f"{config.max_model_len}, or set trainer.generation: transformers"
                )
        self._folder = AdapterFolder()
        if self.shared:
            return
        self._sleeps = self._sleeps and may_sleep()
        given = {"max_model_len": max_length, "max_num_seqs": num_sequences, "seed": seed}
        try:
            self._llm = self._start(model, memory_share, given | (extra or {}))
        except BaseException as exc:
            leave_process_groups()
            self.close()
            if isinstance(exc, GenerationError) or not isinstance(exc, Exception):
                raise
            raise GenerationError(why_no_start(exc)) from exc

    def _start(self, model: Model, memory_share: float | None, given: dict[str, Any]) -> Any:
        """Start vLLM and return the ``vllm.LLM``.

        Args:
            model: The policy.
            memory_share: Fraction of the GPU's memory for the engine; None computes it.
            given: Arguments of ``vllm.LLM`` that replace the computed ones.
        """
        config = model.get_base_model().config
        in_4bit = is_4bit(model)
        max_rank = reserved_rank_of(model)
        trust_remote_code = notes_of(model).trust_remote_code
        arguments = {
            "model": config.name_or_path,
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # no sampling defaults of the model
            "dtype": str(self.adapter_dtype).removeprefix("torch."),
            "max_num_batched_tokens": BATCHED_TOKENS,
            "enable_lora": True,
            "max_lora_rank": max_rank,
            "lora_target_modules": _vllm_modules(
                [adapter.target_modules for adapter in model.peft_config.values()]
            ),
            "max_loras": 1,
            "max_cpu_loras": 2,
            "enable_prefix_caching": True,
            "enable_sleep_mode": self._sleeps,
            "logprobs_mode": "processed_logprobs",  # after temperature and truncation
            "disable_log_stats": True,
        }
        if in_4bit and self._on_gpu:
            arguments["quantization"] = "bitsandbytes"
        elif in_4bit:
            folder = self._folder.root / "base"
            arguments["model"] = str(write_dequantised(model, self.adapter_dtype, folder))
        if not self._on_gpu:
            # vLLM's CPU worker fails on a seeded prompt that is split between two passes
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(BATCHED_TOKENS, given["max_model_len"])
        arguments |= given
        size = engine_size(
            shape_of_config(config, config.name_or_path, trust_remote_code=trust_remote_code),
            in_4bit=in_4bit and self._on_gpu,
            max_rank=max_rank,
            num_sequences=arguments["max_num_seqs"],
            max_length=arguments["max_model_len"],
            batched_tokens=arguments["max_num_batched_tokens"],
            draft_tokens=(given.get("speculative_config") or {}).get("num_speculative_tokens", 0),
        )
        arguments = self._memory(size, memory_share) | arguments
        with without_side_effects(), quiet():
            from vllm import LLM

            if self._sleeps:
                restore_sleep_mode()
            llm = LLM(**arguments)
        if not self._on_gpu:
            llm.apply_model(_add_adapter_quickly)
        return llm

    def _memory(self, size: EngineSize, share: float | None) -> dict[str, Any]:
        """Return vLLM's memory settings for an engine with its own copy of the weights.

        Args:
            size: Memory that the engine needs.
            share: Fraction of the GPU's memory that the user has set; None computes it.
        """
        if not self._on_gpu:
            return {"kv_cache_memory_bytes": cpu_cache(size, detect_hardware().free_memory)}
        torch.cuda.empty_cache()
        hardware = detect_hardware()
        card = hardware.total_memory
        found = engine_memory(
            size, hardware.free_memory, sleeps=self._sleeps, card=card, share=share
        )
        if share is not None:
            return {"gpu_memory_utilization": share}
        # the share is set too, because vLLM checks it against the free memory in any case
        return {
            "kv_cache_memory_bytes": found.cache,
            "gpu_memory_utilization": found.share(card),
        }

    def sync(self, model: Model) -> None:
        """Send the active adapter of ``model`` to vLLM, and remove the previous adapter.

        If no adapter is active, none is sent, and vLLM samples from the base model.

        Raises:
            GenerationError: vLLM rejects the adapter.
            MemoryRanOutError: The GPU has no memory left to wake vLLM.
        """
        started = time.perf_counter()
        self._wake()
        engine = self._llm.llm_engine
        before, self._request = self._request, self._requested(model)
        if _is_lora_request(before):
            engine.remove_lora(before.lora_int_id)
        if _is_lora_request(self._request):
            try:
                engine.add_lora(self._request)
            except ValueError as exc:
                raise GenerationError(
                    f"vLLM rejects the adapter ({first_line(exc)}): set trainer.generation: "
                    f"transformers"
                ) from exc
        engine.reset_prefix_cache()
        self.sync_seconds = time.perf_counter() - started

    def _requested(self, model: Model) -> Any:
        """Return a vLLM ``LoRARequest`` for the active adapter; None if no adapter is active."""
        active = active_adapter(model)
        if active is None:
            return None
        if self.shared and list(model.peft_config) == ["default"]:
            # Unsloth writes the adapter's config to this folder once, and passes tensors
            return model.load_lora(str(self._folder.root / "config"), load_tensors=True)
        from vllm.lora.request import LoRARequest

        self._number += 1
        name = f"rloo-kit-{self._number}"
        if not self.shared:
            folder = self._folder.write(model, self.adapter_dtype)
            return LoRARequest(name, self._number, str(folder))
        # Unsloth's load_lora would send every adapter, also TRL's frozen reference copy
        tensors = {
            "lora_tensors": adapter_tensors(model, active),
            "lora_config": model.peft_config[active].to_dict(),
        }
        return LoRARequest(f"{name}-live", self._number + LIVE_IDS, **tensors)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """Sample one completion of each prompt, each with its own seed (see ``Engine``).

        Raises:
            MemoryRanOutError: The GPU has no memory left to wake vLLM.
            BaseException: Any error or interrupt of vLLM; its requests are aborted first.
        """
        with self._requests():
            outputs = self._llm.generate(
                [{"prompt_token_ids": ids} for ids in prompt_ids],
                [_parameters(sampling, seed + row) for row in range(len(prompt_ids))],
                lora_request=self._request,
                use_tqdm=False,
            )
        return Generations.of(map(_drawn, outputs))

    def grow(self, begun: Begun, sampling: Sampling, seed: int) -> Generations:
        """Continue B completions until all have ended or ``begun.is_enough`` returns True.

        Each row becomes a new request, whose prompt is the row's prompt and its completion so far.
        As soon as enough have ended, the other requests are aborted.

        Returns:
            The new tokens of each completion, and their log-probabilities.

        Raises:
            GenerationError: Unsloth merges the adapter into the base to sample, which works only
                for whole completions.
            MemoryRanOutError: The GPU has no memory left to wake vLLM.
            BaseException: Any error or interrupt of vLLM; its requests are aborted first.
        """
        from vllm.sampling_params import RequestOutputKind

        if self._request is not None and not _is_lora_request(self._request):
            raise GenerationError(
                "Unsloth merges the adapter into a 16-bit base while vLLM samples, so sampling "
                "cannot stop early: leave trainer.partial_rollouts out, or set model.load_in_4bit"
            )
        engine = self._llm.llm_engine
        limit = sampling.thought
        prompts = begun.all_ids
        lengths = [len(ids) for ids in begun.completion_ids]
        found = Generations([[] for _ in lengths], [[] for _ in lengths])
        ended: set[int] = set()
        with self._requests():
            for row, length in enumerate(lengths):
                engine.add_request(
                    str(row),
                    {"prompt_token_ids": prompts[row]},
                    _parameters(
                        sampling,
                        seed + row,
                        max_tokens=sampling.max_tokens - length,
                        output_kind=RequestOutputKind.DELTA,
                    ),
                    lora_request=self._request,
                )
            while len(ended) < len(lengths) and not begun.is_enough(ended):
                for output in engine.step():
                    row = int(output.request_id)
                    new_ids, new_log_probs = _drawn(output)
                    ids = found.completion_ids[row]
                    ids += new_ids
                    found.log_probs[row] += new_log_probs
                    # if the thought is still open after this many new tokens, it is cut there
                    room = limit.tokens - lengths[row] if limit else 0
                    reaches_limit = len(ids) - len(new_ids) < room <= len(ids)
                    if limit and reaches_limit and limit.marks.is_open(prompts[row] + ids[:room]):
                        del ids[room:], found.log_probs[row][room:]
                        engine.abort_request([output.request_id])
                        ended.add(row)
                    elif output.finished:
                        ended.add(row)
        return found

    @contextlib.contextmanager
    def _requests(self) -> Iterator[None]:
        """Wake vLLM; at the end of a ``with`` block abort the requests that are left.

        Otherwise, after Ctrl-C, the next call would also run the requests of the interrupted call.

        Raises:
            MemoryRanOutError: The GPU has no memory left to wake vLLM.
        """
        self._wake()
        engine = self._llm.llm_engine
        try:
            yield
        finally:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def sleep(self) -> None:
        """Free GPU memory: discard the KV cache and move the weights to main memory (level 1).

        Weights that are shared with the trainer stay on the GPU, because training needs them.
        """
        if self._sleeps and self._llm is not None and not self._llm.llm_engine.is_sleeping():
            self._llm.sleep(level=1)

    def _wake(self) -> None:
        if self._sleeps and self._llm.llm_engine.is_sleeping():
            torch.cuda.empty_cache()  # memory that the learning step freed
            try:
                self._llm.wake_up()
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                raise MemoryRanOutError(
                    "the GPU has no memory left to wake vLLM: close other programs on it, lower "
                    "trainer.vllm_gpu_memory_utilization, or set trainer.generation: transformers"
                ) from exc

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and completion together."""
        return self._llm.llm_engine.vllm_config.model_config.max_model_len

    @property
    def is_closed(self) -> bool:
        """True if the engine was shut down."""
        return self._llm is None

    def close(self) -> None:
        """Shut the engine down, including its process groups, threads, caches and files.

        A second call does nothing, so that it cannot end the process groups of a newer engine.
        """
        # A model that shares its weights with the engine must be released before (`release` does
        # this), because vLLM frees the memory pool of the weights together with the engine
        llm, self._llm, self._request = self._llm, None, None
        if llm is not None:
            shut_down_engine(llm, on_gpu=self._on_gpu)
        self._folder.close()


def _parameters(sampling: Sampling, seed: int, **others: Any) -> Any:
    """Return vLLM's ``SamplingParams`` for one completion.

    Args:
        sampling: The settings.
        seed: Seed of the completion.
        **others: Further arguments of ``SamplingParams``.
    """
    from vllm import SamplingParams

    return SamplingParams(**sampling.as_vllm() | others, seed=seed % 2**31, detokenize=False)


def _drawn(output: Any) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probabilities in an output of vLLM for one request."""
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    places = zip(ids, completion.logprobs or (), strict=True)
    return ids, [place[token].logprob for token, place in places]


def _add_adapter_quickly(model: torch.nn.Module) -> None:
    """Let vLLM's layers add the adapter by two matrix products on a CPU.

    vLLM's own code for a CPU copies the adapter's matrices for each token, which takes six times as
    long as the rest of a pass.
    """
    for module in model.modules():
        wrapper = getattr(module, "punica_wrapper", None)
        if wrapper is not None:  # a layer with an adapter
            wrapper.add_lora_linear = functools.partial(add_one_adapter, wrapper)


def add_one_adapter(  # noqa: PLR0913 (the parameters of vLLM's add_lora_linear)
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add the output of the adapter to ``y``, the output of fused linear layers.

    The engine must have only one adapter. In a pass, either all requests use it or none does.

    Args:
        wrapper: The ``PunicaWrapperCPU`` whose method this replaces.
        y: Output ``(tokens, sum of output_slices)``, changed in place.
        x: Input ``(tokens, in)``.
        lora_a_stacked: Matrix ``(1, 1, rank, in)`` of each layer.
        lora_b_stacked: Matrix ``(1, 1, out, rank)`` of each layer.
        scale: Factor of the product.
        output_slices: Number of columns of each layer in ``y``.
    """
    if wrapper.no_lora:
        return
    parts = y.split(output_slices, dim=1)
    for part, down, up in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
        part.addmm_(x @ down[0, 0].T, up[0, 0].T, alpha=scale)


def _is_lora_request(request: object) -> bool:
    """Return True if a request is an ordinary LoRA request, with an id for its adapter in vLLM."""
    # For an unquantised base Unsloth returns a request whose adapter is merged into the shared
    # weights while the engine samples (_MergedLoRARequest); only LLM.generate accepts it
    return hasattr(request, "lora_int_id")


def write_dequantised(model: Model, dtype: torch.dtype, folder: Path) -> Path:
    """Write the dequantised base of a 4-bit PEFT model to a new folder; return the folder.

    This is needed on a CPU, where vLLM has no 4-bit kernels. The original 16-bit checkpoint cannot
    be used instead, because its weights differ from those of the 4-bit policy.

    Args:
        model: The PEFT model.
        dtype: The dtype of the written weights.
        folder: The folder, which must not exist.
    """
    base = copy.deepcopy(model).unload()
    with quiet():
        base.dequantize(dtype).to(dtype).save_pretrained(folder)  # not all weights are in 4 bit
    return folder


def is_4bit(model: Model) -> bool:
    """Return True if the model has 4-bit layers of bitsandbytes."""
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())


def _vllm_modules(targets: list[Any]) -> list[str] | None:
    """Return the names of the layers that vLLM must prepare for LoRA; None for all layers.

    If vLLM fuses a layer with others, the name of the fused layer is included. Without this list
    vLLM would also compute an empty adapter of the LM head for every token.

    Args:
        targets: The ``target_modules`` of each adapter; a string is a pattern.
    """
    if any(isinstance(names, str) for names in targets):  # a pattern
        return None
    names = set[str]().union(*targets)
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return sorted(names | {joined.get(name, name) for name in names})


def compute_dtype(model: Model) -> torch.dtype:
    """Return the dtype in which the trainer runs the base model."""
    dtype = model.get_base_model().config.dtype
    return dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16
