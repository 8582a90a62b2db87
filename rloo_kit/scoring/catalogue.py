"""What rewards there are, and what each one takes: the text behind ``rloo-kit rewards``."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo_kit.scoring.loading import named_rewards, plug_ins, reward_behind


@dataclass(frozen=True)
class Parameter:
    """One parameter of a reward, as a run file's table takes it."""

    name: str
    default: str
    """As Python writes it; "" where there is none."""
    text: str


@dataclass(frozen=True)
class Entry:
    """One reward that has a short name."""

    name: str
    summary: str
    """First line of its docstring."""
    origin: str
    """``built in``, or the package that brings it."""
    text: str
    """The whole docstring."""
    parameters: tuple[Parameter, ...]


def describe_rewards() -> list[Entry]:
    """Return every built-in reward and plug-in, by name; what cannot be imported says so."""
    return [_describe_or_say_why_not(name) for name in sorted(named_rewards())]


def describe_reward(name: str) -> Entry:
    """Return one reward's entry.

    Raises:
        RewardLoadError: There is none of this name, or it cannot be imported.
    """
    target = reward_behind(name)
    text = _docstring(target)
    return Entry(name, text.partition("\n")[0], _origin(name), text, tuple(_parameters(target)))


def entry_text(entry: Entry) -> str:
    """Return what ``rloo-kit rewards show`` prints."""
    lines = [f"{entry.name} ({entry.origin})", "", entry.text, "", "Parameters:"]
    for parameter in entry.parameters:
        default = f" = {parameter.default}" if parameter.default else " (must be given)"
        lines.append(f"  {parameter.name}{default}")
        lines += textwrap.wrap(
            parameter.text, 92, initial_indent="      ", subsequent_indent="      "
        )
    if not entry.parameters:
        lines.append("  none")
    needed = ", ".join(f"{p.name}: ..." for p in entry.parameters if not p.default)
    table = f"{{name: {entry.name}, weight: 0.5{', ' + needed if needed else ''}}}"
    return "\n".join([*lines, "", "In a run file:", "  rewards:", f"    - {table}"])


def _describe_or_say_why_not(name: str) -> Entry:
    try:
        return describe_reward(name)
    except Exception as exc:  # of a package that is none of ours
        reason = str(exc).partition("\n")[0]
        return Entry(name, f"cannot be used: {reason}", _origin(name), "", ())


def _origin(name: str) -> str:
    entry = plug_ins().get(name)
    if entry is None:
        return "built in"
    return f"from {entry.dist.name}" if entry.dist is not None else f"from {entry.module}"


def _docstring(target: Any) -> str:
    """Return the docstring; of an instance or a factory of one class, that class's."""
    while isinstance(target, functools.partial):
        target = target.func
    made = _made_by(target)
    return inspect.getdoc(made[0] if len(made) == 1 else target) or ""


def _parameters(target: Any) -> list[Parameter]:
    """Return what the target takes: fields of a dataclass, arguments of a factory.

    A plain reward function and an instance have none of their own, but for what a table fills in.
    """
    if not inspect.isclass(target) and dataclasses.is_dataclass(target):
        texts = _field_texts(type(target))
        return [
            Parameter(field.name, repr(getattr(target, field.name)), texts.get(field.name, ""))
            for field in dataclasses.fields(target)
            if field.init
        ]
    texts = _texts(target)
    return [
        Parameter(
            parameter.name,
            "" if parameter.default is parameter.empty else _default(parameter.default),
            texts.get(parameter.name, ""),
        )
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in COLUMNS
    ]


COLUMNS = frozenset({"completions", "prompts", "completion_ids", "trainer_state"})
"""Arguments that the trainer fills."""


def _default(value: Any) -> str:
    return "(its own)" if "factory" in repr(value) else repr(value)


def _texts(target: Callable[..., Any]) -> dict[str, str]:
    """Return the text beside each field of the class, or of the classes that a factory makes."""
    texts: dict[str, str] = {}
    for kind in [target] if inspect.isclass(target) else _made_by(target):
        texts.update(_field_texts(kind))
    _, _, arguments = (inspect.getdoc(target) or "").partition("\nArgs:\n")
    return {**texts, **dict(re.findall(r"^ {4}(\w+): (.+)$", arguments, re.MULTILINE))}


def _made_by(target: Any) -> list[type]:
    """Return the dataclasses that a factory says it returns."""
    if inspect.isclass(target) or not inspect.isfunction(target):
        return []
    try:
        made = typing.get_type_hints(target).get("return")
    except NameError:  # an annotation that only a type checker can read
        return []
    return [kind for kind in (made, *typing.get_args(made)) if dataclasses.is_dataclass(kind)]


def _field_texts(kind: type) -> dict[str, str]:
    """Return field -> the string that stands below it in the source, in one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # made at run time
            continue
        body = tree.body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                texts[field.target.id] = (
                    " ".join(str(text.value.value).split()) if is_text else ""  # type: ignore[attr-defined]
                )
    return texts
