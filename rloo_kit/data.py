"""Prompts: the built-in task, files, hub datasets.

Every dataset has a ``prompt`` column (chat messages, or a plain string with ``chat=False``); every
other column reaches the reward functions under its own name.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import DataError
from rloo_kit.tasks import make_arithmetic
from rloo_kit.types import Row

if TYPE_CHECKING:
    from datasets import Dataset

BUILTIN = ("arithmetic",)
FILE_TYPES = (".jsonl", ".csv", ".parquet")
NUM_BUILTIN_PROMPTS = 1024
MAX_HELD_OUT = 256


def load_prompts(
    name: str | Path,
    *,
    split: str = "train",
    num_prompts: int | None = None,
    system: str | None = None,
    chat: bool = True,
    seed: int = 42,
) -> "Dataset":
    """Return prompts as a Dataset with a ``prompt`` column and whatever else the source has.

    Args:
        name: ``arithmetic``, a .jsonl, .csv or .parquet file, or a hub dataset.
        split: Of a hub dataset; ``train`` or ``held_out`` of a built-in task.
        num_prompts: Keep the first so many (a built-in task makes 1,024 when None).
        system: A system message put before every prompt.
        chat: Make a plain string a user message, so that the model's chat template is applied.
        seed: Order and choice of a built-in task.

    Raises:
        DataError: No such source, no ``prompt`` column, no rows, or a bad line, with its number.
    """
    if str(name) in BUILTIN:
        rows = make_arithmetic(num_prompts or NUM_BUILTIN_PROMPTS, split=split, seed=seed)
    else:
        rows = _first(_read(str(name), split), num_prompts)
    if not rows:
        raise DataError(f"{str(name)!r} has no rows: put at least one prompt in it")
    return _as_dataset([_as_prompt(row, system, chat=chat) for row in rows])


def split_held_out(dataset: "Dataset", held_out: int | None) -> "tuple[Dataset, Dataset | None]":
    """Return (train, held-out): the last rows are kept out of training.

    Args:
        dataset: All prompts, n rows.
        held_out: How many; None: an eighth, at most 256; 0: none.

    Raises:
        DataError: Nothing would be left to train on.
    """
    size = len(dataset)
    kept = min(size // 8, MAX_HELD_OUT) if held_out is None else held_out
    if kept >= size:
        raise DataError(
            f"data.held_out {kept} leaves none of the {size} prompts to train on: lower it to at "
            f"most "
            f"{size - 1}"
        )
    if kept == 0:
        return dataset, None
    return dataset.select(range(size - kept)), dataset.select(range(size - kept, size))


# --- files and the hub ---------------------------------------------------------------------------


def _read(name: str, split: str) -> Iterable[Row]:
    path = Path(name).expanduser()
    looks_local = path.suffix.lower() in (*FILE_TYPES, ".json", ".txt") or name.startswith(
        (".", "/", "~")
    )
    if not path.exists() and not looks_local:
        return _read_hub(name, split)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(
            f"data file {name!r} {what}: give the path of a .jsonl, .csv or .parquet file"
        )
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise DataError(
            f"data file {name!r} is none of {', '.join(FILE_TYPES)}: convert it to .jsonl"
        )
    try:
        return list(readers[path.suffix.lower()](path))
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"data file {name!r} cannot be read: {exc}; save it as UTF-8 text") from exc


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as exc:
                raise DataError(
                    f"{path}, line {number}: not valid JSON ({exc.msg}); mend or delete it"
                ) from exc
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number}: holds a {type(row).__name__}, must be an object like "
                    f'{{"prompt": "..."}}'
                )
            yield _checked(row, f"{path}, line {number}")


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{place}: has not the {len(reader.fieldnames or [])} fields of line 1; "
                        f"mend it"
                    )
                yield _checked(row, place)
        except csv.Error as exc:
            raise DataError(
                f"{path}, line {reader.reader.line_num}: not valid CSV ({exc}); mend it"
            ) from exc


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as exc:
        raise DataError(
            f"{path} is not a whole Parquet file ({str(exc)[:120]}): write it again"
        ) from exc
    for number, row in enumerate(table.to_pylist(), 1):
        yield _checked(row, f"{path}, row {number}")


def _read_hub(name: str, split: str) -> Iterable[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as exc:  # hub, network, script and split errors have no common base
        raise DataError(
            f"data {name!r} is neither built in ({', '.join(BUILTIN)}), a file here, nor a hub "
            f"dataset "
            f"that can be loaded now ({type(exc).__name__}: {str(exc).splitlines()[0][:160]}): "
            f"check the "
            f"name, its split {split!r} and the network"
        ) from exc
    return (_checked(dict(row), f"{name}, row {n}") for n, row in enumerate(dataset, 1))


def _checked(row: Row, place: str) -> Row:
    """Return ``row`` if its prompt is a non-empty string or a list of chat messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return row
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            if not (isinstance(message, dict) and {"role", "content"} <= set(message)):
                raise DataError(f"{place}: every message of prompt needs `role` and `content`")
        return row
    if "prompt" not in row:
        raise DataError(
            f"{place}: has no `prompt`, only {sorted(map(str, row))}: rename the column to prompt"
        )
    raise DataError(f"{place}: prompt is {prompt!r}, must be text or a list of chat messages")


def _first(rows: Iterable[Row], num: int | None) -> list[Row]:
    kept = []
    for row in rows:
        if num is not None and len(kept) == num:
            break
        kept.append(row)
    return kept


def _as_prompt(row: Row, system: str | None, *, chat: bool) -> Row:
    prompt = row["prompt"]
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if system and isinstance(prompt, str):
        raise DataError("a system message needs chat prompts: leave chat=True, or drop system")
    if system and prompt[0].get("role") != "system":
        prompt = [{"role": "system", "content": system}, *prompt]
    return {**row, "prompt": prompt}


def _as_dataset(rows: list[Row]) -> "Dataset":
    import datasets

    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        columns[name] = [row.get(name) for row in rows]
    try:
        return datasets.Dataset.from_dict(columns)
    except Exception as exc:  # pyarrow: a column of mixed types
        raise DataError(
            f"a column holds values of different types ({str(exc).splitlines()[0][:160]}): give "
            f"each "
            f"column one type"
        ) from exc
