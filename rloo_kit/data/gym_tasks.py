"""Tasks of the package reasoning-gym as prompts; ``rewards/gym.py`` scores their answers."""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import io
import json
import warnings
from collections.abc import Iterator
from typing import Any

from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line, format_name, format_value
from rloo_kit.types import Row

PREFIX = "reasoning_gym:"
HELD_OUT_ONE_IN = 4
_CHUNK = 256
MOST_NAMES = 20
"""Tasks, or settings, that an error lists where none is near."""


def make_gym_rows(
    name: str,
    num: int,
    *,
    split: str = "train",
    seed: int = 42,
    settings: dict[str, Any] | None = None,
) -> list[Row]:
    """Return up to ``num`` different problems of a reasoning-gym task.

    Args:
        name: ``reasoning_gym:TASK``.
        num: How many; fewer, with a warning, where the task runs out of different questions.
        split: ``held_out`` or another; a quarter of all questions is held out, by their text.
        seed: Of the task; it counts up by 256 as more are needed.
        settings: Of the task, under its own names.

    Returns:
        Rows with ``prompt``, ``task`` (as in ``name``), ``entry`` (the whole entry and the settings
        as JSON, for the verifier), and ``answer`` where the task has one right text.

    Raises:
        DataError: The package or the task is not there, or the task refuses its settings.
    """
    task, settings = name.removeprefix(PREFIX), settings or {}
    found: dict[str, Row] = {}
    for start in range(seed, seed + _CHUNK * (num + 1), _CHUNK):
        before = len(found)
        for entry in _entries(task, start, settings):
            if _is_held_out(entry["question"]) != (split == "held_out"):
                continue
            found.setdefault(entry["question"], _as_row(name, entry, settings))
            if len(found) == num:
                return list(found.values())
        if len(found) == before:
            break
    if found:
        warnings.warn(
            f"{name} has only {len(found)} different prompts of the {num} asked for in the split "
            f"{split!r}: other data.settings may give more",
            UserWarning,
            stacklevel=3,
        )
    return list(found.values())


def _is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _as_row(name: str, entry: dict[str, Any], settings: dict[str, Any]) -> Row:
    row = {"prompt": entry["question"], "task": name, "entry": _as_json(entry, settings, name)}
    return row if entry["answer"] is None else {**row, "answer": str(entry["answer"])}


# --- the package ---------------------------------------------------------------------------------


def _entries(task: str, seed: int, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries of one dataset of the package; some tasks print, and are kept from it."""
    create = _task_maker(task, settings)
    where = format_name(f"{PREFIX}{task}")
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            dataset = create(task, size=_CHUNK, seed=seed, **settings)
        except Exception as exc:  # each task checks in its own way, most by assert
            raise DataError(
                f"{where} refuses the settings {format_value(settings)} ({first_line(exc)}): "
                "change them in data.settings"
            ) from exc
    for index in range(_CHUNK):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                entry = dataset[index]
            except Exception as exc:
                raise DataError(
                    f"{where} cannot make a problem with the settings {format_value(settings)} "
                    f"({first_line(exc)}): change data.settings, or the seed"
                ) from exc
        yield entry


def _task_maker(task: str, settings: dict[str, Any]) -> Any:
    """Return ``reasoning_gym.create_dataset`` if the task and its settings have known names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library of it has invalid escapes
            package = importlib.import_module("reasoning_gym")
            known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as exc:
        raise DataError(
            f"{format_name(PREFIX + task)} needs the package reasoning-gym ({first_line(exc)}): "
            "pip install "
            '"rloo-kit[gym]"'
        ) from exc
    names = sorted(set(known) - {"composite"})  # a mixture: its entries name other tasks
    if task not in names:
        raise DataError(f"reasoning-gym has no task {format_value(task)}{_nearest(task, names)}")
    fields = [field.name for field in dataclasses.fields(known[task][1])]
    for key in settings:
        if key in ("seed", "size"):
            raise DataError(
                f"data.settings has {key!r}, which the kit sets: use "
                f"{'seed' if key == 'seed' else 'data.num_prompts'} of the run file in its place"
            )
        if key not in fields:
            own = [field for field in fields if field not in ("seed", "size")]
            raise DataError(
                f"{PREFIX}{task} has no setting {format_value(key)}{_nearest(str(key), own)}"
            )
    return package.create_dataset


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"; the nearest {'names are' if len(near) > 1 else 'name is'} {', '.join(near)}"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"; it has {', '.join(names[:MOST_NAMES])}{more}"


# --- an entry as text ----------------------------------------------------------------------------


def _as_json(entry: dict[str, Any], settings: dict[str, Any], name: str) -> str:
    """Return the entry as JSON from which it can be made again exactly.

    Some verifiers compare tuples or look up numbers as keys, which JSON has not: a tuple is written
    as ``{"__tuple__": [...]}`` and such a dict as ``{"__items__": [[key, value], ...]}``.
    """
    try:
        return json.dumps(_tagged({**entry, "settings": settings}))
    except TypeError as exc:
        raise DataError(
            f"an entry of {name} cannot be kept as text ({exc}): choose another task"
        ) from exc


def _tagged(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _tagged(item) for key, item in value.items()}
    return {"__items__": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
