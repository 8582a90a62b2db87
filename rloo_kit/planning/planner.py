"""Will it fit: the plan of a run file on a card, and what to change where it does not.

Nothing of the model but its config is read. A plan is arithmetic (``memory_plan``) on what the run
file, the config and the card say; ``benchmarks/plan_accuracy.py`` holds it against real runs.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rloo_kit.config.run_file import EXAMPLES, RunConfig, batch_plan
from rloo_kit.diagnosis.record import DEFAULTS
from rloo_kit.errors import ConfigError, KitError
from rloo_kit.machine.cards import USABLE, Card, card_of, find_card
from rloo_kit.machine.environment import quiet, setup
from rloo_kit.machine.hardware import (
    GIB,
    Hardware,
    check_fp8,
    compute_capability,
    detect_hardware,
    installed_version,
    why_not_unsloth,
)
from rloo_kit.models.adapters import adapter_in
from rloo_kit.models.engine_memory import BATCHED_TOKENS
from rloo_kit.models.shape import TINY_THINKER, ModelShape, read_shape
from rloo_kit.models.shared_engine import why_not_shared
from rloo_kit.planning.memory import (
    CONTEXT,
    DOING,
    PHASES,
    Job,
    Judge,
    MemoryPlan,
    plan_memory,
    planned_engine,
)
from rloo_kit.planning.speed import Range, Speed, estimate_speed
from rloo_kit.text.redaction import redact_tree, without_hidden
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.training.preparation import beside, read_config, read_prompts, with_whole_paths

MIB = 1024**2
BLOCKS = " ▏▎▍▌▋▊▉█"
"""Of a bar: eighths of a column."""
BAR, NAME = 26, 33
"""Columns of the longest bar, and of a part's name: 80 with the number."""
SMALLEST_PART = 0.01
"""Share of the peak from which on a part has a bar of its own."""
SMALLEST_SAVING = 16 * MIB
"""A change that saves less is not worth its line."""
FULL = 0.9
"""Share of the memory that ``tune`` fills."""
MOST_ROWS, MOST_POSITIONS = 64, 16_384
"""Completions of a step, and positions of a pass, beyond which ``tune`` goes no further."""
BATCHED = "max_num_batched_tokens"
"""The setting of ``unsloth:`` and ``vllm:`` that a plan counts."""
REWARD_TOKENS = 8192
"""Of a reward model's pass, where the run file says nothing (rewards/reward_model.py)."""


@dataclass(frozen=True)
class Change:
    """Something to change in a run file, and what that saves."""

    settings: tuple[tuple[str, Any], ...]
    """(name, value) of each; the later ones belong to the first."""
    saves: int
    """Bytes of the peak, together with the changes before it."""

    @property
    def setting(self) -> str:
        """Such as ``trainer.optim``."""
        return self.settings[0][0]

    @property
    def value(self) -> Any:
        """What to set it to."""
        return self.settings[0][1]

    @property
    def lines(self) -> list[str]:
        """``section.key=value`` for each, as after ``--set``."""
        return [f"{name}={_as_yaml(value)}" for name, value in self.settings]

    def __str__(self) -> str:
        return f"set {', '.join(f'{name} to {_as_yaml(value)}' for name, value in self.settings)}"


@dataclass(frozen=True, repr=False)
class Plan:
    """What a run will hold on a card, and whether that fits; its text is the whole picture."""

    config: RunConfig
    shape: ModelShape
    card: Card
    """What is planned for; of a CPU its name and memory."""
    room: int
    """Bytes that are there for this process."""
    job: Job
    memory: MemoryPlan
    changes: tuple[Change, ...]
    """What makes it fit, the least harmful first; empty where it fits, or where nothing helps."""
    speed: Speed | None
    """An estimate; None where there is no ground for one."""
    notes: tuple[str, ...] = ()
    """What had to be assumed."""

    @property
    def peak_bytes(self) -> int:
        """On the card, or of the process on a CPU."""
        return self.memory.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is no more than the room, and vLLM starts."""
        return self.peak_bytes <= self.room and self.refusal is None

    @property
    def vllm_share(self) -> float | None:
        """Share of the card that vLLM gets; None where it does not sample in this process."""
        if not self.job.on_gpu or self.job.engine not in ("shared", "vllm"):
            return None
        return self.job.share or planned_engine(self.job).share(self.job.card or self.room)

    @property
    def refusal(self) -> str | None:
        """Why vLLM would not start, though the peak may fit; None where it does."""
        return None if self.vllm_share is None else planned_engine(self.job).refusal

    @property
    def verdict(self) -> str:
        """In one line."""
        return _verdict(self)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for plan.json, which the report draws."""
        phase = self.memory.phase
        return {
            "verdict": self.verdict,
            "card": self.card.name,
            "room": self.room,
            "peak": self.peak_bytes,
            "fits": self.fits,
            "phase": phase,
            "doing": DOING[phase],
            "phases": self.memory.phases,
            "parts": [{"name": name, "bytes": size} for name, size in self.memory.at(phase)],
            "main_memory": self.memory.main_memory,
            "budget": self.memory.budget,
            "vllm_share": self.vllm_share,
            "changes": [line for change in self.changes for line in change.lines],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return "\n".join(plan_lines(self))

    __str__ = __repr__


def plan(
    source: str | Path | RunConfig, gpu: str | None = None, overrides: Sequence[str] = ()
) -> Plan:
    """Plan the memory of a run before anything is loaded.

    Example:
        print(rk.plan("qwen3-4b-thinking", gpu="12GB"))

    Args:
        source: A run file, the name of one that ships with the kit, the folder of a run, or a
            ``RunConfig``.
        gpu: The card: its memory (``12GB``), its name (``rtx4070``), or ``this`` (None too): the
            one in this machine, else its CPU.
        overrides: ``section.key=value``, as after ``--set``.

    Returns:
        Its text is the picture; ``fits``, ``peak_bytes``, ``memory``, ``changes`` and ``speed`` are
        the numbers.

    Raises:
        ConfigError: The run file or the card is wrong.
        ModelError: The model's config cannot be read.
    """
    config, base = read_config(source, overrides)
    setup(config.model.backend)  # Unsloth wants to come before transformers, which is loaded here
    return make_plan(config, gpu, base=base)


def make_plan(config: RunConfig, gpu: str | None = None, *, base: Path = Path()) -> Plan:
    """Return the plan of settings that are read; see ``plan``. Unsloth is not imported.

    Args:
        config: Of the run.
        gpu: As for ``plan``.
        base: Folder that the paths of model and prompts start from.
    """
    card, hardware = _card(gpu)
    room = card.usable if hardware is None else _room_of(hardware)
    on_gpu = hardware is None or hardware.device != "cpu"
    _check_fp8(config, beside(config.model.name, base), card, hardware)
    with quiet():  # transformers is imported here
        facts = _facts(config, base, room, card, on_gpu=on_gpu)
    job = _job(config, facts)
    memory = plan_memory(job)
    changes = () if memory.peak_bytes <= room else tuple(_smallest(config, facts, room))
    return Plan(
        config=config,
        shape=facts.shape,
        card=card,
        room=room,
        job=job,
        memory=memory,
        changes=changes,
        speed=estimate_speed(job, card, _steps(config)),
        notes=tuple(_notes(config, facts, job)),
    )


def smallest_changes(
    config: RunConfig,
    room: int,
    *,
    base: Path = Path(),
    on_gpu: bool | None = None,
    ran_out: bool = False,
) -> list[Change]:
    """Return the least harmful changes that make a run fit; [] where it does, or nothing helps.

    Args:
        config: Of the run.
        room: Bytes that are there for this process.
        base: Folder that the paths of model and prompts start from.
        on_gpu: Whether the room is a GPU's; None: as this machine trains.
        ran_out: Memory ran out in fact. Where the plan says that it fits all the same, changes are
            returned that take a tenth off the peak.

    Raises:
        ModelError: The model's config cannot be read.
    """
    hardware = detect_hardware()
    card = card_of(hardware.name) or Card(hardware.name, room, bf16=hardware.bf16)
    if on_gpu is None:
        on_gpu = hardware.device != "cpu"
    facts = _facts(config, base, room, card, on_gpu=on_gpu)
    peak = plan_memory(_job(config, facts)).peak_bytes
    if ran_out:
        room = min(room, int(0.9 * peak))
    return [] if peak <= room else list(_smallest(config, facts, room))


def remedy(config: RunConfig, room: int, *, base: Path = Path()) -> str:
    """Return what to change after memory ran out, as a part of a sentence; "" where nothing helps.

    Args:
        config: Of the run.
        room: Bytes that are there for this process.
        base: Folder that the paths of model and prompts start from.
    """
    try:
        found = smallest_changes(config, room, base=base, ran_out=True)
    except KitError:
        return ""
    return ", and ".join(map(str, found))


def tune(made: Plan, path: str | Path, *, base: Path = Path()) -> Plan:
    """Write a run file that fills the card: it fits, with the largest batch and passes that do.

    What does not fit is changed as ``Plan.changes`` says. Then the completions of a step are
    sampled together, as many as fit up to 64, and the passes are made as large as fit.

    Args:
        made: As ``plan`` returned it.
        path: Of the file to write.
        base: Folder that the paths of model and prompts start from.

    Returns:
        The plan of what was written.

    Raises:
        ConfigError: The file exists, cannot be written, or nothing makes the run fit.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists: give another name, or remove it first")
    room = int(FULL * made.room)
    facts = _facts(made.config, base, made.room, made.card, on_gpu=made.job.on_gpu)
    config = made.config
    if plan_memory(_job(config, facts)).peak_bytes > room:
        for change in _smallest(config, facts, room):
            config = _with(config, change.settings)
    if plan_memory(_job(config, facts)).peak_bytes > room:
        raise ConfigError(
            f"nothing makes {config.model.name} fit into {room / GIB:.1f} GiB, nine tenths of "
            f"{made.card.name}: take a smaller model"
        )
    config = _filled(config, facts, room)
    job = _job(config, facts)
    tuned = replace(
        made,
        config=config,
        job=job,
        memory=plan_memory(job),
        changes=(),
        speed=estimate_speed(job, made.card, _steps(config)),
    )
    rewards_base = Path() if base == EXAMPLES else base
    _write(path, with_whole_paths(config, base, rewards_base), tuned)
    return tuned


def room_here() -> int:
    """Return the bytes that this process may take on this machine's GPU, or of its memory."""
    return _room_of(detect_hardware())


def write_plan(config: RunConfig, folder: Path, *, base: Path = Path()) -> None:
    """Write plan.json for this machine into the folder of a run, for its report.

    Nothing is written where no plan can be made: a run does not end for the sake of its picture.

    Args:
        config: Of the run.
        folder: Of the run.
        base: Folder that the paths of model and prompts start from.
    """
    with contextlib.suppress(KitError, OSError):
        content = make_plan(config, base=base).as_dict()
        (folder / "plan.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# --- what is known -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """What a plan needs besides the settings."""

    shape: ModelShape
    judges: tuple[Judge, ...]
    longest: int | None
    """Tokens of the longest prompt, where prompts and tokenizer are here."""
    on_gpu: bool
    card: int
    """Memory of the whole card, as torch reports it; 0 on a CPU."""
    room: int
    value_bytes: int
    backend: str
    vllm: bool
    """Whether it is installed."""
    continues: bool
    """Whether an adapter is trained further, whose rank stays."""
    has_fp8: bool
    """Whether the card is known to compute in FP8."""


def _card(gpu: str | None) -> tuple[Card, Hardware | None]:
    """Return the card, and this machine where it is meant."""
    if gpu is not None and gpu.strip().lower() != "this":
        return find_card(gpu), None
    hardware = detect_hardware()
    known = card_of(hardware.name)
    card = known or Card(hardware.name, hardware.total_memory, bf16=hardware.bf16)
    return replace(card, name=hardware.name, bf16=hardware.bf16), hardware


def _check_fp8(config: RunConfig, source: str, card: Card, hardware: Hardware | None) -> None:
    """Refuse FP8 on a card that is known to be without it."""
    found = card.capability if hardware is None else compute_capability()
    if found or hardware:
        weights_of = source if config.model.load_in_fp8 else None
        check_fp8(found, weights_of=weights_of, cache=config.model.fp8_kv_cache)


def _steps(config: RunConfig) -> int | None:
    """Return the optimizer steps of a run, None where epochs count them."""
    steps = config.trainer.get("max_steps") or 0
    return steps if steps > 0 else None


def _room_of(hardware: Hardware) -> int:
    """Return what this process may take: what is free, and what it has already.

    Whoever asks a GPU for its memory makes a CUDA context there.
    """
    if hardware.device != "cpu":
        import torch

        held = torch.cuda.memory_reserved() if hardware.device == "cuda" else 0
        return min(int(USABLE * hardware.total_memory), hardware.free_memory + CONTEXT + held)
    import psutil

    return hardware.free_memory + psutil.Process().memory_info().rss


def _facts(config: RunConfig, base: Path, room: int, card: Card, *, on_gpu: bool) -> _Facts:
    name = beside(config.model.name, base)
    device = "cuda" if on_gpu else "cpu"
    unsloth = config.model.backend != "transformers" and not why_not_unsloth(device)
    return _Facts(
        shape=_shape(name, config.model.trust_remote_code),
        judges=tuple(_judges(config, base, on_gpu=on_gpu)),
        longest=_longest_prompt(config, name, base),
        on_gpu=on_gpu,
        card=card.usable if on_gpu else 0,
        room=room,
        value_bytes=2 if on_gpu or card.bf16 else 4,
        backend="unsloth" if unsloth else "transformers",
        vllm=installed_version("vllm") is not None,
        continues=adapter_in(name) is not None,
        has_fp8=bool(card.capability),
    )


@lru_cache(maxsize=16)
def _shape(name: str, trust_remote_code: bool, classifier: bool = False) -> ModelShape:
    return read_shape(name, trust_remote_code=trust_remote_code, classifier=classifier)


def _longest_prompt(config: RunConfig, name: str, base: Path) -> int | None:
    """Return the tokens of the longest prompt where all it takes is on this machine, else None."""
    folder = TINY_THINKER if name == "tiny-thinker" else Path(name)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    from rloo_kit.data.files import raw_prompts
    from rloo_kit.data.prompts import prompt_ids

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        prompts, _ = read_prompts(config, base)
        settings = config.trainer.get("chat_template_kwargs")
        settings = dict(settings) if isinstance(settings, dict) else {}
        if config.data.enable_thinking is not None:
            settings["enable_thinking"] = config.data.enable_thinking
        lengths = [len(prompt_ids(tokenizer, prompt, settings)) for prompt in raw_prompts(prompts)]
    except (KitError, OSError, ValueError):  # what is wrong with the prompts is the run's to say
        return None
    limit = config.data.max_prompt_tokens
    return max((n for n in lengths if limit is None or n <= limit), default=None)


def _judges(config: RunConfig, base: Path, *, on_gpu: bool) -> Iterator[Judge]:
    """Yield the reward models of a run file."""
    for reward in config.rewards:
        if not isinstance(reward, dict) or reward.get("name") != "reward_model":
            continue
        model = beside(str(reward.get("model") or ""), base)
        device = reward.get("device")
        yield Judge(
            shape=_shape(model, False, True),
            in_4bit=bool(reward.get("load_in_4bit")),
            on_gpu=on_gpu and device != "cpu",
            offloads=reward.get("offload") is not False,
            tokens=int(reward.get("tokens_per_batch") or REWARD_TOKENS),
        )


def _job(config: RunConfig, facts: _Facts) -> Job:
    trainer = config.trainer
    batch = batch_plan(trainer)
    rows = trainer.get("per_device_train_batch_size", 8)
    accumulation = trainer.get("gradient_accumulation_steps", 1)
    completion = trainer.get("max_completion_length") or DEFAULTS["max_completion_length"]
    beta = trainer.get("beta", DEFAULTS["beta"])
    passes = trainer.get("num_iterations", 1) > 1 or batch.steps_per_generation > accumulation
    on_policy = not passes and trainer.get("skip_old_pass", True)
    engine = _engine(config, facts)
    return Job(
        shape=facts.shape,
        on_gpu=facts.on_gpu,
        room=facts.room,
        card=facts.card,
        backend=facts.backend,
        in_4bit=config.model.load_in_4bit or facts.shape.packed,
        in_fp8=config.model.load_in_fp8,
        value_bytes=facts.value_bytes,
        rank=config.lora.r,
        targets=tuple(config.lora.target_modules),
        optimizer=str(trainer.get("optim") or "adamw_torch"),
        checkpointing=_checkpointing(trainer, facts),
        rows=batch.num_completions,
        step_rows=rows * accumulation,
        group=batch.num_generations,
        prompt=_prompt(config, facts, completion),
        completion=completion,
        max_length=config.model.max_seq_length,
        budget=trainer.get("tokens_per_micro_batch"),
        scores=bool(beta) or not on_policy,
        keeps_graphs=bool(beta) and on_policy,
        engine=engine,
        sleeps=bool(trainer.get("vllm_enable_sleep_mode", facts.on_gpu)),
        share=trainer.get("vllm_gpu_memory_utilization"),
        cache_bytes=1 if config.model.fp8_kv_cache else 2,
        batched_tokens=_tables(config).get(BATCHED, BATCHED_TOKENS),
        judges=facts.judges,
    )


def _tables(config: RunConfig) -> dict[str, Any]:
    return {**config.vllm, **config.unsloth}


def _prompt(config: RunConfig, facts: _Facts, completion: int) -> int:
    """Return the tokens of the longest prompt, or of the longest that is allowed."""
    room = max(1, config.model.max_seq_length - completion)
    known = facts.longest or config.data.max_prompt_tokens or room
    return min(known, room)


def _checkpointing(trainer: dict[str, Any], facts: _Facts) -> str:
    if not trainer.get("gradient_checkpointing", facts.on_gpu):
        return "none"
    return "unsloth" if facts.on_gpu and facts.backend == "unsloth" else "plain"


def _engine(config: RunConfig, facts: _Facts) -> str:
    """Return who will sample, as ``engines.choose`` decides it."""
    trainer = config.trainer
    asked = trainer.get("generation", "auto")
    if trainer.get("use_vllm"):
        asked = "server" if trainer.get("vllm_mode") == "server" else "vllm"
    if asked in ("server", "transformers"):
        return asked
    if asked == "auto" and not (facts.on_gpu and facts.vllm):
        return "transformers"
    if not facts.on_gpu or facts.backend != "unsloth":
        return "vllm"
    if why_not_shared(facts.shape, trust_remote_code=config.model.trust_remote_code) is None:
        return "shared"
    return "transformers" if asked == "auto" else "vllm"


def _notes(config: RunConfig, facts: _Facts, job: Job) -> Iterator[str]:
    """Yield what had to be assumed."""
    if facts.shape.in_16bit:
        yield (
            f"an estimate of {facts.shape.in_16bit:.0%} of the layers stays in 16 bit in "
            f"{config.model.name}: its own config is not on this machine"
        )
    if facts.longest is None and config.data.max_prompt_tokens is None:
        yield (
            f"prompts are taken to have {job.prompt:,} tokens, all that model.max_seq_length "
            f"leaves; data.max_prompt_tokens makes it less"
        )
    if job.on_gpu and not facts.vllm and config.trainer.get("generation", "auto") == "auto":
        yield "transformers samples, since vLLM is not installed here"
    if others := sorted(set(_tables(config)) - {BATCHED}):
        yield f"what `unsloth:` and `vllm:` set is not part of it: {', '.join(others)}"
    if (config.model.load_in_fp8 or config.model.fp8_kv_cache) and not facts.has_fp8:
        yield "FP8 needs a card that has it (model.load_in_fp8: RTX 40 and newer)"
    if not job.on_gpu and job.engine in ("vllm", "shared"):
        yield "vLLM's own memory on a CPU is not part of it"


# --- what to change ------------------------------------------------------------------------------


def _with(config: RunConfig, settings: Sequence[tuple[str, Any]]) -> RunConfig:
    for name, value in settings:
        section, _, key = name.partition(".")
        if section == "trainer":
            config = replace(config, trainer={**config.trainer, key: value})
        else:
            changed = replace(getattr(config, section), **{key: value})
            config = replace(config, **{section: changed})
    return config


Option = tuple[tuple[str, Any], ...]


def _smallest(config: RunConfig, facts: _Facts, room: int) -> Iterator[Change]:
    """Yield changes in the order of harm, as few as make it fit; none where all do not."""

    def peak(options: Sequence[Option]) -> int:
        return plan_memory(_job(_changed(config, options), facts)).peak_bytes

    found: list[Option] = []
    for family in FAMILIES:
        if peak(found) <= room:
            break
        options = family(_changed(config, found), facts)
        fitting = next((one for one in options if peak([*found, one]) <= room), None)
        chosen = fitting or (options[-1] if options else None)
        if chosen and peak(found) - peak([*found, chosen]) >= SMALLEST_SAVING:
            found.append(chosen)
    if peak(found) > room:
        return
    for option in found[-2::-1]:  # the most harmful of the earlier ones first; the last is needed
        without = [one for one in found if one is not option]
        if peak(without) <= room:
            found = without
    for place, option in enumerate(found):
        yield Change(option, peak(found[:place]) - peak(found[: place + 1]))


def _changed(config: RunConfig, options: Sequence[Option]) -> RunConfig:
    for option in options:
        config = _with(config, option)
    return config


def _optimizers(config: RunConfig, facts: _Facts) -> list[Option]:
    name = str(config.trainer.get("optim") or "adamw_torch")
    if not facts.on_gpu or "8bit" in name:
        return []
    return [(("trainer.optim", "adamw_8bit"),), (("trainer.optim", "paged_adamw_8bit"),)]


def _recomputing(config: RunConfig, facts: _Facts) -> list[Option]:
    if _checkpointing(config.trainer, facts) != "none":
        return []
    return [(("trainer.gradient_checkpointing", True),)]


def _packing(config: RunConfig, facts: _Facts) -> list[Option]:
    if config.model.load_in_4bit or facts.shape.packed:
        return []
    other: Option = (("model.load_in_fp8", False),) if config.model.load_in_fp8 else ()
    return [(("model.load_in_4bit", True), *other)]


def _sleeping(config: RunConfig, facts: _Facts) -> list[Option]:
    job = _job(config, facts)
    if job.sleeps or job.engine not in ("vllm", "shared") or not facts.on_gpu:
        return []
    return [(("trainer.vllm_enable_sleep_mode", True),)]


def _passes(config: RunConfig, facts: _Facts) -> list[Option]:
    """Return smaller passes, down to a single row: slower, and the same gradient."""
    job = _job(config, facts)
    budget, options = plan_memory(job).budget, []
    while budget > job.width:
        budget = max(job.width, budget // 2)
        options.append((("trainer.tokens_per_micro_batch", budget),))
    return options


def _sampling(config: RunConfig, facts: _Facts) -> list[Option]:
    """Return less memory for vLLM, or none."""
    engine = _job(config, facts).engine
    if engine not in ("vllm", "shared") or not facts.on_gpu:
        return []
    job = _job(config, facts)
    given = job.share or planned_engine(job).share(job.card or job.room)
    shares = [
        share
        for share in (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
        if share < given and planned_engine(replace(job, share=share)).refusal is None
    ]
    smaller: list[Option] = [(("trainer.vllm_gpu_memory_utilization", share),) for share in shares]
    return [*smaller, (("trainer.generation", "transformers"),)]


def _batches(config: RunConfig, facts: _Facts) -> list[Option]:
    """Return fewer completions at once for the same step: more accumulation."""
    job = _job(config, facts)
    options: list[Option] = []
    for rows in range(job.rows - 1, job.group - 1, -1):
        if rows % job.group or job.step_rows % rows:
            continue
        options.append(
            (
                ("trainer.per_device_train_batch_size", rows),
                ("trainer.gradient_accumulation_steps", job.step_rows // rows),
                ("trainer.steps_per_generation", 1),
            )
        )
    return [] if config.trainer.get("generation_batch_size") else options


def _ranks(config: RunConfig, facts: _Facts) -> list[Option]:
    rank, options = config.lora.r, []
    while rank > 8 and not facts.continues:
        rank = max(8, rank // 2)
        options.append((("lora.r", rank),))
    return options


def _completions(config: RunConfig, facts: _Facts) -> list[Option]:
    job = _job(config, facts)
    length, options = job.completion, []
    while length > 128:
        length = max(128, length // 4 * 3 // 64 * 64)
        options.append(
            (
                ("trainer.max_completion_length", length),
                ("model.max_seq_length", config.model.max_seq_length - job.completion + length),
            )
        )
    return options


FAMILIES: tuple[Callable[[RunConfig, _Facts], list[Option]], ...] = (
    _optimizers,
    _recomputing,
    _packing,
    _sleeping,
    _passes,
    _sampling,
    _batches,
    _ranks,
    _completions,
)
"""In the order of harm; each gives its options, the mildest first."""


# --- a fuller run file ---------------------------------------------------------------------------


def _filled(config: RunConfig, facts: _Facts, room: int) -> RunConfig:
    """Return the settings with as many completions at once, and passes as large, as fit."""
    job = _job(config, facts)

    def fits(settings: Option) -> bool:
        return plan_memory(_job(_with(config, settings), facts)).peak_bytes <= room

    best: Option = ()
    width = job.width
    for rows in range(job.group, max(MOST_ROWS, job.step_rows) + 1, job.group):
        together = rows if rows >= job.step_rows else 0
        if not together and job.step_rows % rows:
            continue
        batch: Option = (
            ("trainer.per_device_train_batch_size", rows),
            ("trainer.gradient_accumulation_steps", 1 if together else job.step_rows // rows),
            ("trainer.steps_per_generation", 1),
            ("trainer.tokens_per_micro_batch", width),
        )
        best = batch if fits(batch) else best
    if not config.trainer.get("generation_batch_size"):  # it says how many are sampled at once
        config = _with(config, best)
    budget = width
    for positions in range(width, MOST_POSITIONS + 1, max(64, width // 4)):
        if not fits((("trainer.tokens_per_micro_batch", positions),)):
            break
        budget = positions
    return _with(config, (("trainer.tokens_per_micro_batch", budget),))


def _write(path: Path, config: RunConfig, tuned: Plan) -> None:
    """Write what differs from the defaults, under a comment with the verdict."""
    content = without_hidden(redact_tree(config.as_short_dict()))[0]
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    head = f"# Filled to {tuned.card.name} by rloo-kit plan --tune, on paper:\n# {tuned.verdict}\n"
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(head + text)
    except OSError as exc:
        raise ConfigError(
            f"the run file cannot be written to {format_value(os.fspath(path))} "
            f"({first_line(exc)}): give another path"
        ) from exc


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value).split("\n")[0]


# --- the picture ---------------------------------------------------------------------------------


def plan_lines(made: Plan) -> list[str]:
    """Return the picture of a plan, at most 80 columns where names are short.

    Args:
        made: As ``plan`` returned it.
    """
    memory, shape = made.memory, made.shape
    lines = [
        made.verdict,
        f"{_count(shape.num_parameters)} parameters, by {shape.source}; "
        f"{made.job.rows} completions at once, rows up to {made.job.width:,} tokens",
        "",
        f"the peak, {_gib(memory.peak_bytes)}, is where {DOING[memory.phase]}:",
    ]
    parts = memory.at(memory.phase)
    longest = max(size for _, size in parts)
    shown_apart = [part for part in parts if part[1] >= SMALLEST_PART * memory.peak_bytes]
    lines += [_bar(name, size, longest) for name, size in shown_apart]
    rest = memory.peak_bytes - sum(size for _, size in shown_apart)
    lines += [_bar("all else", rest, longest)] if rest else []
    lines.append(_bar("room", made.room, longest, draw=False))
    phases = ", ".join(
        f"{phase} {_gib(memory.phases[phase])}" for phase in PHASES if phase in memory.phases
    )
    lines += ["", f"phases: {phases}"]
    if memory.main_memory:
        lines.append(f"beside it {_gib(memory.main_memory)} of main memory")
    lines.append(f"a pass with gradient has {memory.budget:,} positions (tokens_per_micro_batch)")
    if made.vllm_share is not None:
        lines.append(f"vLLM gets {made.vllm_share:.3f} of the card (vllm_gpu_memory_utilization)")
    if made.speed:
        lines.append(_speed(made.speed))
    lines += [f"note: {note}" for note in made.notes]
    if made.changes:
        lines += ["", "to make it fit:"]
        lines += [
            f"  {', '.join(change.lines)}  (saves {_gib(change.saves)})" for change in made.changes
        ]
    elif not made.fits:
        lines += ["", "no setting makes it fit: take a smaller model"]
    return lines


def _verdict(made: Plan) -> str:
    what = f"{made.config.model.name} on {made.card.name}"
    left = made.room - made.peak_bytes
    if left >= 0 and made.refusal:
        return f"{what}: {made.refusal}"
    if left < 0:
        return f"{what}: does not fit, {_gib(-left)} are missing of {_gib(made.peak_bytes)}"
    tight = " (tight)" if left < (1 - USABLE) * 3 * made.room else ""
    return f"{what}: fits{tight}, {_gib(left)} of {_gib(made.room)} stay free"


def _bar(name: str, size: int, longest: int, *, draw: bool = True) -> str:
    eighths = round(8 * BAR * size / max(1, longest)) if draw else 0
    bar = "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
    return f"  {name[:NAME]:<{NAME}} {bar:<{BAR}} {_gib(size):>10}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.2f} million"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.0f} MiB"


def _speed(speed: Speed) -> str:
    text = (
        f"an estimate from the data sheet: {_range(speed.generation)} tokens/s sampled, "
        f"{_range(speed.learning)} learned"
    )
    return f"{text}; {_range(speed.hours, 1)} hours" if speed.hours else text


def _range(values: Range, digits: int = 0) -> str:
    low, high = values
    if digits and high < 10:
        return f"{low:,.{digits}f} to {high:,.{digits}f}"
    return f"{low:,.0f} to {high:,.0f}"
