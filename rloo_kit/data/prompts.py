"""Prompts: built-in tasks, reasoning-gym's tasks, files, hub datasets.

Every dataset has a ``prompt`` column (chat messages, or a plain string with ``chat=False``); every
other column reaches the reward functions under its own name.
"""

import functools
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
# Made prompts are all in memory
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
        name: A built-in task, ``reasoning_gym:TASK``, a dataset of ``hub_tasks.py`` (``gsm8k``, or
            ``gsm8k:PATH`` for a copy), a .jsonl, .csv or .parquet file, a dataset's
            folder, or a hub dataset.
        split: Split of a hub dataset; ``train`` or ``held_out`` of a task.
        config: Configuration of a hub dataset; None: the only one.
        num_prompts: Keep the first N prompts; None: all (a task makes 1,024).
        system: A system message put before every prompt; None: that of ``gsm8k`` or ``dapo-math``,
            or none.
        chat: Make a plain string a user message, so that the model's chat template is applied.
        seed: Seed for the order and choice of a task's problems.
        columns: Names in the kit -> names in the file or hub dataset, such as
            ``{"prompt": "question", "answer": "solution"}``; other columns keep their names.
        level: Difficulty of a built-in or reasoning-gym task, one or several in equal parts; None:
            the first, or that of ``settings``.
        settings: Settings of a reasoning-gym task, under its own names.
        skip_empty: Leave out the empty prompts of a file or dataset; False: they are an error.

    Raises:
        DataError: The source is missing, empty or damaged, it has no column ``prompt``, or an
            argument has no effect on it.
    """
    name = str(name)
    is_made = name in BUILTIN or name.startswith(PREFIX)
    is_known = hub_task(name) is not None
    useless = {
        "config": config and (is_made or is_known or local_path(name).is_file()),
        "columns": columns and (is_made or is_known),
        "level": level is not None and not is_made,
        "settings": settings and not name.startswith(PREFIX),
        "skip_empty": skip_empty and (is_made or is_known),
    }
    for key, is_useless in useless.items():
        if is_useless:
            raise DataError(f"{key} has no effect on the prompts {format_value(name)}: drop it")
    if is_known and chat and system is None:
        system = SYSTEM
    change = functools.partial(as_prompt, system=system, chat=chat)
    if is_made or is_known:
        if is_made:
            num = num_prompts or NUM_BUILTIN_PROMPTS
            rows = _make_task(name, num, split, seed, level, settings)
        else:
            rows = read_hub_task(name, split)[:num_prompts]
        dataset = as_dataset({**row, "prompt": change(row["prompt"])} for row in rows)
    else:
        known = (*BUILTIN, *HUB_TASKS, f"{PREFIX}TASK")
        place = (config, split)
        dataset = read_source(name, place, num_prompts, columns or {}, known, change, skip_empty)
        path = local_path(name)
        dataset = store_images(dataset, path if path.is_dir() else path.parent, name)
    if not len(dataset):
        raise DataError(f"{format_value(name)} has no rows: put at least one prompt in it")
    return dataset


def is_task(name: str) -> bool:
    """Return whether prompts of this name have a held-out split of their own."""
    return name in BUILTIN or name.startswith(PREFIX) or has_held_out_split(name)


def count_levels(name: str) -> int:
    """Return the number of levels of a task; 0: it has none, or the prompts are not a task."""
    if name.startswith(PREFIX):
        return count_gym_levels(name)
    return LEVELS if name in BUILTIN else 0


def split_held_out(dataset: "Dataset", held_out: int | None) -> "tuple[Dataset, Dataset | None]":
    """Return (train, held-out): the last rows are kept out of training.

    ``held_out`` is their number; None: an eighth, at most 256; 0: none, and held-out is None.

    Raises:
        DataError: No prompt is left to train on.
    """
    size = len(dataset)
    kept = min(size // 8, MAX_HELD_OUT) if held_out is None else held_out
    if kept >= size:
        raise DataError(
            f"data.held_out {kept} leaves no prompt of {size} to train on: lower it to at most "
            f"{size - 1}"
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
    if split not in SPLITS:
        raise DataError(
            f"{format_name(name)} has the splits train and held_out, not {format_value(split)}: "
            "name one"
        )
    if name in BUILTIN:
        return make_rows(name, num, split=split, seed=seed, level=level)
    return make_gym_rows(name, num, split=split, seed=seed, settings=settings, level=level)


def as_prompt(prompt: Any, system: str | None, *, chat: bool) -> Any:
    """Return a prompt as a run uses it, with the system message first.

    Args:
        prompt: Text, or chat messages. Messages with a system message of their own keep it.
        system: The system message; None or "": none.
        chat: Make a text a user message; False: keep it as text.

    Raises:
        DataError: There is a system message, but the prompt is plain text.
    """
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        prompt = text_as_parts(prompt)
    if not system:
        return prompt
    if isinstance(prompt, str):
        raise DataError("a system message needs chat prompts: leave chat=True, or drop system")
    if prompt[0].get("role") == "system":
        return prompt
    in_parts = isinstance(prompt[0]["content"], list)
    content = [{"type": "text", "text": system}] if in_parts else system
    return [{"role": "system", "content": content}, *prompt]
