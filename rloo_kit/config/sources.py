"""Find the settings of another library in its source code.

The library is not imported, because importing TRL or PEFT takes seconds.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rloo_kit.errors import ConfigError


@cache
def fields_of(package: str, file: str, name: str) -> dict[str, ast.AnnAssign]:
    """Return a dict from field name to the AST node that defines the field in a class.

    Inherited fields are left out.

    Args:
        package: Name of the package.
        file: Path of the source file in the package.
        name: Name of the class.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = find_spec(package)
    if spec is None:
        raise ConfigError(
            f"{package} is not installed: run `rloo-kit doctor`, which shows the version to install"
        )
    tree = ast.parse((Path(spec.origin or "").parent / file).read_text("utf-8"))
    (source,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {ast.unparse(n.target): n for n in source.body if isinstance(n, ast.AnnAssign)}
