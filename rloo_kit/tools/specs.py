"""Loading of tools and environments: built in, from a file, from a package."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.scoring.specs import find_object
from rloo_kit.text.wording import did_you_mean, format_value
from rloo_kit.tools.calculator import calculator
from rloo_kit.tools.games import GuessNumber, Maze
from rloo_kit.tools.python import python
from rloo_kit.types import Say

TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
ENVIRONMENTS: dict[str, Callable[[], Any]] = {"guess_number": GuessNumber, "maze": Maze}


def load_tools(
    specs: Iterable[Any], base_dir: str | Path | None = None, say: Say | None = None
) -> list[Callable[..., Any]]:
    """Return the tools of a run file, in order.

    Args:
        specs: Functions, built-in names, ``file.py:function`` or ``package.module:function``.
        base_dir: Folder that relative paths start from; None: the working directory.
        say: Called with a line that names foreign code before it is imported.

    Raises:
        ConfigError: There is no such tool, or it is not a function.
        RewardLoadError: The file or module cannot be loaded.
    """
    return [_load(spec, "tool", TOOLS, base_dir, say) for spec in specs]


def load_environment(spec: Any, base_dir: str | Path | None = None, say: Say | None = None) -> Any:
    """Return the environment class of a run file, or a table of classes by name.

    Args:
        spec: A class, a built-in name, ``file.py:Class`` or ``package.module:Class``; a table of
            these by name; or None.
        base_dir: Folder that relative paths start from; None: the working directory.
        say: Called with a line that names foreign code before it is imported.

    Raises:
        ConfigError: There is no such environment.
        RewardLoadError: The file or module cannot be loaded.
    """
    if spec is None:
        return None
    if isinstance(spec, dict):
        return {name: load_environment(one, base_dir, say) for name, one in spec.items()}
    return _load(spec, "environment", ENVIRONMENTS, base_dir, say)


def _load(
    spec: Any,
    what: str,
    known: dict[str, Callable[..., Any]],
    base_dir: str | Path | None,
    say: Say | None,
) -> Callable[..., Any]:
    found = spec
    if isinstance(spec, str):
        found = known.get(spec) or find_object(spec, Path(base_dir or ""), say, what)
    if found is None:
        raise ConfigError(
            f"unknown {what} {format_value(spec)}{did_you_mean(spec, known)}; give "
            f"{''.join(f'{name}, ' for name in known)}file.py:NAME or package.module:NAME"
        )
    if not callable(found):
        raise ConfigError(f"{what} {format_value(spec)} cannot be called: give a function or class")
    return found
