"""Reward-model training: a score head and a LoRA adapter learn which of two texts is better."""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.checkpoints.stopping import StopSignals
from rloo_kit.config.run_file import PROJECTIONS
from rloo_kit.data.files import check_messages, local_path, read_rows
from rloo_kit.errors import ConfigError, DataError, MemoryRanOutError, ModelError
from rloo_kit.machine.environment import precision_as_asked, quiet, setup
from rloo_kit.machine.hardware import TESTED, Hardware, installed_version
from rloo_kit.machine.memory import add_to_session, is_out_of_memory, session
from rloo_kit.models.loading import TINY_THINKER
from rloo_kit.output_folder import free_folder, write_json
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import did_you_mean, first_line, format_value
from rloo_kit.types import Completion, Row

Say = Callable[[str], None]
# A prompt and a completion, as a reward is given them
Text = tuple[Completion, Completion]
# Tokens of the chosen and of the rejected text of one pair
Ids = tuple[list[int], list[int]]

PROGRESS_LINES = 10
# Fields of TRL's `RewardConfig` that the kit sets; also `output_dir` and `use_cpu`
FIXED = {
    "max_length": None,  # the texts are cut before
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,  # a notebook's bar as well
}


@dataclass(frozen=True)
class RewardModelResult:
    """A trained reward model; accuracies are of held-out pairs."""

    folder: Path
    """Adapter, score head, tokenizer, ``calibration.json`` and ``reward_model.json``."""
    accuracy: float | None
    """Share of pairs whose chosen text scores higher; None after a second Ctrl-C."""
    accuracy_before: float
    """The same before the first step, with an untrained score head."""
    margin: float | None
    """Mean score of the chosen minus that of the rejected, in the model's own units."""
    num_pairs: int
    """Trained on."""
    num_held_out: int
    seconds: float
    """Training alone."""
    interrupted: bool = False
    """By Ctrl-C or SIGTERM."""
    terminated: bool = False
    """By SIGTERM."""


@dataclass(frozen=True)
class Pair:
    """Two texts of which the first is better."""

    chosen: Text
    rejected: Text
    group: str
    """Pairs of one group are held out together, so that no prompt is on both sides."""


@dataclass(frozen=True)
class _Job:
    """The checked arguments of ``train_reward_model``."""

    model: str
    place: str
    output_dir: Path
    load_in_4bit: bool
    r: int
    lora_alpha: int
    max_length: int
    keep_thought: bool
    seed: int
    pairs_name: str
    settings: dict[str, Any]


def train_reward_model(  # noqa: PLR0913
    pairs: str | Path | Iterable[Row],
    model: str | Path = "tiny-thinker",
    *,
    output_dir: str | Path = "runs/reward-model",
    load_in_4bit: bool = True,
    r: int = 16,
    lora_alpha: int = 16,
    learning_rate: float = 1e-4,
    num_train_epochs: float = 1.0,
    max_steps: int | None = None,
    per_device_train_batch_size: int = 8,
    max_length: int = 1024,
    held_out: float = 0.1,
    keep_thought: bool = False,
    chat: bool = True,
    seed: int = 42,
    say: Say = print,
    **settings: Any,
) -> RewardModelResult:
    """Train a reward model on pairs by TRL's ``RewardTrainer``, for the reward ``reward_model``.

    Args:
        pairs: A .jsonl, .csv or .parquet file, or rows with ``chosen`` and ``rejected``, and
            ``prompt`` if these do not contain it: text, or chat messages.
        model: The base: ``tiny-thinker``, a local folder or a hub name of a language model.
        output_dir: Where the folder is made; an existing one gets a number instead.
        load_in_4bit: NF4 base (bitsandbytes); the score head is never quantised.
        r: Rank of the adapter.
        lora_alpha: The adapter's output is scaled by ``lora_alpha / r``.
        learning_rate: Peak; it falls linearly.
        num_train_epochs: Passes over the pairs.
        max_steps: Optimizer steps, instead of epochs.
        per_device_train_batch_size: Pairs per pass.
        max_length: Most tokens of prompt and completion; the left is cut off.
        held_out: Share of the pairs (below 1) or their number; all pairs of a prompt together.
        keep_thought: Whether the model reads thoughts; else only what follows ``</think>``.
        chat: Make a plain prompt with plain answers a conversation, as ``load_prompts`` does.
        seed: Of the split, the score head and the order.
        say: Called with each line for the user.
        **settings: Every other field of TRL's ``RewardConfig``.

    Returns:
        The folder and how good it is. Ctrl-C during training saves what was learned.

    Raises:
        KitError: The pairs, a setting or the base is wrong, or a training pass does not fit.
    """
    read = read_pairs(pairs, chat=chat)
    settings = {
        "learning_rate": learning_rate,
        "num_train_epochs": num_train_epochs,
        "max_steps": -1 if max_steps is None else max_steps,
        "per_device_train_batch_size": per_device_train_batch_size,
        **settings,
    }
    job = _Job(
        str(model),
        _place(str(model)),
        Path(output_dir),
        load_in_4bit,
        r,
        lora_alpha,
        max_length,
        keep_thought,
        seed,
        Path(pairs).name if isinstance(pairs, str | Path) else "rows",
        settings,
    )
    _check({**vars(job), **settings, "held_out": held_out, "chat": chat})
    train, held = split_pairs(read, held_out, seed)
    with session():
        return _train_and_save(job, train, held, say)


# --- pairs ---------------------------------------------------------------------------------------


def read_pairs(source: str | Path | Iterable[Row], *, chat: bool = True) -> list[Pair]:
    """Return checked pairs in the order of the file or of the rows.

    Args:
        source: A .jsonl, .csv or .parquet file, or rows with ``chosen`` and ``rejected``.
        chat: Make a plain prompt with plain answers a conversation.

    Raises:
        DataError: No such file, a bad line, with its number, or no pairs.
    """
    if isinstance(source, str | Path):
        where, rows = format_value(str(source)), read_rows(local_path(str(source)))
    else:
        where = "the list of pairs"
        rows = [(f"row {number}", row) for number, row in enumerate(source, 1)]
    if not rows:
        raise DataError(f"{where} holds no pairs: put rows with chosen and rejected in it")
    return [_pair(row, place, chat=chat) for place, row in rows]


def _pair(row: Any, place: str, *, chat: bool) -> Pair:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{place}: holds a {type(row).__name__}, must be an object with chosen and rejected"
        )
    for name in ("chosen", "rejected", "prompt"):
        value = row.get(name)
        if value is None and name != "prompt":
            raise DataError(
                f"{place}: has no `{name}`, only {format_value(sorted(map(str, row)))}: every pair "
                "needs chosen and rejected"
            )
        if value is not None and not isinstance(value, str):
            if not isinstance(value, list) or not value:
                raise DataError(
                    f"{place}: {name} is {format_value(value)}, must be text or a list of chat "
                    "messages"
                )
            check_messages(value, name, place)
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{place}: chosen and rejected are the same text; delete the pair")
    chosen, rejected = (
        _text(row.get("prompt"), row[name], f"{place}: {name}", chat=chat)
        for name in ("chosen", "rejected")
    )
    group = json.dumps(chosen[0], sort_keys=True, default=str) if chosen[0] else place
    return Pair(chosen, rejected, group)


def _text(prompt: Any, answer: Any, place: str, *, chat: bool) -> Text:
    """Return (prompt, completion) of one side, in each of the forms that TRL knows."""
    if isinstance(answer, str):
        if isinstance(prompt, str) and chat:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            return prompt, [{"role": "assistant", "content": answer}]
        return prompt or "", answer
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    has_prompt = isinstance(prompt, str) and answer[0]["role"] != "assistant"
    if has_prompt or answer[: len(before)] == before:
        before = []  # the conversation begins with its prompt
    whole = [*before, *answer]
    if len(whole) < 2 or whole[-1]["role"] != "assistant":
        raise DataError(
            f"{place} must be a conversation that ends with the assistant, with the prompt before "
            "it or in the column prompt"
        )
    return whole[:-1], whole[-1:]


def split_pairs(pairs: list[Pair], held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return (train, held out), each in the order of the file; no prompt is on both sides.

    Args:
        pairs: As ``read_pairs`` returned them.
        held_out: Share of them (below 1) or their number; fewer if whole prompts do not fit.
        seed: Which prompts are held out.

    Raises:
        DataError: One of the two would be empty.
    """
    free = max(1, round(held_out * len(pairs))) if held_out < 1 else int(held_out)
    sizes = Counter(pair.group for pair in pairs)
    groups = list(sizes)
    random.Random(seed).shuffle(groups)
    kept: set[str] = set()
    for group in groups:
        if sizes[group] <= free:
            kept.add(group)
            free -= sizes[group]
    train = [pair for pair in pairs if pair.group not in kept]
    held = [pair for pair in pairs if pair.group in kept]
    if not train or not held:
        raise DataError(
            f"held_out {held_out:g} does not split {len(pairs)} pairs with {len(sizes)} prompts: "
            "all pairs of a prompt go to one side, and both sides need some; lower it, or add pairs"
        )
    return train, held


# --- arguments -----------------------------------------------------------------------------------


def _place(model: str) -> str:
    """Return the folder or hub name of the base.

    Raises:
        ModelError: It is a file, an adapter, or a folder that is missing or holds no model.
    """
    path = TINY_THINKER if model == "tiny-thinker" else Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path)
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix == ".gguf"
    if path.exists() or is_path:
        fault = "is a file" if path.is_file() else "holds no config.json"
        raise ModelError(
            f"the base {model!r} of a reward model {fault if path.exists() else 'does not exist'}: "
            "give the folder of a whole model as save_pretrained wrote it, or a hub name"
        )
    return model


def _check(given: dict[str, Any]) -> None:
    """Raise ConfigError for numbers out of range, before anything heavy is loaded."""
    counts = ("r", "lora_alpha", "max_length", "per_device_train_batch_size", "max_steps")
    for name in (*counts, "learning_rate", "num_train_epochs", "held_out"):
        value, kinds = given[name], int if name in counts else int | float
        if name == "max_steps" and value == -1:  # TRL: by epochs
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            what = "a whole number" if name in counts else "a number"
            raise ConfigError(f"{name} is {value!r}: give {what} above 0")
    if given["held_out"] > 1 and given["held_out"] % 1:
        raise ConfigError(
            f"held_out is {given['held_out']!r}: give a share below 1 or a whole number"
        )
    for name in ("load_in_4bit", "keep_thought", "chat"):
        if not isinstance(given[name], bool):
            raise ConfigError(f"{name} is {given[name]!r}: give true or false")
    if type(given["seed"]) is not int or given["seed"] < 0:
        raise ConfigError(f"seed is {given['seed']!r}: give a whole number, 0 or more")


# --- training ------------------------------------------------------------------------------------


def _train_and_save(job: _Job, train: list[Pair], held: list[Pair], say: Say) -> RewardModelResult:
    """Load, train, score and save; what is loaded here belongs to the open session."""
    hardware = setup().hardware
    folder = free_folder(job.output_dir)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = _arguments(job, scratch, hardware)
        model, tokenizer = _load(job, hardware)
        train_ids, num_equal = _read(tokenizer, train, job)
        held_ids, _ = _read(tokenizer, held, job)
        bits = "4-bit NF4" if job.load_in_4bit else f"{32 if hardware.device == 'cpu' else 16}-bit"
        say(
            f"reward model on {job.model}, {bits}, LoRA r={job.r} and a score head, {hardware.name}"
        )
        say(f"{len(train_ids):,} pairs to train on, {len(held_ids):,} held out")
        if num_equal:
            say(f"{num_equal:,} pairs left out: both texts read the same to the model")
        trainer = _make_trainer(arguments, model, tokenizer, train_ids, say)
        before = _Scores.of(trainer, held_ids)
        seconds, received = _train(trainer, say)
        after = None
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: saved without a score
            after = _Scores.of(trainer, held_ids)
    result = RewardModelResult(
        folder=folder,
        accuracy=after.accuracy if after else None,
        accuracy_before=before.accuracy,
        margin=after.margin if after else None,
        num_pairs=len(train_ids),
        num_held_out=len(held_ids),
        seconds=seconds,
        interrupted=received is not None or after is None,
        terminated=received == signal.SIGTERM,
    )
    _save(job, trainer, result, after.calibration if after else None)
    if after:
        mean, std = after.calibration["mean"], after.calibration["std"]
        say(
            f"held-out pairs: accuracy {after.accuracy:.3f} (before {result.accuracy_before:.3f}), "
            f"margin {after.margin:.2f}; scores {mean:.2f} ± {std:.2f}"
        )
    say(f"{result.seconds:.0f} s; reward model in {result.folder}")
    say(f"next: in a run file, rewards: [{{name: reward_model, model: {result.folder}}}]")
    return result


def _reader() -> Any:
    """Return the module that reads texts and loads classifiers for the reward."""
    return importlib.import_module("rloo_kit.rewards._classifier")


def _load(job: _Job, hardware: Hardware) -> tuple[Any, Any]:
    """Return the base with a fresh score head and adapter, and its tokenizer.

    Raises:
        ModelError: It cannot be loaded, or lacks other weights than the head's.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, set_seed

    reader = _reader()
    set_seed(job.seed)
    what = f"the base {job.model!r} of a reward model"
    with quiet(), reader.loading(what, job.place):
        model, missing = reader.load_base(
            job.place, load_in_4bit=job.load_in_4bit, device=hardware.device
        )
        tokenizer = AutoTokenizer.from_pretrained(job.place, trust_remote_code=False)
    if others := sorted(name for name in missing if not name.startswith(("score", "classifier"))):
        raise ModelError(
            f"the base {job.model!r} has no weights for {', '.join(others[:3])}: give a whole model"
        )
    add_to_session(model)
    reader.set_up_tokenizer(model, tokenizer, job.model)
    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    targets = [name for name in PROJECTIONS if name in leaves] or "all-linear"
    lora = LoraConfig(
        task_type="SEQ_CLS", r=job.r, lora_alpha=job.lora_alpha, target_modules=targets
    )
    return get_peft_model(model, lora), tokenizer


def _read(tokenizer: Any, pairs: list[Pair], job: _Job) -> tuple[list[Ids], int]:
    """Return the tokens of each pair as the reward will read it, and how many were equal.

    Raises:
        DataError: No pair is left.
    """
    token_ids = _reader().token_ids
    how = {
        "keep_thought": job.keep_thought,
        "max_length": min(job.max_length, tokenizer.model_max_length),
    }
    found = [
        (token_ids(tokenizer, *pair.chosen, **how), token_ids(tokenizer, *pair.rejected, **how))
        for pair in pairs
    ]
    different = [ids for ids in found if ids[0] != ids[1]]
    if not different:
        raise DataError(
            f"none of {len(pairs)} pairs differs in what the model reads (the last "
            f"{job.max_length} tokens{'' if job.keep_thought else ', without the thought'}): raise "
            "max_length, or set keep_thought if the thoughts are what differs"
        )
    return different, len(found) - len(different)


def _arguments(job: _Job, folder: str, hardware: Hardware) -> Any:
    """Return TRL's configuration.

    Raises:
        ConfigError: A setting is unknown, is set by the kit, or is refused by TRL.
    """
    from trl.trainer.reward_config import RewardConfig

    fields = [field for field in dataclasses.fields(RewardConfig) if field.init]
    known = sorted({field.name for field in fields} - {*FIXED, "output_dir", "use_cpu"})
    for name in job.settings:
        if name not in known:
            raise ConfigError(
                f"a reward model has no setting {name!r}: give a field of TRL's RewardConfig that "
                f"the kit does not set itself{did_you_mean(name, known)}"
            )
    on_cpu = hardware.device == "cpu"
    half = None if on_cpu else hardware.mixed_precision
    # Unsloth changes defaults of the classes of TRL that it patches.
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    defaults |= {
        "bf16": half == "bf16",
        "fp16": half == "fp16",
        "gradient_checkpointing": not on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "seed": job.seed,
    }
    values = {**defaults, **job.settings, **FIXED, "output_dir": folder, "use_cpu": on_cpu}
    try:
        arguments = RewardConfig(**values)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"TRL refuses the settings of the reward model: {exc}") from exc
    if not arguments.bf16 and not arguments.fp16:
        arguments.mixed_precision = "no"  # else accelerate reads the variable that setup() sets
    return arguments


def _make_trainer(arguments: Any, model: Any, tokenizer: Any, ids: Sequence[Ids], say: Say) -> Any:
    """Return TRL's trainer on tokenised pairs, with the adapter in float32."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.reward_trainer import RewardTrainer

    columns = {"chosen_ids": [c for c, _ in ids], "rejected_ids": [r for _, r in ids]}
    with precision_as_asked(arguments), quiet():
        trainer: Any = RewardTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[_progress(say)],
        )
    trainer.remove_callback(PrinterCallback)
    # TRL casts the adapter of a 4-bit model to bf16, where small updates are lost.
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return trainer


def _progress(say: Say) -> Any:
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        """Prints about ten lines per training, and ends it after the step of a signal."""

        start = 0.0
        stop: StopSignals | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.start = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.stop and self.stop.received is not None:
                control.should_training_stop = True

        def on_log(  # pyright: ignore[reportIncompatibleMethodOverride]  # it also gets the logs
            self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any
        ) -> None:
            step, total = state.global_step, state.max_steps
            if "loss" in logs and (step % max(1, total // PROGRESS_LINES) == 0 or step == total):
                left = (time.monotonic() - self.start) / step * (total - step)
                say(
                    f"step {step:>{len(str(total))}}/{total}  loss {float(logs['loss']):.3f}  "
                    f"accuracy {logs['accuracy']:.2f}  {left:.0f} s left"
                )
            self.on_step_end(args, state, control)  # a signal may have come meanwhile

    return Progress()


def _train(trainer: Any, say: Say) -> tuple[float, int | None]:
    """Train; return seconds and the signal that ended it. A second one is raised at once.

    Raises:
        MemoryRanOutError: A pass does not fit.
    """
    start = time.monotonic()
    progress = next(one for one in trainer.callback_handler.callbacks if hasattr(one, "stop"))
    try:
        with StopSignals(say) as progress.stop:
            trainer.train()
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        raise MemoryRanOutError(
            "out of memory while training the reward model: lower per_device_train_batch_size (and "
            "raise gradient_accumulation_steps by as much) or max_length"
        ) from exc
    received = progress.stop.received
    if received is not None:
        say(f"interrupted after step {trainer.state.global_step}: saving what was learned")
    return time.monotonic() - start, received


@dataclass(frozen=True)
class _Scores:
    """Scores of held-out pairs."""

    chosen: list[float]
    rejected: list[float]

    @classmethod
    def of(cls, trainer: Any, ids: Sequence[Ids]) -> "_Scores":
        """Score pairs with the trainer's model as it is now."""
        import torch

        model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        rows = [side for pair in ids for side in pair]
        budget = 2 * args.per_device_train_batch_size * max(map(len, rows))  # as a training pass
        model.eval()
        with torch.autocast(args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16):
            pad = trainer.processing_class.pad_token_id
            scores = _reader().logits(model, pad, rows, budget)
        model.train()
        return cls(scores[0::2], scores[1::2])

    @property
    def accuracy(self) -> float:
        right = sum(c > r for c, r in zip(self.chosen, self.rejected, strict=True))
        return right / len(self.chosen)

    @property
    def margin(self) -> float:
        return statistics.fmean(self.chosen) - statistics.fmean(self.rejected)

    @property
    def calibration(self) -> dict[str, Any]:
        both = [*self.chosen, *self.rejected]
        return {
            "mean": statistics.fmean(both),
            "std": statistics.pstdev(both),
            "num_scores": len(both),
            "of": "held-out chosen and rejected texts",
        }


# --- the folder ----------------------------------------------------------------------------------


def _save(
    job: _Job, trainer: Any, result: RewardModelResult, calibration: dict[str, Any] | None
) -> None:
    """Write the folder under another name and rename it, so that it is whole or absent.

    Raises:
        ModelError: The disk refused.
    """
    model, partial = trainer.model, result.folder.with_name(f".{result.folder.name}.partial")
    model.peft_config["default"].base_model_name_or_path = job.model
    facts = _facts(job, result, trainer.state.global_step)
    try:
        # With save_embedding_layers PEFT would ask the hub for the base's vocabulary.
        model.save_pretrained(str(partial), save_embedding_layers=False)
        trainer.processing_class.save_pretrained(str(partial))
        (partial / "README.md").unlink(missing_ok=True)  # a card of placeholders
        if calibration and calibration["std"] > 0:
            write_json(partial / "calibration.json", calibration, indent=2)
        write_json(partial / "reward_model.json", redact_tree(facts), indent=2)
        partial.rename(result.folder)
    except OSError as exc:
        raise ModelError(
            f"the reward model cannot be written to {str(result.folder)!r} "
            f"({first_line(exc)}): free some space or choose another output_dir"
        ) from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _facts(job: _Job, result: RewardModelResult, steps: int) -> dict[str, Any]:
    """Return how the model was made, and how its base is found from another place."""
    facts: dict[str, Any] = {"base": job.model}
    if Path(job.place).is_dir():
        facts["base_fingerprint"] = _reader().fingerprint(Path(job.place))
        if job.model != "tiny-thinker":
            place, folder = Path(job.place).resolve(), result.folder.resolve()
            with contextlib.suppress(ValueError):  # another drive
                facts["base_folder"] = Path(os.path.relpath(place, folder)).as_posix()
    copied = ("num_pairs", "num_held_out", "accuracy_before", "accuracy", "margin", "interrupted")
    return facts | {
        "load_in_4bit": job.load_in_4bit,
        "keep_thought": job.keep_thought,
        "max_length": job.max_length,
        "pairs": job.pairs_name,
        **{name: getattr(result, name) for name in copied},
        "steps": steps,
        "seconds": round(result.seconds, 1),
        "seed": job.seed,
        "settings": {"r": job.r, "lora_alpha": job.lora_alpha, **job.settings},
        "versions": {name: installed_version(name) for name in ("rloo_kit", *TESTED)},
    }
