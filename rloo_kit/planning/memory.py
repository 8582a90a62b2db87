"""Bytes of each part of a training, and of the moment when most of them are held at once.

Arithmetic alone: no tensor is made. A step has phases (the model is loaded, completions are
sampled, rewards score them, passes without gradient, passes with), and each part is held in some of
them. The peak is the largest phase, not the sum of all parts.

Where numbers come from: bytes of weights and optimizer states are what bitsandbytes and torch
store. Bytes of activations were counted on a CPU with torch's profiler, for Llama and Qwen3 layers
with LoRA under autocast (docs/how-to/plan.md); a GPU's fused kernels keep less, so there they are
an upper bound. What lies outside of tensors is a constant with its reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rloo_kit.errors import GenerationError
from rloo_kit.models.engine_memory import (
    BATCHED_TOKENS,
    UNMEASURED,
    EngineMemory,
    engine_memory,
    engine_size,
    reserved_rank,
)
from rloo_kit.models.shape import Linear, ModelShape, nf4_bytes, weight_bytes

MIB = 1024**2
LOAD, SAMPLE, REWARD, SCORE, LEARN = PHASES = ("load", "sample", "reward", "score", "learn")
DOING = {
    LOAD: "the model is loaded",
    SAMPLE: "completions are sampled",
    REWARD: "a reward model scores",
    SCORE: "log-probabilities are computed",
    LEARN: "it learns",
}
"""What happens in a phase, in words."""

LIBRARIES = {"unsloth": 1010 * MIB, "transformers": 1010 * MIB}
"""Resident memory of a CPU process that has trained, its tensors apart: Python, torch (a build for
CUDA, too), TRL and the backend. benchmarks/plan_accuracy.py measures it."""
CONTEXT = 600 * MIB
"""Of a GPU, outside of torch's allocator: the CUDA context, cuBLAS and Triton's kernels. It differs
by card and driver; an estimate."""
FRAGMENTATION = 0.06
"""Share of what comes and goes on a GPU that lies between blocks, with expandable segments; an
estimate."""
NO_GRAD_FACTOR = 4
"""How much larger passes without gradient are (learner.NO_GRAD_FACTOR)."""
CHUNK_LOGITS = 2**24
"""Logits that exist at a time on a CPU (logprobs.CHUNK_LOGITS; Unsloth has the same)."""
PLAIN_CHUNK_TOKENS = 256
"""Tokens of them at most, without Unsloth (logprobs.CHUNK_TOKENS)."""
TRITON_TOKENS, TRITON_LOGITS = 4096, 32768
"""Tile of TRL 1.15's kernel on a GPU: tokens, and logits of each (kernels/chunked_logprob.py)."""
LARGE_BLOCK = 32 * MIB
"""On a CPU glibc takes blocks of this size from the system and gives them back (its largest
M_MMAP_THRESHOLD), and keeps the room of smaller ones."""
HOLES, HOLES_NORMED = 1.35, 1.6
"""Room of small blocks over what they hold: temporaries lie between what a pass keeps, and norms of
queries and keys make more of them, in float32. Measured with Llama's layers and Qwen3's."""
HOLES_OF_LAYERS = 0.6
"""The same with checkpointing, over what all layers would keep without it: gradients that stay
split the room of a layer that was computed again, and the next layer's blocks do not fit.
Measured."""
IN_ONE_PLACE, IN_ONE_PLACE_4BIT = 0.8, 0.1
"""Share of the empty room that a large block may find in one place; weights that are unpacked for
every use split it. Measured."""
LOADING = 3.5
"""Bytes for each packed weight that a 4-bit load on a CPU takes in such room. Measured."""
KEPT_FREE = "kept free by the allocator"
PAGED_FROM = 100_000
"""Elements from which on a paged optimizer keeps a state in main memory (bitsandbytes 0.50)."""
EIGHT_BIT_FROM, EIGHT_BIT_BLOCK = 4096, 256
"""Elements from which on a state is kept in 8 bit, and elements for each of its statistics."""


@dataclass(frozen=True)
class Judge:
    """A reward model, as far as memory goes."""

    shape: ModelShape
    in_4bit: bool
    on_gpu: bool
    offloads: bool
    """Whether its weights are in main memory while it does not score."""
    tokens: int
    """Of a forward pass."""


@dataclass(frozen=True)
class Job:
    """A training as far as memory goes; lengths in tokens, memory in bytes."""

    shape: ModelShape
    on_gpu: bool
    room: int
    """What the card has for this process, or what is free on a CPU."""
    card: int = 0
    """Memory of the whole card, as torch reports it; 0: the room."""
    backend: str = "unsloth"
    in_4bit: bool = True
    in_fp8: bool = False
    """Whether the linear layers' weights are kept in FP8."""
    value_bytes: int = 2
    """Of an activation: 2 in 16 bit, 4 in float32."""
    rank: int = 16
    targets: tuple[str, ...] = ()
    """Names of the linear layers with an adapter."""
    optimizer: str = "adamw_torch"
    """TRL's name, in its spelling ``adamw_8bit`` or ``paged_adamw_8bit``."""
    checkpointing: str = "none"
    """``none``, ``plain``, or ``unsloth``, which keeps the inputs of layers in main memory."""
    rows: int = 8
    """Completions that are sampled at once."""
    step_rows: int = 8
    """Completions of an optimizer step."""
    group: int = 4
    prompt: int = 512
    """Of the longest."""
    completion: int = 512
    max_length: int = 1024
    """Of both together."""
    budget: int | None = None
    """``tokens_per_micro_batch``; None: from the memory that is free."""
    scores: bool = True
    """Whether passes without gradient are made: a reference, or old log-probabilities."""
    keeps_graphs: bool = True
    """Whether whole groups are run forward before any of them is run backward."""
    engine: str = "transformers"
    """Who samples: ``transformers``, ``vllm``, ``shared`` (vLLM on Unsloth's weights) or
    ``server``."""
    sleeps: bool = True
    share: float | None = None
    """Of the GPU, for vLLM; None: computed (``engine_memory``)."""
    cache_bytes: float = 2
    """Of a key or value in vLLM's cache: 2 in 16 bit, 1 in FP8."""
    batched_tokens: int = BATCHED_TOKENS
    """Prompt tokens that vLLM reads in one pass."""
    judges: tuple[Judge, ...] = ()

    @property
    def width(self) -> int:
        """The longest row: its prompt and its completion."""
        return min(self.prompt + self.completion, self.max_length)


@dataclass(frozen=True)
class Part:
    """Something that takes memory, and when; bytes by phase."""

    name: str
    bytes: dict[str, int]
    in_main_memory: bool = False
    """Beside a GPU: it does not count towards the card."""

    @property
    def most(self) -> int:
        """In its largest phase."""
        return max(self.bytes.values(), default=0)


@dataclass(frozen=True)
class MemoryPlan:
    """What a training holds, part by part and phase by phase."""

    parts: tuple[Part, ...]
    budget: int
    """Positions of a training pass (rows times width)."""
    phases: dict[str, int] = field(default_factory=dict)
    """Bytes on the device, or of the process on a CPU."""

    @property
    def phase(self) -> str:
        """The phase of the peak; of several, the one that uses most of it."""
        free = next((part.bytes for part in self.parts if part.name == KEPT_FREE), {})
        return max(self.phases, key=lambda phase: (self.phases[phase], -free.get(phase, 0)))

    @property
    def peak_bytes(self) -> int:
        """On the device, or of the process on a CPU."""
        return self.phases[self.phase]

    @property
    def main_memory(self) -> int:
        """Bytes in the machine's memory, beside a GPU, in the largest phase."""
        held = [part for part in self.parts if part.in_main_memory]
        return max(sum(part.bytes.get(phase, 0) for part in held) for phase in PHASES)

    def at(self, phase: str) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is held in a phase, in the order of the parts.

        Args:
            phase: One of ``PHASES``.
        """
        return [
            (part.name, part.bytes[phase])
            for part in self.parts
            if not part.in_main_memory and part.bytes.get(phase)
        ]


def plan_memory(job: Job) -> MemoryPlan:
    """Return what a training will hold.

    Args:
        job: What is trained, how, and on what.
    """
    return _on_gpu(job) if job.on_gpu else _on_cpu(job)


# --- what both have ------------------------------------------------------------------------------


def _always(name: str, size: float, *, since: str = LOAD, in_main_memory: bool = False) -> Part:
    phases = PHASES[PHASES.index(since) :]
    return Part(name, dict.fromkeys(phases, int(size)), in_main_memory)


def adapter_sizes(job: Job) -> list[int]:
    """Return the elements of each tensor of the adapter (A and B of every layer that has one)."""
    return [
        size * job.rank
        for linear in _adapted(job)
        for _ in range(linear.count)
        for size in (linear.rows, linear.columns)
    ]


def _adapted(job: Job) -> list[Linear]:
    return [linear for linear in job.shape.linears if linear.name in job.targets]


def optimizer_bytes(name: str, sizes: Sequence[int], *, on_gpu: bool = True) -> tuple[int, int]:
    """Return the bytes of an optimizer's states: on the device, and in main memory.

    Args:
        name: TRL's ``optim``.
        sizes: Elements of every trained tensor.
        on_gpu: On a CPU, 8-bit and paged optimizers are replaced by AdamW in float32.
    """
    states = 0 if name == "sgd" else 1 if "lion" in name or "rmsprop" in name else 2
    eight_bit, paged = ("8bit" in name and on_gpu), ("paged" in name and on_gpu)
    here = elsewhere = 0
    for size in sizes:
        each = 4 * size
        if eight_bit and size >= EIGHT_BIT_FROM:
            each = size + 4 * -(-size // EIGHT_BIT_BLOCK)
        if paged and size >= PAGED_FROM:
            elsewhere += states * each
        else:
            here += states * each
    return here, elsewhere


def layer_bytes(job: Job) -> int:
    """Return what one layer keeps of a position for its backward pass.

    Two norms keep float32 of their input, and so do the norms of queries and keys; five values in
    16 bit as wide as the model, three as wide as the queries, two as the keys, four as the MLP, one
    of each adapter's rank. With torch's profiler the same to the byte (docs/how-to/plan.md).
    """
    shape, wide = job.shape, job.value_bytes
    normed = 4 * shape.qk_norm
    heads = shape.num_heads + shape.num_kv_heads
    adapters = sum(linear.count for linear in _adapted(job)) / max(1, shape.num_layers)
    return int(
        shape.hidden_size * (8 + 5 * wide)
        + shape.query_size * (normed + 3 * wide)
        + shape.kv_size * (normed + 2 * wide)
        + shape.intermediate_size * 4 * wide
        + adapters * job.rank * wide
        + (8 + 4 * shape.num_heads + 4 * shape.qk_norm * heads)
    )


def _passing(job: Job) -> int:
    """Return what a layer holds of a position while it is run forward without gradient."""
    return job.value_bytes * (4 * job.shape.intermediate_size + 6 * job.shape.hidden_size)


def _turning(job: Job) -> int:
    """Return what a layer holds of a position, besides what it kept, while it is run backward."""
    return int(job.value_bytes * (2 * job.shape.intermediate_size + 3.5 * job.shape.hidden_size))


def _at_once(job: Job, budget: int) -> int:
    """Return the positions whose graphs are held together in the worst case."""
    width, rows = job.width, job.step_rows
    piece = max(1, budget // width)
    if job.keeps_graphs:
        groups = budget // (job.group * width)
        return min(max(groups * job.group, piece), rows) * width
    return min(piece, rows) * width


def _kept(job: Job, positions: int) -> tuple[int, int]:
    """Return the bytes that graphs of so many positions keep: on the device, in main memory."""
    layers, hidden, wide = job.shape.num_layers, job.shape.hidden_size, job.value_bytes
    head = 2 * wide * hidden
    if job.checkpointing == "none":
        return positions * (layers * layer_bytes(job) + head), 0
    inputs, one = layers * hidden * wide, layer_bytes(job) + _turning(job)
    if job.checkpointing == "unsloth":  # two layers' inputs are on their way at a time
        return positions * (2 * hidden * wide + one + head), positions * inputs
    return positions * (inputs + one + head), 0


def _kv_cache(job: Job) -> int:
    sizes = 2 * job.shape.num_layers * job.shape.kv_size * job.value_bytes
    return job.rows * job.width * sizes


def _budget(job: Job, free: int) -> int:
    """Return ``tokens_per_micro_batch`` as it was given, or as the trainer will choose it."""
    from rloo_kit.rloo.batching import default_token_budget

    return job.budget or default_token_budget(
        max(0, free),
        job.shape.hidden_size,
        job.shape.num_layers,
        intermediate_size=job.shape.intermediate_size,
        bytes_per_value=job.value_bytes,
        checkpointing=job.checkpointing != "none",
        on_cpu=not job.on_gpu,
    )


# --- on a GPU ------------------------------------------------------------------------------------


def _on_gpu(job: Job) -> MemoryPlan:
    shape, sizes = job.shape, adapter_sizes(job)
    trained = 4 * sum(sizes)
    weights = weight_bytes(
        shape, in_4bit=job.in_4bit, value_bytes=job.value_bytes, in_fp8=job.in_fp8
    )
    here, paged = optimizer_bytes(job.optimizer, sizes)
    parts = [
        _always("CUDA context", CONTEXT),
        _always(f"weights, {_bits(job)}", weights),
        Part("largest layer, before it is packed", {LOAD: _unpacked(job)}),
        _always("LoRA adapter, float32", trained, since=SAMPLE),
        _always(f"optimizer states, {job.optimizer}", here, since=SAMPLE),
        _always("optimizer states, paged", paged, since=SAMPLE, in_main_memory=True),
        *_sampling_on_gpu(job, weights),
        *_judging(job),
    ]
    engine = sum(part.bytes.get(LEARN, 0) for part in parts if part.name.startswith("vLLM"))
    budget = _budget(job, job.room - CONTEXT - weights - trained - engine)
    parts += _passes_on_gpu(job, budget, trained)
    parts.append(_between_blocks(parts))
    return _summed(job, parts, budget)


def _bits(job: Job) -> str:
    plain = "FP8" if job.in_fp8 else f"{8 * job.value_bytes} bit"
    return "4 bit (NF4)" if job.in_4bit else plain


def _unpacked(job: Job) -> int:
    """Return the largest weight that is on the card in 16 bit until it is packed."""
    if job.shape.packed or not (job.in_4bit or job.in_fp8):
        return 0
    return 2 * max(linear.size for linear in job.shape.linears)


def _passes_on_gpu(job: Job, budget: int, trained: int) -> list[Part]:
    hidden, wide = job.shape.hidden_size, job.value_bytes
    positions = _at_once(job, budget)
    kept, offloaded = _kept(job, positions)
    several = 2 if positions < job.step_rows * job.width else 1  # gradients before, and of now
    tile = min(TRITON_TOKENS, positions) * min(TRITON_LOGITS, job.shape.vocab_size) * wide
    parts = [
        Part("gradients, float32", {LEARN: several * trained}),
        Part("activations", {LEARN: kept}),
        Part("log-prob chunk", {LEARN: tile + 4 * positions * hidden}),
        Part("activations, offloaded", {LEARN: offloaded}, in_main_memory=True),
        Part("LoRA adapter, 16 bit", {SCORE: trained * wide // 4, LEARN: trained * wide // 4}),
    ]
    if job.scores:
        scored = _at_once_without_gradient(job, budget)
        parts.append(Part("activations of one layer", {SCORE: scored * _passing(job)}))
        tile = min(TRITON_TOKENS, scored) * min(TRITON_LOGITS, job.shape.vocab_size) * wide
        parts.append(Part("log-prob chunk, no gradient", {SCORE: tile}))
    return parts


def _at_once_without_gradient(job: Job, budget: int) -> int:
    rows = max(1, NO_GRAD_FACTOR * budget // job.width)
    return min(rows, max(job.rows, job.step_rows)) * job.width


def _sampling_on_gpu(job: Job, weights: int) -> list[Part]:
    shape = job.shape
    if job.engine == "server":
        return []
    if job.engine == "transformers":
        cache = _kv_cache(job)
        prompts = job.rows * min(job.prompt, job.width) * _passing(job)
        return [
            Part("keys and values", {SAMPLE: cache + cache // max(1, shape.num_layers)}),
            Part("prompts, read at once", {SAMPLE: prompts}),
            Part("logits of the next token", {SAMPLE: _logits(job)}),
        ]
    awake = (SAMPLE,) if job.sleeps else PHASES[1:]
    copy = 0 if job.engine == "shared" else weights
    engine = planned_engine(job)
    parts = [
        Part("vLLM weights", dict.fromkeys(awake, copy)),
        Part("vLLM keys and values", dict.fromkeys(awake, engine.cache)),
        Part("vLLM activations", {SAMPLE: engine.size.working}),
        _always("vLLM CUDA graphs", engine.size.graphs + UNMEASURED, since=SAMPLE),
    ]
    if job.sleeps and copy:
        asleep = dict.fromkeys((REWARD, SCORE, LEARN), copy)
        parts.append(Part("vLLM weights, asleep", asleep, in_main_memory=True))
    return parts


def planned_engine(job: Job) -> EngineMemory:
    """Return what vLLM takes of the card, as the engine will ask for it when it starts.

    Where it does not fit, what all completions at full length would need.

    Args:
        job: One that vLLM samples for in this process, on a GPU.
    """
    rank = reserved_rank(job.rank)
    size = engine_size(
        job.shape,
        in_4bit=job.in_4bit,
        max_rank=rank,
        num_sequences=job.rows,
        max_length=job.max_length,
        value_bytes=job.value_bytes,
        cache_bytes=job.cache_bytes,
        in_fp8=job.in_fp8,
        batched_tokens=job.batched_tokens,
    )
    free = job.room - CONTEXT
    if job.engine != "shared":  # the trainer's model and adapter are on the card already
        free -= size.weights + 4 * sum(adapter_sizes(job))
    try:
        card = job.card or job.room
        return engine_memory(size, free, sleeps=job.sleeps, card=card, share=job.share)
    except GenerationError as exc:
        return EngineMemory(size, size.full_cache, str(exc))


def _logits(job: Job) -> int:
    """Return the next token's logits in 16 bit and float32, their softmax, and what is drawn."""
    return job.rows * job.shape.vocab_size * (job.value_bytes + 12)


def _judging(job: Job) -> list[Part]:
    """Return the reward models' weights, and what they compute with."""
    parts = []
    for number, judge in enumerate(job.judges, 1):
        name = "reward model" if len(job.judges) == 1 else f"reward model {number}"
        weights = weight_bytes(judge.shape, in_4bit=judge.in_4bit)
        waits = judge.on_gpu and judge.offloads
        if judge.on_gpu:
            phases = (REWARD,) if waits else PHASES[1:]
            parts.append(Part(name, dict.fromkeys(phases, weights)))
        if waits or not judge.on_gpu:
            parts.append(_always(f"{name}, waiting", weights, since=SAMPLE, in_main_memory=True))
        passing = 2 * (4 * judge.shape.intermediate_size + 6 * judge.shape.hidden_size)
        work = Part(f"{name}, at work", {REWARD: judge.tokens * passing}, not judge.on_gpu)
        parts.append(work)
    return parts


def _between_blocks(parts: Iterable[Part]) -> Part:
    """Return what is lost between blocks that come and go."""
    comes_and_goes = dict.fromkeys(PHASES, 0.0)
    for part in parts:
        if part.in_main_memory or len(part.bytes) == len(PHASES):
            continue
        for phase, size in part.bytes.items():
            comes_and_goes[phase] += FRAGMENTATION * size
    return Part("between blocks", {phase: int(size) for phase, size in comes_and_goes.items()})


# --- on a CPU ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """What a phase holds on the heap of a CPU process."""

    name: str
    phase: str
    size: int
    block: int
    """Bytes of its largest block."""
    room: int | None = None
    """Bytes of the heap that it takes; None: its size, and the usual holes."""


def _on_cpu(job: Job) -> MemoryPlan:
    sizes = adapter_sizes(job)
    trained = 4 * sum(sizes)
    states, _ = optimizer_bytes(job.optimizer, sizes, on_gpu=False)
    parts = [
        _always("Python and libraries", LIBRARIES[job.backend]),
        *_weights_on_cpu(job),
        _always("LoRA adapter, float32", trained, since=SAMPLE),
        _always("best weights so far", trained, since=SAMPLE),
        _always("optimizer states, float32", states, since=SAMPLE),
        *(_judge_on_cpu(judge) for judge in job.judges),
    ]
    static = sum(part.bytes.get(SAMPLE, 0) for part in parts)
    budget = _budget(job, job.room - static)
    pieces = [
        *_loading_on_cpu(job),
        *_sampling_on_cpu(job),
        *_judging_on_cpu(job),
        *_passes_on_cpu(job, budget, trained),
    ]
    parts += [Part(piece.name, {piece.phase: piece.size}) for piece in pieces]
    holes = HOLES_NORMED if job.shape.qk_norm else HOLES
    place = IN_ONE_PLACE_4BIT if job.in_4bit else IN_ONE_PLACE
    parts.append(Part(KEPT_FREE, _kept_free(pieces, holes, place)))
    return _summed(job, parts, budget)


def _kept_free(pieces: Sequence[_Piece], holes: float, share: float) -> dict[str, int]:
    """Return the room for small blocks that stays empty in each phase.

    A large block goes where another phase's small blocks have been, if it fits; not into holes.

    Args:
        pieces: Of all phases.
        holes: Room of small blocks over what they hold.
        share: Of the empty room that lies in one place.
    """
    small, room = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)
    for piece in pieces:
        if piece.block < LARGE_BLOCK:
            small[piece.phase] += piece.size
            room[piece.phase] += int(holes * piece.size) if piece.room is None else piece.room
    heap = max(room.values())
    filled = {phase: 0 for phase in PHASES if phase != LOAD}
    for piece in pieces:
        place = int(share * (heap - room[piece.phase]))
        if piece.phase in filled and LARGE_BLOCK <= piece.block <= place:
            filled[piece.phase] += piece.size
    return {
        phase: max(0, heap - room[phase] - size) + room[phase] - small[phase]
        for phase, size in filled.items()
    }


def _loading_on_cpu(job: Job) -> list[_Piece]:
    if not job.in_4bit or job.shape.packed:
        return []
    largest = max(linear.size for linear in job.shape.linears)
    return [_Piece("packing", LOAD, int(LOADING * job.shape.num_quantised), 4 * largest)]


def _weights_on_cpu(job: Job) -> list[Part]:
    """Return the weights: mapped from their file where its type is computed in, else copied.

    A 4-bit load reads every weight once, and the embedding keeps the file mapped.
    """
    shape = job.shape
    packed = sum(
        nf4_bytes(linear.rows, linear.columns) * linear.count
        for linear in shape.linears
        if linear.quantised
    )
    parts = []
    if job.value_bytes == 2:
        size = weight_bytes(shape, in_4bit=shape.packed)
        parts.append(_always("weights, mapped from their file", size))
    elif not job.in_4bit:
        parts.append(_always("weights, 32 bit", 4 * shape.num_parameters))
    else:
        others = shape.num_parameters - shape.num_quantised
        parts.append(_always("weights, 32 bit", 4 * others))
    if job.in_4bit and not (shape.packed and job.value_bytes == 2):
        parts.append(_always("weights, 4 bit (NF4)", packed))
    return parts


def _judge_on_cpu(judge: Judge) -> Part:
    return _always("reward model", weight_bytes(judge.shape, in_4bit=judge.in_4bit), since=REWARD)


def _judging_on_cpu(job: Job) -> list[_Piece]:
    return [
        _Piece(
            "reward model, at work",
            REWARD,
            2 * judge.tokens * (4 * judge.shape.intermediate_size + 6 * judge.shape.hidden_size),
            2 * judge.tokens * judge.shape.intermediate_size,
        )
        for judge in job.judges
    ]


def _sampling_on_cpu(job: Job) -> list[_Piece]:
    if job.engine != "transformers":
        return []
    shape, wide = job.shape, job.value_bytes
    cache = _kv_cache(job)
    one = cache // max(1, 2 * shape.num_layers)
    pieces = [_Piece("keys and values", SAMPLE, cache + 2 * one, one)]
    positions = job.rows * min(job.prompt, job.width)
    reading = positions * _passing(job)
    # bmm of oneDNN copies the LM head for every row, where a prompt's last position is a slice
    copies = wide * job.rows * shape.vocab_size * shape.hidden_size if wide == 2 else _logits(job)
    if copies >= reading:
        name = "LM head, copied for each row" if wide == 2 else "logits of the next token"
        pieces.append(_Piece(name, SAMPLE, copies, copies))
    else:
        block = positions * shape.intermediate_size * wide
        pieces.append(_Piece("prompts, read at once", SAMPLE, reading, block))
    return pieces


def _passes_on_cpu(job: Job, budget: int, trained: int) -> list[_Piece]:
    wide, positions = job.value_bytes, _at_once(job, budget)
    kept, _ = _kept(job, positions)
    several = 2 if positions < job.step_rows * job.width else 1
    cast = trained // 2 if wide == 2 else 0
    widest = job.shape.intermediate_size * wide
    room = None
    if job.checkpointing != "none":
        uncut = positions * job.shape.num_layers * layer_bytes(job)
        room = int(max(kept, HOLES_OF_LAYERS * uncut))
    pieces = [
        _Piece("gradients, float32", LEARN, several * trained, 0),
        _Piece("LoRA adapter, 16 bit", LEARN, cast, 0),
        _Piece("activations", LEARN, kept, positions * widest, room),
        _Piece("log-prob chunk", LEARN, *_chunk_on_cpu(job, positions)),
    ]
    if job.scores:
        scored = _at_once_without_gradient(job, budget)
        pieces += [
            _Piece("activations of one layer", SCORE, scored * _passing(job), scored * widest),
            _Piece("log-prob chunk, no gradient", SCORE, *_chunk_on_cpu(job, scored)),
        ]
    return pieces


def _chunk_on_cpu(job: Job, positions: int) -> tuple[int, int]:
    """Return the bytes of a chunk's tables of logits in float32, and of one of them."""
    vocabulary = job.shape.vocab_size
    tokens = min(positions, max(1, CHUNK_LOGITS // vocabulary))
    tables = 3
    if job.backend != "unsloth":
        tokens, tables = min(tokens, PLAIN_CHUNK_TOKENS), 5
    table = 4 * tokens * vocabulary
    return tables * table, table


def _summed(job: Job, parts: Iterable[Part], budget: int) -> MemoryPlan:
    held = tuple(part for part in parts if part.most > 0)
    left_out = {REWARD: not job.judges, SCORE: not job.scores}
    phases = {
        phase: sum(part.bytes.get(phase, 0) for part in held if not part.in_main_memory)
        for phase in PHASES
        if not left_out.get(phase)
    }
    return MemoryPlan(held, budget, phases)
