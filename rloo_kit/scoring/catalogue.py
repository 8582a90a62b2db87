"""Catalogue of the built-in rewards with their docstrings and parameters.

``rloo-kit rewards`` and the generated documentation use it.
"""

import ast
import inspect
import itertools
import textwrap
import typing
from dataclasses import dataclass

from rloo_kit.errors import RewardLoadError
from rloo_kit.rewards import BUILTIN
from rloo_kit.text.wording import did_you_mean, format_value
from rloo_kit.types import Reward


@dataclass(frozen=True)
class Parameter:
    """Parameter of a reward, which can be set in the reward's table in a run file."""

    name: str
    default: str  # default value as Python code; "" if the parameter is required
    text: str  # what the parameter means


@dataclass(frozen=True)
class Entry:
    """Catalogue entry of one built-in reward."""

    name: str
    summary: str  # first line of the reward's docstring
    text: str  # the reward's whole docstring
    parameters: tuple[Parameter, ...]


def describe_rewards() -> list[Entry]:
    """Return the catalogue entries of all built-in rewards, sorted by name."""
    return [describe_reward(name) for name in sorted(BUILTIN)]


def describe_reward(name: str) -> Entry:
    """Return the catalogue entry of a built-in reward.

    Raises:
        RewardLoadError: There is no built-in reward of that name.
    """
    if name not in BUILTIN:
        raise RewardLoadError(
            f"there is no built-in reward {format_value(name)}{did_you_mean(name, BUILTIN)}; give "
            f"one of: {', '.join(sorted(BUILTIN))}"
        )
    target = BUILTIN[name]
    text = inspect.getdoc(target) or ""
    return Entry(name, text.partition("\n")[0], text, tuple(_parameters(target)))


def entry_text(entry: Entry) -> str:
    """Return the text that ``rloo-kit rewards show`` prints for a catalogue entry."""
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
    if entry.name == "format":  # `format` has no required parameter, but needs one of three
        needed = ", tags: [think, answer]"
    table = f"{{name: {entry.name}, weight: 0.5{needed}}}"
    return "\n".join([*lines, "", "In a run file:", "  rewards:", f"    - {table}"])


def _parameters(target: Reward) -> list[Parameter]:
    """Return the parameters of a built-in reward.

    The reward is a class, or a factory function whose return annotation is the union of the classes
    that it may return.
    """
    is_class = inspect.isclass(target)
    kinds = [target] if is_class else typing.get_args(typing.get_type_hints(target)["return"])
    texts = {}
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
    """Return the description of each field of a dataclass, as field name -> text on one line.

    The description is the string literal that follows the field in the source code.
    """
    texts = {}
    for base in reversed(kind.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for field, below in itertools.pairwise(getattr(tree.body[0], "body", ())):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts
