"""Files and hub datasets, read with their columns under the kit's names and their prompts checked.

A text file comes as rows, so that a fault is named with its line. A table (Parquet, the hub) comes
as the Dataset it is, so that images stay as they are.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import DataError
from rloo_kit.types import Row

if TYPE_CHECKING:
    from datasets import Dataset

FILE_TYPES = (".jsonl", ".csv", ".parquet")
PlacedRow = tuple[str, Row]
"""Where a row stands, in words, and the row."""


def read_source(
    name: str,
    split: str,
    num: int | None = None,
    columns: Mapping[str, str] | None = None,
    builtin: Iterable[str] = (),
) -> "list[Row] | Dataset":
    """Return the first ``num`` rows of a file or a hub dataset.

    Args:
        name: A .jsonl, .csv or .parquet file, or a hub dataset.
        split: Of a hub dataset.
        num: None: all.
        columns: Name in the kit -> name in the source; other columns keep theirs.
        builtin: Names that would have been neither, for the error's text.

    Raises:
        DataError: It cannot be read, a column of ``columns`` is not there, or a prompt is none.
    """
    path = Path(name).expanduser()
    looks_local = path.suffix.lower() in (*FILE_TYPES, ".json", ".txt") or name.startswith(
        (".", "/", "~")
    )
    if not path.exists() and not looks_local:
        return _checked_table(_read_hub(name, split, builtin), name, num, columns)
    _check_file(path)
    if path.suffix.lower() == ".parquet":
        return _checked_table(_read_parquet(path), str(path), num, columns)
    return _checked_rows(read_rows(path), columns)[:num]


def read_rows(path: Path) -> list[PlacedRow]:
    """Return every row of a .jsonl, .csv or .parquet file, with the place where it stands.

    Raises:
        DataError: It cannot be read, or a line is no row.
    """
    _check_file(path)
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"data file {str(path)!r} is none of {', '.join(FILE_TYPES)}: convert it to .jsonl"
        )
    try:
        return list(reader(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(
            f"data file {str(path)!r} cannot be read: {exc}; save it as UTF-8 text"
        ) from exc


def _check_file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(
            f"data file {str(path)!r} {what}: give the path of a .jsonl, .csv or .parquet file"
        )


def as_dataset(rows: list[Row]) -> "Dataset":
    """Return rows as a Dataset; a column that some rows lack is None there.

    Raises:
        DataError: A column holds values of different types.
    """
    import datasets

    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        columns[name] = [row.get(name) for row in rows]
    try:
        return datasets.Dataset.from_dict(columns)
    except Exception:  # pyarrow: a column of mixed types, or values it cannot hold
        for name, values in columns.items():
            _check_column(name, values)
        raise


def _check_column(name: str, values: list[Any]) -> None:
    import datasets

    try:
        datasets.Dataset.from_dict({name: values})
    except Exception as exc:
        raise DataError(
            f"the column {name!r} cannot be stored ({str(exc).splitlines()[0][:160]}): give it "
            "values of one type, text in valid Unicode and numbers of at most 64 bits"
        ) from exc


def raw_prompts(dataset: "Dataset") -> list[Any]:
    """Return the prompts as they are stored; an image in one is its bytes or path."""
    return dataset.select_columns("prompt").with_format("arrow")[:].column("prompt").to_pylist()


# --- reading -------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
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
            yield f"{path}, line {number}", row


def _read_csv(path: Path) -> Iterator[PlacedRow]:
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
                yield place, row
        except csv.Error as exc:
            raise DataError(
                f"{path}, line {reader.reader.line_num}: not valid CSV ({exc}); mend it"
            ) from exc


def _read_parquet_rows(path: Path) -> Iterator[PlacedRow]:
    for number, row in enumerate(_read_table(path).to_pylist(), 1):
        yield f"{path}, row {number}", row


def _read_parquet(path: Path) -> "Dataset":
    import datasets
    import pyarrow

    table = _read_table(path)
    for place, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):  # pandas' categories
            values = table.column(place).cast(field.type.value_type)
            table = table.set_column(place, field.name, values)
    try:
        return datasets.Dataset(datasets.table.InMemoryTable(table))
    except Exception as exc:
        raise DataError(
            f"{path} holds a column that datasets cannot take ({str(exc).splitlines()[0][:160]}): "
            "write it without that column"
        ) from exc


def _read_table(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as exc:
        raise DataError(
            f"{path} is not a whole Parquet file ({str(exc)[:120]}): write it again"
        ) from exc
    except OSError as exc:
        raise DataError(f"data file {str(path)!r} cannot be read: {exc}") from exc


def _read_hub(name: str, split: str, builtin: Iterable[str]) -> "Dataset":
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as exc:  # hub, network, script and split errors have no common base
        raise DataError(
            f"data {name!r} is neither built in ({', '.join(builtin)}), a file here, nor a hub "
            f"dataset that can be loaded now ({type(exc).__name__}: "
            f"{str(exc).splitlines()[0][:160]}): check the name, its split {split!r} and the "
            f"network"
        ) from exc


# --- columns and prompts -------------------------------------------------------------------------


def _checked_rows(placed: list[PlacedRow], columns: Mapping[str, str] | None) -> list[Row]:
    new_names = _new_names(columns, list({key: None for _, row in placed for key in row}))
    rows = []
    for place, row in placed:
        renamed = {new_names.get(key, key): value for key, value in row.items()}
        if "prompt" not in renamed:
            raise DataError(_no_prompt(place, row))
        _check_prompt(renamed["prompt"], place)
        rows.append(renamed)
    return rows


def _checked_table(
    dataset: "Dataset", name: str, num: int | None, columns: Mapping[str, str] | None
) -> "Dataset":
    if num is not None:
        dataset = dataset.select(range(min(num, len(dataset))))
    new_names = _new_names(columns, dataset.column_names)
    renamed = dataset.rename_columns(new_names) if new_names else dataset
    if "prompt" not in renamed.column_names:
        raise DataError(_no_prompt(name, dataset.column_names))
    for number, prompt in enumerate(raw_prompts(renamed), 1):
        _check_prompt(prompt, f"{name}, row {number}")
    return renamed


def _new_names(columns: Mapping[str, str] | None, there: list[str]) -> dict[str, str]:
    """Return name in the source -> name in the kit, of the columns that change it."""
    columns = columns or {}
    if not all(isinstance(name, str) for pair in columns.items() for name in pair):
        raise DataError(f"columns is {columns!r}, must be texts, as in {{prompt: question}}")
    wanted = {new: old for new, old in columns.items() if new != old}
    for new, old in columns.items():
        if there and old not in there:
            raise DataError(
                f"columns names {old!r} as the source of {new!r}, and there are only "
                f"{sorted(map(str, there))}: name one of these"
            )
    new_names = {old: new for new, old in wanted.items()}
    if len(new_names) < len(wanted):
        raise DataError(f"columns gives one column two names ({wanted}): keep one of them")
    for new in wanted:
        if new in there and new not in new_names:
            raise DataError(
                f"columns makes {wanted[new]!r} the column {new!r}, which there is already: give "
                f"that one another name too, such as {{{new}: {wanted[new]}, old_{new}: {new}}}"
            )
    return new_names if there else {}


def _no_prompt(place: str, there: Iterable[object]) -> str:
    return (
        f"{place}: has no `prompt`, only {sorted(map(str, there))}: rename the column to prompt, "
        "or name it with columns, as in {prompt: question}"
    )


def _check_prompt(prompt: Any, place: str) -> None:
    """Refuse what is neither a non-empty text nor a list of chat messages."""
    if isinstance(prompt, str) and prompt.strip():
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place}: prompt is {prompt!r}, must be text or a list of chat messages")
    for message in prompt:
        if not (isinstance(message, dict) and {"role", "content"} <= set(message)):
            raise DataError(f"{place}: every message of prompt needs `role` and `content`")
