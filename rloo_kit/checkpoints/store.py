"""Write, verify, find and remove the checkpoint folders of a run.

A checkpoint is a folder ``checkpoint-N`` in the folder of a run. Its files are first written into
the hidden folder ``.checkpoint-N.part``. Then a manifest with their checksums is added, everything
is synced to the disk, and the folder is renamed. Therefore a folder ``checkpoint-N`` is always
complete, and the checksums show whether it was damaged later. Before a checkpoint is removed, it is
renamed to ``.checkpoint-N.gone``. If a process is killed, the next process that writes a checkpoint
removes the hidden folders that are left.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.errors import CheckpointError, DiskError
from rloo_kit.output_folder import disk_errors, read_json
from rloo_kit.text.wording import format_name, format_value

MANIFEST = "manifest.json"
FORMAT = 2

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


class _BrokenError(Exception):
    """A folder is not a valid checkpoint; the text says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been verified."""

    folder: Path
    step: int  # number of optimizer steps that were made when it was written
    facts: dict[str, Any]  # the facts passed to `write_checkpoint`, after a round trip through JSON


# --- writing -------------------------------------------------------------------------------------


def write_checkpoint(
    run: Path,
    step: int,
    fill: Callable[[Path], None],
    *,
    facts: dict[str, Any],
    score: float | None,
) -> Path:
    """Write the checkpoint of a step completely or not at all, and return its folder.

    An older checkpoint of the same step is replaced. All other checkpoints stay, even if writing
    fails.

    Args:
        run: Folder of the run; created if it does not exist.
        step: Number of optimizer steps so far, 0 or more; it becomes part of the folder's name.
        fill: Function that writes the files; it is called with an empty folder.
        facts: Facts about the run that are stored in the manifest; must be valid JSON.
        score: Score that ``keep_best`` compares, a finite number; None means that there is none.

    Raises:
        DiskError: The disk is full, or the folder cannot be written to.
    """
    part = run / f".checkpoint-{step}.part"
    final = run / f"checkpoint-{step}"
    try:
        with checkpoint_errors(run, step):
            run.mkdir(parents=True, exist_ok=True)
            # Hidden folders that a killed process left. On a network disk their removal may fail
            for left in run.glob(".checkpoint-*.*"):
                shutil.rmtree(left, ignore_errors=True)
            part.mkdir()
            fill(part)
            seal_checkpoint(part, step, facts=facts, score=score)
            if final.exists():
                _discard(final)
            part.rename(final)
            _sync_folder(run)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


def checkpoint_errors(run: Path, step: int) -> AbstractContextManager[None]:
    """Return a context in which an error of the disk becomes a ``DiskError`` about a checkpoint.

    Args:
        run: Folder of the run, for the message.
        step: Number of optimizer steps so far, for the message.
    """
    return disk_errors(
        DiskError,
        f"checkpoint {step} could not be written to {str(run)!r}",
        "free some space or make the folder writable, and resume with --resume",
    )


def seal_checkpoint(folder: Path, step: int, *, facts: dict[str, Any], score: float | None) -> None:
    """Complete a checkpoint: write its manifest, and sync all files to the disk.

    Args:
        folder: Folder of the checkpoint, which has all other files already. Without a manifest it
            is not a valid checkpoint.
        step: Number of optimizer steps so far.
        facts: Facts about the run that are stored in the manifest; must be valid JSON.
        score: Score that ``keep_best`` compares, a finite number; None means that there is none.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    manifest = {
        "format": FORMAT,
        "version": importlib.metadata.version("rloo-kit"),
        "step": step,
        "time": time.time(),
        "score": score,
        "facts": facts,
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
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of_manifest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest, without its own entry ``sha256``."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Sync a folder and everything in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("r+b") as file:  # Windows syncs only files that are open for writing
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Sync the names of the files in a folder to the disk, if the system can do so."""
    # Windows cannot open folders, and some network disks cannot sync them
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)


def _discard(folder: Path) -> None:
    """Remove a checkpoint. After a crash, ``checkpoint-N`` is either complete or does not exist."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def prune_checkpoints(run: Path, keep_last: int, keep_best: int, spare: str = "") -> None:
    """Remove the checkpoints that are neither among the newest nor among the best.

    The checkpoint that was written last always stays. Broken checkpoints stay too, and are not
    counted. If a checkpoint cannot be removed, a warning names it.

    Args:
        run: Folder of the run.
        keep_last: Number of checkpoints with the highest steps that stay; at least 1.
        keep_best: Number of checkpoints with the highest scores that stay. If scores are equal,
            the later step counts as better. Scores of different kinds (the fact ``score_of``)
            cannot be compared. Therefore a score counts only if its kind is unknown or is the kind
            of the checkpoint that was written last.
        spare: Name of a checkpoint that always stays; "" for none.
    """
    found = {}
    for step in list_steps(run):
        with contextlib.suppress(_BrokenError):
            found[step] = _read_manifest(run / f"checkpoint-{step}")
    steps = list(found)  # the lowest first
    written_last = max(steps, key=lambda step: found[step]["time"], default=0)
    kinds = {step: found[step]["facts"].get("score_of") for step in steps}
    kind = kinds.get(written_last)
    scored = sorted(
        (found[step]["score"], step)
        for step in steps
        if found[step]["score"] is not None and kinds[step] in (kind, None)
    )
    best = [step for _, step in scored[::-1][:keep_best]]
    kept = {f"checkpoint-{step}" for step in (*steps[::-1][:keep_last], *best, written_last)}
    for name in {f"checkpoint-{step}" for step in steps} - kept - {spare}:
        try:
            _discard(run / name)
        except OSError as exc:
            warnings.warn(f"{name} cannot be removed: {exc}", stacklevel=2)


# --- reading -------------------------------------------------------------------------------------


def list_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoint folders of a run in ascending order, even broken ones."""
    folders = [folder.name for folder in run.glob("checkpoint-*") if folder.is_dir()]
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, folders) if match)


def find_checkpoint(run: Path) -> Checkpoint | None:
    """Return the valid checkpoint with the highest step; None if the run has none.

    Broken checkpoints are skipped but not removed, and a UserWarning names each of them.

    Args:
        run: Folder of the run; it need not exist.
    """
    for step in reversed(list_steps(run)):
        try:
            return _read(run / f"checkpoint-{step}")
        except _BrokenError as exc:
            warnings.warn(f"checkpoint-{step} is broken ({exc}): it is skipped", stacklevel=2)
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, after its manifest and the checksums were verified.

    Raises:
        CheckpointError: The folder is not a checkpoint, is damaged, or was written by an
            incompatible version of rloo-kit.
    """
    try:
        return _read(folder)
    except _BrokenError as exc:
        remedy = "; resume the run with --resume, which uses its newest valid checkpoint"
        if folder.is_dir() and not (folder / MANIFEST).exists():
            remedy = ""  # the reason already says what to do
        raise CheckpointError(f"checkpoint {str(folder)!r} is broken: {exc}{remedy}") from exc


def _read(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises:
        _BrokenError: The checkpoint is not valid.
    """
    manifest = _read_manifest(folder)
    for name, listed in manifest["files"].items():
        try:
            digest = _checksum_of_file(folder / name)
        except OSError as exc:
            raise _BrokenError(f"{name} cannot be read: {exc.strerror}") from exc
        if digest != listed["sha256"]:
            raise _BrokenError(f"the content of {name} has changed")
    return Checkpoint(folder, manifest["step"], manifest["facts"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after verifying it.

    Raises:
        _BrokenError: The manifest is missing, damaged, or of another format; or a file that it
            lists is missing.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        why = f"{MANIFEST} is not the manifest of a checkpoint"
        if not folder.is_dir():
            why = "there is no such folder"
        elif not (folder / MANIFEST).exists():
            why = (
                f"it has no {MANIFEST}: TRL's own trainer wrote it, or the run was killed while it "
                "was written; to train its adapter further, begin a new run with model.name set to "
                "this folder"
            )
        raise _BrokenError(why)
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
