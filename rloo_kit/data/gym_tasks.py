"""Prompts from tasks of the package reasoning-gym; ``rewards/gym.py`` scores the answers."""

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from rloo_kit.data.tasks import is_kept_by_hash
from rloo_kit.errors import DataError
from rloo_kit.text.wording import did_you_mean, first_line, format_name, format_value
from rloo_kit.types import Row

PREFIX = "reasoning_gym:"
HELD_OUT_ONE_IN = 4
_CHUNK = 256


def make_gym_rows(
    name: str,
    num: int,
    *,
    split: str = "train",
    seed: int = 42,
    settings: dict[str, Any] | None = None,
    level: int | list[int] | None = None,
) -> list[Row]:
    """Return up to ``num`` different problems of a reasoning-gym task, as rows of a dataset.

    The columns are ``prompt``, ``task`` and ``entry``. ``entry`` is the whole problem and its
    settings as JSON, which the verifier reads. There is also ``answer`` if the problem has one
    answer, and ``level`` if a level was requested.

    Args:
        name: ``reasoning_gym:TASK``.
        num: Number of problems. If the task has fewer different problems, all of them are returned,
            with a warning.
        split: ``train`` or ``held_out``. A hash of the question puts a quarter of all problems
            into the held-out split.
        seed: Seed of the problems.
        settings: Settings of the task, which override those of its level.
        level: A level of the task's curriculum, counted from 1, or a list of levels to alternate
            between. None: the task's default settings.

    Raises:
        DataError: reasoning-gym is not installed or has no such task or level, or the task cannot
            make problems with these settings.
    """
    if level is None:
        return _make_rows(name, num, split, seed, settings or {})
    by_level = []
    levels = level if isinstance(level, list) else [level]
    for place, one in enumerate(levels[:num]):
        own = {**_level_settings(name, one), **(settings or {})}
        made = _make_rows(name, (num - place - 1) // len(levels) + 1, split, seed, own)
        by_level.append([{**row, "level": one} for row in made])
    return [row for turn in zip_longest(*by_level) for row in turn if row is not None]


def count_gym_levels(name: str) -> int:
    """Return the number of levels in a task's curriculum, or 0 if the task has no curriculum."""
    factory, task = _factory(name)
    curriculum = factory.CURRICULA.get(task)
    attributes = curriculum().attributes.values() if curriculum else ()
    return max((len(attribute.levels) for attribute in attributes), default=0)


def _level_settings(name: str, level: int) -> dict[str, Any]:
    """Return the settings of one level of a task's curriculum.

    An attribute of the curriculum that has fewer levels uses its last level.
    """
    last = count_gym_levels(name)
    if type(level) is not int or not 1 <= level <= last:
        there = f"the levels 1 to {last}, not {format_value(level)}" if last else "no levels"
        raise DataError(f"{format_name(name)} has {there}: change data.level or set data.settings")
    factory, task = _factory(name)
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

    curriculum = factory.CURRICULA[task]()
    curriculum.set_global_level(level - 1)
    context = DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND)
    config = vars(curriculum.generate_configuration(context=context))
    fields = ("field_name", "lower_field_name", "upper_field_name")
    attributes = curriculum.attributes.values()
    names = [vars(attribute).get(field) for attribute in attributes for field in fields]
    return {name: config[name] for name in names if name}


def _make_rows(name: str, num: int, split: str, seed: int, settings: dict[str, Any]) -> list[Row]:
    found = {}
    for start in range(seed, seed + _CHUNK * (num + 1), _CHUNK):
        before = len(found)
        for entry in _entries(name, start, settings):
            question = entry["question"]
            if is_kept_by_hash(question, HELD_OUT_ONE_IN) != (split == "held_out"):
                continue
            content = json.dumps(_tagged({**entry, "settings": settings}))
            row = {"prompt": question, "task": name, "entry": content}
            if entry["answer"] is not None:
                row["answer"] = str(entry["answer"])
            found.setdefault(question, row)
            if len(found) == num:
                return list(found.values())
        if len(found) == before:
            break
    if found:
        warnings.warn(
            f"{name} has only {len(found)} different prompts of the {num} requested: other "
            "data.settings may give more",
            stacklevel=4,
        )
    return list(found.values())


# --- the package ---------------------------------------------------------------------------------


def _entries(name: str, seed: int, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield problems of a task, each made only when needed, since some take half a second.

    Raises:
        DataError: The settings are wrong, or the task cannot make problems with them.
    """
    for key in {"seed", "size"} & settings.keys():
        raise DataError(
            f"data.settings has {key!r}: leave it out; the run's seed replaces seed, and "
            "data.num_prompts replaces size"
        )
    factory, task = _factory(name)
    dataset = None
    for index in range(_CHUNK):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                dataset = dataset or factory.create_dataset(
                    task, size=_CHUNK, seed=seed, **settings
                )
                entry = dataset[index]
        except Exception as exc:
            # Each task checks its settings in its own way, most with assert
            raise DataError(
                f"{format_name(name)} cannot make prompts with the settings "
                f"{format_value(settings)} ({first_line(exc)}): change data.settings, the level "
                "or the seed"
            ) from exc
        yield entry


def _factory(name: str) -> tuple[Any, str]:
    """Import ``reasoning_gym.factory``, and return the module and the task's name in it.

    Raises:
        DataError: reasoning-gym is not installed or has no such task.
    """
    try:
        with warnings.catch_warnings():
            # A library that reasoning-gym imports has invalid escape sequences
            warnings.simplefilter("ignore")
            from reasoning_gym import factory
    except ImportError as exc:
        raise DataError(
            f"{format_name(name)} needs the package reasoning-gym ({first_line(exc)}): "
            "pip install reasoning-gym"
        ) from exc
    task = name.removeprefix(PREFIX)
    # `composite` is a mixture, whose entries have the names of other tasks
    names = set(factory.DATASETS) - {"composite"}
    if task not in names:
        raise DataError(
            f"reasoning-gym has no task {format_value(task)}{did_you_mean(task, names)}"
        )
    return factory, task


# --- an entry as text ----------------------------------------------------------------------------


def _tagged(value: object) -> Any:
    # JSON has neither tuples nor numbers as keys, but some verifiers need them
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": _tagged([*value])}
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _tagged(item) for key, item in value.items()}
    return {"__items__": _tagged([[*pair] for pair in value.items()])}
