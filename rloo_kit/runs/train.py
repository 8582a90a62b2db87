"""Run a training from start to end: load the model, train, score, save, and release the memory."""

import contextlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.checkpoints.stopping import terminate_as_interrupt, who_interrupted
from rloo_kit.checkpoints.store import Checkpoint, find_checkpoint, list_steps
from rloo_kit.config.run_file import RunConfig, read_run_file
from rloo_kit.errors import ConfigError, KitError, MemoryRanOutError, ProcessEndedError
from rloo_kit.evaluation.evaluator import Evaluation, check_held_out
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.live.select import chosen_view
from rloo_kit.machine.cleanup import MIB, is_out_of_memory, session
from rloo_kit.machine.engines import sleep_pool_bytes
from rloo_kit.machine.processes import from_first, is_cut_off, is_first, num_processes
from rloo_kit.output_folder import check_writable, free_folder, lock_folder, read_json
from rloo_kit.planning.planner import remedy, room_here
from rloo_kit.runs import summary
from rloo_kit.runs.folder import (
    RUN_FILE,
    check_is_record,
    check_same_settings,
    command_after_stop,
    finished_steps,
    folder_to_resume,
    opened_folder,
    run_of,
)
from rloo_kit.runs.summary import RunResult
from rloo_kit.text.redaction import redacting
from rloo_kit.text.wording import first_line, resume_command
from rloo_kit.types import Say

if TYPE_CHECKING:
    from rloo_kit.runs.recorder import RunRecorder
    from rloo_kit.training.trainer import LeaveOneOutTrainer

# Functions of transformers that read settings, but only after the training has begun
SET_UP = {"create_optimizer", "create_scheduler", "on_train_begin"}


def train(
    source: str | Path | RunConfig,
    overrides: Sequence[str] = (),
    say: Say = print,
    *,
    resume: bool | str | Path = False,
    in_subprocess: bool = False,
) -> RunResult:
    """Train with the settings of a run file, and write a folder with the record of the run.

    Args:
        source: A YAML file, the name of an example that comes with the kit, the folder of a run,
            or a ``RunConfig``.
        overrides: Settings in the form ``section.key=value``, as after ``--set``.
        say: Called with each line that is printed for the user. If it raises an OSError, for
            example because the terminal was closed, the run continues.
        resume: True: resume ``source`` if it is the folder of a run or the run.yaml in it, else the
            newest run in ``output_dir``. A path: resume the run in that folder. The run continues
            from its newest valid checkpoint, or from step 0 if it has neither a checkpoint nor an
            adapter.
        in_subprocess: Train in a subprocess, so that all memory is free again afterwards. A
            subprocess is always used if an earlier vLLM engine of this process could not free all
            of its memory.

    Returns:
        The folder, the scores before and after training, and the released memory. After Ctrl-C,
        SIGTERM or SIGHUP the current step is finished, the adapter is saved, and ``interrupted`` is
        True.

    Raises:
        KitError: The run cannot start or continue; the message says what to change. If this
            happens before the first step, no folder is left. Later, a checkpoint of the last
            finished step is saved, except with TRL's step.
    """
    if left := 0 if in_subprocess else sleep_pool_bytes():
        say(
            f"an earlier vLLM engine of this process still uses {left / MIB:,.0f} MiB, so this "
            f"training runs in a process of its own"
        )
    if in_subprocess or left:
        from rloo_kit.runs.child import call_in_child

        return call_in_child(train, (source, overrides), say, resume=resume)
    say = _unheard(redacting(say)) if is_first() else lambda _: None
    # an older version may have begun the run with settings that this version rejects together
    recorded = resume is not False and not overrides and run_of(source) is not None
    config, base = read_config(source, overrides, recorded=recorded)
    job = PreparedJob(config, base, say, recorded)
    with terminate_as_interrupt(), session() as opened, contextlib.ExitStack() as stack:
        if num_processes() > 1:
            _ = job.args  # connects the processes
        past = from_first(folder_to_resume(source, config, resume))
        check_writable(past or free_folder(config.output_dir))
        if past is not None:
            check_is_record(past)
            if is_first():
                stack.enter_context(lock_folder(past))
            check_same_settings(past, job.config)
            if steps := finished_steps(past, config.trainer):
                say(
                    f"the run in {past} has finished its {steps} steps; for more raise "
                    "trainer.max_steps or trainer.num_train_epochs"
                )
                return RunResult(past, None, None, steps, 0.0)
        elif resume:
            say(f"{config.output_dir} has no run to resume: a new run begins")
        result = _train_and_score(job, past)
    result = replace(result, released=opened.released)
    if is_first():
        summary.conclude(say, result)
    return result


def _unheard(say: Say) -> Say:
    """Return ``say`` without its OSErrors: a closed terminal or pipe must not end a run."""

    def call(line: str) -> None:
        with contextlib.suppress(OSError):
            say(line)

    return call


# --- preparation ---------------------------------------------------------------------------------


def _prepare(job: PreparedJob, past: Path | None, before: Evaluation | None) -> None:
    """Load the data, the model and the engine. Nothing is written yet.

    Args:
        job: The run.
        past: Folder of the run to resume; None for a new run.
        before: The scores from before training in the record of that run; None if there are none.
    """
    say = job.say
    chosen_view()  # rejects a wrong RLOO_KIT_LIVE before the model is loaded
    job.prepare()
    from rloo_kit.training.trainer import check_prompts  # TRL, after Unsloth

    prompts, held_out = job.splits
    check_prompts(prompts, job.args)
    if before is not None:
        check_held_out(held_out, before)
    summary.announce_load(job)
    engine, choice = job.engine
    summary.introduce(job)
    say(
        f"{len(prompts):,} prompts to train on, {len(held_out or ()):,} held out; "
        f"run folder {past or free_folder(job.config.output_dir)}"
    )
    if engine is not None:
        say(f"completions from {engine.name}, adapter sent after every step")
    elif choice.reason:
        say(f"completions from transformers, not from vLLM: {choice.reason}")


# --- training ------------------------------------------------------------------------------------


def _has_same_name(job: PreparedJob, folder: Path) -> bool:
    """Return True if ``model.name`` is the same as in the run.yaml in ``folder``.

    It differs if the folder or the repository of the model has moved.
    """
    return read_run_file(folder / RUN_FILE, recorded=True).model.name == job.config.model.name


def _train_and_score(job: PreparedJob, past: Path | None) -> RunResult:
    """Load, train, save and score; the caller's session releases the memory afterwards.

    Args:
        job: The run.
        past: Folder of the run to resume; None for a new run.
    """
    say = job.say
    checkpoint, before = _find_progress(past, job.config.trainer.get("stop_on") or ())
    if checkpoint and _has_same_name(job, checkpoint.folder.parent):
        job.checkpoint = checkpoint.folder
    _prepare(job, past, before)
    from rloo_kit.runs.scores import HeldOutScores  # transformers, after Unsloth

    with _opened(job, past, checkpoint) as (folder, recorder):
        trainer = _make_trainer(job, folder, recorder)
        scores = HeldOutScores(job, trainer, recorder, before)
        if checkpoint is None:
            trainer.dry_run_if_wanted(
                say,
                max_prompt_tokens=job.config.data.max_prompt_tokens,
                remedy=lambda: remedy(job.config, room_here(), base=job.base),
            )
        scores.follow()
        started = time.monotonic()
        after = None
        _, by = _until_interrupted(lambda: _train(trainer, checkpoint, say))
        seconds = time.monotonic() - started
        steps = trainer.state.global_step
        if by:
            say(f"\ninterrupted after step {steps}: saving the adapter")
        trainer.save_adapter(folder / "adapter", job.policy[1])
        if not by:
            after, by = _until_interrupted(scores.score)
        if recorder is not None:
            if after is not None:
                recorder.write_evaluation(after)
            reason = f"by {by}" if by else trainer.stop_reason or ""
            how = "interrupted" if by else "stopped" if reason else "finished"
            recorder.write_end(how, reason, steps, seconds, trainer.watch)
    summary.compare(say, scores.before, after)
    return RunResult(
        folder,
        scores.before,
        after,
        steps,
        seconds,
        interrupted=bool(by),
        terminated=by not in ("", "the user"),
    )


@contextlib.contextmanager
def _opened(
    job: PreparedJob, past: Path | None, checkpoint: Checkpoint | None
) -> Iterator[tuple[Path, "RunRecorder | None"]]:
    """Open the folder of the run while the body trains.

    Args:
        job: The run.
        past: Folder of the run to resume; None for a new run.
        checkpoint: Checkpoint to resume from; None to start from step 0.

    Yields:
        The folder and the recorder. The recorder is None in all processes except the first.

    Raises:
        ProcessEndedError: Another process of this training has ended.
    """
    opened = opened_folder(job, past, checkpoint)
    with opened if is_first() else contextlib.nullcontext() as recorder:
        try:
            yield from_first(recorder.folder if recorder else Path()), recorder
        except Exception as exc:
            if not is_cut_off(exc):
                raise
            raise ProcessEndedError(
                "another process of this training has ended: read its own error message, and then "
                "resume with --resume"
            ) from exc


def _find_progress(
    past: Path | None, stop_on: Sequence[str]
) -> tuple[Checkpoint | None, Evaluation | None]:
    """Return the checkpoint to resume from, and the recorded scores from before training.

    Both are None for a new run, and for a run without a valid checkpoint. The scores are also None
    if they cannot be read.

    Args:
        past: Folder of the run to resume; None for a new run.
        stop_on: Kinds of findings that end the run from now on.

    Raises:
        ConfigError: A finding of one of these kinds ended the run, or the run has no valid
            checkpoint but an adapter, which a new start would remove.
    """
    if past is None:
        return None, None
    if command := command_after_stop(past, stop_on):
        raise ConfigError(
            f"trainer.stop_on ended the run in {str(past)!r}, and its newest checkpoint has the "
            f"weights after the fault: train the kept adapter further with `{command}`, or resume "
            "with --set trainer.stop_on=null if the finding is false"
        )
    checkpoint = find_checkpoint(past)
    if checkpoint is None:
        if (past / "adapter").is_dir():
            raise ConfigError(
                f"the run in {str(past)!r} has an adapter but no checkpoint to resume from: leave "
                f"--resume out, and set model.name={past / 'adapter'} to train the adapter further"
            )
        return None, None
    found = (read_json(past / "evaluation.json") or {}).get("before") or {}
    try:
        return checkpoint, Evaluation.from_dict(found)
    except TypeError:  # the scores are missing or of another version, so they are computed again
        return checkpoint, None


def _make_trainer(
    job: PreparedJob, folder: Path, recorder: "RunRecorder | None"
) -> "LeaveOneOutTrainer":
    """Return the trainer of the run.

    Raises:
        ConfigError: TRL does not accept the settings.
    """
    from rloo_kit.training.trainer import LeaveOneOutTrainer

    model, tokenizer = job.policy
    job.args.output_dir = str(folder)
    try:
        trainer = LeaveOneOutTrainer(
            model=model,
            reward_funcs=job.rewards,
            args=job.args,
            train_dataset=job.splits[0],
            processing_class=tokenizer,
            callbacks=[] if recorder is None else [recorder],
            engine=job.engine[0],
            tools=job.tools[0],
            environment_factory=job.tools[1],
        )
    except (ImportError, RuntimeError, ValueError) as exc:
        if isinstance(exc, KitError) or is_out_of_memory(exc):
            raise
        raise _not_accepted(exc) from exc
    if trainer.watch is not None:
        trainer.watch.config = job.config  # with all sections
    return trainer


def _not_accepted(exc: Exception) -> ConfigError:
    """Return the error of the kit for settings that TRL or transformers did not accept."""
    return ConfigError(
        "TRL does not accept the trainer settings; correct the one that it names: "
        f"{first_line(exc)}"
    )


def _raised_by_set_up(exc: Exception) -> bool:
    """Return True if transformers raised the error from settings that it read in ``train()``."""
    return any(
        frame.f_code.co_name in SET_UP
        and frame.f_globals["__name__"].startswith("transformers.")
        # this module has a function on_train_begin that calls all callbacks, the kit's too
        and frame.f_globals["__name__"] != "transformers.trainer_callback"
        for frame, _ in traceback.walk_tb(exc.__traceback__)
    )


def _train(trainer: "LeaveOneOutTrainer", checkpoint: Checkpoint | None, say: Say) -> None:
    """Train, and print how to resume if training stops early.

    Raises:
        ConfigError: transformers does not accept the settings of the optimizer, of the learning
            rate, or of a tracker.
        MemoryRanOutError: Memory ran out.
        Exception: Any other error that ended the training.
    """
    if checkpoint is not None:
        how = ", as transformers does, which is not bit for bit" if trainer.by_trl else ""
        say(f"resuming from step {checkpoint.step} ({checkpoint.folder}){how}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="training stops")  # printed below
            # a warning about the dry run, which has already dropped its compiled code
            warnings.filterwarnings("ignore", message="Unsloth: detected a manual forward")
            trainer.train(resume_from_checkpoint=checkpoint and checkpoint.folder)
        if trainer.fault:
            raise trainer.fault
    except Exception as exc:
        if step := trainer.state.global_step:
            folder = Path(str(trainer.args.output_dir))
            how = f": resume with {resume_command(folder)}" if list_steps(folder) else ""
            say(f"\nstopped after step {step}{how}")
        if is_out_of_memory(exc):
            raise MemoryRanOutError(
                f"memory ran out ({first_line(exc)}): close other programs; or lower "
                "trainer.per_device_train_batch_size and raise "
                "trainer.gradient_accumulation_steps; or lower trainer.max_completion_length"
            ) from exc
        if not isinstance(exc, KitError) and _raised_by_set_up(exc):
            raise _not_accepted(exc) from exc
        raise
    if trainer.stop_reason:
        say(f"\nstopped after step {trainer.state.global_step}: {trainer.stop_reason}")


def _until_interrupted(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of ``call()``, and "".

    If a signal interrupts the call, return None, and the name of the signal or "the user" (Ctrl-C).
    """
    try:
        return call(), ""
    except KeyboardInterrupt as exc:
        return None, who_interrupted(exc)
