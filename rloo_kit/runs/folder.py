"""Create or reopen the folder of a run, and record how the run ended, even if it failed."""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rloo_kit.checkpoints.stopping import interrupt_for, stop_signals, who_interrupted
from rloo_kit.checkpoints.store import Checkpoint, list_steps
from rloo_kit.config.run_file import SECTIONS, RunConfig, read_run_file
from rloo_kit.config.trainer_settings import trl_defaults
from rloo_kit.errors import ConfigError, DiskError
from rloo_kit.job import PreparedJob, is_folder, run_file_in
from rloo_kit.machine.hardware import TESTED, installed_version
from rloo_kit.machine.processes import num_processes
from rloo_kit.models.adapters import adapter_in, lora_settings
from rloo_kit.output_folder import (
    latest_folder,
    lock_folder,
    make_run_folder,
    read_json,
    write_atomically,
    write_json,
)
from rloo_kit.text.redaction import redact_tree, without_hidden
from rloo_kit.text.wording import format_value, resume_command, without_folders

if TYPE_CHECKING:
    from rloo_kit.runs.recorder import RunRecorder

RUN_FILE = "run.yaml"
# Settings that `check_same_settings` does not compare. It leaves the settings of `trainer` to the
# trainer, which compares them with its checkpoint
MAY_CHANGE = {
    "model.name",  # a folder may have moved; the weights themselves are compared
    "model.backend",
    "data.held_out_every",
    "data.prompts",
    "trainer",
    "output_dir",
}
# Settings that name files. Their folders are not compared, because a folder may have moved
OF_FILES = {"data.held_out_rewards", "environment", "model.chat_template", "rewards", "tools"}
# Parameters of a judge that may differ, because they are only about the requests to its server
OF_SERVER = {"api_key_env", "base_url", "max_concurrency", "max_retries", "timeout_seconds"}
# Files that a run writes while it trains
RECORD = ("metrics.jsonl", "completions.jsonl", "evaluation.json", "end.json", "report.html")


# --- which run -----------------------------------------------------------------------------------


def folder_to_resume(
    source: str | Path | RunConfig, config: RunConfig, resume: bool | str | Path
) -> Path | None:
    """Return the folder of the run to resume; None to begin a new run.

    Args:
        source: The argument ``source`` of ``train``.
        config: The settings that were read from it.
        resume: False: begin a new run. A path: resume the run in that folder. True: resume
            ``source`` if it is a folder or the run.yaml of a run, otherwise the newest run in
            ``output_dir``, if there is one.

    Raises:
        ConfigError: The folder does not belong to a run, or ``config`` has another ``output_dir``
            than the run in ``source``.
    """
    if resume is False:
        return None
    if resume is not True:
        return run_file_in(resume).parent
    folder = run_of(source)
    if folder is None:
        return latest_folder(config.output_dir)
    recorded = read_run_file(run_file_in(folder), recorded=True).output_dir
    is_same = Path(config.output_dir).expanduser().resolve() == folder.resolve()
    if config.output_dir != recorded and not is_same:
        raise ConfigError(
            f"output_dir is {format_value(config.output_dir)}, but the run continues in its own "
            f"folder {format_value(str(folder))}: leave output_dir out"
        )
    return folder


def run_of(source: object) -> Path | None:
    """Return the folder of a run if ``source`` is the folder or its run.yaml, otherwise None.

    The run.yaml of a run has the file environment.json beside it.
    """
    if not isinstance(source, str | Path):
        return None
    place = Path(source)
    if is_folder(source):
        return place
    is_record = place.name == RUN_FILE and os.path.isfile(place.parent / "environment.json")
    return place.parent if is_record else None


def check_is_record(folder: Path) -> None:
    """Check that a run wrote the run.yaml in a folder, because a resume may replace the file.

    Raises:
        ConfigError: The file is the user's own.
    """
    if not (list_steps(folder) or (folder / "environment.json").is_file()):
        raise ConfigError(
            f"{format_value(str(folder / RUN_FILE))} is not the record of a run, and a resume "
            "would replace it: give the file itself, not its folder, and leave resume out"
        )


def finished_steps(folder: Path, trainer: dict[str, Any]) -> int:
    """Return the number of steps of a run that has finished; 0 if the run must continue.

    A run has finished if it reached its end, saved its adapter, and the settings of this start do
    not ask for more steps.

    Args:
        folder: Folder of the run.
        trainer: The section ``trainer:`` of this start, which may ask for more steps or epochs.
    """
    end = read_json(folder / "end.json") or {}
    if end.get("how") != "finished" or not (folder / "adapter").is_dir():
        return 0
    then = trl_defaults() | read_run_file(folder / RUN_FILE, recorded=True).trainer
    now = trl_defaults() | trainer
    if now["max_steps"] > 0:
        is_enough = end["steps"] >= now["max_steps"]
    else:
        is_enough = then["max_steps"] <= 0 and now["num_train_epochs"] <= then["num_train_epochs"]
    return end["steps"] if is_enough else 0


def command_with_adapter(
    source: str | Path, overrides: Sequence[str], config: RunConfig, adapter: Path
) -> str:
    """Return the command that starts a new run, which trains an adapter further.

    Args:
        source: Run file or folder of the run that made the adapter. The new run has its settings.
        overrides: Settings of the new run that differ, in the form ``section.key=value``.
        config: The settings in ``source``.
        adapter: Folder of the adapter.
    """
    words = ["rloo-kit", "train", Path(source).as_posix()]
    settings = [*overrides, f"model.name={adapter.as_posix()}"]
    layers = lora_settings(adapter, {})["target_modules"]
    given = config.lora.target_modules
    named = {given} if isinstance(given, str) else {*given}  # a pattern, or names
    if "target_modules" in config.lora.given and named != {*layers}:
        settings.append(f"lora.target_modules=[{','.join(layers)}]")  # replaces all-linear
    if config.model.revision is not None:
        settings.append("model.revision=null")  # a folder, such as the adapter, has no revision
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def command_after_stop(folder: Path, stop_on: Sequence[str] | None = None) -> str:
    """Return the command that trains the best weights of a run further after a finding ended it.

    When a finding of the doctor ends a run (``trainer.stop_on``), the run saves its best weights
    as its adapter, while its newest checkpoint has later weights.

    Args:
        folder: Folder of the run.
        stop_on: Kinds of findings that count; None: all.

    Returns:
        The command; "" if no finding of these kinds ended the run, or if the run has no adapter.
    """
    finding = (read_json(folder / "end.json") or {}).get("finding")
    if not isinstance(finding, dict) or adapter_in(folder / "adapter") is None:
        return ""
    if stop_on is not None and finding.get("kind") not in stop_on:
        return ""
    remedies = filter(None, str(finding.get("setting") or "").split(", "))
    config = read_run_file(folder / RUN_FILE, recorded=True)
    return command_with_adapter(folder, [*remedies], config, folder / "adapter")


def check_same_settings(folder: Path, now: RunConfig) -> None:
    """Check that the settings are the same as those with which the resumed run began.

    Settings in ``MAY_CHANGE``, parameters of a judge in ``OF_SERVER``, and the folders of files may
    differ. The trainer itself compares the settings of ``trainer:``.

    Args:
        folder: Folder of the run to resume.
        now: The settings of this start.

    Raises:
        ConfigError: A setting differs. The message names the first one.
    """
    recorded = read_run_file(folder / RUN_FILE, recorded=True)
    then = _by_path(without_hidden(recorded.as_dict()))
    # secrets are masked in run.yaml, so both are compared without them
    asked = _by_path(without_hidden(redact_tree(now.as_dict())))
    for path in {**then, **asked}:
        old, new = then.get(path), asked.get(path)
        if path in OF_FILES and _comparable(old) == _comparable(new):
            continue
        if old != new and path not in MAY_CHANGE:
            raise ConfigError(
                f"{path} is {format_value(new)}, but the run in {format_value(str(folder))} began "
                f"with {format_value(old)}: set it back, or resume with the old settings "
                f"(`{resume_command(folder)}`), or leave --resume out to begin a new run"
            )


def _comparable(value: object) -> Any:
    """Return rewards or files in a form to compare: without folders, and without ``OF_SERVER``."""
    if isinstance(value, list):
        return [_comparable(one) for one in value]
    if not isinstance(value, dict):
        return without_folders(value)
    is_judge = str(value.get("name")).partition(":")[0] == "judge"
    return {k: _comparable(v) for k, v in value.items() if not (is_judge and k in OF_SERVER)}


def _by_path(settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings in one flat dict; the keys in a section become ``section.key``."""
    found = {}
    for name, value in settings.items():
        found |= {f"{name}.{k}": v for k, v in value.items()} if name in SECTIONS else {name: value}
    return found


# --- creating and reopening ----------------------------------------------------------------------


@contextlib.contextmanager
def opened_folder(
    job: PreparedJob, past: Path | None, checkpoint: Checkpoint | None
) -> Iterator["RunRecorder"]:
    """Create the folder of a new run, or reopen the folder of an unfinished run.

    If the body fails before the first step, a new folder is removed. If it fails later, the error
    is written to end.json and to the report.

    Args:
        job: The run.
        past: Folder of the unfinished run, which the caller has locked; None to create a new one.
        checkpoint: Checkpoint to resume from; None: the run starts from step 0, and the files
            that an earlier start has written are removed.

    Yields:
        The recorder of the run, which knows the folder.

    Raises:
        KeyboardInterrupt: A signal arrived while the folder was created.
    """
    from rloo_kit.runs.recorder import RunRecorder

    with contextlib.ExitStack() as stack:
        with stop_signals() as signals:  # a signal now must not leave an empty folder behind
            folder = past or make_run_folder(job.config.output_dir)
            if past is None:
                stack.callback(_remove_if_empty, folder)
                stack.enter_context(lock_folder(folder))
        if signals.received:
            raise interrupt_for(signals.received)
        recorder = RunRecorder(folder)
        if checkpoint is None:
            _begin(job, recorder, RECORD)
        else:
            recorder.make_ready = partial(_begin, job, recorder, ("end.json",))
        started = time.monotonic()
        try:
            yield recorder
        except BaseException as exc:
            if recorder.steps:  # made by this start, or by the run before its checkpoint
                how, reason = "failed", f"{type(exc).__name__}: {exc}"
                if isinstance(exc, KeyboardInterrupt):
                    how, reason = "interrupted", f"by {who_interrupted(exc)}"
                # if the disk is full too, the first error must still be raised
                with contextlib.suppress(DiskError):
                    recorder.write_end(how, reason, recorder.steps, time.monotonic() - started)
            raise


def _begin(job: PreparedJob, recorder: "RunRecorder", outdated: Iterable[str]) -> None:
    """Remove what is left of an earlier start, and write the settings and the environment.

    Args:
        job: The run.
        recorder: The recorder, which knows the folder.
        outdated: Names of the files to remove.
    """
    folder = recorder.folder
    for name in outdated:
        (folder / name).unlink(missing_ok=True)
    # an adapter that an earlier start saved would look like the result of this run
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    facts = asdict(job.environment) | {
        "step": str(job.step),
        "processes": num_processes(),
        "versions": {name: installed_version(name) for name in ("rloo_kit", *TESTED)},
    }
    write_json(folder / "environment.json", redact_tree(facts), indent=2)
    write_run_file(folder, job.config)  # last: without environment.json, it counts as the user's


def write_run_file(folder: Path, config: RunConfig) -> None:
    """Write the settings to run.yaml in the folder of a run, atomically and without secrets."""
    text = yaml.safe_dump(redact_tree(config.as_dict()), sort_keys=False)
    write_atomically(folder / RUN_FILE, text.encode())


def _remove_if_empty(folder: Path) -> None:
    """Remove a new folder if its run ended before the first step."""
    learned = ("metrics.jsonl", "completions.jsonl", "adapter")
    if not any((folder / name).exists() for name in learned) and not list_steps(folder):
        shutil.rmtree(folder, ignore_errors=True)
        # if the parent folder has other runs, this fails and the parent stays
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
