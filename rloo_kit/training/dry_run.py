"""The worst case before the first step: memory that would run out in hours runs out now.

One step at the longest prompt and the longest completions a run can have, and nothing of it stays:
weights, random states, counters and metrics are what they were. Only as much is computed as shows
the peak; which passes that takes, and why, is in docs/how-to/plan.md.
"""

import contextlib
import copy
import datetime
import hashlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rloo_kit.checkpoints.store import random_states, set_random_states
from rloo_kit.config.settings import OF_MEMORY
from rloo_kit.data.files import raw_prompts
from rloo_kit.data.prompts import prompt_ids
from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.hardware import GIB, TESTED, detect_hardware, installed_version
from rloo_kit.machine.memory import is_out_of_memory, measure, return_to_system, take_peak
from rloo_kit.models.shared_engine import notes_of
from rloo_kit.output_folder import write_json
from rloo_kit.processes import ALONE
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.learner import NO_GRAD_FACTOR, Learner, Tally
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.sampling.choice import blame_generation_kwargs, make_sampling

SHORT = 8
"""Tokens that an engine samples, whose cache of keys and values is reserved anyway."""
NOT_STEPPED = ("paged", "layerwise", "lomo")
"""Optimizers, by parts of their names, whose states are not rehearsed: the first keep them in main
memory and never give them back, the others hook into the backward pass."""
REMEMBERED = 200
"""Dry runs that the file of the user's cache holds; the oldest make room."""
ROOM_LOST = 0.97
"""A card with less than this share of the memory that was free then is rehearsed again."""


@dataclass(frozen=True)
class Rehearsal:
    """What one step in the worst case took; of this process where several train."""

    peak_bytes: int
    """The most that was held at once: on a GPU by tensors and by what lies outside of torch's
    allocator (CUDA context, an engine, other programs), on a CPU the process's resident memory."""
    device_bytes: int
    """Memory of the card that this process may use, or of the machine."""
    seconds: float
    rows: int
    """Completions of a generation batch."""
    tokens: int
    """Of each, its prompt included."""
    budget: int
    """``tokens_per_micro_batch`` from here on."""
    phase: str
    """In which the peak was: ``optimizer``, ``sampling``, ``scoring`` or ``learning``."""
    lowered: tuple[str, ...] = ()
    """What had to be made smaller because memory ran out, in words."""

    def __str__(self) -> str:
        text = (
            f"dry run: worst case of {self.rows:,} rows x {self.tokens:,} tokens peaks at "
            f"{self.peak_bytes / GIB:.1f} GiB of {self.device_bytes / GIB:.1f} GiB in "
            f"{self.seconds:.0f} s"
        )
        return "; ".join([text, *self.lowered])


@dataclass(frozen=True)
class _Worst:
    """The largest batch that a run can sample; of this process where several train."""

    rows: int
    step_rows: int
    """Of an optimizer step."""
    prompt: int
    completion: int

    @property
    def width(self) -> int:
        return self.prompt + self.completion


def rehearse_first(
    trainer: Any,
    say: Callable[[str], None],
    *,
    max_prompt_tokens: int | None = None,
    remedy: Callable[[], str] | None = None,
) -> Rehearsal | None:
    """Rehearse where ``args.dry_run`` asks for it, or would by default, and say what came of it.

    By default (None) a GPU rehearses until the same worst case has fitted once on the same card
    with the same versions, and a CPU does not.

    Args:
        trainer: A ``LeaveOneOutTrainer`` that has not begun to train.
        say: For one line.
        max_prompt_tokens: As for ``rehearse``.
        remedy: As for ``rehearse``.

    Returns:
        What it took; None where nothing was rehearsed.

    Raises:
        MemoryRanOutError: The worst case does not fit.
    """
    wanted = trainer.args.dry_run
    on_cpu = trainer.accelerator.device.type == "cpu"
    if not (wanted or (wanted is None and not on_cpu)):
        return None
    if trainer._use_trl_path:
        if wanted and trainer.team.is_first:
            say(f"dry run: not made, since TRL's own code trains ({trainer._use_trl_path})")
        trainer.rehearsed = True
        return None
    if not wanted and not _is_bounded(trainer, max_prompt_tokens):
        return None
    worst = _worst_case(trainer, max_prompt_tokens)
    key, free = digest(_facts(trainer, worst)), detect_hardware().free_memory
    memory = Memory()
    if not trainer.team.broadcast(bool(wanted) or not memory.knows(key, free)):
        trainer.rehearsed = True
        return None
    found = _rehearse(trainer, worst, remedy)
    if trainer.team.is_first:
        say(str(found))
        if not found.lowered:
            memory.keep(key, free)
    return found


def rehearse(
    trainer: Any,
    *,
    max_prompt_tokens: int | None = None,
    remedy: Callable[[], str] | None = None,
) -> Rehearsal:
    """Take the memory of one step in the worst case, and give it back.

    Example:
        print(rehearse(trainer))
        trainer.train()

    Args:
        trainer: A ``LeaveOneOutTrainer`` that has not begun to train. Nothing of it changes, but
            for the two sizes that halve where memory runs out: the token budget of its passes, and
            the completions it samples at one time.
        max_prompt_tokens: The longest prompt of a stream, whose prompts are not known; None: what
            the model's ``max_seq_length`` leaves.
        remedy: Called when memory ran out: what to change, as a part of a sentence. None, or an
            empty answer: a sentence of this room's own.

    Returns:
        Its peak and time.

    Raises:
        MemoryRanOutError: The worst case does not fit, not even a single completion of it.
    """
    return _rehearse(trainer, _worst_case(trainer, max_prompt_tokens), remedy)


def _rehearse(trainer: Any, worst: _Worst, remedy: Callable[[], str] | None) -> Rehearsal:
    started = time.perf_counter()
    if trainer._learner is None:
        trainer._learner = trainer._make_learner()  # its budget is what memory is free by now
    learner, at_once = trainer._learner, trainer._sampling.size
    budget = learner.budget
    peak = _Peak()
    try:
        with _remedied(trainer, worst, remedy), _unchanged(trainer), _quiet():
            _run(trainer, worst, peak)
    finally:
        return_to_system()
        take_peak()  # what training reports as its own peak begins here
    lowered = []
    if learner.budget < budget:
        lowered.append(f"memory ran out: tokens_per_micro_batch is {learner.budget} from here on")
    if trainer._sampling.size != at_once:
        lowered.append(f"{trainer._sampling.size} completions are sampled at a time from here on")
    trainer.rehearsed = True
    return Rehearsal(
        peak_bytes=peak.bytes,
        device_bytes=_device_bytes(),
        seconds=time.perf_counter() - started,
        rows=worst.rows,
        tokens=worst.width,
        budget=learner.budget,
        phase=peak.phase,
        lowered=tuple(lowered),
    )


def _run(trainer: Any, worst: _Worst, peak: "_Peak") -> None:
    """Run the phases of a step in their order, with the optimizer's states of a later step."""
    optimizer = _step_once(trainer)
    peak.note("optimizer")
    _sample(trainer, worst)
    peak.note("sampling")
    if trainer.engine is not None:
        trainer.engine.sleep()  # as training does before it scores
    _score(trainer, worst)
    peak.note("scoring")
    _learn(trainer, worst)
    peak.note("learning")
    del optimizer  # until here: its states are there while a step samples and learns


# --- what the worst case is ----------------------------------------------------------------------


def _worst_case(trainer: Any, max_prompt_tokens: int | None) -> _Worst:
    args, size = trainer.args, trainer.team.size
    rows = args.generation_batch_size
    step_rows = rows // args.steps_per_generation * args.gradient_accumulation_steps
    return _Worst(
        rows=-(-rows // size),
        step_rows=-(-step_rows // size),
        prompt=_longest_prompt(trainer, max_prompt_tokens),
        completion=args.max_completion_length,
    )


def _longest_prompt(trainer: Any, max_prompt_tokens: int | None) -> int:
    """Return the tokens of the longest prompt; of a stream, of the longest that is allowed."""
    dataset = trainer.train_dataset
    if hasattr(dataset, "__len__"):
        settings = trainer.chat_template_kwargs
        return max(
            len(prompt_ids(trainer._tokenizer, prompt, settings)) for prompt in raw_prompts(dataset)
        )
    longest = notes_of(trainer.model).max_seq_length
    if longest is None:
        longest = trainer.model.config.get_text_config().max_position_embeddings
    room = max(1, longest - trainer.args.max_completion_length)
    return min(max_prompt_tokens or room, room)


def _is_bounded(trainer: Any, max_prompt_tokens: int | None) -> bool:
    """Return whether the length of a prompt is limited by more than what the model could read."""
    limit = max_prompt_tokens or notes_of(trainer.model).max_seq_length
    return hasattr(trainer.train_dataset, "__len__") or limit is not None


def _random_ids(trainer: Any, rows: int, width: int) -> list[list[int]]:
    """Return rows of ids that are no special tokens, from a random state of their own."""
    tokenizer = trainer._tokenizer
    known = min(len(tokenizer), trainer.model.config.get_text_config().vocab_size)
    plain = torch.tensor(sorted(set(range(known)) - set(tokenizer.all_special_ids)))
    drawn = torch.randint(
        len(plain), (rows, width), generator=torch.Generator().manual_seed(rows * width)
    )
    return plain[drawn].tolist()


def _batch(trainer: Any, rows: int, prompt: int, completion: int) -> Rollout:
    """Return a rollout of whole groups, each row with signal: every second one is right."""
    group = trainer.num_generations
    rows = -(-rows // group) * group
    ids = _random_ids(trainer, rows, prompt + completion)
    scores = torch.arange(rows, device=trainer.accelerator.device).remainder(group).remainder(2.0)
    sampled = ScoredBatch(
        prompts=[""] * rows,
        completions=[""] * rows,
        tokens=TokenRows([row[:prompt] for row in ids], [row[prompt:] for row in ids]),
        ended=[True] * rows,
        rewards=scores.unsqueeze(1),
        scores=scores,
    )
    return Rollout.scored(sampled, group, trainer.args.shaping.with_plain_scores())


# --- the phases ----------------------------------------------------------------------------------


def _step_once(trainer: Any) -> Any:
    """Return an optimizer like the run's that has made a step, so that its states are there.

    The trained weights are put back from copies in main memory. None where the optimizer exists
    already or cannot be tried.
    """
    asked = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if trainer.optimizer is not None or any(mark in asked for mark in NOT_STEPPED):
        return None
    parameters = trainer._learner.parameters
    kept = [p.detach().to("cpu", copy=True) for p in parameters]
    try:
        optimizer = trainer.create_optimizer()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        if hasattr(optimizer, "train"):  # schedule-free optimizers
            optimizer.train()
        optimizer.step()
    finally:
        trainer.optimizer = None
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.grad = None
            parameter.data.copy_(values)
    return optimizer


def _sample(trainer: Any, worst: _Worst) -> None:
    """Take the memory of sampling: prompts read, and a cache of keys and values at full length."""
    if trainer.engine is not None:
        sampling = make_sampling(trainer.args, trainer.eos_token_ids)
        others = {n: v for n, v in sampling.others.items() if n != "min_tokens"}
        short = replace(sampling, max_tokens=min(SHORT, worst.completion), others=others)
        trainer.engine.sync(trainer.model)
        trainer.engine.generate(_random_ids(trainer, worst.rows, worst.prompt), short, 0)
        return
    if trainer.use_vllm or trainer.use_transformers_continuous_batching:
        return  # reserved by others, or page by page as far as memory goes
    done = False

    def draw(rows: Sequence[int]) -> list[int]:
        nonlocal done
        if not done:  # the other pieces of the batch are no larger
            _fill_cache(trainer, replace(worst, rows=len(rows)))
            done = True
        return list(rows)

    trainer._sampling.run(draw, range(worst.rows), worst.rows)


def _fill_cache(trainer: Any, worst: _Worst) -> None:
    """Generate as sampling does, at its first token and at its last.

    One row is read at full width and its keys and values are repeated for all rows: reading all of
    them at full width would take activations that sampling, which reads the prompts and then one
    token a row, never takes.
    """
    settings = copy.deepcopy(trainer.generation_config)
    settings.max_new_tokens, settings.min_new_tokens, settings.min_length = 1, None, 0
    settings.return_dict_in_generate, settings.use_cache = True, True
    model = trainer.accelerator.unwrap_model(trainer.model)
    device = trainer.accelerator.device

    def generate(rows: int, width: int, **others: Any) -> Any:
        ids = torch.tensor(_random_ids(trainer, rows, width), device=device)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, generation_config=settings, **others)

    with (
        blame_generation_kwargs(trainer.args),
        _modes_kept(model),
        _sampling_mode(model),
        torch.no_grad(),
        trainer.accelerator.autocast(),
    ):
        generate(worst.rows, worst.prompt)
        if settings.cache_implementation not in (None, "dynamic") or worst.width < 2:
            return
        try:
            cache = generate(1, worst.width - 1).past_key_values
            cache.batch_repeat_interleave(worst.rows)
            generate(worst.rows, worst.width, past_key_values=cache)
        except Exception as exc:  # what a model's own kind of cache cannot do differs by model
            if is_out_of_memory(exc):
                raise
            warnings.warn(
                f"dry run: the memory of {worst.rows} completions at full length is not part of "
                f"it, since this model's cache cannot be filled ({type(exc).__name__}: {exc})",
                UserWarning,
                stacklevel=2,
            )


@contextlib.contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    """Put the model into the mode it samples in."""
    switch = getattr(model, "for_inference", None)  # Unsloth's fast decoding
    switch() if switch else model.eval()
    try:
        yield
    finally:
        back = getattr(model, "for_training", None)
        back() if back else model.train()


def _score(trainer: Any, worst: _Worst) -> None:
    """Let the kit's reward models read as much at one time as they ever do."""
    for model in _reward_models(trainer.reward_funcs):
        rows = min(worst.rows, 1 + model.tokens_per_batch // worst.width)
        ids = _random_ids(trainer, rows, worst.width)
        decode = trainer._tokenizer.batch_decode
        prompts = decode([row[: worst.prompt] for row in ids])
        completions = decode([row[worst.prompt :] for row in ids])
        was_loaded, scores = model.is_loaded, copy.copy(model._cache)
        try:
            model(completions=completions, prompts=prompts)
        finally:
            if not was_loaded:
                model.release()
            model._cache = scores


def _reward_models(rewards: Sequence[Any]) -> list[Any]:
    """Return the reward models of ``rewards/reward_model.py``, inside of other rewards too."""
    found, waiting = [], list(rewards)
    while waiting:
        reward = waiting.pop()
        if hasattr(reward, "is_loaded") and hasattr(reward, "tokens_per_batch"):
            found.append(reward)
        parts = (getattr(reward, name, None) for name in ("reward", "by"))
        waiting += [part for part in parts if part is not None]
    return found


def _learn(trainer: Any, worst: _Worst) -> None:
    """Run the largest passes of a step; once more where the budget had to be lowered."""
    trainer.model.train()
    _checkpoint(trainer)
    learner, budget = trainer._learner, None
    whole = _batch(trainer, worst.rows, worst.prompt, worst.completion)
    while budget != learner.budget:
        budget = learner.budget
        if whole.shaping.beta or _has_old_pass(trainer, worst):
            for rows, width in _largest(worst, worst.rows, NO_GRAD_FACTOR * budget):
                _pass_without_gradient(trainer, worst, rows, width)
        several = worst.step_rows * worst.width > budget
        for rows, width in _largest(worst, worst.step_rows, budget):
            batch = whole if width == worst.width else _narrow(trainer, worst, rows, width)
            _pass(trainer, batch, rows, several=several)


def _largest(worst: _Worst, at_most: int, budget: int) -> list[tuple[int, int]]:
    """Return (rows, width) of the micro-batches that take the most memory.

    The longest rows, as many as fit into the budget; and where they leave some of it free, rows
    just short enough for one more.

    >>> worst = _Worst(rows=64, step_rows=64, prompt=1000, completion=8000)
    >>> _largest(worst, 64, 16_384)
    [(1, 9000), (2, 8192)]
    >>> _largest(worst, 64, 18_000)
    [(2, 9000)]

    Args:
        worst: With the longest row.
        at_most: Rows that a micro-batch can hold.
        budget: Positions.
    """
    rows = min(at_most, max(1, budget // worst.width))
    found = [(rows, worst.width)]
    if rows < at_most:
        width = budget // (rows + 1)
        if (rows + 1) * width > rows * worst.width and width > 1:
            found.append((rows + 1, width))
    return found


def _narrow(trainer: Any, worst: _Worst, rows: int, width: int) -> Rollout:
    completion = min(worst.completion, width - 1)
    return _batch(trainer, rows, width - completion, completion)


def _has_old_pass(trainer: Any, worst: _Worst) -> bool:
    """Return whether a step of the worst case has an old-log-prob pass of its own."""
    args, group = trainer.args, trainer.num_generations
    later = args.steps_per_generation > args.gradient_accumulation_steps
    waits = bool(args.beta) and (
        args.normalize_advantages or group * worst.width > trainer._learner.budget
    )
    return not args.skip_old_pass or later or waits


def _pass_without_gradient(trainer: Any, worst: _Worst, rows: int, width: int) -> None:
    learner, numbers = trainer._learner, list(range(rows))
    tokens = _narrow(trainer, worst, rows, width).sampled.tokens
    if trainer.args.beta:
        trainer._reference_log_probs(tokens, numbers)
    if _has_old_pass(trainer, worst):
        learner.log_probs(tokens, numbers, learner.forward)


def _pass(trainer: Any, batch: Rollout, rows: int, *, several: bool) -> None:
    """Learn from some rows of a batch.

    Args:
        trainer: Whose learner it is.
        batch: A rollout.
        rows: How many of its rows are in the pass.
        several: The step has further passes, so that gradients of the former ones are there.
    """
    learner: Learner = trainer._learner
    weights = torch.zeros(len(batch), device=trainer.accelerator.device)
    weights[:rows] = 1 / rows
    for parameter in learner.parameters:
        parameter.grad = torch.zeros_like(parameter) if several else None
    with trainer.compute_loss_context_manager():
        learner.learn(batch, weights)
    for parameter in learner.parameters:
        parameter.grad = None


def _checkpoint(trainer: Any) -> None:
    """Turn gradient checkpointing on as transformers' trainer does when it begins."""
    args, model = trainer.args, trainer.model
    if not args.gradient_checkpointing or model.is_gradient_checkpointing:
        return
    kwargs = dict(args.gradient_checkpointing_kwargs or {})
    others = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, **others)


# --- what is kept, and what is said --------------------------------------------------------------


@contextlib.contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Put back what the passes change."""
    learner = trainer._learner
    team, learner.team = learner.team, ALONE  # every process runs the largest pass by itself
    states = random_states()
    gradients = [(p, p.grad) for p in learner.parameters]
    try:
        with _modes_kept(trainer.model):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        learner.team, learner.tally = team, Tally()
        set_random_states(states)


@contextlib.contextmanager
def _modes_kept(model: Any) -> Iterator[None]:
    """Put back which modules train and which checkpoint."""
    modules = [(m, m.training, _owned(m, "gradient_checkpointing")) for m in model.modules()]
    try:
        yield
    finally:
        for module, training, checkpointing in modules:
            module.training = training
            if checkpointing is not None:
                module.gradient_checkpointing = checkpointing


def _owned(module: Any, name: str) -> Any:
    """Return an attribute that a module has itself: a wrapper also shows those of what it wraps."""
    return vars(module).get(name, getattr(type(module), name, None))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out warnings of what the result says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory ran out")
        yield


@contextlib.contextmanager
def _remedied(trainer: Any, worst: _Worst, remedy: Callable[[], str] | None) -> Iterator[None]:
    """Say what to change where memory runs out."""
    try:
        yield
    except Exception as exc:
        if not (isinstance(exc, MemoryRanOutError) or is_out_of_memory(exc)):
            raise
        change = (remedy() if remedy is not None else "") or _own_remedy(trainer)
        raise MemoryRanOutError(
            f"the worst case of this run, {worst.rows:,} rows x {worst.width:,} tokens, does not "
            f"fit into {_device_bytes() / GIB:.1f} GiB of memory: {change}"
        ) from exc


def _own_remedy(trainer: Any) -> str:
    """Return the changes that save memory and are not made yet, the least harmful first."""
    args = trainer.args
    on_gpu = trainer.accelerator.device.type != "cpu"
    asked = str(getattr(args.optim, "value", args.optim))
    changes = []
    if on_gpu and "8bit" not in asked:
        changes.append("set trainer.optim: adamw_8bit")
    if not args.gradient_checkpointing:
        changes.append("set trainer.gradient_checkpointing: true")
    if not any(type(module).__name__ == "Linear4bit" for module in trainer.model.modules()):
        changes.append("set model.load_in_4bit: true")
    changes.append("lower lora.r")
    return f"{', '.join(changes)}, or last lower trainer.max_completion_length"


class _Peak:
    """The highest of the peaks of several phases."""

    def __init__(self) -> None:
        self.bytes, self.phase = 0, ""
        take_peak()

    def note(self, phase: str) -> None:
        """End a phase."""
        found = take_peak() + measure().gpu_other
        if found > self.bytes:
            self.bytes, self.phase = found, phase


def _device_bytes() -> int:
    """Return the memory that this process may use, in bytes."""
    total = detect_hardware().total_memory
    if torch.cuda.is_available():
        return int(total * torch.cuda.get_per_process_memory_fraction())
    return total


# --- what has fitted already ---------------------------------------------------------------------


def _facts(trainer: Any, worst: _Worst) -> dict[str, Any]:
    """Return what decides whether a worst case fits: card, versions, model and settings."""
    hardware = detect_hardware()
    digest_of_model = hashlib.sha256()
    for name, parameter in trainer.model.named_parameters():
        fact = f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        digest_of_model.update(fact.encode())
    return {
        "card": [hardware.device, hardware.name, _device_bytes()],
        "versions": {name: installed_version(name) for name in ("rloo-kit", *TESTED)},
        "model": digest_of_model.hexdigest(),
        "worst": [worst.rows, worst.step_rows, worst.prompt, worst.completion],
        "engine": getattr(trainer.engine, "name", None),
        "reward models": [
            [model.model, model.tokens_per_batch, model.batch_size, model.max_length]
            for model in _reward_models(trainer.reward_funcs)
        ],
        "settings": {name: getattr(trainer.args, name) for name in OF_MEMORY},
    }


def digest(facts: dict[str, Any]) -> str:
    """Return a sum of facts, which are plain values or texts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class Memory:
    """Which worst cases have fitted, in a file of the user's cache folder.

    A file that is damaged, or cannot be read or written, counts as one that holds nothing.

    Args:
        file: None: ``dry_runs.json`` in ``$XDG_CACHE_HOME/rloo-kit`` or ``~/.cache/rloo-kit``.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or _cache_folder() / "dry_runs.json"

    def knows(self, key: str, free: int) -> bool:
        """Return whether a worst case has fitted when no more memory was free than now.

        Args:
            key: Of ``digest``.
            free: Bytes on the device now.
        """
        entry = self._read().get(key)
        then = entry.get("free") if isinstance(entry, dict) else None
        return isinstance(then, int) and free >= ROOM_LOST * then

    def keep(self, key: str, free: int) -> None:
        """Note that a worst case has fitted with so many bytes free."""
        entries = self._read()
        entries.pop(key, None)
        entries[key] = {"free": free, "at": datetime.datetime.now().isoformat(timespec="seconds")}
        newest = itertools.islice(entries.items(), max(0, len(entries) - REMEMBERED), None)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, dict(newest), indent=1)
        except OSError:  # the next run repeats the dry run
            pass

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _cache_folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "rloo-kit"
    return Path(os.path.expanduser("~")) / ".cache" / "rloo-kit"
