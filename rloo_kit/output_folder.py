"""The folder that a command writes: a new one, so that nothing is overwritten, and its lock."""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError

LOCK = "run.lock"


def free_folder(wanted: str | Path) -> Path:
    """Return ``wanted``, or the next ``wanted-N`` that does not exist; nothing is made.

    Raises:
        ConfigError: It would lie in a file, or has no name.
    """
    wanted = Path(wanted)
    folder = next(folder for folder in _numbered(wanted) if not os.path.lexists(folder))
    parent = next(p for p in folder.absolute().parents if os.path.lexists(p))
    if not parent.is_dir():
        raise ConfigError(
            f"output_dir {str(wanted)!r} lies in {str(parent)!r}, which is a file: choose another"
        )
    return folder


def make_run_folder(wanted: str | Path) -> Path:
    """Make ``wanted``, or the next ``wanted-N`` that does not exist, and return it.

    Processes that ask at the same moment each get their own.

    Raises:
        ConfigError: It cannot be made.
    """
    wanted = Path(wanted)
    try:
        free_folder(wanted).parent.mkdir(parents=True, exist_ok=True)
        folders = _numbered(wanted)
        while True:
            folder = next(folders)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except (OSError, ValueError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(
            f"output_dir {str(wanted)!r} cannot be written ({exc}): choose another"
        ) from exc


def _numbered(wanted: Path) -> Iterator[Path]:
    if not wanted.name:
        raise ConfigError(
            f"output_dir {str(wanted)!r} has no name that a number could be added to: choose a "
            f"folder such as 'runs/first'"
        )
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def latest_folder(wanted: str | Path) -> Path | None:
    """Return the run folder with the highest number among ``wanted``, ``wanted-2``, ...

    A run folder has run.yaml or metrics.jsonl. Another run whose output_dir was called
    ``wanted-5`` looks the same by its name: compare its run.yaml.
    """
    wanted = Path(wanted)
    pattern = re.compile(re.escape(wanted.name) + "(?:-([2-9]|[1-9][0-9]+))?")
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(wanted.parent):
            folder, match = wanted.with_name(name), pattern.fullmatch(name)
            if match and any((folder / f).is_file() for f in ("run.yaml", "metrics.jsonl")):
                found[int(match[1] or 1)] = folder
    return found[max(found)] if found else None


# --- files that are whole -------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the old content or the new one, never a part.

    Raises:
        OSError: The folder cannot be written; the old content is unchanged.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write a JSON file atomically, NaN and infinities as null.

    Raises:
        OSError: The folder cannot be written.
    """
    text = json.dumps(without_nan(content), ensure_ascii=False, indent=indent)
    # A lone surrogate, which a tokenizer may return, is no valid UTF-8; `json.loads` reads it.
    write_atomically(path, f"{text}\n".encode("utf-8", "surrogatepass"))


def without_nan(value: Any) -> Any:
    """Return nested dicts and lists with NaN and infinities as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- one process a folder -------------------------------------------------------------------------


@contextlib.contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a run's folder: ``run.lock``, with the number of this process in it.

    The system releases the lock when the process ends, however it ends.

    Raises:
        ConfigError: Another process holds it, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    path, owner = Path(folder) / LOCK, os.getpid()
    lock = FileLock(path, blocking=False)
    try:
        os.listdir(folder)  # filelock would make a folder that is missing
        lock.acquire()
    except Timeout as exc:
        raise ConfigError(
            f"run folder {str(folder)!r} is in use by {_holder(path)}: wait for it, or choose "
            f"another output_dir"
        ) from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"run folder {str(folder)!r} cannot be locked ({exc}): make it writable, or choose "
            f"another output_dir"
        ) from exc
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            path.write_text(str(owner))
        yield
    finally:
        if os.getpid() == owner:  # not in a forked copy that leaves this block
            with contextlib.suppress(OSError):  # first: a name that is free means a free lock
                path.unlink()
            lock.release()


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        number = path.read_text()
        if number == str(os.getpid()):
            return "another run of this process"
        if number.isdecimal():
            return f"process {number}"
    return "another process"


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process of the same training is in the body."""
    from filelock import FileLock

    if not folder.is_dir():
        yield
        return
    with FileLock(folder / ".writing.lock"):
        yield
