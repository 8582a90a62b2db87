"""Memory of a training run: bytes of each part in each phase of a step, and the peak.

This is arithmetic only. The peak is the largest phase of a step, not the sum of all parts. Weights
and optimizer states are as bitsandbytes and torch store them; activations were counted with torch's
profiler on a CPU (docs/how-to/plan.md), which is an upper bound for a GPU's fused kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rloo_kit.errors import GenerationError
from rloo_kit.machine.hardware import CHUNK_LOGITS
from rloo_kit.models.engine_memory import (
    BATCHED_TOKENS,
    MIB,
    UNMEASURED,
    EngineMemory,
    engine_memory,
    engine_size,
    reserved_rank,
)
from rloo_kit.models.shape import Linear, ModelShape, weight_bytes
from rloo_kit.rloo.token_budget import NO_GRAD_FACTOR, default_token_budget

# Phases, and their descriptions
DOING = {
    "load": "the model is loaded",
    "start": "vLLM starts",
    "sample": "completions are sampled",
    "score": "log-probabilities are computed",
    "learn": "it learns",
}
PHASES = tuple(DOING)
LOAD, START, SAMPLE, SCORE, LEARN = PHASES

# Resident memory of a CPU process that has trained, without tensors: Python, torch, TRL and the
# backend, as benchmarks/plan_accuracy.py --libraries measures it
LIBRARIES = 1010 * MIB
# On a GPU, outside of torch's allocator: the CUDA context, cuBLAS and Triton's kernels. It differs
# by card and driver: 610 and 676 MiB on an H100
CONTEXT = 680 * MIB
# Share of temporary memory that is lost between blocks: on a GPU with expandable segments (an
# estimate), and in the heap of a CPU process (docs/how-to/plan.md)
FRAGMENTATION = 0.06
HEAP = 0.25
# Memory of a 4-bit load on a CPU while it packs, relative to the model in 16 bit
LOADING = 1.4
TRITON_TOKENS = 4096
TRITON_LOGITS = 32768
"""Tile of TRL 1.15's kernel on a GPU: tokens, and logits of each (kernels/chunked_logprob.py)."""
# Smallest state, in elements, that a paged optimizer keeps in main memory (bitsandbytes 0.50)
PAGED_FROM = 100_000
EIGHT_BIT_FROM = 4096
EIGHT_BIT_BLOCK = 256
"""Smallest state, in elements, that is kept in 8 bit, and elements that share a statistic."""


@dataclass(frozen=True)
class Job:
    """Facts of a training run that decide its memory; lengths in tokens, memory in bytes."""

    shape: ModelShape
    on_gpu: bool
    room: int  # memory of the card that this process may use, or free memory on a CPU
    card: int = 0  # memory of the whole card, as torch reports it; 0: the room
    in_4bit: bool = True
    value_bytes: int = 2  # of an activation: 2 in 16 bit, 4 in float32
    rank: int = 16
    targets: tuple[str, ...] = ()  # names of the linear layers with an adapter
    adapted_layers: int | None = None  # number of layers with an adapter; None: all
    whole: int = 0  # number of embeddings and LM heads that train as a whole
    optimizer: str = "adamw_torch"  # TRL's `optim`
    checkpointing: str = "none"  # or `plain`, or `unsloth` (layer inputs in main memory)
    rows: int = 8  # completions of a generation batch
    in_flight: int | None = None  # completions that are sampled at once; None: `rows`
    step_rows: int = 8  # completions of an optimizer step
    group: int = 4
    prompt: int = 512  # the longest prompt
    completion: int = 512
    max_length: int = 1024  # longest prompt plus completion
    budget: int | None = None  # `tokens_per_micro_batch`; None: from the free memory
    scores: bool = True  # there are passes without gradient
    keeps_graphs: bool = True  # whole groups run forward before any of them runs backward
    engine: str = "transformers"  # or `server`, `vllm`, `shared` (vLLM on Unsloth's weights)
    sleeps: bool = True
    share: float | None = None  # of the GPU, for vLLM; None: computed (`engine_memory`)
    batched_tokens: int = BATCHED_TOKENS  # prompt tokens that vLLM reads in one pass
    draft_tokens: int = 0  # tokens that vLLM guesses for a completion in one pass
    cards: int = 1  # cards that share base, adapter and its states; the rest is per card

    @property
    def width(self) -> int:
        """Tokens of the longest row: its prompt and its completion."""
        return min(self.prompt + self.completion, self.max_length)

    @property
    def at_once(self) -> int:
        """Completions that are sampled at once."""
        return self.in_flight or self.rows


# Phase -> bytes that a part holds in it
Held = dict[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a training run by phase, and by part, such as weights or activations."""

    parts: dict[str, Held]
    budget: int  # positions of a training pass (rows times width)
    phases: dict[str, int]  # bytes on the device, or of the process on a CPU

    @property
    def phase(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes, on the GPU or, on a CPU, of the process."""
        return self.phases[self.phase]

    def at(self, phase: str) -> list[tuple[str, int]]:
        """Return (name, bytes) of the parts that are held in one of ``PHASES``."""
        return [(name, held[phase]) for name, held in self.parts.items() if held.get(phase)]


def plan_memory(job: Job) -> MemoryPlan:
    """Return the memory of a training run."""
    sizes = adapter_sizes(job)
    trained = 4 * sum(sizes) // job.cards
    parts = {**_weights(job), "LoRA adapter, float32": _since(SAMPLE, trained), **_sampling(job)}
    budget = _budget(job, job.room - _total(parts, LEARN))
    states = optimizer_bytes(job.optimizer, sizes, on_gpu=job.on_gpu) // job.cards
    parts[f"optimizer states, {job.optimizer}"] = _since(SAMPLE, states)
    parts |= _passes(job, budget, trained)
    # parts that are held all the time are allocated once and leave no holes
    brief = {name: held for name, held in parts.items() if len(held) < len(PHASES)}
    lost = FRAGMENTATION if job.on_gpu else HEAP
    # the measured memory of a starting vLLM includes it
    parts["between blocks"] = {p: int(lost * _total(brief, p)) for p in PHASES if p != START}
    there = {SCORE: job.scores, START: job.on_gpu and job.engine in ("vllm", "shared")}
    phases = {p: _total(parts, p) for p in PHASES if there.get(p, True)}
    return MemoryPlan(parts, budget, phases)


def _since(first: str, size: float) -> Held:
    """Return a part that is held from one phase on."""
    return dict.fromkeys(PHASES[PHASES.index(first) :], int(size))


def _total(parts: dict[str, Held], phase: str) -> int:
    return sum(held.get(phase, 0) for held in parts.values())


# --- weights, adapter, optimizer -----------------------------------------------------------------


def _weights(job: Job) -> dict[str, Held]:
    shape = job.shape
    packing = mapped = 0
    if job.in_4bit and not shape.packed:
        packing = 2 * max(linear.size for linear in shape.linears)  # one layer after the other
        if not job.on_gpu:
            mapped = weight_bytes(shape, in_4bit=False)  # the whole file is read, and stays
            packing = int(LOADING * mapped)
    outside = "CUDA context" if job.on_gpu else "Python and libraries"
    total = weight_bytes(shape, in_4bit=job.in_4bit, value_bytes=job.value_bytes)
    # divided weights are gathered for use: a layer, the next one, and embeddings with the head
    outer = shape.others * job.value_bytes
    gathered = outer + 2 * (total - outer) // shape.num_layers
    return {
        outside: _since(LOAD, CONTEXT if job.on_gpu else LIBRARIES),
        "weights": _since(LOAD, total // job.cards),
        "weights, gathered": _since(SAMPLE, gathered if job.cards > 1 else 0),
        "weights, mapped from their file": _since(LOAD, mapped),
        "weights, while they are packed": {LOAD: packing},
    }


def adapter_sizes(job: Job) -> list[int]:
    """Return the elements of each tensor of the adapter (A and B of every layer that has one)."""
    layers = job.shape.num_layers
    part = layers if job.adapted_layers is None else job.adapted_layers
    sizes = [
        size * job.rank
        for linear in _adapted(job)
        for _ in range(linear.count * part // layers)
        for size in (linear.rows, linear.columns)
    ]
    return sizes + job.whole * [job.shape.vocab_size * job.shape.hidden_size]


def _adapted(job: Job) -> list[Linear]:
    return [linear for linear in job.shape.linears if linear.name in job.targets]


def optimizer_bytes(name: str, sizes: Sequence[int], *, on_gpu: bool = True) -> int:
    """Return the bytes of an optimizer's states on the device.

    On a CPU, 8-bit and paged optimizers are replaced by AdamW in float32.

    Args:
        name: TRL's ``optim``.
        sizes: Elements of every trained tensor.
        on_gpu: The run trains on a GPU.
    """
    # bitsandbytes keeps small tensors in 32 bit, and pages only large ones
    states = 0 if name == "sgd" else 1 if "lion" in name or "rmsprop" in name else 2
    eight_bit = "8bit" in name and on_gpu
    paged = "paged" in name and on_gpu
    here = 0
    for size in sizes:
        packed = eight_bit and size >= EIGHT_BIT_FROM
        each = size + 4 * -(-size // EIGHT_BIT_BLOCK) if packed else 4 * size
        here += 0 if paged and size >= PAGED_FROM else states * each
    return here


# --- sampling ------------------------------------------------------------------------------------


def _sampling(job: Job) -> dict[str, Held]:
    if job.engine == "transformers":
        return _by_transformers(job)
    if not job.on_gpu or job.engine == "server":  # vLLM on a CPU is not counted
        return {}
    awake = (START, SAMPLE) if job.sleeps else PHASES[1:]
    engine = planned_engine(job)
    size = engine.size
    shared = job.engine == "shared"
    cache = engine.cache
    if shared:  # vLLM fills its whole share
        cache = engine.total - size.fixed
    merged = sum(linear.count * linear.size for linear in _adapted(job))
    return {
        "vLLM weights": dict.fromkeys(awake, 0 if shared else size.weights),
        "vLLM keys and values": dict.fromkeys(awake, cache),
        "vLLM activations": dict.fromkeys((START, SAMPLE), size.working),
        "vLLM CUDA graphs": _since(START, size.graphs + UNMEASURED),  # they stay while it sleeps
        # vLLM 0.26 used the estimate for keys and values, so the graphs come in addition
        "CUDA graphs over vLLM's share": _since(START, size.graphs),
        "vLLM, while it starts": {START: size.starting - size.graphs},
        # Unsloth merges an adapter into 16-bit weights, and keeps the rounding error
        "weights, while the adapter is merged": {
            SAMPLE: 2 * merged if shared and not job.in_4bit else 0
        },
    }


def planned_engine(job: Job) -> EngineMemory:
    """Return the memory of vLLM on the card, as the engine will request it.

    If vLLM does not fit, ``refusal`` of the result says why, and its memory is that for all
    completions at full length.
    """
    size = engine_size(
        job.shape,
        in_4bit=job.in_4bit,
        max_rank=reserved_rank(job.rank),
        num_sequences=job.at_once,
        max_length=job.max_length,
        value_bytes=job.value_bytes,
        batched_tokens=job.batched_tokens,
        draft_tokens=job.draft_tokens,
    )
    free = job.room - CONTEXT
    if job.engine != "shared":  # the trainer's model and adapter are on the card already
        free -= size.weights + 4 * sum(adapter_sizes(job))
    try:
        card = job.card or job.room
        return engine_memory(size, free, sleeps=job.sleeps, card=card, share=job.share)
    except GenerationError as exc:
        return EngineMemory(size, size.full_cache, str(exc))


def _by_transformers(job: Job) -> dict[str, Held]:
    shape = job.shape
    wide = job.value_bytes
    cache = 2 * shape.num_layers * shape.kv_size * wide * job.at_once * job.width
    cache += cache // max(1, shape.num_layers)  # a layer is copied when it grows
    # Unsloth's models on a GPU have their own decoding loop, which runs a prompt per completion
    prompts = job.at_once if job.on_gpu else -(-job.at_once // job.group)
    read = prompts * min(job.prompt, job.width) * _forward_bytes(job)
    matrices = 0
    if not job.on_gpu:
        matrices = wide * sum(linear.count * linear.size for linear in _adapted(job))
    return {
        "keys and values": {SAMPLE: cache},
        "prompts, read at once": {SAMPLE: read},
        # for every row: logits, the same in float32, their softmax, and a copy for sampling
        "logits of the next token": {SAMPLE: job.at_once * shape.vocab_size * (wide + 12)},
        "base and adapter as one matrix": {SAMPLE: matrices if 4 * matrices < job.room else 0},
    }


# --- passes with and without gradient ------------------------------------------------------------


def layer_bytes(job: Job) -> int:
    """Return the bytes of activations that one layer keeps for each position until backward.

    The two norms, and those of queries and keys, keep their inputs in float32. In 16 bit a layer
    keeps five vectors as wide as the model, three as wide as the queries, two as wide as the keys,
    four as wide as the MLP, and one of each adapter's rank. The result equals that of torch's
    profiler to the byte (docs/how-to/plan.md).
    """
    shape = job.shape
    wide = job.value_bytes
    normed = 4 * shape.qk_norm
    heads = shape.num_heads + shape.num_kv_heads
    adapted = [linear.count for linear in _adapted(job) if not linear.is_expert]
    adapters = sum(adapted) / max(1, shape.num_layers)
    return int(
        shape.hidden_size * (8 + 5 * wide)
        + shape.query_size * (normed + 3 * wide)
        + shape.kv_size * (normed + 2 * wide)
        + shape.intermediate_size * 4 * wide
        + adapters * job.rank * wide
        + (8 + 4 * shape.num_heads + 4 * shape.qk_norm * heads)
    )


def _forward_bytes(job: Job) -> int:
    """Return the bytes that a layer holds of a position in a forward pass without gradient."""
    return job.value_bytes * (4 * job.shape.intermediate_size + 6 * job.shape.hidden_size)


def _budget(job: Job, free: int) -> int:
    """Return ``tokens_per_micro_batch`` as set, or as the trainer will choose it."""
    return job.budget or default_token_budget(
        max(0, free),
        job.shape.hidden_size,
        job.shape.num_layers,
        intermediate_size=job.shape.intermediate_size,
        bytes_per_value=job.value_bytes,
        checkpointing=job.checkpointing != "none",
        on_cpu=not job.on_gpu,
    )


def _passes(job: Job, budget: int, trained: int) -> dict[str, Held]:
    width = job.width
    wide = job.value_bytes
    # a row longer than the budget is a pass of its own
    rows = max(1, budget // width)
    if job.keeps_graphs:  # as many whole groups as fit
        rows = max(budget // (job.group * width) * job.group, rows)
    rows = min(rows, job.step_rows)
    gradients = (2 if rows < job.step_rows else 1) * trained  # of earlier passes, and of this one
    copied = trained * wide // 4 if wide == 2 else 0
    parts: dict[str, Held] = {
        "gradients, float32": {LEARN: gradients},
        "activations": {LEARN: _activations(job, rows * width)},
        "log-prob chunk": {LEARN: _log_prob_chunk(job, rows * width, gradient=True)},
        "LoRA adapter, 16 bit": {SCORE: copied, LEARN: copied},
    }
    if job.scores:
        rows = max(1, NO_GRAD_FACTOR * budget // width)
        scored = min(rows, max(job.rows, job.step_rows)) * width
        chunk = _log_prob_chunk(job, scored, gradient=False)
        parts["activations of one layer"] = {SCORE: scored * _forward_bytes(job)}
        parts["log-prob chunk, no gradient"] = {SCORE: chunk}
    return parts


def _activations(job: Job, positions: int) -> int:
    """Return the bytes on the device that are kept for the backward pass of some positions."""
    layers = job.shape.num_layers
    hidden = job.shape.hidden_size
    wide = job.value_bytes
    head = 2 * wide * hidden
    whole = positions * (layers * layer_bytes(job) + head)
    if job.checkpointing == "none":
        return whole
    # one layer at a time is computed again, and its backward pass needs additional memory
    backward = int(wide * (2 * job.shape.intermediate_size + 3.5 * hidden))
    one = layer_bytes(job) + backward + head
    # Unsloth keeps the layers' inputs in main memory, and two of them on the card at a time
    inputs = 2 if job.checkpointing == "unsloth" else layers
    kept = positions * (inputs * hidden * wide + one)
    # the heap of a CPU process keeps holes, since gradients lie between freed blocks
    return kept if job.on_gpu else max(kept, whole // 2)


def _log_prob_chunk(job: Job, positions: int, *, gradient: bool) -> int:
    """Return the bytes of the logits that exist at a time, and for their gradient."""
    vocabulary = job.shape.vocab_size
    if not job.on_gpu:  # three tables in float32
        return 3 * 4 * min(positions * vocabulary, CHUNK_LOGITS)
    tile = min(TRITON_TOKENS, positions) * min(TRITON_LOGITS, vocabulary) * job.value_bytes
    return tile + (4 * positions * job.shape.hidden_size if gradient else 0)
