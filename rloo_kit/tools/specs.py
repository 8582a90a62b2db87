"""Functions that load tools and environments: built-in ones, or from a file or a package."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.scoring.specs import find_object
from rloo_kit.text.wording import did_you_mean, first_line, format_value
from rloo_kit.tools.calculator import calculator
from rloo_kit.tools.environments import Tool
from rloo_kit.tools.games import GuessNumber, Maze
from rloo_kit.tools.python import PythonSession, python
from rloo_kit.tools.search import search
from rloo_kit.types import Say

# Built-in tools, functions that make a tool from the parameters in a table, and environments
TOOLS = {"calculator": calculator, "python": python}
MADE = {"search": search}
ENVIRONMENTS = {"guess_number": GuessNumber, "maze": Maze, "python_session": PythonSession}


def load_tools(specs: Iterable[Any], base_dir: Path = Path(), say: Say | None = None) -> list[Tool]:
    """Return the tools that the key ``tools`` of a run file names, in the same order.

    Args:
        specs: Each spec is a function, a built-in name, ``file.py:function``,
            ``package.module:function``, or a table such as ``{name: search, file: notes.jsonl}``.
            In a table, ``name`` names a function that returns the tool. The function is called with
            the other keys as parameters.
        base_dir: Folder to which paths are relative, including the ``file`` of a table.
        say: Function that is called with a line of text before code of a file or package is run.

    Raises:
        ConfigError: There is no such tool, it is not a function, or a parameter is wrong.
        DataError: The file of the tool ``search`` cannot be read.
        RewardLoadError: The Python file or module of a tool cannot be loaded.
    """
    tools = []
    for spec in specs:
        if isinstance(spec, str) and spec in MADE:
            raise ConfigError(
                f"tool {spec} needs a table with its parameters, {{name: {spec}, ...}}"
            )
        if isinstance(spec, Mapping):
            tools.append(_made(dict(spec), base_dir, say))
        else:
            tools.append(_load(spec, "tool", TOOLS, base_dir, say))
    return tools


def _made(table: dict[str, Any], base_dir: Path, say: Say | None) -> Any:
    """Return the tool that a table describes.

    Raises:
        ConfigError: The tool has no parameters, or its function cannot be called with these
            parameters or does not return a function.
    """
    name = table.pop("name", None)
    if isinstance(name, str) and name in TOOLS:
        raise ConfigError(f"tool {name} has no parameters: write its name alone")
    make = _load(name, "tool", MADE, base_dir, say)
    if "file" in table:
        table["file"] = base_dir / Path(str(table["file"])).expanduser()
    try:
        tool = make(**table)
    except TypeError as exc:
        raise ConfigError(
            f"tool {format_value(name)} cannot be made from {format_value(table)}: "
            f"{first_line(exc)}"
        ) from exc
    if not callable(tool):
        raise ConfigError(
            f"tool {format_value(name)} is given as a table, so this function must return the "
            "tool, but it does not return a function: correct it or, if it is itself the tool, "
            "write its name without a table"
        )
    return tool


def load_environment(spec: Any, base_dir: Path = Path(), say: Say | None = None) -> Any:
    """Return the environment class that the key ``environment`` of a run file names.

    If the key holds a table of several classes, return a dict of classes by name. If the key is not
    set, return None.

    Args:
        spec: A class, a built-in name, ``file.py:Class`` or ``package.module:Class``. A dict whose
            values have one of these forms stands for several classes. None if the key is not set.
        base_dir: Folder to which paths are relative.
        say: Function that is called with a line of text before code of a file or package is run.

    Raises:
        ConfigError: There is no such environment.
        RewardLoadError: The file or module cannot be loaded.
    """
    if spec is None:
        return None
    if isinstance(spec, dict):
        return {name: load_environment(one, base_dir, say) for name, one in spec.items()}
    return _load(spec, "environment", ENVIRONMENTS, base_dir, say)


def _load(spec: Any, what: str, known: Mapping[str, Tool], base_dir: Path, say: Say | None) -> Tool:
    found = spec
    if isinstance(spec, str):
        found = known.get(spec) or find_object(spec, base_dir, say, what)
    if found is None:
        raise ConfigError(
            f"unknown {what} {format_value(spec)}{did_you_mean(spec, known)}; give "
            f"{', '.join([*known, 'file.py:NAME'])} or package.module:NAME"
        )
    if not callable(found):
        raise ConfigError(f"{what} {format_value(spec)} cannot be called: give a function or class")
    return found
