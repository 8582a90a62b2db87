"""What is found of a run after it: files beside its record, that only grow."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import read_json
from rloo_kit.errors import ConfigError
from rloo_kit.output_folder import write_atomically, write_json
from rloo_kit.text.redaction import redact_tree


def check_place(folder: Path) -> None:
    """Make a folder for results, before anything is computed for it.

    Raises:
        ConfigError: It cannot be written.
    """
    with _writing(folder / ".written") as path:
        path.touch()
        path.unlink()


def add_result(path: Path, name: str, result: dict[str, Any]) -> None:
    """Add a result to the list ``name`` of a JSON file, which is whole or as it was.

    Raises:
        ConfigError: The folder cannot be written.
    """
    found = read_json(path)
    if found is None and path.exists():  # what is in it may still be read by somebody
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    earlier = (found or {}).get(name)
    results = [*(earlier if isinstance(earlier, list) else []), result]
    with _writing(path):
        write_json(path, redact_tree({name: results}), indent=1)


def replace_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON in the place of those that were there.

    Raises:
        ConfigError: The folder cannot be written.
    """
    text = "".join(json.dumps(redact_tree(row)) + "\n" for row in rows)
    with _writing(path):
        write_atomically(path, text.encode())


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Path]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as exc:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({exc}): give another folder with --output"
        ) from exc
