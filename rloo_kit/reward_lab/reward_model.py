"""Training of reward models: a score head and a LoRA adapter learn which of two texts is better."""

import contextlib
import json
import math
import os
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rloo_kit.config.settings import Rule
from rloo_kit.config.values import check_value
from rloo_kit.data.files import check_messages, placed_rows
from rloo_kit.errors import ConfigError, DataError, DivergedError
from rloo_kit.machine.cleanup import add_to_session, session
from rloo_kit.machine.environment import quiet, setup
from rloo_kit.machine.hardware import TESTED, Hardware, installed_version
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.output_folder import check_writable, free_folder, whole_folder, write_json
from rloo_kit.rewards._classifier import (
    fingerprint,
    load_base,
    loading,
    logits,
    set_up_tokenizer,
    token_ids,
)
from rloo_kit.text.redaction import redact_tree
from rloo_kit.types import Completion, Row, Say, Tokenizer

# A prompt and a completion, each as text or as a list of chat messages
Text = tuple[Completion, Completion]
# Token ids of the chosen text and of the rejected text of one pair
Ids = tuple[list[int], list[int]]

# Name of the model in messages
WHAT = "the reward model"
REMEDY = (
    "lower max_length, or lower per_device_train_batch_size and raise gradient_accumulation_steps "
    "by the same factor"
)


@dataclass(frozen=True)
class RewardModelResult:
    """Folder of a trained reward model, and its accuracy and margin on held-out pairs."""

    folder: Path  # adapter, score head, tokenizer, ``calibration.json`` and ``reward_model.json``
    accuracy: float  # share of pairs whose chosen text scores higher
    accuracy_before: float  # accuracy before the first step, with an untrained score head
    margin: float  # mean score of chosen minus mean score of rejected texts, before calibration
    num_pairs: int  # pairs trained on
    num_held_out: int
    seconds: float  # time of the training steps, without loading and scoring


@dataclass(frozen=True)
class Pair:
    """A preference pair: two texts, of which ``chosen`` is better than ``rejected``."""

    chosen: Text
    rejected: Text
    group: str  # identifies the prompt; all pairs of a group are put into the same split


@dataclass(frozen=True)
class _Job:
    """Settings of one training: how to load the model, how to read texts, and TRL's settings."""

    base: str
    load_in_4bit: bool
    r: int
    lora_alpha: int
    max_length: int
    keep_thought: bool
    seed: int
    settings: dict[str, Any]  # fields of TRL's ``RewardConfig``

    @property
    def place(self) -> str:
        return str(EMBEDDED.get(self.base, self.base))


def train_reward_model(  # noqa: PLR0913
    pairs: str | Path | Iterable[Row],
    model: str | Path = "tiny-thinker",
    *,
    output_dir: str | Path = "runs/reward-model",
    load_in_4bit: bool = True,
    r: int = 16,
    lora_alpha: int = 16,
    learning_rate: float = 1e-4,
    max_length: int = 1024,
    held_out: float = 0.1,
    keep_thought: bool = False,
    chat: bool = True,
    seed: int = 42,
    say: Say = print,
    **settings: Any,
) -> RewardModelResult:
    """Train a reward model on preference pairs with TRL's ``RewardTrainer``.

    The built-in reward ``reward_model`` uses the trained model to score the completions of a run.

    Args:
        pairs: A .jsonl, .csv or .parquet file, or rows. Each row has ``chosen`` and ``rejected``,
            as text or as chat messages. It also has ``prompt``, unless ``chosen`` and ``rejected``
            contain the prompt.
        model: The base model: ``tiny-thinker``, or a local folder or hub name of a language model.
        output_dir: Folder to create. If it already exists, a number is added to the name.
        load_in_4bit: Load the base model in 4-bit NF4 (bitsandbytes). The score head is never
            quantised.
        r: Rank of the LoRA adapter.
        lora_alpha: The adapter's output is scaled by ``lora_alpha / r``.
        learning_rate: Peak learning rate, which then decays linearly.
        max_length: Maximum number of tokens in prompt and completion together. Longer texts are
            cut at the start.
        held_out: Pairs to hold out for evaluation, as a share (below 1) or a number. Pairs with the
            same prompt are held out together.
        keep_thought: If True, the model also reads the thoughts. If False, it reads only the text
            after ``</think>``.
        chat: If True, a plain-text prompt and its answers become a chat conversation, as in
            ``load_prompts``.
        seed: Seed of the split, the initial score head and the order of the pairs.
        say: Function that is called with each line of output.
        **settings: Other fields of TRL's ``RewardConfig``. The default is one epoch, with 8 pairs
            in each forward pass.

    Returns:
        The folder of the reward model, and its accuracy and margin on the held-out pairs.

    Raises:
        DataError: A pair is wrong, or the pairs cannot be split.
        ConfigError: A setting is wrong.
        DivergedError: The trained model's scores are NaN or Inf.
        ModelError: The base model cannot be loaded.
        MemoryRanOutError: A training pass does not fit in memory.
    """
    if settings.get("max_steps", -1) == 0:
        raise ConfigError("max_steps is 0: set it to 1 or more, or leave it out for one epoch")
    read = read_pairs(pairs, chat=chat)
    job = _Job(
        os.path.expanduser(model), load_in_4bit, r, lora_alpha, max_length, keep_thought, seed,
        {"num_train_epochs": 1.0, "learning_rate": learning_rate, **settings},
    )  # fmt: skip
    # The libraries check these values only after the model is loaded, or not at all
    errors = check_value("seed", seed, int, Rule(minimum=0))
    for name, value, kind in (
        ("r", r, int),
        ("lora_alpha", lora_alpha, int),
        ("max_length", max_length, int),
        ("learning_rate", learning_rate, float),
        ("held_out", held_out, float),
    ):
        errors += check_value(name, value, kind, Rule(above=0))
    if errors:
        raise ConfigError("; ".join(errors))
    train, held = split_pairs(read, held_out, seed)
    with session():
        return _train_and_save(job, train, held, Path(output_dir), say)


# --- pairs ---------------------------------------------------------------------------------------


def read_pairs(source: str | Path | Iterable[Row], *, chat: bool = True) -> list[Pair]:
    """Read preference pairs from a file or from rows, check them, and return them in order.

    Args:
        source: A .jsonl, .csv or .parquet file, or rows, each with ``chosen`` and ``rejected``.
        chat: If True, a plain-text prompt and its answers become a chat conversation.

    Raises:
        DataError: The file cannot be read, or a pair is wrong.
    """
    pairs = []
    for place, row in placed_rows(source, ("chosen", "rejected")):
        prompt = row.get("prompt")
        if not isinstance(prompt, str | None):
            check_messages(prompt, "prompt", place)
        chosen, rejected = (
            _text(prompt, row[name], f"{place}: {name}", chat=chat)
            for name in ("chosen", "rejected")
        )
        group = json.dumps(chosen[0], sort_keys=True, default=str) if chosen[0] else place
        pairs.append(Pair(chosen, rejected, group))
    return pairs


def _text(prompt: Any, answer: Any, place: str, *, chat: bool) -> Text:
    """Return the prompt and the completion of the chosen or the rejected side of a pair.

    Both are plain text or both are lists of chat messages, the two forms that TRL accepts.
    """
    if isinstance(prompt, str) and (chat or not isinstance(answer, str)):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str):
        if not isinstance(prompt, list):
            return prompt or "", answer
        answer = [{"role": "assistant", "content": answer}]
    # If the assistant's message is not the first, the conversation contains its own prompt
    whole = [*(prompt or []), *answer] if answer[0]["role"] == "assistant" else answer
    if len(whole) < 2 or whole[-1]["role"] != "assistant":
        raise DataError(
            f"{place} must be a conversation that ends with a message of the assistant; put the "
            "prompt before that message, or in the column prompt"
        )
    return whole[:-1], whole[-1:]


def split_pairs(pairs: list[Pair], held_out: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split pairs at random into training pairs and held-out pairs.

    ``held_out`` is a share (below 1) or a number of pairs to hold out. All pairs of a prompt are in
    the same split, so fewer pairs than asked for may be held out. Both splits keep the order of
    ``pairs``.

    Raises:
        DataError: One of the two splits would be empty.
    """
    free = max(1, round(held_out * len(pairs))) if held_out < 1 else int(held_out)
    sizes = Counter(pair.group for pair in pairs)
    groups = list(sizes)
    random.Random(seed).shuffle(groups)
    kept = set()
    for group in groups:
        if sizes[group] <= free:
            kept.add(group)
            free -= sizes[group]
    train = [pair for pair in pairs if pair.group not in kept]
    held = [pair for pair in pairs if pair.group in kept]
    if not train or not held:
        raise DataError(
            f"held_out {held_out:g} cannot split {len(pairs)} pairs with {len(sizes)} prompts, "
            "because pairs of a prompt stay together and each split needs at least one pair; "
            f"{'lower' if held else 'raise'} it, or add pairs"
        )
    return train, held


# --- training ------------------------------------------------------------------------------------


def _train_and_save(
    job: _Job, train: list[Pair], held: list[Pair], output_dir: Path, say: Say
) -> RewardModelResult:
    """Load the model, train it, score the held-out pairs and save the result.

    The caller's session releases the model afterwards.
    """
    hardware = setup().hardware
    from datasets import Dataset
    from trl.trainer.reward_config import RewardConfig  # after Unsloth
    from trl.trainer.reward_trainer import RewardTrainer

    from rloo_kit.training.supervised import make_arguments, make_trainer, memory_errors

    check_writable(free_folder(output_dir).parent)
    with tempfile.TemporaryDirectory() as scratch:
        # No max_length for TRL, because `_read` has already cut the texts
        fixed = {"max_length": None, "output_dir": scratch, "seed": job.seed}
        arguments = make_arguments(RewardConfig, WHAT, fixed, job.settings)
        model, tokenizer = _load(job, hardware)
        train_ids = _read(tokenizer, train, job)
        held_ids = _read(tokenizer, held, job)
        bits = "4-bit NF4" if job.load_in_4bit else f"{32 if hardware.device == 'cpu' else 16}-bit"
        say(f"reward model on {job.base}, {bits}, LoRA r={job.r} and a score head, {hardware.name}")
        say(f"{len(train_ids):,} pairs to train on, {len(held_ids):,} held out")
        rows = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in train_ids]
        trainer = make_trainer(
            RewardTrainer,
            say,
            ("accuracy",),
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        accuracy_before, _, _ = _scores(trainer, held_ids)
        with memory_errors(WHAT, REMEDY):
            seconds = trainer.train().metrics["train_runtime"]
        accuracy, margin, calibration = _scores(trainer, held_ids)
    result = RewardModelResult(
        folder=free_folder(output_dir),  # chosen late: another training may have made a folder
        accuracy=accuracy,
        accuracy_before=accuracy_before,
        margin=margin,
        num_pairs=len(train_ids),
        num_held_out=len(held_ids),
        seconds=round(seconds, 1),
    )
    _save(job, trainer, result, calibration)
    say(
        f"held-out pairs: accuracy {accuracy:.3f} (before {accuracy_before:.3f}), "
        f"margin {margin:.2f}; scores {calibration['mean']:.2f} ± {calibration['std']:.2f}"
    )
    say(f"{result.seconds:.0f} s; reward model in {result.folder}")
    say(f"next: in a run file, rewards: [{{name: reward_model, model: {result.folder}}}]")
    return result


def _load(job: _Job, hardware: Hardware) -> tuple[Any, Any]:
    """Return the base model with a new score head and a new adapter, and its tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, set_seed

    set_seed(job.seed)
    with quiet(), loading(f"the base {job.base!r} of a reward model", job.place):
        model, _ = load_base(job.place, load_in_4bit=job.load_in_4bit, device=hardware.device)
        tokenizer = AutoTokenizer.from_pretrained(job.place, trust_remote_code=False)
    add_to_session(model)
    set_up_tokenizer(model, tokenizer, job.base)
    lora = LoraConfig(
        task_type="SEQ_CLS", r=job.r, lora_alpha=job.lora_alpha, target_modules="all-linear"
    )
    return get_peft_model(model, lora), tokenizer


def _read(tokenizer: Tokenizer, pairs: list[Pair], job: _Job) -> list[Ids]:
    """Return the token ids of each pair, as the reward ``reward_model`` tokenizes texts.

    Pairs whose two sides have the same token ids are left out.
    """
    limit = min(job.max_length, tokenizer.model_max_length)
    read = partial(token_ids, tokenizer, keep_thought=job.keep_thought, max_length=limit)
    found = [(read(*pair.chosen), read(*pair.rejected)) for pair in pairs]
    different = [ids for ids in found if ids[0] != ids[1]]
    if not different:
        raise DataError(
            f"chosen and rejected are the same in each of the {len(pairs)} pairs, in the part that "
            f"the model reads (the last {limit} tokens"
            f"{'' if job.keep_thought else ', without the thought'}); raise max_length, or set "
            "keep_thought if only the thoughts differ"
        )
    return different


def _scores(trainer: Any, ids: Sequence[Ids]) -> tuple[float, float, dict[str, float]]:
    """Score held-out pairs with the current model.

    Returns:
        The accuracy (share of pairs whose chosen text scores higher), the margin (mean score of the
        chosen minus mean score of the rejected texts), and ``mean`` and ``std`` of all scores.
    """
    rows = [side for pair in ids for side in pair]
    # Score at most as many tokens at a time as a training pass may have
    budget = 2 * trainer.args.per_device_train_batch_size * max(map(len, rows))
    trainer.model.eval()
    with trainer.accelerator.autocast():
        scores = logits(trainer.model, trainer.processing_class.pad_token_id, rows, budget)
    if not all(map(math.isfinite, scores)):
        remedy = "lower learning_rate" if trainer.state.global_step else "name another base model"
        raise DivergedError(f"{WHAT} has scores that are NaN or Inf, so nothing is saved: {remedy}")
    chosen = scores[0::2]
    rejected = scores[1::2]
    right = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    margin = statistics.fmean(chosen) - statistics.fmean(rejected)
    calibration = {"mean": statistics.fmean(scores), "std": statistics.pstdev(scores)}
    return right / len(chosen), margin, calibration


def _plain(value: Any) -> Any:
    """Return a NumPy number as a Python number, and any other value as text."""
    return value.item() if hasattr(value, "item") else str(value)


# --- the folder ----------------------------------------------------------------------------------


def _save(
    job: _Job, trainer: Any, result: RewardModelResult, calibration: dict[str, float]
) -> None:
    """Write the folder under a temporary name, then rename it, so that it is never incomplete.

    ``reward_model.json`` records the settings, the results and the place of the base model.
    """
    model = trainer.model
    model.peft_config["default"].base_model_name_or_path = job.base
    facts = {
        **vars(job),
        # JSON has neither numbers of NumPy nor dtypes
        "settings": json.loads(json.dumps(job.settings, default=_plain)),
        **vars(result),
        "steps": trainer.state.global_step,
        "versions": {name: installed_version(name) for name in ("rloo_kit", *TESTED)},
    }
    del facts["folder"]
    place = Path(job.place)
    if place.is_dir():
        facts["base_fingerprint"] = fingerprint(place)
        if job.base not in EMBEDDED:
            with contextlib.suppress(ValueError):
                # On Windows no relative path leads to another drive
                relative = os.path.relpath(place.resolve(), result.folder.resolve())
                facts["base_folder"] = Path(relative).as_posix()
    with whole_folder(result.folder) as part:
        # With save_embedding_layers PEFT would ask the hub for the base's vocabulary.
        model.save_pretrained(str(part), save_embedding_layers=False)
        trainer.processing_class.save_pretrained(str(part))
        # PEFT's model card holds only placeholders
        (part / "README.md").unlink(missing_ok=True)
        if calibration["std"] > 0:
            write_json(part / "calibration.json", calibration, indent=2)
        write_json(part / "reward_model.json", redact_tree(facts), indent=2)
