"""Catalogue of rewards with docstrings and parameters, for ``rloo-kit rewards``."""

import ast
import inspect
import itertools
import textwrap
import typing
from dataclasses import dataclass

from rloo_kit.rewards import BUILTIN
from rloo_kit.scoring.specs import reward_behind
from rloo_kit.types import Reward


@dataclass(frozen=True)
class Parameter:
    """One parameter of a reward, as a table in a run file gives it."""

    name: str
    default: str  # as Python writes it; "" without one
    text: str


@dataclass(frozen=True)
class Entry:
    """One reward with a short name."""

    name: str
    summary: str  # first line of its docstring
    text: str  # the whole docstring
    parameters: tuple[Parameter, ...]


def describe_rewards() -> list[Entry]:
    """Return every built-in reward, by name."""
    return [describe_reward(name) for name in sorted(BUILTIN)]


def describe_reward(name: str) -> Entry:
    """Return one reward's entry."""
    target = reward_behind(name)
    text = inspect.getdoc(target) or ""
    return Entry(name, text.partition("\n")[0], text, tuple(_parameters(target)))


def entry_text(entry: Entry) -> str:
    """Return the text that ``rloo-kit rewards show`` prints."""
    lines = [entry.name, "", entry.text, "", "Parameters:"]
    for parameter in entry.parameters:
        default = f" = {parameter.default}" if parameter.default else " (must be given)"
        lines.append(f"  {parameter.name}{default}")
        lines += textwrap.wrap(
            parameter.text, 92, initial_indent="      ", subsequent_indent="      "
        )
    if not entry.parameters:
        lines.append("  none")
    needed = "".join(f", {p.name}: ..." for p in entry.parameters if not p.default)
    table = f"{{name: {entry.name}, weight: 0.5{needed}}}"
    return "\n".join([*lines, "", "In a run file:", "  rewards:", f"    - {table}"])


def _parameters(target: Reward) -> list[Parameter]:
    """Return the parameters of a class, or of a function that makes several classes."""
    is_class = inspect.isclass(target)
    kinds = [target] if is_class else typing.get_args(typing.get_type_hints(target)["return"])
    texts: dict[str, str] = {}
    for kind in kinds:
        texts |= _field_texts(kind)
    values = {
        p.name: "" if p.default is p.empty else repr(p.default)
        for p in inspect.signature(target).parameters.values()
        if not p.name.startswith("_")
    }
    return [
        Parameter(name, "(its own)" if "factory" in value else value, texts[name])
        for name, value in values.items()
    ]


def _field_texts(kind: type) -> dict[str, str]:
    """Return a dict from the name of each field to the string below it, joined into one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for field, below in itertools.pairwise(getattr(tree.body[0], "body", ())):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts
