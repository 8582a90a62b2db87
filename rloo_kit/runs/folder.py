"""Folder of a run: created, reopened to resume, and completed even if the run fails."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rloo_kit.checkpoints.stopping import interrupt_for, stop_signals
from rloo_kit.checkpoints.store import Checkpoint, list_steps
from rloo_kit.config.run_file import SECTIONS, RunConfig, read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.machine.environment import Environment
from rloo_kit.machine.hardware import TESTED, installed_version
from rloo_kit.machine.processes import num_processes
from rloo_kit.output_folder import (
    latest_folder,
    lock_folder,
    make_run_folder,
    read_json,
    write_atomically,
    write_json,
)
from rloo_kit.text.redaction import redact_tree, without_hidden
from rloo_kit.text.wording import format_value

if TYPE_CHECKING:
    from rloo_kit.runs.recorder import RunRecorder

RUN_FILE = "run.yaml"
# Settings that may differ when a run resumes; the trainer compares those of `trainer:`
MAY_CHANGE = {
    "model.name",  # a folder may have moved: the weights themselves are compared
    "model.backend",
    "data.held_out_every",
    "data.prompts",
    "trainer",
    "output_dir",
}
RECORD = ("metrics.jsonl", "completions.jsonl", "evaluation.json", "end.json", "report.html")


# --- which run -----------------------------------------------------------------------------------


def folder_to_resume(
    source: str | Path | RunConfig, config: RunConfig, resume: bool | str | Path
) -> Path | None:
    """Return the folder of the run to resume; None if there is no such run yet.

    Args:
        source: Source of ``train``.
        config: Its settings.
        resume: False, True, or the folder of a run.

    Raises:
        ConfigError: The folder is not the folder of a run.
    """
    if resume is False:
        return None
    if resume is not True:
        folder = Path(resume)
    elif not isinstance(source, RunConfig) and os.path.isdir(source):
        folder = Path(source)
    else:
        return latest_folder(config.output_dir)
    if not (folder / RUN_FILE).is_file():
        raise ConfigError(
            f"{str(folder)!r} holds no {RUN_FILE}: give a folder that rloo-kit train wrote"
        )
    return folder


def has_finished(folder: Path, max_steps: int) -> bool:
    """Return whether a run has finished all its steps; with ``max_steps`` 0, all its epochs."""
    end = read_json(folder / "end.json") or {}
    done = end.get("how") == "finished" and end["steps"] >= max_steps
    return done and (folder / "adapter").is_dir()


def check_same_settings(folder: Path, now: RunConfig) -> None:
    """Reject settings that differ from those of the run to resume and may not change.

    The trainer itself compares the settings of ``trainer:``.

    Raises:
        ConfigError: A setting differs; the message names the first one.
    """
    then = _by_path(without_hidden(read_run_file(folder / RUN_FILE).as_dict()))
    # secrets are masked in run.yaml, so both are compared without them
    asked = _by_path(without_hidden(redact_tree(now.as_dict())))
    for path, new in asked.items():
        old = then.get(path)
        if old != new and path not in MAY_CHANGE:
            raise ConfigError(
                f"{path} is {format_value(new)}, and the run in {format_value(str(folder))} began "
                f"with {format_value(old)}: set it back, resume with rloo-kit train {folder} "
                f"--resume, which needs no --set, or leave --resume out to begin a new run"
            )


def _by_path(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of sections as ``section.key``, all others under their own names."""
    found = {}
    for name, value in settings.items():
        found |= {f"{name}.{k}": v for k, v in value.items()} if name in SECTIONS else {name: value}
    return found


# --- creating and reopening ----------------------------------------------------------------------


@contextlib.contextmanager
def opened_folder(
    free: Path,
    past: Path | None,
    config: RunConfig,
    environment: Environment,
    checkpoint: Checkpoint | None,
    step: str,
) -> Iterator["RunRecorder"]:
    """Create a run's folder, or reopen that of an unfinished run; yield the recorder of the run.

    A new folder is removed if the body fails before the first step. A later error is written to
    it, with a report.

    Args:
        free: The new folder; a number is added if it exists.
        past: Folder of the unfinished run, which the caller has locked; None to create a new one.
        config: Settings of the run.
        environment: Backend and hardware of the run.
        checkpoint: Checkpoint to resume from; without one the run starts from step 0 with an empty
            record.
        step: Name of the step that trains (the kit's or TRL's), for environment.json.

    Raises:
        KeyboardInterrupt: A signal arrived while the folder was created.
    """
    from rloo_kit.runs.recorder import RunRecorder

    def begin() -> None:
        for name in RECORD if checkpoint is None else ("end.json",):
            (folder / name).unlink(missing_ok=True)
        # an adapter of fewer steps would look like the result of the run
        shutil.rmtree(folder / "adapter", ignore_errors=True)
        write_run_file(folder, config)
        facts = asdict(environment) | {"step": step, "processes": num_processes()}
        facts["versions"] = {name: installed_version(name) for name in ("rloo_kit", *TESTED)}
        write_json(folder / "environment.json", redact_tree(facts), indent=2)

    with contextlib.ExitStack() as stack:
        with stop_signals() as signals:  # a signal in between would leave an empty folder
            folder = past or make_run_folder(free)
            if past is None:
                stack.enter_context(_removed_if_empty(folder))
                stack.enter_context(lock_folder(folder))
        if signals.received:
            raise interrupt_for(signals.received)
        recorder = RunRecorder(folder, begin)
        if checkpoint is None:  # else after the trainer has accepted the checkpoint
            recorder.begin()
        stack.enter_context(_end_recorded(recorder))
        yield recorder


def write_run_file(folder: Path, config: RunConfig) -> None:
    """Write the settings to run.yaml atomically."""
    text = yaml.safe_dump(redact_tree(config.as_dict()), sort_keys=False)
    write_atomically(folder / RUN_FILE, text.encode())


@contextlib.contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a new folder if the run fails before its first step."""
    learned = ("metrics.jsonl", "completions.jsonl", "adapter")
    try:
        yield
    except BaseException:
        if not any((folder / name).exists() for name in learned) and not list_steps(folder):
            shutil.rmtree(folder, ignore_errors=True)
            # the parent stays if it holds other runs
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        raise


@contextlib.contextmanager
def _end_recorded(recorder: "RunRecorder") -> Iterator[None]:
    """Write an error that ends the run to end.json and into the report."""
    start = time.monotonic()
    try:
        yield
    except BaseException as exc:
        if recorder.began and (recorder.folder / "metrics.jsonl").exists():
            reason = f"{type(exc).__name__}: {exc}"
            # an error of a full disk must not hide the first error
            with contextlib.suppress(OSError):
                recorder.write_end("failed", reason, recorder.steps, time.monotonic() - start)
        raise
