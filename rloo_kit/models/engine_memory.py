"""Memory of a vLLM engine in this process: weights, activations, CUDA graphs and KV cache.

The same computation serves three uses: the plan (``rloo-kit plan``), loading a model whose weights
Unsloth shares with vLLM, and starting an engine with its own copy of the weights. As a fraction of
the GPU's memory, the result is vLLM's setting ``gpu_memory_utilization``.
"""

import math
from dataclasses import dataclass

from rloo_kit.errors import GenerationError
from rloo_kit.machine.hardware import GIB
from rloo_kit.models.shape import ModelShape, weight_bytes

MIB = 1024**2
# LoRA ranks for which vLLM can reserve buffers
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Maximum number of completions that vLLM samples at a time. Unsloth treats 256 as "not given".
MAX_SEQUENCES = 255
# Prompt tokens that vLLM processes in one pass; longer prompts need several passes
BATCHED_TOKENS = 4096
SMALLEST_CACHE = 64 * MIB
# Memory of vLLM that the formulas here do not contain: its process group, small buffers
UNMEASURED = 128 * MIB
# With less memory not even a tiny model starts, because loaded kernels use memory too, and every
# CUDA graph needs a block of at least 2 MiB. Observed on an H100.
SMALLEST_TOTAL = GIB
# While an engine starts, 1/SPARE of the GPU's memory stays free
SPARE = 20


@dataclass(frozen=True)
class EngineSize:
    """Memory that an engine needs for one model and one batch, in bytes."""

    weights: int  # weights of the base model: the engine's own copy, or shared with the trainer
    trained: int  # number of parameters of the adapter, not bytes
    working: int  # activations, logits and LoRA buffers of the largest pass
    graphs: int  # CUDA graphs; they are not freed when the engine sleeps
    starting: int  # additional memory that is needed only while the engine starts
    full_cache: int  # KV cache of all completions at full length
    # KV cache of one completion at full length; with less, vLLM does not start or limits the length
    smallest_cache: int

    @property
    def fixed(self) -> int:
        """Memory of a running engine without its KV cache, in bytes."""
        return self.weights + self.working + self.graphs + UNMEASURED


@dataclass(frozen=True)
class EngineMemory:
    """GPU memory that an engine will use, in bytes."""

    size: EngineSize  # what the engine needs
    cache: int  # size of the KV cache
    refusal: str | None = None  # in a plan, the reason why vLLM would not start

    @property
    def total(self) -> int:
        """GPU memory that the engine uses, including its KV cache, in bytes."""
        return max(self.size.fixed + self.cache, SMALLEST_TOTAL)

    def share(self, card: int) -> float:
        """Return vLLM's ``gpu_memory_utilization`` for a GPU with ``card`` bytes of memory."""
        return min(1.0, math.ceil(1000 * self.total / card) / 1000)


def engine_size(  # noqa: PLR0913
    shape: ModelShape,
    *,
    in_4bit: bool,
    max_rank: int,
    num_sequences: int,
    max_length: int,
    value_bytes: int = 2,
    batched_tokens: int = BATCHED_TOKENS,
    draft_tokens: int = 0,
) -> EngineSize:
    """Return the memory that an engine needs to sample ``num_sequences`` completions at a time.

    Args:
        shape: The shape of the base model.
        in_4bit: True if the base is loaded in 4 bit (NF4).
        max_rank: LoRA rank for which vLLM reserves buffers.
        num_sequences: Completions to sample at a time. At most ``MAX_SEQUENCES`` run at once; the
            others wait.
        max_length: Maximum tokens of prompt and completion together.
        value_bytes: Bytes of an activation, and of a weight that is not in 4 bit.
        batched_tokens: Prompt tokens that the engine processes in one pass.
        draft_tokens: Draft tokens of speculative decoding, per completion and pass.
    """
    rows = min(num_sequences, MAX_SEQUENCES)
    weights = weight_bytes(shape, in_4bit=in_4bit, value_bytes=value_bytes)
    packed = weights - shape.others * value_bytes if in_4bit else 0
    trained = sum(
        max_rank * (linear.rows + linear.columns) * linear.count for linear in shape.linears
    )
    activations = batched_tokens * (2 * shape.intermediate_size + 4 * shape.hidden_size)
    # keys and values, 2 bytes each
    sequence = 2 * 2 * shape.num_layers * shape.kv_size * max_length
    # in float32: logits, their softmax, and a copy for sampling
    logits = 12 * rows * (1 + draft_tokens) * shape.vocab_size
    working = value_bytes * (activations + trained) + logits
    # Unsloth's estimate (approximate_vllm_memory_usage): 172 graphs of a float32 hidden state for
    # each layer, between 0.15 and 1 GiB
    graphs = min(max(172 * 4 * shape.hidden_size * shape.num_layers, 3 * GIB // 20), GIB)
    return EngineSize(
        weights=weights,
        trained=trained,
        working=working,
        graphs=graphs,
        # What the profiling run leaves in torch's cache, and a second copy of the packed weights.
        # Measured on an H100: 0.1 to 0.6 GiB in 16 bit, 2.3 GiB for a model of 4B in 4 bit
        starting=packed + working + graphs + UNMEASURED,
        full_cache=sequence * rows,
        smallest_cache=max(SMALLEST_CACHE, sequence),
    )


def engine_memory(
    size: EngineSize, free: int, *, sleeps: bool, card: int, share: float | None = None
) -> EngineMemory:
    """Return the memory that an engine will use on a GPU that also trains.

    If ``share`` is None, the KV cache is large enough for all completions at full length, as far as
    memory allows. Two amounts are reserved first: the memory of the engine without its cache, and
    the memory for starting the engine or for training, whichever is larger. If the engine frees its
    memory during the learning step, the cache gets at most nine tenths of what is left. Otherwise
    it gets at most half of what is left.

    Args:
        size: Memory that the engine needs.
        free: GPU memory in bytes that is free before the engine starts. For an engine that shares
            the model's weights, the memory that is free before the weights are loaded.
        sleeps: True if the engine frees its memory during the learning step.
        card: Total memory of the GPU, in bytes.
        share: Fraction of the GPU's memory for the engine, set by the user; None computes it.

    Raises:
        GenerationError: The KV cache of one completion does not fit.
    """
    if share is not None:
        cache = int(share * card) - size.fixed
    else:
        # training keeps a float32 weight, its gradient and Adam's two moments
        left = free - size.fixed - max(16 * size.trained, size.starting + card // SPARE)
        cache = min(
            math.ceil(1.05 * size.full_cache) + SMALLEST_CACHE,
            left * 9 // 10 if sleeps else left // 2,
        )
    if cache < size.smallest_cache:
        taken = f"{free / GIB:.1f} GiB free"
        remedy = (
            "lower model.max_seq_length (or trainer.vllm_max_model_length, if it is set or if "
            "load_model did not load the model)"
        )
        if share is not None:
            taken = f"{share:g} of the card"
            remedy = "raise trainer.vllm_gpu_memory_utilization"
        raise GenerationError(
            f"vLLM does not fit: with {taken}, its weights, activations and CUDA graphs need "
            f"{size.fixed / GIB:.1f} GiB, and the KV cache of one completion needs "
            f"{size.smallest_cache / GIB:.1f} GiB; {remedy}, or set trainer.generation: "
            f"transformers"
        )
    return EngineMemory(size, cache)


def cpu_cache(size: EngineSize, free: int) -> int:
    """Return the size of the KV cache of an engine on a CPU, in bytes.

    It is large enough for all completions at full length, but at most a quarter of the memory that
    weights and training leave free. It is never smaller than ``SMALLEST_CACHE``.

    Args:
        size: Memory that the engine needs.
        free: Free main memory, in bytes.
    """
    left = (free - size.weights - 16 * size.trained) // 4
    return max(SMALLEST_CACHE, min(math.ceil(1.05 * size.full_cache) + SMALLEST_CACHE, left))


def reserved_rank(rank: int) -> int:
    """Return the smallest rank in ``LORA_RANKS`` that is at least ``rank``.

    If ``rank`` is greater than all of them, return the greatest rank in ``LORA_RANKS``.
    """
    return next((reserved for reserved in LORA_RANKS if reserved >= rank), LORA_RANKS[-1])
