"""Calculation of a run's memory: the bytes of each part in each phase, and the peak.

Nothing is measured or loaded here. The peak is the phase that needs the most memory, not the sum of
all parts. Weights and optimizer states have the sizes in which bitsandbytes and torch store them.
Activations were counted with torch's profiler on a CPU (docs/how-to/plan.md), which gives an upper
bound for a GPU with fused kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rloo_kit.errors import GenerationError
from rloo_kit.machine.hardware import CHUNK_LOGITS
from rloo_kit.models.engine_memory import (
    MIB,
    UNMEASURED,
    EngineMemory,
    engine_memory,
    engine_size,
    reserved_rank,
)
from rloo_kit.models.shape import Linear, ModelShape, weight_bytes
from rloo_kit.rloo.token_budget import NO_GRAD_FACTOR, default_token_budget

# Phase -> what happens in it, as a clause
DOING = {
    "load": "the model is loaded",
    "start": "vLLM starts",
    "sample": "completions are sampled",
    "score": "log-probabilities are computed",
    "learn": "the model is trained",
}
PHASES = tuple(DOING)
LOAD, START, SAMPLE, SCORE, LEARN = PHASES

# Resident memory of a CPU process after training, without tensors: Python, torch, TRL and the
# backend, measured with benchmarks/plan_accuracy.py --libraries
LIBRARIES = 1010 * MIB
# GPU memory outside of torch's allocator: the CUDA context, cuBLAS and Triton's kernels. It depends
# on the GPU and the driver; 610 and 676 MiB were measured on an H100.
CONTEXT = 680 * MIB
# Fragmentation, as a share of the temporary memory: on a GPU with expandable segments (estimated),
# and in the heap of a CPU process (docs/how-to/plan.md)
FRAGMENTATION = 0.06
HEAP = 0.25
# Memory needed to quantise a model to 4 bit on a CPU, relative to the model's size in 16 bit
LOADING = 1.4
# Tile size of TRL 1.15's kernel on a GPU (kernels/chunked_logprob.py): number of tokens, and number
# of logits for each token
TRITON_TOKENS = 4096
TRITON_LOGITS = 32768
# Number of elements from which a paged optimizer keeps a state in main memory (bitsandbytes 0.50)
PAGED_FROM = 100_000
# Number of elements from which a state is kept in 8 bit, and elements in a quantisation block
EIGHT_BIT_FROM = 4096
EIGHT_BIT_BLOCK = 256


@dataclass(frozen=True)
class Job:
    """Facts that determine the memory of a run. Lengths are in tokens, and memory is in bytes."""

    shape: ModelShape
    on_gpu: bool
    room: int  # memory that this process may use: GPU memory, or main memory without a GPU
    card: int  # memory of the whole GPU, as torch reports it
    in_4bit: bool
    value_bytes: int  # size of a value of an activation: 2 in 16 bit, 4 in float32
    rank: int
    targets: tuple[str, ...]  # names of the linear layers with an adapter
    adapted_layers: int  # number of layers with an adapter
    whole: int  # number of embeddings and LM heads that are trained in full, without LoRA
    optimizer: str  # TRL's `optim`
    checkpointing: str  # `none`, `plain`, or `unsloth` (keeps layer inputs in main memory)
    rows: int  # completions in a generation batch
    at_once: int  # completions that are sampled at the same time
    step_rows: int  # completions in an optimizer step
    group: int  # completions of a prompt
    prompt: int  # length of the longest prompt
    completion: int  # length of the longest completion
    max_length: int  # maximum length of prompt and completion together
    budget: int | None  # `tokens_per_micro_batch`; None: computed from the free memory
    scores: bool  # True if a phase computes log-probabilities without gradient
    keeps_graphs: bool  # True if all rows of a group run forward before any runs backward
    engine: str  # `transformers`, `server`, `vllm`, or `shared` (vLLM on Unsloth's weights)
    sleeps: bool  # True if vLLM frees its memory during training
    share: float | None  # vLLM's share of the GPU memory; None: see `engine_memory`
    batched_tokens: int  # prompt tokens that vLLM processes in one pass
    draft_tokens: int  # draft tokens of a completion in one pass (speculative decoding)
    cards: int = 1  # GPUs across which base, adapter and optimizer states are sharded

    @property
    def width(self) -> int:
        """Maximum number of tokens in a row (a prompt with its completion)."""
        return min(self.prompt + self.completion, self.max_length)


# Phase -> bytes that a part of the memory needs in that phase
Held = dict[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run: the total of each phase, and its parts, such as weights or activations."""

    parts: dict[str, Held]  # name of the part -> its bytes in each phase
    budget: int  # positions in a training pass (rows times width)
    phases: dict[str, int]  # phase -> total bytes on the GPU, or of the process if it runs on a CPU
    engine: EngineMemory | None  # memory of a vLLM engine in this process on a GPU; None without it

    @property
    def phase(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes: GPU memory, or memory of the process if the run uses a CPU."""
        return self.phases[self.phase]

    def at(self, phase: str) -> list[tuple[str, int]]:
        """Return name and bytes of each part that needs memory in ``phase``, one of ``PHASES``."""
        return [(name, held[phase]) for name, held in self.parts.items() if held.get(phase)]


def plan_memory(job: Job) -> MemoryPlan:
    """Compute the memory that a run needs in each phase."""
    sizes = adapter_sizes(job)
    trained = 4 * sum(sizes) // job.cards
    parts = {**_weights(job), "LoRA adapter, float32": _since(SAMPLE, trained)}
    engine = None
    if job.engine == "transformers":
        parts |= _by_transformers(job)
    elif job.on_gpu and job.engine != "server":  # the memory of vLLM on a CPU is not counted
        engine = planned_engine(job)
        parts |= _by_vllm(job, engine)
    # The trainer computes the same budget from the memory that is free after loading
    budget = job.budget or default_token_budget(
        job.room - _total(parts, LEARN),
        job.shape.hidden_size,
        job.shape.num_layers,
        intermediate_size=job.shape.intermediate_size,
        bytes_per_value=job.value_bytes,
        checkpointing=job.checkpointing != "none",
        on_cpu=not job.on_gpu,
    )
    states = optimizer_bytes(job.optimizer, sizes, on_gpu=job.on_gpu) // job.cards
    parts[f"optimizer states, {job.optimizer}"] = _since(SAMPLE, states)
    parts |= _passes(job, budget, trained)
    # Parts that are held in all phases are allocated once, so they cause no fragmentation
    brief = {name: held for name, held in parts.items() if len(held) < len(PHASES)}
    lost = FRAGMENTATION if job.on_gpu else HEAP
    # The measured memory of vLLM's start already includes fragmentation
    parts["between blocks"] = {p: int(lost * _total(brief, p)) for p in PHASES if p != START}
    there = {SCORE: job.scores, START: engine is not None}
    phases = {p: _total(parts, p) for p in PHASES if there.get(p, True)}
    return MemoryPlan(parts, budget, phases, engine)


def _since(first: str, size: float) -> Held:
    """Return the bytes per phase of a part that is held from the phase ``first`` to the end."""
    return dict.fromkeys(PHASES[PHASES.index(first) :], int(size))


def _total(parts: dict[str, Held], phase: str) -> int:
    return sum(held.get(phase, 0) for held in parts.values())


# --- weights, adapter, optimizer -----------------------------------------------------------------


def _weights(job: Job) -> dict[str, Held]:
    """Return the parts of the memory that the base model and the libraries need."""
    shape = job.shape
    packing = mapped = 0
    if job.in_4bit and not shape.packed:
        # one layer at a time is packed
        packing = 2 * max((linear.size for linear in shape.linears), default=0)
        if not job.on_gpu:
            mapped = weight_bytes(shape, in_4bit=False)  # the mapped file stays in memory
            packing = int(LOADING * mapped)
    outside = "CUDA context" if job.on_gpu else "Python and libraries"
    total = weight_bytes(shape, in_4bit=job.in_4bit, value_bytes=job.value_bytes)
    # Sharded weights are gathered for use: one layer, the next one, embeddings and LM head
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
    """Return the number of elements of each trained tensor.

    These are LoRA's matrices A and B of every layer with an adapter, and the embeddings and LM
    heads that are trained in full.
    """
    sizes = [
        size * job.rank
        for linear in _adapted(job)
        for _ in range(linear.count * job.adapted_layers // job.shape.num_layers)
        for size in (linear.rows, linear.columns)
    ]
    return sizes + job.whole * [job.shape.vocab_size * job.shape.hidden_size]


def _adapted(job: Job) -> list[Linear]:
    """Return the linear layers that get an adapter."""
    return [linear for linear in job.shape.linears if linear.name in job.targets]


def optimizer_bytes(name: str, sizes: Sequence[int], *, on_gpu: bool = True) -> int:
    """Return the bytes that the states of an optimizer need on the device.

    On a CPU, 8-bit and paged optimizers are replaced by AdamW in float32.

    Args:
        name: Name of the optimizer, as in TRL's ``optim``.
        sizes: Number of elements of each trained tensor.
        on_gpu: True if the run trains on a GPU.
    """
    if not on_gpu and ("8bit" in name or "paged" in name):
        name = "adamw_torch"
    # bitsandbytes keeps the states of small tensors in 32 bit, and pages only large states
    states = 0 if name == "sgd" else 1 if "lion" in name or "rmsprop" in name else 2
    here = 0
    for size in sizes:
        packed = "8bit" in name and size >= EIGHT_BIT_FROM
        each = size + 4 * -(-size // EIGHT_BIT_BLOCK) if packed else 4 * size
        here += 0 if "paged" in name and size >= PAGED_FROM else states * each
    return here


# --- sampling ------------------------------------------------------------------------------------


def _by_vllm(job: Job, engine: EngineMemory) -> dict[str, Held]:
    """Return the parts of the memory that sampling with vLLM on this GPU needs."""
    awake = (START, SAMPLE) if job.sleeps else PHASES[1:]
    size = engine.size
    shared = job.engine == "shared"
    cache = engine.total - size.fixed if shared else engine.cache  # shared: it fills its share
    merged = sum(linear.count * linear.size for linear in _adapted(job))
    return {
        "vLLM weights": dict.fromkeys(awake, 0 if shared else size.weights),
        "vLLM keys and values": dict.fromkeys(awake, cache),
        "vLLM activations": dict.fromkeys((START, SAMPLE), size.working),
        "vLLM CUDA graphs": _since(START, size.graphs + UNMEASURED),  # they stay while it sleeps
        # vLLM 0.26 fills the memory reserved for graphs with KV cache, so graphs come in addition
        "CUDA graphs over vLLM's share": _since(START, size.graphs),
        "vLLM, while it starts": {START: size.starting - size.graphs},
        # Unsloth merges an adapter into 16-bit weights, and keeps the rounding error
        "weights, while the adapter is merged": {
            SAMPLE: 2 * merged if shared and not job.in_4bit else 0
        },
    }


def planned_engine(job: Job) -> EngineMemory:
    """Return the GPU memory that vLLM will request in the run.

    If vLLM does not fit, ``refusal`` of the result says why, and ``cache`` is the size that the KV
    cache of all completions at full length would have.
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
    if job.engine != "shared":  # the trainer's model and adapter are already on the GPU
        free -= size.weights + 4 * sum(adapter_sizes(job))
    try:
        return engine_memory(size, free, sleeps=job.sleeps, card=job.card, share=job.share)
    except GenerationError as exc:
        return EngineMemory(size, size.full_cache, str(exc))


def _by_transformers(job: Job) -> dict[str, Held]:
    """Return the parts of the memory that sampling with transformers needs."""
    shape = job.shape
    wide = job.value_bytes
    cache = 2 * shape.num_layers * shape.kv_size * wide * job.at_once * job.width
    cache += cache // shape.num_layers  # the cache of a layer is copied when it grows
    # Unsloth's decoding loop on a GPU processes the prompt again for each of its completions
    prompts = job.at_once if job.on_gpu else -(-job.at_once // job.group)
    read = prompts * min(job.prompt, job.width) * _forward_bytes(job)
    matrices = 0
    if not job.on_gpu:
        matrices = wide * sum(linear.count * linear.size for linear in _adapted(job))
    return {
        "keys and values": {SAMPLE: cache},
        "prompts, read at once": {SAMPLE: read},
        # For every row: logits, logits in float32, their softmax, and a copy for sampling
        "logits of the next token": {SAMPLE: job.at_once * shape.vocab_size * (wide + 12)},
        "base and adapter as one matrix": {SAMPLE: matrices if 4 * matrices < job.room else 0},
    }


# --- passes with and without gradient ------------------------------------------------------------


def layer_bytes(job: Job) -> int:
    """Return the bytes of activations that one layer keeps per position for the backward pass.

    The layer's two norms, and the norms of queries and keys, keep their inputs in float32. With
    ``job.value_bytes`` per value, a layer also keeps five vectors of the hidden size, three of the
    query size, two of the key size, four of the MLP's size, and one of the rank for each adapter.
    A test compares the result with what torch saves on a CPU, and allows a difference of 3%.
    """
    shape = job.shape
    wide = job.value_bytes
    normed = 4 * shape.qk_norm
    heads = shape.num_heads + shape.num_kv_heads
    adapted = [linear.count for linear in _adapted(job) if not linear.is_expert]
    adapters = sum(adapted) / shape.num_layers
    return int(
        shape.hidden_size * (8 + 5 * wide)
        + shape.num_heads * shape.head_dim * (normed + 3 * wide)
        + shape.kv_size * (normed + 2 * wide)
        + shape.intermediate_size * 4 * wide
        + adapters * job.rank * wide
        + (8 + 4 * shape.num_heads + 4 * shape.qk_norm * heads)
    )


def _forward_bytes(job: Job) -> int:
    """Return the bytes that one layer needs per position in a forward pass without gradient."""
    return job.value_bytes * (4 * job.shape.intermediate_size + 6 * job.shape.hidden_size)


def _passes(job: Job, budget: int, trained: int) -> dict[str, Held]:
    """Return the parts of the memory that passes of the model need, with and without gradient.

    Args:
        job: Facts of the run.
        budget: Positions in a training pass.
        trained: Bytes of the trained parameters in float32, on one GPU.
    """
    width = job.width
    wide = job.value_bytes
    # A row longer than the budget gets its own pass
    rows = max(1, budget // width)
    if job.keeps_graphs:  # as many complete groups as fit
        rows = max(budget // (job.group * width) * job.group, rows)
    rows = min(rows, job.step_rows)
    # Gradients of this pass, and the sum of those of earlier passes if there are several
    gradients = (2 if rows < job.step_rows else 1) * trained
    copied = trained * wide // 4 if wide == 2 else 0
    parts = {
        "gradients, float32": {LEARN: gradients},
        "activations": {LEARN: _activations(job, rows * width)},
        "log-prob chunk": {LEARN: _log_prob_chunk(job, rows * width, gradient=True)},
        "LoRA adapter, 16 bit": _since(SCORE, copied),
    }
    if job.scores:
        rows = max(1, NO_GRAD_FACTOR * budget // width)
        scored = min(rows, max(job.rows, job.step_rows)) * width
        chunk = _log_prob_chunk(job, scored, gradient=False)
        parts["activations of one layer"] = {SCORE: scored * _forward_bytes(job)}
        parts["log-prob chunk, no gradient"] = {SCORE: chunk}
    return parts


def _activations(job: Job, positions: int) -> int:
    """Return the bytes on the device that a pass keeps for its backward pass.

    ``positions`` is the number of positions in the pass.
    """
    layers = job.shape.num_layers
    hidden = job.shape.hidden_size
    wide = job.value_bytes
    head = 2 * wide * hidden
    whole = positions * (layers * layer_bytes(job) + head)
    if job.checkpointing == "none":
        return whole
    # One layer at a time is recomputed, and its backward pass needs additional memory
    backward = int(wide * (2 * job.shape.intermediate_size + 3.5 * hidden))
    one = layer_bytes(job) + backward + head
    # Unsloth keeps the layers' inputs in main memory, with at most two of them on the GPU
    inputs = 2 if job.checkpointing == "unsloth" else layers
    kept = positions * (inputs * hidden * wide + one)
    # The heap of a CPU process stays fragmented, since gradients lie between freed blocks
    return kept if job.on_gpu else max(kept, whole // 2)


def _log_prob_chunk(job: Job, positions: int, *, gradient: bool) -> int:
    """Return the bytes of the logits that are in memory at the same time.

    ``gradient`` adds the memory that the backward pass needs for them on a GPU.
    """
    vocabulary = job.shape.vocab_size
    if not job.on_gpu:  # three copies of the logits in float32
        return 3 * 4 * min(positions * vocabulary, CHUNK_LOGITS)
    tile = min(TRITON_TOKENS, positions) * min(TRITON_LOGITS, vocabulary) * job.value_bytes
    return tile + (4 * positions * job.shape.hidden_size if gradient else 0)
