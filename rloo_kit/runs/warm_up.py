"""Warm up a policy before a run: a short supervised training, whose adapter the run trains further.

The tokens are the same as in the run: the prompt with its chat template, the completion, and the
token that ends a turn. The examples are the user's own, or the best completions of an earlier run
or of a calibration.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import Rule
from rloo_kit.config.values import check_value
from rloo_kit.data.files import check_messages, local_path, placed_rows
from rloo_kit.data.images import has_images
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.data.prompts import as_prompt
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.job import PreparedJob, read_config, system_message
from rloo_kit.machine.cleanup import session
from rloo_kit.machine.processes import num_processes
from rloo_kit.models.loading import save_adapter
from rloo_kit.output_folder import check_writable, free_folder, write_json
from rloo_kit.runs.folder import command_with_adapter
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.text.numbers import finite_number
from rloo_kit.text.redaction import redacting
from rloo_kit.text.thoughts import THOUGHT_BEGINS, opens_thought, thought_marks
from rloo_kit.text.wording import encodable, format_value, text_of
from rloo_kit.types import Row, Say, Tokenizer

WHAT = "the warm-up"  # how messages call this training
# Fields of TRL's `SFTConfig` that the kit sets
FIXED = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_length": None,
    "packing": False,
    "padding_free": False,
    # the rows are already tokenized
    "dataset_kwargs": {"skip_prepare_dataset": True},
}


def warm_up(  # noqa: PLR0913
    source: str | Path | RunConfig,
    examples: str | Path | Sequence[Row],
    *,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    epochs: float | None = None,
    learning_rate: float = 2e-4,
    output: str | Path | None = None,
    say: Say = print,
) -> Path:
    """Train a run's policy on examples with TRL's ``SFTTrainer``; return the adapter's folder.

    Set a run's ``model.name`` to this folder to train the adapter further with RLOO.

    Args:
        source: A run file or another source that ``train`` accepts.
        examples: A .jsonl, .csv or .parquet file whose rows have ``prompt`` and ``completion``, or
            ``messages``; a list of such rows; or the folder of a run, whose completions are used.
            If any row has a ``score``, or a folder is given, only the best completions of each
            prompt are used, and rows without a score are left out.
        overrides: Settings in the form ``section.key=value``, as after ``--set``.
        steps: Number of optimizer steps, each with 4 examples; None: ``epochs`` decides.
        epochs: Number of passes over the examples; None: 2, unless ``steps`` is given.
        learning_rate: Initial learning rate. It falls linearly to 0.
        output: Folder for the adapter; None: the run's ``output_dir`` with ``-warm-up`` added. If
            the folder exists, a number is added.
        say: Called with each line that is printed for the user.

    Raises:
        KitError: A setting or an example is wrong, or a training step does not fit into memory.
    """
    say = redacting(say)
    settings = _settings(steps, epochs, learning_rate)
    overrides = [overrides] if isinstance(overrides, str) else overrides
    config, base = read_config(source, overrides)
    if config.tools or config.environment:
        raise ConfigError("a warm-up cannot train tool calls: leave tools and environment out")
    wanted = Path(output or f"{config.output_dir}-warm-up")
    check_writable(free_folder(wanted).parent)
    rows = read_examples(examples)
    with session():
        folder, found = _trained(PreparedJob(config, base, say), rows, settings, wanted)
    named = str(examples) if isinstance(examples, str | Path) else "rows"
    write_json(folder / "warm_up.json", {"examples": named, **settings, **found}, indent=1)
    file = "RUN.yaml" if isinstance(source, RunConfig) else source
    command = command_with_adapter(file, overrides, config, folder)
    say(f"adapter in {folder}; train it further with {command}")
    return folder


def _settings(steps: int | None, epochs: float | None, learning_rate: float) -> dict[str, Any]:
    """Check the arguments, and return them as TRL's settings.

    Raises:
        ConfigError: An argument is out of range, steps and epochs are both given, or a launcher
            has started several processes.
    """
    above_0 = Rule(above=0)
    errors = check_value("learning_rate", learning_rate, float, above_0)
    errors += check_value("steps", steps, int | None, above_0)
    errors += check_value("epochs", epochs, float | None, above_0)
    if steps is not None and epochs is not None:
        errors.append("steps and epochs are both given: leave one of them out")
    if num_processes() > 1:
        errors.append(
            "a warm-up trains in one process, but there are several: start it without a launcher"
        )
    if errors:
        raise ConfigError("; ".join(errors))
    length = {"num_train_epochs": epochs or 2.0} if steps is None else {"max_steps": steps}
    return {"learning_rate": learning_rate, **length}


# --- examples ------------------------------------------------------------------------------------


def read_examples(source: str | Path | Sequence[Row]) -> list[Row]:
    """Return rows with ``prompt`` and ``completion``, where ``completion`` is plain text.

    If any row has a ``score``, or ``source`` is the folder of a run, only the best completions of
    each prompt are returned, and only if their score is above the mean score of that prompt.

    Args:
        source: A file, the folder of a run, or rows.

    Raises:
        DataError: The file is missing or has no rows, a row has no prompt or no completion, or no
            completion has a score above the mean of its prompt.
    """
    of_run = isinstance(source, str | Path) and local_path(str(source)).is_dir()
    if of_run:
        source = str(local_path(str(source)) / "completions.jsonl")
    placed = [(place, _example(place, row)) for place, row in placed_rows(source, ())]
    rows = [row for _, row in placed]
    if not (of_run or any(row.get("score") is not None for row in rows)):
        for place, row in placed:
            if not row["completion"].strip():
                there = format_value(sorted(map(str, row.keys() - {"completion"})))
                raise DataError(
                    f"{place}: `completion` has no text (other columns: {there}): fill it in"
                )
        return rows
    best = best_completions(rows)
    if not best:
        raise DataError(
            f"none of the {len(rows)} completions in {format_value(source)} has a `score` above "
            "the mean of its prompt: give completions that solve their prompts or, to train on "
            "all of them, leave the column `score` out"
        )
    return best


def _example(place: str, row: Row) -> Row:
    """Return a row with ``prompt`` and the plain text of its ``completion``.

    Args:
        place: Position of the row for messages, such as its file and line.
        row: The row as it was read, perhaps with ``messages``.

    Raises:
        DataError: The row has no prompt, several turns in its completion, or a score that is not a
            number.
    """
    row = dict(row)
    if "messages" in row and "completion" not in row:
        check_messages(messages := row.pop("messages"), "messages", place)
        *prompt, last = messages
        row |= {"prompt": prompt, "completion": [last]}
        if not prompt or last["role"] != "assistant":
            raise DataError(
                f"{place}: messages must have a prompt, and end with a message of the assistant"
            )
    if not isinstance(prompt := row.get("prompt"), str):
        check_messages(prompt, "prompt", place)
    turns = row.get("completion")
    if isinstance(turns, list) and len(turns) > 1:
        raise DataError(
            f"{place}: the completion has {len(turns)} turns, but a warm-up can train only on one: "
            "leave out the tool calls, or train with RLOO without a warm-up"
        )
    row["completion"] = text_of(turns)
    # in a CSV file, all values are text
    if isinstance(cut := row.get("truncated"), str):
        row["truncated"] = cut.strip().lower() in ("true", "1", "1.0")
    score = row.get("score")
    try:
        if score is not None:
            row["score"] = float(score) if str(score).strip() else None
    except (TypeError, ValueError) as exc:
        raise DataError(
            f"{place}: score is {format_value(score)}, must be a number or empty: correct it, or "
            "leave the column `score` out"
        ) from exc
    return row


def best_completions(rows: Sequence[Row]) -> list[Row]:
    """Return the completions that have the best score of their prompt.

    A prompt whose best score is not above its mean score is left out. Truncated completions, empty
    completions, and repetitions of the same text are left out too.

    Args:
        rows: Rows with ``prompt``, ``completion`` and ``score``.
    """
    groups = defaultdict(list)
    for row in rows:
        if finite_number(row.get("score")) is not None:
            groups[json.dumps(row["prompt"], default=str)].append(row)
    best = []
    for group in groups.values():
        mean = fmean(row["score"] for row in group)
        whole = [row for row in group if row["completion"] and not row.get("truncated")]
        top = max((row["score"] for row in whole), default=mean)
        if top > mean:
            best += {row["completion"]: row for row in whole if row["score"] == top}.values()
    return best


# --- training ------------------------------------------------------------------------------------


def tokenized(
    tokenizer: Tokenizer, rows: Sequence[Row], settings: dict[str, Any] | None
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of prompt and completion of each row.

    The prompt has the same tokens as in the run. The completion ends with the end-of-turn token or,
    if the prompt is plain text or the tokenizer has no such token, with the end-of-text token. If
    the chat template opens a thought at the end of the prompt, the mark that opens a
    thought is removed from the start of the completion.

    Args:
        tokenizer: The tokenizer of the policy.
        rows: Rows that ``read_examples`` returned.
        settings: Additional arguments for the chat template.
    """
    end_of_text = tokenizer.eos_token_id
    end_of_turn = end_of_turn_id(tokenizer)
    marks = thought_marks(tokenizer)
    start = THOUGHT_BEGINS if marks is None else marks.start.text
    found = []
    for row in rows:
        ids = prompt_ids(tokenizer, row["prompt"], settings)
        completion = row["completion"]
        before = tokenizer.decode(ids)
        if marks is not None:  # a run writes its completions with the usual marks
            completion = marks.own_text(completion)
        if opens_thought(tokenizer, before):
            opening = before[before.rindex(start) :]
            completion = completion.removeprefix(opening).removeprefix(start)
        answer = tokenizer(text=encodable(completion), add_special_tokens=False)["input_ids"]
        is_text = isinstance(row["prompt"], str) or end_of_turn is None
        end = end_of_text if is_text else end_of_turn
        found.append((ids, answer if answer[-1:] == [end] else [*answer, end]))
    return found


def _fitting(job: PreparedJob, rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids (prompt, completion) of the examples that fit into the run's limits.

    If examples are left out because they are too long, print their number.

    Raises:
        DataError: All examples are too long, or the run's prompts have images.
    """
    if has_images(job.splits[0]):
        raise DataError(
            "the run's prompts have images, but a warm-up reads only text: train without a warm-up"
        )
    data = job.config.data
    system = system_message(data)
    rows = [row | {"prompt": as_prompt(row["prompt"], system, chat=data.chat)} for row in rows]
    found = tokenized(job.tokenizer, rows, job.args.chat_template_kwargs)
    longest, limit = job.config.model.max_seq_length, job.args.max_completion_length
    fit = [(p, c) for p, c in found if len(p) + len(c) <= longest and len(c) <= limit]
    why = f"longer than model.max_seq_length {longest} or trainer.max_completion_length {limit}"
    if not fit:
        raise DataError(f"all {len(found)} examples are {why}: raise the limit that they exceed")
    if len(fit) < len(found):
        job.say(f"{len(found) - len(fit)} of {len(found)} examples left out: {why}")
    return fit


def _trained(
    job: PreparedJob, rows: Sequence[Row], settings: dict[str, Any], wanted: Path
) -> tuple[Path, dict[str, Any]]:
    """Train the policy of a job on examples, and save its adapter in a new folder.

    Returns:
        The folder, which is ``wanted`` or, if that exists, ``wanted`` with a number; and a dict
        with the number of examples, the logged losses, and the duration in seconds.
    """
    job.prepare()
    examples = _fitting(job, rows)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage] # patched
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from rloo_kit.training.supervised import make_arguments, make_trainer, memory_errors
    from rloo_kit.training.trainer import follow_model

    args = job.args
    args.generation, args.use_vllm = "transformers", False  # no engine, because nothing is sampled
    model, tokenizer = job.policy
    follow_model(args, model, tokenizer)
    same = ("bf16", "fp16", "gradient_checkpointing", "seed")
    settings = settings | {name: getattr(args, name) for name in same}
    columns = {
        "input_ids": [prompt + completion for prompt, completion in examples],
        "labels": [[-100] * len(prompt) + completion for prompt, completion in examples],
    }
    job.say(f"warm-up of {job.model_name} on {len(examples)} examples")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(
            SFTTrainer,
            job.say,
            (),
            model=model,
            args=make_arguments(SFTConfig, WHAT, FIXED | {"output_dir": scratch}, settings),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            data_collator=DataCollatorForLanguageModeling(tokenizer.pad_token_id),
        )
        with memory_errors(WHAT, "leave the longest examples out, or close other programs"):
            seconds = trainer.train().metrics["train_runtime"]
    folder = free_folder(wanted)
    save_adapter(trainer.model, tokenizer, folder)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return folder, {"num_examples": len(examples), "losses": losses, "seconds": seconds}
