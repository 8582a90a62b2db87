"""Math datasets that have a short name, such as ``gsm8k``.

``gsm8k`` loads the dataset from the hub at a fixed commit. ``gsm8k:PATH`` reads rows with the same
columns from a file or a folder, such as a download of the dataset.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_kit.data.files import FILE_TYPES, PlacedRow, local_path, number_rows, read_rows
from rloo_kit.errors import DataError
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Row

# From the model cards of Qwen2.5-Math and Qwen3; used unless `data.system` is set
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
# Instruction that DAPO puts before and after each problem
_INSTRUCTION = re.compile(
    r"\A\s*Solve the following math problem step by step\..*?\n\n"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z",
    re.DOTALL,
)


@dataclass(frozen=True)
class HubTask:
    """A dataset of questions with one correct answer each."""

    repository: str
    revision: str  # commit, so that a run uses the same rows when the dataset changes
    subset: str | None  # configuration of the dataset; None: it has only one
    train: str | None  # split to train on; None: the dataset is only for evaluation
    held_out: str | None  # held-out split; None: the dataset has none
    needs: str  # names of the columns that it must have, for an error message
    convert: Callable[[Row], Row]  # converts a row to one with the columns `prompt`, `answer`, ...


def _gsm8k(row: Row) -> Row:
    worked, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer {format_value(worked or answer)} has no ####")
    return {"prompt": row["question"], "answer": answer.strip().replace(",", "")}


def _dapo_math(row: Row) -> Row:
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    answer = row["reward_model"]["ground_truth"]
    return {"prompt": _INSTRUCTION.sub("", text).strip(), "answer": str(answer)}


def _math500(row: Row) -> Row:
    return {
        "prompt": row["problem"],
        "answer": row["answer"],
        "level": row.get("level"),
        "subject": row.get("subject"),
    }


HUB_TASKS = {
    "gsm8k": HubTask(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "main",
        "train",
        "test",
        "question, answer",
        _gsm8k,
    ),
    "dapo-math": HubTask(
        "open-r1/DAPO-Math-17k-Processed",
        "31dd309567e3da778038cc87d868b6097a3ccf68",
        "en",
        "train",
        None,
        "prompt, reward_model.ground_truth",
        _dapo_math,
    ),
    "math500": HubTask(
        "HuggingFaceH4/MATH-500",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        None,
        None,
        "test",
        "problem, answer",
        _math500,
    ),
}


def hub_task(name: str) -> HubTask | None:
    """Return the entry NAME of ``HUB_TASKS`` for a name of the form ``NAME`` or ``NAME:PATH``.

    If there is no such entry, return None.
    """
    return HUB_TASKS.get(name.partition(":")[0])


def has_held_out_split(name: str) -> bool:
    """Return whether the dataset ``NAME`` or ``NAME:PATH`` has both a train and a held-out split.

    The result is False if PATH is a single file, which is read as one split.
    """
    task = hub_task(name)
    path = name.partition(":")[2]
    has_both = task is not None and None not in (task.train, task.held_out)
    return has_both and (not path or os.path.isdir(local_path(path)))


def read_hub_task(name: str, split: str) -> list[Row]:
    """Return the rows of a math dataset, without repeated questions.

    Args:
        name: ``NAME`` or ``NAME:PATH``.
        split: ``train`` or ``held_out``. If PATH is a single file, ``train`` means all of its
            rows. If the dataset is only for evaluation and thus has no training rows, ``train``
            means its held-out rows.

    Raises:
        DataError: The dataset cannot be loaded, it does not have the split, or a row does not have
            the columns of this dataset.
    """
    short, _, path = name.partition(":")
    task = HUB_TASKS[short]
    whole_file = path and not os.path.isdir(local_path(path))
    own = task.held_out if split == "held_out" else task.train or task.held_out
    if own is None or (whole_file and split == "held_out"):
        raise DataError(
            f"{short} has no held-out split: either the dataset itself has none, or the path after "
            "its name is a single file; set data.held_out to hold out the last of the training rows"
        )
    placed = _read_files(local_path(path), task, own) if path else _read_hub(short, task, own)
    rows = {}
    for place, row in placed:
        try:
            converted = task.convert(row)
            if not (converted["prompt"] or "").strip():
                raise ValueError("the question is empty")
        except Exception as exc:  # the type depends on what is wrong with the row
            raise DataError(
                f"{place} is not a row of {short}, whose rows have {task.needs} "
                f"({type(exc).__name__}: {first_line(exc)}): fix the row, or give the file without "
                "the name of the task and name its columns with data.columns"
            ) from exc
        rows.setdefault(converted["prompt"], converted)
    return list(rows.values())


def _read_files(path: Path, task: HubTask, split: str) -> Iterator[PlacedRow]:
    if not os.path.isdir(path):
        return read_rows(path)
    folder = path / task.subset if task.subset and (path / task.subset).is_dir() else path
    files = [one for one in sorted(folder.rglob(f"{split}*")) if one.suffix in FILE_TYPES]
    if not files:
        raise DataError(
            f"the folder {format_value(str(folder))} has no file {split}*.parquet, .jsonl or .csv: "
            "give the path of a file, or of a folder that has one"
        )
    return (placed for one in files for placed in read_rows(one))


def _read_hub(short: str, task: HubTask, split: str) -> Iterator[PlacedRow]:
    import datasets

    name = task.repository
    try:
        rows = datasets.load_dataset(name, task.subset, split=split, revision=task.revision)
    except Exception as exc:
        # Errors of the hub, the network or the split have no common base class
        raise DataError(
            f"{short} cannot be loaded from the hub now ({type(exc).__name__}: {first_line(exc)}): "
            f"check the network, or give a copy of {name} as {short}:PATH"
        ) from exc
    return number_rows(rows, name)
