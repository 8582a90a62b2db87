"""Where a command writes: a folder that is not there yet, so that nothing is overwritten.

And a lock, so that two processes never write one run.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "run.lock"
_REFUSED = {errno.EWOULDBLOCK, errno.EACCES}
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


# --- a folder of its own -------------------------------------------------------------------------


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
    free_folder(wanted)  # tells what lies in a file
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for folder in _numbered(wanted):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except (OSError, ValueError) as exc:
        raise _cannot_be_written(wanted, exc) from exc
    raise AssertionError("numbers do not end")


def _numbered(wanted: Path) -> Iterator[Path]:
    if not wanted.name:
        raise ConfigError(
            f"output_dir {str(wanted)!r} has no name that a number could be added to: choose a "
            f"folder such as 'runs/first'"
        )
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def _cannot_be_written(folder: Path, exc: Exception) -> ConfigError:
    return ConfigError(f"output_dir {str(folder)!r} cannot be written ({exc}): choose another")


def latest_folder(wanted: str | Path) -> Path | None:
    """Return the run folder with the highest number among ``wanted``, ``wanted-2``, ...

    A run folder holds run.yaml or metrics.jsonl. Another run whose output_dir was called
    ``wanted-5`` is not told apart by its name: compare its run.yaml.
    """
    wanted = Path(wanted)
    pattern = re.compile(re.escape(wanted.name) + "(?:-([2-9]|[1-9][0-9]+))?")
    try:
        names = os.listdir(wanted.parent)
    except OSError:
        return None
    numbers = {name: int(m[1] or 1) for name in names if (m := pattern.fullmatch(name))}
    folders = (wanted.with_name(name) for name in sorted(numbers, key=numbers.get, reverse=True))
    return next((folder for folder in folders if _is_run_folder(folder)), None)


def _is_run_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("run.yaml", "metrics.jsonl"))


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


# --- one process a folder ------------------------------------------------------------------------


@contextlib.contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a run's folder: ``run.lock``, with the number of this process in it.

    The system gives the lock back when the process ends, however it ends, so a lock file that a
    killed process left does not stand in the way. Programs that this process starts do not hold it.
    A forked copy would, since a lock belongs to the opened file that both then share: it closes its
    share as it begins, unless it was forked past Python's own ``os.fork``. Where the system or the
    disk knows no such locks, nothing is locked.

    Raises:
        ConfigError: Another process holds it, or the folder cannot be written.
    """
    path = Path(folder) / LOCK
    if fcntl is None:
        yield
        return
    try:
        place = _open_locked(path)
    except ConfigError:
        raise
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"run folder {str(folder)!r} cannot be locked ({exc}): see that it can be written, or "
            f"choose another output_dir"
        ) from exc
    owner = os.getpid()
    _held.add(place)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            os.ftruncate(place, 0)
            os.write(place, str(owner).encode())
        yield
    finally:
        if os.getpid() == owner:  # not in a forked copy that leaves this block
            _held.discard(place)
            with contextlib.suppress(OSError):  # first: a name that is free means a free lock
                path.unlink()
            os.close(place)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process of the same training is in the body, for a folder that exists.

    Where the system or the disk knows no locks, nothing is waited for.
    """
    if fcntl is None or not folder.is_dir():
        yield
        return
    place = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _open_locked(path: Path) -> int:
    """Return a descriptor of the file of that name, locked where locks are known."""
    for attempt in itertools.count():
        place = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            _lock(place, path.parent)
            # The one that held it may have removed the file after it was opened here. A disk whose
            # files have no lasting numbers cannot tell.
            with contextlib.suppress(FileNotFoundError):
                if attempt >= 99 or os.path.samestat(os.fstat(place), os.lstat(path)):
                    return place
        except BaseException:
            os.close(place)
            raise
        os.close(place)
    raise AssertionError("it goes on until it returns")


def _lock(place: int, folder: Path) -> None:
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno not in _REFUSED:  # a disk without locks
            return
        raise ConfigError(
            f"run folder {str(folder)!r} is in use by {_holder(place)}: wait for it, or choose "
            f"another output_dir"
        ) from exc


def _holder(place: int) -> str:
    number = os.read(place, 32).decode("ascii", "replace")
    if number == str(os.getpid()):
        return "another run of this process"
    return f"process {number}" if number.isdecimal() else "another process"


def _let_go() -> None:
    """Close the share that a forked copy got."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
