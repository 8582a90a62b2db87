"""Find and make new output folders, lock the folder of a run, and write files atomically."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError, DiskError, KitError, ModelError
from rloo_kit.text.wording import first_line

# Parts of the operating system's messages about a full disk
FULL = ("No space left on device", "Disk quota exceeded")


def free_folder(wanted: str | Path) -> Path:
    """Return ``wanted`` or, if it exists, the first free path of ``wanted-2``, ``wanted-3``, ...

    The folder is not created.

    Raises:
        ConfigError: ``wanted`` is a path without a name, such as ``/``.
    """
    wanted = Path(wanted).expanduser()
    if not wanted.name:
        raise ConfigError(
            f"output_dir {str(wanted)!r} has no name: give a folder such as 'runs/first'"
        )
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([wanted], numbered) if not os.path.lexists(one))


def make_run_folder(wanted: str | Path) -> Path:
    """Create the folder that ``free_folder`` returns for ``wanted``, and return it.

    Processes that call this function at the same moment get different folders.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        Path(wanted).expanduser().parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = free_folder(wanted)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as exc:
        raise ConfigError(
            f"output_dir {str(wanted)!r} cannot be written to ({exc}): choose another folder"
        ) from exc


def check_writable(folder: Path) -> None:
    """Check that results can be written to a folder, before they are computed.

    The folder need not exist, and is not created.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    try:
        tempfile.TemporaryFile(dir=nearest_folder(folder)).close()
    except OSError as exc:
        raise ConfigError(
            f"{str(folder)!r} cannot be written ({exc.strerror or exc}): give another folder"
        ) from exc


def nearest_folder(folder: Path) -> Path:
    """Return ``folder`` or, if it does not exist, the nearest existing folder above it."""
    return next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))


def latest_folder(wanted: str | Path) -> Path | None:
    """Return the run folder with the highest number among ``wanted``, ``wanted-2``, ...

    A folder counts as a run folder if it has run.yaml or metrics.jsonl. If there is no run folder,
    return None. The result may belong to another run whose ``output_dir`` was, for example,
    ``wanted-5``, so callers must compare its run.yaml with their settings.
    """
    wanted = Path(wanted).expanduser()
    pattern = re.compile(re.escape(wanted.name) + "(?:-([2-9]|[1-9][0-9]+))?")
    found = {
        int(match[1] or 1): folder
        for folder in wanted.parent.glob("*")
        if (match := pattern.fullmatch(folder.name))
        and any(os.path.isfile(folder / file) for file in ("run.yaml", "metrics.jsonl"))
    }
    return found[max(found)] if found else None


@contextlib.contextmanager
def disk_errors(kind: type[KitError], what: str, remedy: str) -> Iterator[None]:
    """Convert disk errors in a ``with`` block that writes files to an error of the kit.

    Args:
        kind: Class of the error to raise.
        what: What could not be written; the error message begins with this text.
        remedy: What the user can do; the error message ends with this text.

    Raises:
        KitError: The disk is full, or a file or folder cannot be written; the class is ``kind``.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as exc:
        # tokenizers raises a bare Exception, and torch.save a RuntimeError. Only their text shows
        # that the disk is the cause
        texts = ("(os error ", "inline_container")
        of_disk = isinstance(exc, OSError | SafetensorError | DiskError)
        if not (of_disk or any(text in str(exc) for text in texts)):
            raise
        raise kind(f"{what} ({first_line(exc.__cause__ or exc)}): {remedy}") from exc


@contextlib.contextmanager
def whole_folder(goal: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``goal`` at the end of the block.

    If the block fails, the temporary folder is removed, so that ``goal`` is never incomplete.

    Raises:
        ModelError: The folder cannot be written.
    """
    part = goal.with_name(f".{goal.name}.partial")
    what = f"{str(goal)!r} cannot be written"
    try:
        with disk_errors(ModelError, what, "free some space, or choose another folder"):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            yield part
            part.rename(goal)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- atomic files ---------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that even after a crash it has either its old or its whole new content.

    Raises:
        DiskError: The file cannot be written. Its old content is unchanged.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:
        raise DiskError(
            f"{str(path)!r} cannot be written ({exc.strerror or exc}): free some space, or make "
            "the folder writable"
        ) from exc
    finally:
        with contextlib.suppress(OSError):  # the first error is the one to report
            part.unlink(missing_ok=True)


def write_json(path: Path, content: object, *, indent: int | None = None) -> None:
    """Write a JSON file atomically. NaN and infinities are written as null.

    Raises:
        DiskError: The file cannot be written. Its old content is unchanged.
    """
    text = json.dumps(without_nan(content), ensure_ascii=False, indent=indent)
    # A tokenizer may return a lone surrogate, which UTF-8 cannot encode. With "backslashreplace"
    # its JSON escape is written
    write_atomically(path, f"{text}\n".encode("utf-8", "backslashreplace"))


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write a .jsonl file atomically; values that JSON cannot represent are written as text.

    Raises:
        DiskError: The file cannot be written. Its old content is unchanged.
    """
    lines = "".join(f"{json.dumps(row, default=str)}\n" for row in rows)
    write_atomically(path, lines.encode())


def without_nan(value: object) -> Any:
    """Return a copy of nested dicts and lists in which NaN and infinities are None.

    JSON has neither NaN nor infinities.
    """
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- locks and JSON -------------------------------------------------------------------------------


# Absolute paths of the folders that this process has locked
LOCKED: set[Path] = set()


@contextlib.contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock the folder of a run during the ``with`` block, so that no other process uses it.

    If the process is killed, the system releases the lock.

    Raises:
        ConfigError: Another run has locked the folder.
        DiskError: The folder cannot be locked, for example because it is on a network disk that
            does not support file locks.
    """
    from filelock import FileLock, Timeout

    file = Path(folder) / "run.lock"
    lock = FileLock(file, blocking=False)
    try:
        lock.acquire()
    except Timeout as exc:
        raise ConfigError(
            f"run folder {str(folder)!r} is in use by another run: wait for it, or choose another "
            f"output_dir"
        ) from exc
    except OSError as exc:
        raise DiskError(
            f"run folder {str(folder)!r} cannot be locked ({exc.strerror or exc}): free some "
            f"space, or choose an output_dir on a disk that has file locks"
        ) from exc
    LOCKED.add(resolved := file.parent.resolve())
    try:
        yield
    finally:
        LOCKED.discard(resolved)
        # Remove the file before the lock is released, because afterwards the file may belong to
        # another process. Windows cannot remove a locked file; there filelock removes it
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        lock.release()


def read_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON text and return its object; None if it is not valid JSON or not an object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing, damaged, or not an object."""
    try:
        return read_object(path.read_bytes())
    except OSError:
        return None
