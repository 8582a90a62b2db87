"""Checkpoints that are whole or absent.

A checkpoint is a folder ``checkpoint-N`` of a run. Its files are written into a hidden folder
beside it, summed in a manifest, brought to the disk, and renamed as one; so a folder of that name
is whole, and what the disk or a person did to it later shows in the sums.

Hidden names, none of which outlives the next write:

- ``.checkpoint-N.part`` is being written, or was when the process was killed;
- ``.checkpoint-N.old`` was replaced by a newer ``checkpoint-N``, and is the checkpoint of that step
  for the moment in which the newer one has no name yet;
- ``.checkpoint-N.gone`` is being removed.
"""

import contextlib
import errno
import functools
import hashlib
import heapq
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from rloo_kit.errors import CheckpointError, DiskError
from rloo_kit.output_folder import write_atomically
from rloo_kit.text.wording import format_name, format_value

MANIFEST = "manifest.json"
FORMAT = 1
SPARE_BYTES = 2**20
"""Kept free beside a tenth more than a checkpoint is expected to take."""

_NUMBER = "(0|[1-9][0-9]*)"
_SHOWN = re.compile(rf"checkpoint-{_NUMBER}")
_HIDDEN = re.compile(rf"\.checkpoint-{_NUMBER}\.(part|old|gone)")
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _BrokenError(Exception):
    """Why a folder is no whole checkpoint."""


class _OtherFormatError(_BrokenError):
    """It may be whole, but another version of the kit wrote it."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    step: int
    """Optimizer steps that were made when it was written."""
    score: float | None
    """What ``keep_best`` compares; higher is better."""
    facts: dict[str, Any]
    """What the writer gave, as JSON keeps it."""


# --- writing -------------------------------------------------------------------------------------


def write_checkpoint(
    run: Path,
    step: int,
    fill: Callable[[Path], None],
    *,
    facts: dict[str, Any] | None = None,
    score: float | None = None,
    expected_bytes: int = 0,
) -> Checkpoint:
    """Write ``checkpoint-STEP`` of a run: whole, or not at all.

    Killed at any moment, or failed, it leaves every checkpoint that was there before; one of the
    same step is replaced.

    Args:
        run: Folder of the run; made if it is missing.
        step: Number of the checkpoint, from 0.
        fill: Writes the files into the empty folder that it is called with: no links, and none
            named ``manifest.json``.
        facts: Kept in the manifest; must be JSON.
        score: What ``keep_best`` compares; a number that is not finite counts as none.
        expected_bytes: What ``fill`` will write; a tenth more must be free.

    Raises:
        DiskError: The disk is full or refuses.
        CheckpointError: ``fill`` left a link, or a file named ``manifest.json``.
    """
    run = Path(run)
    part = run / f".checkpoint-{step}.part"
    with _disk_faults_told(run, step):
        run.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(run)
        if part.exists():  # it could not be removed: say why
            shutil.rmtree(part)
        _check_space(run, step, expected_bytes)
        try:
            part.mkdir()
            fill(part)
            manifest = _sealed(step, score, facts or {}, _sum_and_sync(part))
            _write_manifest(part, manifest)
            _put_in_place(part, step)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return _checkpoint(run / f"checkpoint-{step}", manifest)


@contextlib.contextmanager
def _disk_faults_told(run: Path, step: int) -> Iterator[None]:
    try:
        yield
    except _BrokenError as exc:
        raise CheckpointError(
            f"checkpoint {step} cannot be written to {str(run)!r}: {exc}; fill its folder with "
            f"plain files of other names"
        ) from exc
    except DiskError:
        raise
    except Exception as exc:
        fault = _fault_of_the_disk(exc)
        if fault is None:
            raise
        raise DiskError(_disk_text(run, step, fault)) from exc


def _fault_of_the_disk(exc: BaseException | None) -> int | None:
    """Return the errno of a refused write, also where a library written in Rust raises its own."""
    while exc is not None:
        is_network = isinstance(exc, ConnectionError | TimeoutError)
        if isinstance(exc, OSError) and exc.errno and not is_network:
            return exc.errno
        if match := _RUST_ERROR.search(str(exc)):
            return int(match[1])
        exc = exc.__cause__
    return None


def _disk_text(run: Path, step: int, fault: int) -> str:
    free = _free_bytes(run)
    shown = "" if free is None else f", {_size(free)} free there"
    remedy = "free some space" if fault in _FULL else "see that the folder can be written"
    return (
        f"checkpoint {step} could not be written to {str(run)!r} ({os.strerror(fault)}{shown}): "
        f"{remedy} and go on with --resume, or set trainer.rescue_dir to a folder on another disk"
    )


def _check_space(run: Path, step: int, expected_bytes: int) -> None:
    needed, free = int(expected_bytes * 1.1) + SPARE_BYTES, _free_bytes(run)
    if free is not None and free < needed:
        raise DiskError(
            f"checkpoint {step} needs {_size(needed)} in {str(run)!r}, where {_size(free)} are "
            f"free: free some space and go on with --resume, or set trainer.rescue_dir to a folder "
            f"on another disk"
        )


def _free_bytes(folder: Path) -> int | None:
    """Return what is free where the folder is or would be; None where the system cannot tell."""
    place = next((p for p in (folder, *folder.absolute().parents) if p.is_dir()), folder)
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network disks call everything 0


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the name, relative and with slashes, and the size of every file below."""
    waiting = [""]
    while waiting:
        place = waiting.pop()
        with os.scandir(folder / place) as entries:
            for entry in entries:
                name, facts = place + entry.name, entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    waiting.append(f"{name}/")
                elif stat.S_ISREG(facts.st_mode):
                    yield name, facts.st_size
                else:
                    raise _BrokenError(f"{name} is a symbolic link or no file")


def _sum_and_sync(folder: Path) -> dict[str, dict[str, Any]]:
    """Bring every file and folder below to the disk; return their sizes and sums by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, size in sorted(_files(folder)):
        if name.casefold() == MANIFEST:
            raise _BrokenError(f"{name} is the name of its list of files")
        with (folder / name).open("r+b") as file:  # Windows syncs only what may be written
            found[name] = {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            os.fsync(file.fileno())
    for below in {folder / parent for name in found for parent in PurePosixPath(name).parents}:
        _sync_folder(below)
    return found


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # it has no way to
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    except OSError as exc:
        if exc.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(place)


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("rloo-kit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _sealed(
    step: int, score: float | None, facts: dict[str, Any], files: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    content = {
        "format": FORMAT,
        "version": _version(),
        "step": step,
        "time": time.time(),
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "facts": facts,
        "files": files,
    }
    content = json.loads(json.dumps(content))
    return content | {"sha256": _seal(content)}


def _seal(content: dict[str, Any]) -> str:
    """Return the sum over a manifest without its own sum: a fact may not change unseen either."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_manifest(part: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=1)
    write_atomically(part / MANIFEST, f"{text}\n".encode())
    _sync_folder(part)


def _put_in_place(part: Path, step: int) -> None:
    final, aside = part.with_name(f"checkpoint-{step}"), part.with_name(f".checkpoint-{step}.old")
    replaces = os.path.lexists(final)
    if replaces:
        os.rename(final, aside)
    try:
        os.rename(part, final)
    except BaseException:
        if replaces:
            with contextlib.suppress(OSError):  # where this fails, it is found as it is
                os.rename(aside, final)
        raise
    _sync_folder(final.parent)
    if replaces:
        _discard(aside, step)


# --- removing ------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, as far as the system lets."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _discard(path: Path, step: int) -> OSError | None:
    """Remove a checkpoint so that none is ever half there; return why it could not be taken."""
    gone = path.with_name(f".checkpoint-{step}.gone")
    _remove(gone)
    try:
        os.rename(path, gone)
    except OSError as exc:
        return exc
    _remove(gone)
    return None


def _clear_leftovers(run: Path) -> None:
    """Remove what a killed process left, and give a checkpoint that lost its name that back."""
    for name in os.listdir(run):
        match = _HIDDEN.fullmatch(name)
        if match is None:
            continue
        final = run / f"checkpoint-{match[1]}"
        if match[2] != "old":
            _remove(run / name)
        elif os.path.lexists(final) and _is_whole(final):
            _discard(run / name, int(match[1]))
        else:
            if os.path.lexists(final):
                _discard(final, int(match[1]))
            os.rename(run / name, final)


def prune_checkpoints(run: Path, keep_last: int, keep_best: int) -> list[int]:
    """Remove the checkpoints that are neither among the newest nor among the best.

    Only manifests and sizes are read. The newest and the one written last always stay. What is
    broken does not count and stays too, for a person to look at.

    Args:
        run: Folder of the run.
        keep_last: Highest steps that stay, at least 1.
        keep_best: Highest scores that stay, of equal ones the later; 0: none for their score.

    Returns:
        Steps that were removed, in order; one that cannot be removed is named in a UserWarning.
    """
    run = Path(run)
    found: dict[int, dict[str, Any]] = {}
    for step in list_steps(run):
        with contextlib.suppress(_BrokenError):
            found[step] = _read_manifest(run / f"checkpoint-{step}")
    if not found:
        return []
    scored = [(facts["score"], step) for step, facts in found.items() if facts["score"] is not None]
    kept = {
        *heapq.nlargest(max(1, keep_last), found),
        *(step for _, step in heapq.nlargest(keep_best, scored)),
        max(found, key=lambda step: found[step]["time"]),
    }
    removed = []
    for step in sorted(set(found) - kept):
        refused = _discard(run / f"checkpoint-{step}", step)
        if refused is None:
            removed.append(step)
        else:
            warnings.warn(f"checkpoint-{step} cannot be removed: {refused}", stacklevel=2)
    return removed


# --- reading -------------------------------------------------------------------------------------


def list_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoint folders of a run, in order; nothing is verified."""
    return sorted({step for step, _ in _candidates(Path(run))})


def _candidates(run: Path) -> list[tuple[int, Path]]:
    """Return step and folder of what may be a checkpoint, the first to be tried first."""
    try:
        names = os.listdir(run)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise CheckpointError(
            f"run folder {str(run)!r} cannot be listed ({exc}): see that it can be read"
        ) from exc
    found = [(step, run / name) for name in names if (step := _step_of(name)) is not None]
    found = [(step, folder) for step, folder in found if folder.is_dir()]
    return sorted(found, key=lambda one: (-one[0], one[1].name.startswith(".")))


def _step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint, moved aside or not."""
    match = _SHOWN.fullmatch(name) or _HIDDEN.fullmatch(name)
    return None if match is None or name.endswith((".part", ".gone")) else int(match[1])


def find_checkpoint(run: Path, before: int | None = None) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run, or None.

    Every file of those that are looked at is read. Nothing is removed; each broken one that was
    passed over is named in a UserWarning.

    Args:
        run: Folder of the run; None is found where it is missing.
        before: Only steps below this one.

    Raises:
        CheckpointError: The folder of the run cannot be listed.
    """
    broken, found = [], None
    for step, folder in _candidates(Path(run)):
        if before is not None and step >= before:
            continue
        try:
            found = _read_whole(folder)
            break
        except _BrokenError as exc:
            broken.append(f"{folder.name} is broken ({exc})")
    outcome = "no whole one is left" if found is None else f"{found.folder.name} is used"
    for fault in broken:
        warnings.warn(f"{fault}: {outcome}", stacklevel=2)
    return found


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint: its manifest, and size and sum of every file that it lists.

    Other files beside them are no fault; links are.

    Raises:
        CheckpointError: It is none, it is broken, or another version of the kit wrote it.
    """
    try:
        return _read_whole(Path(folder))
    except _OtherFormatError as exc:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} cannot be read: {exc}; install that version to go on "
            f"with it"
        ) from exc
    except _BrokenError as exc:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is broken: {exc}; go on with --resume, which takes the "
            f"newest whole one of its run"
        ) from exc


def _is_whole(folder: Path) -> bool:
    try:
        _read_whole(folder)
    except _BrokenError:
        return False
    return True


def _checkpoint(folder: Path, manifest: dict[str, Any]) -> Checkpoint:
    return Checkpoint(folder, manifest["step"], manifest["score"], manifest["facts"])


def _read_whole(folder: Path) -> Checkpoint:
    manifest = _read_manifest(folder)
    for name, listed in manifest["files"].items():
        try:
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as exc:
            raise _BrokenError(f"{name} cannot be read: {exc.strerror}") from exc
        if found != listed["sha256"]:
            raise _BrokenError(f"the content of {name} has changed")
    return _checkpoint(folder, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return a manifest whose files are all there, with the right sizes."""
    if folder.is_symlink():
        raise _BrokenError("it is a symbolic link")
    if not folder.is_dir():
        raise _BrokenError("there is no such folder")
    try:
        sizes = dict(_files(folder))
        if MANIFEST not in sizes:
            raise _BrokenError(f"{MANIFEST} is missing")
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except OSError as exc:
        raise _BrokenError(f"it cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise _BrokenError(f"{MANIFEST} is no JSON") from exc
    _check_manifest(manifest, _step_of(folder.name))
    for name, listed in manifest["files"].items():
        if name not in sizes:
            raise _BrokenError(f"{name} is missing")
        if sizes[name] != listed["bytes"]:
            raise _BrokenError(f"{name} has {sizes[name]} bytes instead of {listed['bytes']}")
    return manifest


def _check_manifest(manifest: Any, step: int | None) -> None:
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _BrokenError(f"{MANIFEST} is not the manifest of a checkpoint")
    if manifest["format"] != FORMAT:
        writer = manifest.get("version", "of an unknown version")
        raise _OtherFormatError(
            f"it has format {format_value(manifest['format'])}, written by rloo-kit "
            f"{format_name(writer)}, and this version reads format {FORMAT}"
        )
    for name in manifest["files"] if isinstance(manifest.get("files"), dict) else ():
        if _leads_out(name):
            raise _BrokenError(
                f"{MANIFEST} lists {format_value(name)}, which lies outside the checkpoint"
            )
    if manifest.get("sha256") != _seal(manifest):
        raise _BrokenError(f"the content of {MANIFEST} has changed")
    if not _has_fields(manifest):
        raise _BrokenError(f"{MANIFEST} is not the manifest of a checkpoint")
    if step not in (None, manifest["step"]):
        raise _BrokenError(f"it holds step {manifest['step']}")


def _leads_out(name: str) -> bool:
    kinds = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.anchor or ".." in path.parts for path in kinds)


def _has_fields(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest whose sum is right was also written by the kit."""
    kinds = {"step": int, "time": float, "score": float | None, "facts": dict, "files": dict}
    return all(isinstance(manifest.get(name), kind) for name, kind in kinds.items()) and all(
        isinstance(listed, dict) and {"bytes", "sha256"} <= set(listed)
        for listed in manifest["files"].values()
    )


# --- the state of a training -------

TREE, TENSORS = "state.json", "state.safetensors"
SAMPLED_ROWS = 512
"""Rows of a data set that its sum looks at, evenly spaced."""
SAMPLED_VALUES = 64
"""Values of each frozen weight that their sum looks at."""


def write_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Write a tree to ``state.json`` and ``state.safetensors``.

    Args:
        folder: That exists.
        tree: Of dicts (keys are texts or numbers), lists, tuples, numbers, texts, None, tensors of
            torch and arrays of NumPy.

    Raises:
        CheckpointError: It holds something else.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    plain = _encode(tree, "", tensors)
    (folder / TREE).write_text(json.dumps(plain), encoding="ascii")
    save_file(tensors, str(folder / TENSORS))


def read_tree(folder: Path) -> dict[str, Any]:
    """Return what ``write_tree`` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: The files are missing, or no tree.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        plain = json.loads((folder / TREE).read_bytes())
        tensors = load_file(str(folder / TENSORS))
        tree = _decode(plain, tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as exc:
        tree = exc
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{str(folder)!r} holds no state of a training ({tree!r}): take an earlier checkpoint"
        )
    return tree


def _encode(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, list):
        return [_encode(item, f"{path}.{place}", tensors) for place, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": _encode(list(value), path, tensors)}
    if isinstance(value, dict):
        items = [
            [_encode(key, path, tensors), _encode(item, f"{path}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"dict": items}
    name = f"{len(tensors)}{path}"
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, torch.Tensor):
        # a copy of its own: safetensors takes no views, and this state may be written later
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    raise CheckpointError(
        f"the training's state holds a {type(value).__name__} at {path[1:]!r}, which only a pickle "
        f"could keep: use an optimizer or reward whose state is numbers, texts and tensors"
    )


def _decode(plain: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(plain, list):
        return [_decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tuple":
        return tuple(_decode(content, tensors))
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    # a clone: what safetensors maps from the file must not change with it
    tensor = tensors[content].clone()
    return tensor.numpy() if kind == "array" else tensor


# --- random states -------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, a GPU's included."""
    import numpy as np
    import torch

    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": on_gpu,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` returned; a GPU's only where there are as many GPUs."""
    import numpy as np
    import torch

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


# --- which model, which prompts ------------------------------------------------------------------


def sum_of_weights(model: Any) -> str:
    """Return a sum of the frozen weights: names, shapes, types and some values of each.

    Args:
        model: Whose trained parameters have ``requires_grad``; those are left out.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or ".ref." in name:  # TRL's copy of the adapter
            continue
        values = parameter.detach().reshape(-1)[:SAMPLED_VALUES].cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(str(values.tolist()).encode())
    return digest.hexdigest()


def sum_of_rows(dataset: Any) -> str | None:
    """Return a sum of a data set: its length and some of its rows; None of a stream."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for place in range(0, size, max(1, size // SAMPLED_ROWS)):
        digest.update(json.dumps(dataset[place], sort_keys=True, default=str).encode())
    return digest.hexdigest()
