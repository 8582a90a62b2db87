"""Checkpoints on the disk: atomic folders of safetensors and JSON, with checksums.

A checkpoint is a folder ``checkpoint-N`` of a run. Its files are written into the hidden folder
``.checkpoint-N.part``, listed with their checksums in a manifest, synced to the disk, and renamed
as one. So a folder of that name is whole, and later damage shows in the checksums. A folder is
removed under the name ``.checkpoint-N.gone``; the next write clears hidden folders that a killed
process left.
"""

import contextlib
import hashlib
import heapq
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import CheckpointError, DiskError
from rloo_kit.text.wording import first_line, format_name, format_value
from rloo_kit.types import Model

if TYPE_CHECKING:
    pass

MANIFEST = "manifest.json"
FORMAT = 1
TREE, TENSORS = "state.json", "state.safetensors"
# Rows of a data set that its checksum reads, evenly spaced
SAMPLED_ROWS = 512
# Values of each frozen weight that their checksum reads
SAMPLED_VALUES = 64

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_HIDDEN = re.compile(r"\.checkpoint-[0-9]+\.(part|old|gone)")


class _BrokenError(Exception):
    """Why a folder is no valid checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint."""

    folder: Path
    step: int  # optimizer steps that were made when it was written
    score: float | None  # what ``keep_best`` compares; higher is better
    facts: dict[str, Any]  # what the writer gave, as JSON keeps it


# --- writing -------------------------------------------------------------------------------------


def write_checkpoint(
    run: Path,
    step: int,
    fill: Callable[[Path], None],
    *,
    facts: dict[str, Any] | None = None,
    score: float | None = None,
) -> Checkpoint:
    """Write ``checkpoint-STEP`` of a run: whole, or not at all.

    A checkpoint of the same step is replaced; all others stay whatever happens.

    Args:
        run: Folder of the run; made if it is missing.
        step: Number of the checkpoint, from 0.
        fill: Writes the files into the empty folder that it is called with.
        facts: Kept in the manifest; must be JSON.
        score: What ``keep_best`` compares; NaN and Inf count as None.

    Raises:
        DiskError: The disk is full or refuses.
    """
    from safetensors import SafetensorError

    part, final = run / f".checkpoint-{step}.part", run / f"checkpoint-{step}"
    manifest = {
        "format": FORMAT,
        "version": importlib.metadata.version("rloo-kit"),
        "step": step,
        "time": time.time(),
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "facts": facts or {},
    }
    try:
        run.mkdir(parents=True, exist_ok=True)
        # Hidden folders that a killed process left
        for name in os.listdir(run):
            if _HIDDEN.fullmatch(name):
                shutil.rmtree(run / name)
        part.mkdir()
        fill(part)
        manifest["files"] = _checksums_of(part)
        manifest["sha256"] = _checksum_of_manifest(manifest)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _sync(part)
        if final.exists():
            _discard(final)
        part.rename(final)
        _sync_folder(run)
    except BaseException as exc:
        shutil.rmtree(part, ignore_errors=True)
        # safetensors writes in Rust and wraps the system's error
        if isinstance(exc, OSError | SafetensorError) and not isinstance(exc, ConnectionError):
            raise DiskError(
                f"checkpoint {step} could not be written to {str(run)!r} ({first_line(exc)}): "
                f"free some space or make the folder writable, and resume with --resume"
            ) from exc
        raise
    return _checkpoint(final, json.loads(json.dumps(manifest)))


def _checksums_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sha256 of every file below, by its relative name with slashes."""
    return {
        path.relative_to(folder).as_posix(): {"sha256": _checksum_of_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _checksum_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of_manifest(manifest: dict[str, Any]) -> str:
    """Return the checksum of a manifest without its own one: no fact may change unnoticed."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Bring every file and folder below to the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync_folder(path)
        else:
            # Windows syncs only what may be written
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    # Windows opens no folder, and some network disks sync none
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)


def _discard(folder: Path) -> None:
    """Remove a checkpoint so that none is ever half there."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def prune_checkpoints(run: Path, keep_last: int, keep_best: int) -> list[int]:
    """Remove the checkpoints that are neither among the newest nor among the best.

    The one written last always stays. Broken ones do not count and stay, too.

    Args:
        run: Folder of the run.
        keep_last: Highest steps that stay, at least 1.
        keep_best: Highest scores that stay, of equal ones the later; 0: none for their score.

    Returns:
        Steps that were removed, in order; one that cannot be removed is named in a UserWarning.
    """
    found = {}
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
        try:
            _discard(run / f"checkpoint-{step}")
            removed.append(step)
        except OSError as exc:
            warnings.warn(f"checkpoint-{step} cannot be removed: {exc}", stacklevel=2)
    return removed


# --- reading -------------------------------------------------------------------------------------


def list_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoint folders of a run, in order; nothing is verified."""
    folders = Path(run).glob("checkpoint-*") if Path(run).is_dir() else ()
    found = [(_NAME.fullmatch(folder.name), folder) for folder in folders]
    return sorted(int(match[1]) for match, folder in found if match and folder.is_dir())


def find_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint of a run, or None.

    Nothing is removed; each broken one that was passed over is named in a UserWarning.

    Args:
        run: Folder of the run; None is found where it is missing.
    """
    for step in reversed(list_steps(run)):
        try:
            return _read(Path(run) / f"checkpoint-{step}")
        except _BrokenError as exc:
            text = f"checkpoint-{step} is broken ({exc}): an earlier one is looked for"
            warnings.warn(text, stacklevel=2)
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint: its manifest, and the checksum of every file that it lists.

    Raises:
        CheckpointError: It is none, it is broken, or another version of the kit wrote it.
    """
    try:
        return _read(Path(folder))
    except _BrokenError as exc:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is broken: {exc}; resume the run with --resume, which "
            f"takes its newest valid checkpoint"
        ) from exc


def _checkpoint(folder: Path, manifest: dict[str, Any]) -> Checkpoint:
    return Checkpoint(folder, manifest["step"], manifest["score"], manifest["facts"])


def _read(folder: Path) -> Checkpoint:
    manifest = _read_manifest(folder)
    for name, listed in manifest["files"].items():
        try:
            digest = _checksum_of_file(folder / name)
        except OSError as exc:
            raise _BrokenError(f"{name} cannot be read: {exc.strerror}") from exc
        if digest != listed["sha256"]:
            raise _BrokenError(f"the content of {name} has changed")
    return _checkpoint(folder, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise _BrokenError(f"{MANIFEST} cannot be read: {first_line(exc)}") from exc
    if not isinstance(manifest, dict):
        raise _BrokenError(f"{MANIFEST} is not the manifest of a checkpoint")
    if manifest.get("format", FORMAT) != FORMAT:
        raise _BrokenError(
            f"it has format {format_value(manifest['format'])}, written by rloo-kit "
            f"{format_name(manifest.get('version', 'of an unknown version'))}: install that version"
        )
    if manifest.get("sha256") != _checksum_of_manifest(manifest):
        raise _BrokenError(f"the content of {MANIFEST} has changed")
    for name in manifest["files"]:
        if not (folder / name).is_file():
            raise _BrokenError(f"{name} is missing")
    return manifest


# --- the state of a training ---------------------------------------------------------------------


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


def _encode(value: object, path: str, tensors: dict[str, Any]) -> Any:
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


def _decode(plain: object, tensors: dict[str, Any]) -> Any:
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

    # of the device that trains: asking the others would put a CUDA context on each
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": on_gpu,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` returned; of older states, of every GPU, the first GPU's."""
    import numpy as np
    import torch

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][0])


# --- which model, which prompts ------------------------------------------------------------------


def checksum_of_weights(model: Model) -> str:
    """Return a checksum of the frozen weights: names, shapes, types and some values of each.

    Args:
        model: Whose trained parameters have ``requires_grad``; those are left out.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # TRL's copy of the adapter
        if parameter.requires_grad or ".ref." in name:
            continue
        values = parameter.detach().reshape(-1)[:SAMPLED_VALUES].cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(str(values.tolist()).encode())
    return digest.hexdigest()


def checksum_of_rows(dataset: Any) -> str | None:
    """Return a checksum of a data set: its length and some of its rows; None of a stream."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    size = len(dataset)
    digest = hashlib.sha256(str(size).encode())
    for place in range(0, size, max(1, size // SAMPLED_ROWS)):
        digest.update(json.dumps(dataset[place], sort_keys=True, default=str).encode())
    return digest.hexdigest()
