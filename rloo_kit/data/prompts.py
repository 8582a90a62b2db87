"""Function that loads prompts from a built-in task, a reasoning-gym task, a file or the hub.

Every dataset has a column ``prompt``, with chat messages or, if ``chat=False``, plain strings. The
reward functions receive every other column as an argument of the same name.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.data.files import as_dataset, local_path, read_source
from rloo_kit.data.gym_tasks import PREFIX, count_gym_levels, make_gym_rows
from rloo_kit.data.hub_tasks import HUB_TASKS, SYSTEM, has_held_out_split, hub_task, read_hub_task
from rloo_kit.data.images import store_images, text_as_parts
from rloo_kit.data.tasks import LEVELS, SPLITS, TASKS, make_rows
from rloo_kit.errors import DataError
from rloo_kit.text.wording import format_name, format_value
from rloo_kit.types import Row

if TYPE_CHECKING:
    from datasets import Dataset

BUILTIN = tuple(TASKS)
NUM_BUILTIN_PROMPTS = 1024
MAX_HELD_OUT = 256
# Maximum number of generated prompts, which are all kept in memory
MAX_MADE = 1_000_000


def load_prompts(  # noqa: PLR0913
    name: str | Path,
    *,
    split: str = "train",
    config: str | None = None,
    num_prompts: int | None = None,
    system: str | None = None,
    chat: bool = True,
    seed: int = 42,
    columns: Mapping[str, str] | None = None,
    level: int | list[int] | None = None,
    settings: dict[str, Any] | None = None,
    skip_empty: bool = False,
) -> "Dataset":
    """Return prompts as a Dataset with a ``prompt`` column and all other columns of the source.

    Args:
        name: A built-in task (``arithmetic``, ``countdown``, ``sums``), ``reasoning_gym:TASK``, a
            math dataset (``gsm8k``, ``dapo-math``, ``math500``, or ``gsm8k:PATH`` for a local
            copy), a .jsonl, .csv or .parquet file, a folder with a dataset, or a hub dataset.
        split: ``train`` or ``held_out`` for a task or a math dataset. Otherwise the name of a split
            of the hub dataset.
        config: Configuration of a hub dataset. None: the default configuration, or the only one if
            there is no default.
        num_prompts: Number of prompts to load. None: 1,024 problems of a built-in or reasoning-gym
            task, and all prompts of any other source.
        system: System message to put before every prompt. None: no system message, except for a
            math dataset with ``chat=True``, which has a default message that asks for step-by-step
            reasoning and a boxed answer.
        chat: Turn a plain string into a user message, so that the chat template is applied.
        seed: Seed that determines which problems of a task are made, and in which order.
        columns: Columns to rename, as name in the kit -> name in the file or hub dataset, such as
            ``{"prompt": "question", "answer": "solution"}``. Other columns keep their names.
        level: Difficulty of a built-in or reasoning-gym task, counted from 1. A list mixes several
            levels in equal parts. None: the first level of a built-in task, and the default
            settings of a reasoning-gym task.
        settings: Settings of a reasoning-gym task, under reasoning-gym's names. They override
            those of the level.
        skip_empty: Leave out the empty prompts of a file or dataset. False: an empty prompt is an
            error.

    Raises:
        DataError: The source is missing, empty or damaged, it has no column ``prompt``, or an
            argument has no effect on it.
    """
    if not isinstance(name, str | Path):
        raise DataError(
            f"load_prompts reads a name or a path, not a {type(name).__name__}: make a dataset of "
            "rows with datasets.Dataset.from_list"
        )
    name = str(name)
    path = local_path(name)
    is_file = os.path.isfile(path)  # Path.is_file raises OSError if the name is too long
    is_made = name in BUILTIN or name.startswith(PREFIX)
    has_splits = is_made or hub_task(name) is not None
    useless = {
        "split": split != "train" and is_file,
        "config": config and (has_splits or is_file),
        "columns": columns and has_splits,
        "level": level is not None and not is_made,
        "settings": settings and not name.startswith(PREFIX),
        "skip_empty": skip_empty and has_splits,
    }
    for key, is_useless in useless.items():
        if is_useless:
            raise DataError(f"{key} has no effect on the prompts {format_value(name)}: drop it")
    if has_splits and split not in SPLITS:
        raise DataError(
            f"{format_name(name)} has the splits train and held_out, not {format_value(split)}: "
            "choose one of the two"
        )
    if num_prompts is not None and num_prompts < 1:
        raise DataError(f"num_prompts is {num_prompts}, must be at least 1: correct it")
    rows = None
    if is_made:
        rows = _make_task(name, num_prompts or NUM_BUILTIN_PROMPTS, split, seed, level, settings)
    elif has_splits:
        rows = read_hub_task(name, split)[:num_prompts]
        system = SYSTEM if chat and system is None else system
    change = functools.partial(as_prompt, system=system, chat=chat)
    if rows is not None:
        dataset = as_dataset({**row, "prompt": change(row["prompt"])} for row in rows)
    else:
        known = (*BUILTIN, *HUB_TASKS, f"{PREFIX}TASK")
        dataset = read_source(
            name, (config, split), num_prompts, columns or {}, known, change, skip_empty
        )
        dataset = store_images(dataset, path if path.is_dir() else path.parent, name)
    if not len(dataset):
        raise DataError(f"{format_value(name)} has no rows: put at least one prompt in it")
    return dataset


def is_task(name: str) -> bool:
    """Return whether the source of this name has its own held-out split, separate from train."""
    return name in BUILTIN or name.startswith(PREFIX) or has_held_out_split(name)


def count_levels(name: str) -> int:
    """Return the number of difficulty levels of a task, or 0 if the source has no levels."""
    if name.startswith(PREFIX):
        return count_gym_levels(name)
    return LEVELS if name in BUILTIN else 0


def split_held_out(dataset: "Dataset", held_out: int | None) -> "tuple[Dataset, Dataset | None]":
    """Split a dataset into (train, held-out set); the last rows become the held-out set.

    Args:
        dataset: The prompts.
        held_out: Number of rows to hold out. None: an eighth of the rows, but at most 256. If the
            number is 0, the returned held-out set is None.

    Raises:
        DataError: No prompt is left to train on.
    """
    size = len(dataset)
    kept = min(size // 8, MAX_HELD_OUT) if held_out is None else held_out
    if kept >= size:
        raise DataError(
            f"data.held_out {kept} leaves no prompt to train on, because there are only {size}: "
            f"lower it to at most {size - 1}"
        )
    if kept == 0:
        return dataset, None
    return dataset.select(range(size - kept)), dataset.select(range(size - kept, size))


# --- one source ----------------------------------------------------------------------------------


def _make_task(
    name: str,
    num: int,
    split: str,
    seed: int,
    level: int | list[int] | None,
    settings: dict[str, Any] | None,
) -> list[Row]:
    if num > MAX_MADE:
        raise DataError(
            f"{num:,} prompts of {format_name(name)} are requested, but at most {MAX_MADE:,} can "
            "be made: lower data.num_prompts or data.held_out"
        )
    if name in BUILTIN:
        return make_rows(name, num, split=split, seed=seed, level=level)
    return make_gym_rows(name, num, split=split, seed=seed, settings=settings, level=level)


def as_prompt(prompt: Any, system: str | None, *, chat: bool) -> Any:
    """Convert a prompt of a source to the form that a run uses.

    Args:
        prompt: Text, or chat messages.
        system: System message to put first, unless the messages begin with one already. None or
            "": no system message.
        chat: Turn text into a user message. False: leave it as text.

    Raises:
        DataError: There is a system message, but the prompt is plain text.
    """
    if isinstance(prompt, str):
        if not chat and system:
            raise DataError("a system message needs chat prompts: leave chat=True, or drop system")
        if not chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    prompt = text_as_parts(prompt)
    if not system or prompt[0]["role"] == "system":
        return prompt
    in_parts = isinstance(prompt[0]["content"], list)
    content = [{"type": "text", "text": system}] if in_parts else system
    return [{"role": "system", "content": content}, *prompt]
