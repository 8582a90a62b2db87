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
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.errors import CheckpointError, DiskError
from rloo_kit.text.wording import first_line, format_name, format_value

MANIFEST = "manifest.json"
FORMAT = 1

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


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
) -> Path:
    """Write ``checkpoint-STEP`` of a run: whole, or not at all; return it.

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

    part = run / f".checkpoint-{step}.part"
    final = run / f"checkpoint-{step}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        # Hidden folders that a killed process left
        for left in run.glob(".checkpoint-*.*"):
            shutil.rmtree(left)
        part.mkdir()
        fill(part)
        seal_checkpoint(part, step, facts=facts, score=score)
        if final.exists():
            _discard(final)
        part.rename(final)
        _sync_folder(run)
    except (OSError, SafetensorError) as exc:  # safetensors wraps the system's error
        raise DiskError(
            f"checkpoint {step} could not be written to {str(run)!r} ({first_line(exc)}): "
            f"free some space or make the folder writable, and resume with --resume"
        ) from exc
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def seal_checkpoint(
    folder: Path, step: int, *, facts: dict[str, Any] | None = None, score: float | None = None
) -> None:
    """Write the manifest of a folder whose files are all there, and bring all to the disk.

    Args:
        folder: Of the checkpoint; without a manifest it does not count as one.
        step: As ``write_checkpoint`` has it.
        facts: The same.
        score: The same.

    Raises:
        OSError: The disk is full or refuses.
    """
    manifest = {
        "format": FORMAT,
        "version": importlib.metadata.version("rloo-kit"),
        "step": step,
        "time": time.time(),
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "facts": facts or {},
        "files": {
            path.relative_to(folder).as_posix(): {"sha256": _checksum_of_file(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    manifest["sha256"] = _checksum_of_manifest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync(folder)


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


def prune_checkpoints(run: Path, keep_last: int, keep_best: int, spare: str = "") -> None:
    """Remove the checkpoints that are neither among the newest nor among the best.

    The one written last always stays. Broken ones do not count and stay, too. One that cannot be
    removed is named in a UserWarning.

    Args:
        run: Folder of the run.
        keep_last: Highest steps that stay, at least 1.
        keep_best: Highest scores that stay, of equal ones the later; 0: none for their score.
        spare: Name of one that stays in any case.
    """
    found = {}
    for step in list_steps(run):
        with contextlib.suppress(_BrokenError):
            found[step] = _read_manifest(run / f"checkpoint-{step}")
    scored = [(facts["score"], step) for step, facts in found.items() if facts["score"] is not None]
    kept = {
        *heapq.nlargest(keep_last, found),
        *(step for _, step in heapq.nlargest(keep_best, scored)),
        max(found, key=lambda step: found[step]["time"], default=0),
    }
    for step in sorted(set(found) - kept):
        if f"checkpoint-{step}" == spare:
            continue
        try:
            _discard(run / f"checkpoint-{step}")
        except OSError as exc:
            warnings.warn(f"checkpoint-{step} cannot be removed: {exc}", stacklevel=2)


# --- reading -------------------------------------------------------------------------------------


def list_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoint folders of a run, in order; nothing is verified."""
    folders = [folder.name for folder in run.glob("checkpoint-*") if folder.is_dir()]
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, folders) if match)


def find_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint of a run, or None.

    Nothing is removed; each broken one that was passed over is named in a UserWarning.

    Args:
        run: Folder of the run; None is found where it is missing.
    """
    for step in reversed(list_steps(run)):
        try:
            return _read(run / f"checkpoint-{step}")
        except _BrokenError as exc:
            text = f"checkpoint-{step} is broken ({exc}): an earlier one is looked for"
            warnings.warn(text, stacklevel=2)
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint: its manifest, and the checksum of every file that it lists.

    Raises:
        CheckpointError: The folder is not a checkpoint, is broken, or is from another version.
    """
    try:
        return _read(folder)
    except _BrokenError as exc:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is broken: {exc}; resume the run with --resume, which "
            f"takes its newest valid checkpoint"
        ) from exc


def _read(folder: Path) -> Checkpoint:
    manifest = _read_manifest(folder)
    for name, listed in manifest["files"].items():
        try:
            digest = _checksum_of_file(folder / name)
        except OSError as exc:
            raise _BrokenError(f"{name} cannot be read: {exc.strerror}") from exc
        if digest != listed["sha256"]:
            raise _BrokenError(f"the content of {name} has changed")
    return Checkpoint(folder, manifest["step"], manifest["score"], manifest["facts"])


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
