"""Memory of a vLLM engine in this process: weights, activations, CUDA graphs and KV cache.

The plan, the load of a model whose weights Unsloth shares with vLLM, and an engine with its own
copy of the weights use the same computation. vLLM calls the result ``gpu_memory_utilization``.
"""

import math
from dataclasses import dataclass

from rloo_kit.errors import GenerationError
from rloo_kit.machine.hardware import GIB
from rloo_kit.models.shape import ModelShape, weight_bytes

MIB = 1024**2
# Ranks that vLLM reserves buffers for
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Most completions that vLLM samples at a time. Unsloth reads exactly 256 as "not given".
MAX_SEQUENCES = 255
# Prompt tokens that vLLM reads in one pass; longer prompts need several
BATCHED_TOKENS = 4096
SMALLEST_CACHE = 64 * MIB
# Memory of vLLM that no formula here names: its process group, small buffers
UNMEASURED = 128 * MIB
# With less not even a tiny model starts, since loaded kernels count and every CUDA graph needs a
# block of at least 2 MiB. Seen on an H100.
SMALLEST_TOTAL = GIB
# One part in this many of the card stays free while an engine starts
SPARE = 20


@dataclass(frozen=True)
class EngineSize:
    """Needs of an engine for one model and one batch; memory in bytes."""

    weights: int  # the base model's: the engine's own copy, or the one shared with the trainer
    trained: int  # parameters of the adapter, not bytes
    working: int  # activations, logits and LoRA buffers of the largest pass
    graphs: int  # CUDA graphs; they stay when the engine sleeps
    starting: int  # in addition, while the engine starts
    full_cache: int  # keys and values of all completions at full length
    smallest_cache: int  # for one completion: with less vLLM does not start, or cuts the length

    @property
    def fixed(self) -> int:
        """Memory of a running engine without its KV cache, in bytes."""
        return self.weights + self.working + self.graphs + UNMEASURED


@dataclass(frozen=True)
class EngineMemory:
    """Memory of the card that an engine uses, in bytes."""

    size: EngineSize
    cache: int  # keys and values
    refusal: str | None = None  # in a plan: why vLLM would not start

    @property
    def total(self) -> int:
        """Memory of the card that the engine uses, KV cache included, in bytes."""
        return max(self.size.fixed + self.cache, SMALLEST_TOTAL)

    def share(self, card: int) -> float:
        """Return vLLM's ``gpu_memory_utilization`` for a card of ``card`` bytes."""
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
    """Return the needs of an engine that samples ``num_sequences`` completions at a time.

    Args:
        shape: The base model.
        in_4bit: The weights of the base are NF4.
        max_rank: LoRA rank that vLLM reserves buffers for.
        num_sequences: Completions at a time; more than ``MAX_SEQUENCES`` wait.
        max_length: Longest prompt plus completion, in tokens.
        value_bytes: Bytes of an activation, and of a weight that is not in 4 bit.
        batched_tokens: Prompt tokens that the engine reads in one pass.
        draft_tokens: Draft tokens of speculative decoding for a completion in one pass.
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
        # Measured on an H100 (0.1 to 0.6 GiB in 16 bit, 2.3 GiB for 4B in 4 bit): the rest of the
        # profiling run in torch's cache, and the packed weights once more
        starting=packed + working + graphs + UNMEASURED,
        full_cache=sequence * rows,
        smallest_cache=max(SMALLEST_CACHE, sequence),
    )


def engine_memory(
    size: EngineSize, free: int, *, sleeps: bool, card: int, share: float | None = None
) -> EngineMemory:
    """Return the memory of an engine on a GPU that also trains.

    If ``share`` is None, the KV cache holds all completions at full length if they fit. Weights and
    the needs of starting and training come first. Of what is left, the cache takes at most nine
    tenths if the engine sleeps while the model learns, and at most half if it stays awake.

    Args:
        size: Needs of the engine.
        free: Free bytes before the engine starts. If it shares the model's weights, free bytes
            before these are loaded.
        sleeps: The engine sleeps while the model learns.
        card: Bytes of the card.
        share: Share of the card that the engine takes, as the user set it; None: computed.

    Raises:
        GenerationError: The keys and values of one completion do not fit.
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
        remedy = "lower model.max_seq_length (or trainer.vllm_max_model_length of a loaded model)"
        if share is not None:
            taken = f"{share:g} of the card"
            remedy = "raise trainer.vllm_gpu_memory_utilization"
        raise GenerationError(
            f"vLLM does not fit: with {taken} its weights, activations and CUDA graphs need "
            f"{size.fixed / GIB:.1f} GiB, and a completion's keys and values "
            f"{size.smallest_cache / GIB:.1f} GiB; {remedy}, or set trainer.generation: "
            f"transformers"
        )
    return EngineMemory(size, cache)


def cpu_cache(size: EngineSize, free: int) -> int:
    """Return the size of the KV cache of an engine on a CPU, in bytes.

    It is at most a quarter of the memory that is free once weights and training have theirs, but
    never less than ``SMALLEST_CACHE``.

    Args:
        size: Needs of the engine.
        free: Free main memory, in bytes.
    """
    left = (free - size.weights - 16 * size.trained) // 4
    return max(SMALLEST_CACHE, min(math.ceil(1.05 * size.full_cache) + SMALLEST_CACHE, left))


def reserved_rank(rank: int) -> int:
    """Return the smallest LoRA rank that vLLM can reserve for adapters of ``rank``, at most 512."""
    return next((reserved for reserved in LORA_RANKS if reserved >= rank), LORA_RANKS[-1])
