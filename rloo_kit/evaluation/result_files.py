"""What is found of a run after it: files beside its record, that only grow."""

import json
import os
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import read_json
from rloo_kit.errors import ConfigError
from rloo_kit.text.redaction import redact_tree


def check_place(folder: Path) -> None:
    """Make a folder for results, before anything is computed for it.

    Raises:
        ConfigError: It cannot be written.
    """
    _replace(folder / ".written", "")
    (folder / ".written").unlink(missing_ok=True)


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
    _replace(path, json.dumps(redact_tree({name: results}), indent=1) + "\n")


def replace_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as lines of JSON in the place of those that were there.

    Raises:
        ConfigError: The folder cannot be written.
    """
    _replace(path, "".join(json.dumps(redact_tree(row)) + "\n" for row in rows))


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as exc:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({exc}): give another folder with --output"
        ) from exc
