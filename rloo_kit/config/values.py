"""Check of one value against its type hint and its rule; the message names the user's own key."""

import importlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rloo_kit.config.settings import Rule
from rloo_kit.text.wording import did_you_mean, format_name, format_value

WORDS = {
    bool: "true or false",
    dict: "a table",
    float: "a number",
    int: "a whole number",
    list: "a list",
    list[float]: "a list of numbers",
    list[int]: "a list of whole numbers",
    list[str]: "a list of texts",
    str: "text",
    tuple[float, float]: "a list of two numbers",
    type(None): "null",
}
NO_RULE = Rule()


def check_value(path: str, value: object, hint: Any, rule: Rule = NO_RULE) -> list[str]:
    """Return what is wrong with the value of a key such as ``trainer.beta``: [] or one sentence."""
    start = f"{path} is {format_value(value)}, must be"
    if not _fits(value, hint):
        is_text = isinstance(value, str) and float in _options(hint)
        note = " (YAML reads 1e-5 as text: write 1.0e-5)" if is_text else ""
        return [f"{start} {describe(hint)}{note}"]
    items = value if isinstance(value, list | tuple) else [value]
    choices = rule.choices or _rows_of(rule.table)
    wrong = [item for item in items if item is not None and item not in choices]
    if choices and wrong:
        names = [str(choice) for choice in choices]
        return [f"{start} among {', '.join(names)}{did_you_mean(str(wrong[0]), names)}"]
    if isinstance(value, int | float) and not _in_range(value, rule):
        return [f"{start} {describe_range(rule)}"]
    return []


def _rows_of(table: str) -> tuple[str, ...]:
    """Return the names in a table such as ``package.module:TABLE``; ``""`` has none."""
    if not table:
        return ()
    module, _, name = table.partition(":")
    return tuple(getattr(importlib.import_module(module), name))


def check_keys(section: str, names: Iterable[object], known: Iterable[str]) -> list[str]:
    """Return a sentence for each key that a section does not have."""
    known = set(known)
    return [
        f"unknown key {section}.{format_name(name)}{suggest(str(name), known)}"
        for name in names
        if name not in known
    ]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest one, or the few there are."""
    names = sorted(known)
    listed = f"; known are {', '.join(names)}" if len(names) <= 20 else "; drop it"
    return did_you_mean(name, names) or listed


def is_table(value: object, section: str, errors: list[str]) -> typing.TypeGuard[Mapping[Any, Any]]:
    """Return whether a section holds ``key: value`` lines; note an error where it holds others."""
    if value is not None and not isinstance(value, Mapping):
        errors.append(f"{section}: holds `key: value` lines, not {format_value(value)}")
    return isinstance(value, Mapping)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the hint alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in arguments)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple) or (origin is tuple and len(value) != 2):
            return False
        return all(_fits(item, arguments[0]) for item in value)
    if hint in (int, float):
        kinds = int if hint is int else int | float
        # what fits into 64 bits, and is no NaN or Inf
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, origin or hint)


def _in_range(value: float, rule: Rule) -> bool:
    return (
        (rule.minimum is None or value >= rule.minimum)
        and (rule.above is None or value > rule.above)
        and (rule.maximum is None or value <= rule.maximum)
        and (rule.below is None or value < rule.below)
    )


def describe(hint: Any) -> str:
    """Return a type in words, such as ``a number or null``."""
    words: list[str] = []
    for option in sorted(_options(hint), key=lambda option: option is type(None)):
        if typing.get_origin(option) is Literal:
            words += typing.get_args(option)
        else:
            words.append(WORDS.get(option) or WORDS[typing.get_origin(option)])
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def describe_range(rule: Rule) -> str:
    """Return the bounds of a rule in words; "" where it has none."""
    if rule.minimum is not None and rule.maximum is not None:
        return f"between {_number(rule.minimum)} and {_number(rule.maximum)}"
    bounds = {
        "at least": rule.minimum,
        "above": rule.above,
        "at most": rule.maximum,
        "below": rule.below,
    }
    given = [f"{word} {_number(bound)}" for word, bound in bounds.items() if bound is not None]
    return " and ".join(given)


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
