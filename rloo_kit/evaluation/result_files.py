"""Result files in a run's folder: ``eval.json`` and ``judge.json`` grow, their samples do not."""

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


def check_writable(folder: Path) -> None:
    """Make a folder for results before anything is computed for it.

    Raises:
        ConfigError: It cannot be written.
    """
    with _writing(folder / ".written") as path:
        path.touch()
        path.unlink()


def write_results(
    path: Path, name: str, result: dict[str, Any], samples: Path, rows: list[dict[str, Any]]
) -> str | None:
    """Add a result to ``{name: [result, ...]}`` and replace its samples.

    A file that cannot be read is kept under another name. Returns a line for people, None where the
    folder is not that of a run.

    Raises:
        ConfigError: The folder cannot be written.
    """
    found = read_json(path)
    if found is None and path.exists():
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    earlier = (found or {}).get(name)
    results = [*(earlier if isinstance(earlier, list) else []), result]
    lines = "".join(json.dumps(redact_tree(row)) + "\n" for row in rows)
    with _writing(path):
        write_json(path, redact_tree({name: results}), indent=1)
        write_atomically(samples, lines.encode())
    if not (path.parent / "run.yaml").is_file():
        return None
    return f"written to {path}"


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Path]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as exc:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({exc}): give another folder with --output"
        ) from exc
