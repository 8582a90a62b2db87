"""Functions that read files, folders and hub datasets, rename columns and check the prompts.

A text file (.jsonl, .csv) is read row by row, so that an error can name the line, and prompts can
be text in one row and messages in another. A table (Parquet, hub dataset) is read as a Dataset, so
that images stay encoded. Files are not copied to the cache of the library ``datasets``.
"""

import contextlib
import csv
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line, format_value, printable, where_missing
from rloo_kit.types import Row

if TYPE_CHECKING:
    from datasets import Dataset, Features

FILE_TYPES = (".jsonl", ".csv", ".parquet")
SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # files of a folder of `save_to_disk`
# Number of rows that are converted to Python objects at once
CHUNK = 10_000
# (place, row): file and line of a row, for error messages, and the row itself
PlacedRow = tuple[str, Row]


def read_source(  # noqa: PLR0913
    name: str,
    place: tuple[str | None, str],
    num: int | None,
    columns: Mapping[str, str],
    builtin: Iterable[str],
    change: Callable[[Any], Any],
    skip_empty: bool,
) -> "Dataset":
    """Return the first ``num`` rows of a file or hub dataset, with checked and converted prompts.

    Args:
        name: A file, a folder with a dataset, or the name of a dataset on the hub.
        place: (configuration, split) of a hub dataset; configuration None: see ``load_prompts``.
        num: Number of rows to read; None: all rows.
        columns: Columns to rename, as name in the kit -> name in the source.
        builtin: Names of the built-in tasks, which an error message lists.
        change: Function that converts a prompt of the source to the prompt to use.
        skip_empty: Leave out empty prompts, with a warning that says how many there are. False:
            empty prompts are an error.

    Raises:
        DataError: The source does not exist or cannot be read, a row is invalid, or ``columns`` is
            wrong: it uses a column twice, uses a missing column, or leaves no column ``prompt``.
    """
    import datasets

    path = local_path(name)
    key = columns.get("prompt", "prompt")
    table = features = None
    if os.path.isdir(path) or not (os.path.exists(path) or looks_local(name)):
        table = _read_hub(str(path), *place, builtin)
    elif path.suffix.lower() == ".parquet":
        table = _read_parquet(path)
    if table is None:
        placed = islice(read_rows(path), num)
    else:
        if key not in table.column_names:
            raise _without_prompt(name, key, table.column_names)
        table = table.select(range(len(table))[:num])
        prompts = table.select_columns(key)
        placed = number_rows(prompts, name)
        if not isinstance(prompts.features[key], datasets.Value):
            features = prompts.features  # messages may contain images, so their type is kept
    empty = []
    dataset = as_dataset(_changed_rows(placed, key, change, empty), features)
    if table is not None:
        dataset = replace_column(table, key, dataset)
    if empty and not skip_empty:
        raise DataError(
            f"there are empty prompts, {len(empty):,} in all, the first at {'; '.join(empty[:5])}: "
            f"fill them in, or leave them out with data.skip_empty: true (skip_empty=True)"
        )
    if empty:
        warnings.warn(f"{len(empty):,} empty prompts are left out", stacklevel=3)
        numbered = enumerate(iter_column(dataset, key))
        dataset = dataset.select([row for row, prompt in numbered if prompt is not None])
    return _renamed(dataset, columns)


def looks_local(name: str) -> bool:
    """Return whether a name refers to a file rather than to a hub dataset.

    Only the name is looked at; the file need not exist. The name of a file begins with ``.``, ``/``
    or ``~``, ends with the suffix of a data file, or has a dot and no slash.
    """
    is_file = name.lower().endswith((*FILE_TYPES, ".json", ".txt"))
    return is_file or name.startswith((".", "/", "~")) or ("/" not in name and "." in name)


def local_path(name: str) -> Path:
    """Return a name as a path, with ``~`` expanded."""
    return Path(os.path.expanduser(name))


def placed_rows(source: str | Path | Iterable[Row], columns: Sequence[str]) -> list[PlacedRow]:
    """Return every row of a file or list as (place, row), after checking its columns.

    ``place`` says where the row comes from (file and line, or row number), for error messages.

    Args:
        source: A .jsonl, .csv or .parquet file, or the rows themselves.
        columns: Columns that every row must have, each holding text or a list of chat messages.

    Raises:
        DataError: There are no rows, or one of ``columns`` is missing in a row or holds neither
            text nor chat messages.
    """
    if isinstance(source, str | Path):
        rows = list(read_rows(local_path(str(source))))
    else:
        rows = [(f"row {number}", row) for number, row in enumerate(source, 1)]
    if not rows:
        raise DataError("there are no rows: add at least one")
    for place, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{place}: is a {type(row).__name__}, but must be a dict of columns")
        for name in columns:
            if not isinstance(value := row.get(name), str):
                check_messages(value, name, place)
    return rows


def as_dataset(rows: Iterable[Row], features: "Features | None" = None) -> "Dataset":
    """Return rows as a Dataset. If a row does not have a column, its value there is None.

    Args:
        rows: The rows.
        features: Types of the columns; None: inferred from the values.

    Raises:
        DataError: A column has values of types that cannot be combined (integers and floats can),
            or values that cannot be stored.
    """
    import pyarrow

    types = {field.name: field.type for field in features.arrow_schema} if features else {}
    tables = [pyarrow.table({})]
    left = iter(rows)
    while chunk := list(islice(left, CHUNK)):
        columns = {}
        for name in dict.fromkeys(key for row in chunk for key in row):
            with _storing(f"the column {format_value(name)}"):
                name.encode()
                columns[name] = pyarrow.array([row.get(name) for row in chunk], types.get(name))
        tables.append(pyarrow.table(columns))
    with _storing("a column"):
        return _dataset(pyarrow.concat_tables(tables, promote_options="permissive"), features)


@contextlib.contextmanager
def _storing(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        # pyarrow raises many types of errors, for mixed types or unsupported values or names
        raise DataError(
            f"{what} cannot be stored ({first_line(exc)}): give all its values the same type, use "
            "only valid Unicode in texts, and at most 64 bits for a number"
        ) from exc


def _dataset(table: Any, features: "Features | None" = None) -> "Dataset":
    import datasets

    # Without a fingerprint datasets would pickle the whole table to compute one
    info = datasets.DatasetInfo(features=features)
    return datasets.Dataset(table, info, fingerprint=uuid.uuid4().hex)


def number_rows(dataset: "Dataset", name: str) -> Iterator[PlacedRow]:
    """Yield every row of a dataset as (place, row), where place is ``NAME, row N``.

    Values are returned as they are stored: an image is a dict with its bytes or path, not decoded.
    """
    tables = dataset.with_format("arrow").iter(CHUNK)
    rows = (row for table in tables for row in table.to_pylist())  # pyright: ignore[reportAttributeAccessIssue]
    for number, row in enumerate(rows, 1):
        yield f"{name}, row {number}", row


def iter_column(dataset: "Dataset", name: str) -> Iterator[Any]:
    """Return an iterator over the values of one column as they are stored (images not decoded)."""
    return (row[name] for _, row in number_rows(dataset.select_columns(name), ""))


# --- reading -------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[PlacedRow]:
    """Yield every row of a .jsonl, .csv or .parquet file as (place, row).

    ``place`` is the file and the line (Parquet: the row number), for error messages.

    Raises:
        DataError: The file is missing, has another type or cannot be read, or a line is invalid.
    """
    _check_file(path)
    kind = path.suffix.lower()
    if kind not in FILE_TYPES:
        raise DataError(
            f"data file {format_value(str(path))} is not one of {', '.join(FILE_TYPES)}: convert "
            "it to .jsonl"
        )
    if kind == ".parquet":
        yield from number_rows(_read_parquet(path), printable(str(path)))
        return
    try:
        yield from (_read_csv if kind == ".csv" else _read_jsonl)(path)
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(
            f"data file {format_value(str(path))} cannot be read: {first_line(exc)}; save it as "
            "UTF-8 text"
        ) from exc


def _check_file(path: Path) -> None:
    if not os.path.isfile(path):
        raise missing_file(str(path))


def missing_file(name: str, base: Path = Path()) -> DataError:
    """Return the error for a data file that is missing, or that is a folder.

    Args:
        name: Name of the file, as the user wrote it.
        base: Folder in which the file was looked for, besides the current folder.
    """
    what = "is a folder" if os.path.isdir(name) else where_missing(name, base)
    return DataError(
        f"data file {format_value(name)} {what}; give the path of a .jsonl, .csv or .parquet file"
    )


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
    where = printable(str(path))
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{where}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as exc:
                # A number of 5,000 digits, or [[[[[..., raises an error without `msg`
                reason = getattr(exc, "msg", first_line(exc))
                raise DataError(f"{place}: not valid JSON ({reason}); fix or delete it") from exc
            if not isinstance(row, dict):
                raise DataError(f"{place}: is a {type(row).__name__}, but must be a JSON object")
            yield place, row


def _read_csv(path: Path) -> Iterator[PlacedRow]:
    where = printable(str(path))
    csv.field_size_limit(2**31 - 1)  # test cases of code may exceed the default, 131,072 characters
    with path.open(encoding="utf-8-sig", newline="") as lines:
        header = lines.readline()
        lines.seek(0)
        delimiter = next((mark for mark in ",;\t" if mark in header), ",")
        reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
        try:
            for row in reader:
                place = f"{where}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{place}: must have {len(reader.fieldnames or ())} fields, as many as the "
                        "header in line 1: fix the row"
                    )
                yield place, row
        except csv.Error as exc:
            line = reader.reader.line_num
            raise DataError(
                f"{where}, line {line}: not valid CSV ({first_line(exc)}); fix it"
            ) from exc


def _read_parquet(path: Path) -> "Dataset":
    import pyarrow.parquet

    _check_file(path)
    try:
        return _dataset(pyarrow.parquet.read_table(path))
    except Exception as exc:
        # Errors of pyarrow and of datasets
        raise DataError(
            f"data file {format_value(str(path))} cannot be read as Parquet ({first_line(exc)}): "
            "write it again"
        ) from exc


def _read_hub(name: str, config: str | None, split: str, builtin: Iterable[str]) -> "Dataset":
    import datasets

    try:
        if not any(Path(name, file).is_file() for file in SAVED_TO_DISK):
            return datasets.load_dataset(name, config, split=split)
        saved = datasets.load_from_disk(name)
        if not isinstance(saved, datasets.DatasetDict):
            saved = datasets.DatasetDict({"train": saved})
        return saved[split].with_format(None)
    except Exception as exc:
        # Errors of the hub, the network, a script or a split have no common base class
        raise DataError(
            f"data {format_value(name)} is not one of {', '.join(builtin)}, is not a file here, "
            f"and cannot be loaded now as a folder or hub dataset ({type(exc).__name__}: "
            f"{first_line(exc)}): check the name, the split {format_value(split)}, the "
            "configuration (data.config) and the network"
        ) from exc


# --- columns and prompts -------------------------------------------------------------------------


def _changed_rows(
    placed: Iterable[PlacedRow], key: str, change: Callable[[Any], Any], empty: list[str]
) -> Iterator[Row]:
    """Check the prompt of each row, replace it by ``change(prompt)``, and yield the row.

    An empty prompt is replaced by None, and the place of its row is added to ``empty``.

    Args:
        placed: The rows.
        key: Column of the prompts.
        change: As for ``read_source``.
        empty: List to which the places of empty prompts are added.
    """
    for place, row in placed:
        if key not in row:
            raise _without_prompt(place, key, row)
        prompt = row[key]
        if not prompt or not str(prompt).strip():
            empty.append(place)
            yield {**row, key: None}
            continue
        if not isinstance(prompt, str):
            check_messages(prompt, "prompt", place)
        yield {**row, key: change(prompt)}


def replace_column(dataset: "Dataset", name: str, made: "Dataset") -> "Dataset":
    """Return a dataset with other columns in place of one of its columns.

    Args:
        dataset: The dataset.
        name: The column to drop.
        made: Dataset with the columns to use instead. If it has no rows, it is returned as it is,
            without the other columns of ``dataset``.
    """
    import datasets

    others = dataset.remove_columns(name)
    if not len(made) or not others.column_names:
        return made
    return datasets.concatenate_datasets([made, others], axis=1)


def _renamed(dataset: "Dataset", columns: Mapping[str, str]) -> "Dataset":
    there = dataset.column_names
    if not there:
        return dataset  # an empty file
    for new, old in columns.items():
        if old not in there:
            raise DataError(
                f"columns: {format_value(new)} should come from the column {format_value(old)}, "
                f"but the data has only {format_value(sorted(there))}: name one of these"
            )
        if new in there and new not in columns.values():
            raise DataError(
                f"columns would rename {format_value(old)} to {format_value(new)}, but the data "
                f"already has a column {format_value(new)}: leave this entry out to use the "
                "existing column, or rename the existing column in columns too"
            )
    names = {old: new for new, old in columns.items()}
    renamed = dataset.rename_columns(names)
    if len(names) < len(columns) or "prompt" not in renamed.column_names:
        raise DataError(
            f"columns {format_value(dict(columns))} leaves no column prompt, or uses a column "
            "twice: write {prompt: COLUMN} for the column that has the prompts, and copy a column "
            "in the data if you need it under two names"
        )
    return renamed


def _without_prompt(place: str, key: str, there: Iterable[str]) -> DataError:
    return DataError(
        f"{place}: has no `{printable(key)}`, only {format_value(sorted(map(str, there)))}: rename "
        "the column to prompt, or name it in data.columns, as in {prompt: question}"
    )


def check_messages(messages: object, name: str, place: str) -> None:
    """Check that a value is a list of chat messages, each with a role and a content.

    Args:
        messages: The value to check.
        name: Column of the value, for the error message.
        place: File and line of the value, for the error message.

    Raises:
        DataError: The value is not such a list.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{place}: {name} is {format_value(messages)}, must be text or a list of chat messages"
        )
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        content = fields.get("content", False)
        # A message with a tool call may have the content None
        fits = isinstance(content, str | list) or (content is None and len(fields) > 2)
        if not fits or not isinstance(fields.get("role"), str):
            raise DataError(
                f"{place}: a message of {name} is {format_value(message)}: it needs a `role`, "
                "which is text, and a `content`, which is text or a list of parts such as "
                "{type: text, text: ...}"
            )
