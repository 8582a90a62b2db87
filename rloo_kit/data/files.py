"""Files and hub datasets, read with their columns under the kit's names and their prompts checked.

A text file is read as rows, so that an error names its line. A table (Parquet, the hub) is read as
a Dataset, so that images stay as they are.
"""

import contextlib
import csv
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line, format_value, printable
from rloo_kit.types import Row

if TYPE_CHECKING:
    from datasets import Dataset

FILE_TYPES = (".jsonl", ".csv", ".parquet")
# Rows that are Python objects at a time
CHUNK = 10_000
# A row's file and line, as errors show it, and the row
PlacedRow = tuple[str, Row]


def read_source(
    name: str,
    split: str,
    num: int | None = None,
    columns: Mapping[str, str] | None = None,
    builtin: Iterable[str] = (),
) -> "Iterable[Row] | Dataset":
    """Return the first ``num`` rows of a file or a hub dataset.

    ``columns`` is name in the kit -> name in the source; an error lists the tasks ``builtin``.
    """
    path = local_path(name)
    looks_local = path.suffix.lower() in (*FILE_TYPES, ".json", ".txt") or name.startswith(
        (".", "/", "~")
    )
    if not os.path.exists(path) and not looks_local:
        return _checked_table(_read_hub(name, split, builtin), name, num, columns)
    _check_file(path)
    if path.suffix.lower() == ".parquet":
        return _checked_table(_read_parquet(path), str(path), num, columns)
    there = dict.fromkeys(key for _, row in _iter_rows(path) for key in row) if columns else {}
    return islice(_checked_rows(_iter_rows(path), _new_names(columns, list(there))), num)


def local_path(name: str) -> Path:
    """Return the path of a file, ``~`` resolved."""
    return Path(os.path.expanduser(name))


def read_rows(path: Path) -> list[PlacedRow]:
    """Return every row of a .jsonl, .csv or .parquet file, with its file and line."""
    return list(_iter_rows(path))


def placed_rows(source: str | Path | Iterable[Row], columns: Sequence[str]) -> list[PlacedRow]:
    """Return every row of a file or of a list, each with its place.

    Raises:
        DataError: There are none, or one of ``columns`` is neither text nor chat messages.
    """
    if isinstance(source, str | Path):
        rows = read_rows(local_path(str(source)))
    else:
        rows = [(f"row {number}", row) for number, row in enumerate(source, 1)]
    if not rows:
        raise DataError(f"there are no rows: give some with {' and '.join(columns)}")
    for place, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{place}: holds a {type(row).__name__}, must be an object")
        for name in columns:
            if not isinstance(value := row.get(name), str):
                check_messages(value, name, place)
    return rows


def _iter_rows(path: Path) -> Iterator[PlacedRow]:
    _check_file(path)
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"data file {format_value(str(path))} is none of {', '.join(FILE_TYPES)}: convert it "
            "to .jsonl"
        )
    try:
        yield from reader(path)
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(
            f"data file {format_value(str(path))} cannot be read: {first_line(exc)}; save it as "
            "UTF-8 text"
        ) from exc


def as_dataset(rows: Iterable[Row]) -> "Dataset":
    """Return rows as a Dataset; a column that some rows lack is None there."""
    import pyarrow

    parts: dict[str, list[Any]] = {}  # column -> arrays, one for each chunk of rows
    lengths: list[int] = []
    left = iter(rows)
    while chunk := list(islice(left, CHUNK)):
        for name in dict.fromkeys([*parts, *(key for row in chunk for key in row)]):
            arrays = parts.setdefault(name, [pyarrow.nulls(length) for length in lengths])
            with _storing(name):
                arrays.append(pyarrow.array([row.get(name) for row in chunk]))
        lengths.append(len(chunk))
    table = pyarrow.table({name: _joined(name, arrays) for name, arrays in parts.items()})
    return _dataset(table)


def _joined(name: str, arrays: list[Any]) -> Any:
    """Return one column of arrays whose types may differ, as integers and numbers do."""
    import pyarrow

    kinds = [pyarrow.schema([("", one)]) for one in {array.type for array in arrays}]
    with _storing(name):
        kind = pyarrow.unify_schemas(kinds, promote_options="permissive").field(0).type
        return pyarrow.chunked_array([array.cast(kind) for array in arrays], kind)


@contextlib.contextmanager
def _storing(name: str) -> Iterator[None]:
    try:
        name.encode()
        yield
    except Exception as exc:
        # From pyarrow: mixed types, values or names that it cannot hold.
        raise DataError(
            f"the column {format_value(name)} cannot be stored ({first_line(exc)}): give it "
            "values of one type, text in valid Unicode and numbers of at most 64 bits"
        ) from exc


def _dataset(table: Any, features: Any = None) -> "Dataset":
    import datasets

    return datasets.Dataset(
        datasets.table.InMemoryTable(table),  # pyright: ignore[reportAttributeAccessIssue] - a submodule that datasets imports
        info=features and datasets.DatasetInfo(features=features),
        # datasets would pickle the whole table for a name of its content
        fingerprint=uuid.uuid4().hex,
    )


def iter_prompts(dataset: "Dataset") -> Iterator[Any]:
    """Yield the prompts as they are stored; an image in one is its bytes or path."""
    for table in dataset.select_columns("prompt").with_format("arrow").iter(CHUNK):
        yield from table.column("prompt").to_pylist()  # type: ignore[union-attr]


def with_changed_prompts(dataset: "Dataset", change: Callable[[Any], Any]) -> "Dataset":
    """Return the dataset with other prompts; messages keep their type, for there may be images."""
    import datasets
    import pyarrow

    features, kind, arrays, is_same = None, None, [], True
    if not isinstance(next(iter_prompts(dataset), ""), str):
        features = datasets.Features({"prompt": dataset.features["prompt"]})
        kind = features.arrow_schema.field(0).type
    prompts = iter_prompts(dataset)
    while chunk := list(islice(prompts, CHUNK)):
        changed = [change(prompt) for prompt in chunk]
        is_same = is_same and changed == chunk
        arrays.append(pyarrow.array(changed, kind))
    if is_same:
        return dataset
    made = _dataset(pyarrow.table({"prompt": pyarrow.chunked_array(arrays)}), features)
    if dataset.column_names == ["prompt"]:
        return made
    both = datasets.concatenate_datasets([made, dataset.remove_columns("prompt")], axis=1)
    return both.select_columns(dataset.column_names)


# --- reading -------------------------------------------------------------------------------------


def _check_file(path: Path) -> None:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "does not exist"
        raise DataError(
            f"data file {format_value(str(path))} {what}: give the path of a .jsonl, .csv or "
            ".parquet file"
        )


def _place(path: Path, unit: str, number: int) -> str:
    return f"{printable(str(path))}, {unit} {number}"


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = _place(path, "line", number)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as exc:
                # A number of 5,000 digits; [[[[[...
                reason = getattr(exc, "msg", first_line(exc))
                raise DataError(f"{place}: not valid JSON ({reason}); fix or delete it") from exc
            if not isinstance(row, dict):
                raise DataError(f"{place}: holds a {type(row).__name__}, must be an object")
            yield place, row


def _read_csv(path: Path) -> Iterator[PlacedRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            count = len(reader.fieldnames or ())
            for row in reader:
                place = _place(path, "line", reader.line_num)
                if None in row or None in row.values():
                    raise DataError(f"{place}: must have the {count} fields of line 1; fix it")
                yield place, row
        except csv.Error as exc:
            place = _place(path, "line", reader.reader.line_num)
            raise DataError(f"{place}: not valid CSV ({first_line(exc)}); fix it") from exc


def _read_parquet_rows(path: Path) -> Iterator[PlacedRow]:
    tables: Any = _read_parquet(path).with_format("arrow").iter(CHUNK)
    for number, row in enumerate((row for table in tables for row in table.to_pylist()), 1):
        yield _place(path, "row", number), row


def _read_parquet(path: Path) -> "Dataset":
    import pyarrow.parquet

    try:
        return _dataset(pyarrow.parquet.read_table(path))
    except Exception as exc:
        # Errors of pyarrow and of datasets.
        raise DataError(
            f"data file {format_value(str(path))} cannot be read as Parquet ({first_line(exc)}): "
            "write it again"
        ) from exc


def _read_hub(name: str, split: str, builtin: Iterable[str]) -> "Dataset":
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as exc:
        # Hub, network, script and split errors have no common base.
        raise DataError(
            f"data {format_value(name)} is neither built in ({', '.join(builtin)}), a file here, "
            f"nor a hub dataset that can be loaded now ({type(exc).__name__}: "
            f"{first_line(exc)}): check the name, its split {format_value(split)} and the network"
        ) from exc


# --- columns and prompts -------------------------------------------------------------------------


def _checked_rows(placed: Iterable[PlacedRow], new_names: Mapping[str, str]) -> Iterator[Row]:
    for place, row in placed:
        renamed = {new_names.get(key, key): value for key, value in row.items()}
        _check_prompt(renamed, place, row)
        yield renamed


def _checked_table(
    dataset: "Dataset", name: str, num: int | None, columns: Mapping[str, str] | None
) -> "Dataset":
    if num is not None:
        dataset = dataset.select(range(min(num, len(dataset))))
    new_names = _new_names(columns, dataset.column_names)
    renamed = dataset.rename_columns(new_names) if new_names else dataset
    if "prompt" not in renamed.column_names:
        _check_prompt({}, name, dataset.column_names)
    for number, prompt in enumerate(iter_prompts(renamed), 1):
        _check_prompt({"prompt": prompt}, f"{name}, row {number}")
    return renamed


def _new_names(columns: Mapping[str, str] | None, there: list[str]) -> dict[str, str]:
    """Return name in the source -> name in the kit, of the columns that change it."""
    columns = columns or {}
    for new, old in columns.items():
        if there and old not in there:
            raise DataError(
                f"columns names {format_value(old)} as the source of {format_value(new)}, and "
                f"there are only {format_value(sorted(map(str, there)))}: name one of these"
            )
    wanted = {new: old for new, old in columns.items() if new != old}
    new_names = {old: new for new, old in wanted.items()}
    for new in wanted:
        if new in there and new not in new_names:
            raise DataError(f"columns makes {format_value(new)}, which exists already: rename that")
    return new_names if there else {}


def _check_prompt(row: Mapping[str, Any], place: str, there: Iterable[str] = ()) -> None:
    """Refuse a row whose prompt is neither a non-empty text nor a list of chat messages."""
    if "prompt" not in row:
        raise DataError(
            f"{place}: has no `prompt`, only {format_value(sorted(map(str, there)))}: rename the "
            "column to prompt, or name it with columns, as in {prompt: question}"
        )
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        check_messages(prompt, "prompt", place)


def check_messages(messages: object, name: str, place: str) -> None:
    """Refuse what is no list of chat messages that a chat template can render.

    Raises:
        DataError: It says where, and what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{place}: {name} is {format_value(messages)}, must be text or a list of chat messages"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise DataError(f"{place}: every message of {name} needs `role` and `content`")
        role, content = message["role"], message["content"]
        # A tool call has no content.
        fits = isinstance(content, str | list) or (content is None and len(message) > 2)
        if not fits or not isinstance(role, str):
            raise DataError(
                f"{place}: a message of {name} has the role {format_value(role)} and the content "
                f"{format_value(content)}: the role must be text, the content text or a list of "
                "parts such as {type: text, text: ...}"
            )
