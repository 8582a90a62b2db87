"""One run from start to end: set up, load, attach, train, score, save, release."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.checkpoints.stopping import Terminated, terminate_as_interrupt
from rloo_kit.checkpoints.store import Checkpoint, find_checkpoint
from rloo_kit.config.run_file import RunConfig
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import ConfigError, DataError, KitError, MemoryRanOutError
from rloo_kit.evaluation.evaluator import Evaluation, evaluate, settings_of
from rloo_kit.job import PreparedJob, read_config, with_whole_paths
from rloo_kit.live.select import chosen_view
from rloo_kit.machine.engines import sleep_pool_bytes
from rloo_kit.machine.memory import MIB, is_out_of_memory, session
from rloo_kit.models.loading import save_adapter
from rloo_kit.output_folder import free_folder, lock_folder, read_json
from rloo_kit.planning.planner import remedy, room_here
from rloo_kit.runs import summary
from rloo_kit.runs.folder import (
    check_same_settings,
    folder_to_resume,
    has_finished,
    new_folder,
    reopened_folder,
)
from rloo_kit.runs.summary import RunResult
from rloo_kit.text.redaction import redacting
from rloo_kit.text.wording import first_line

if TYPE_CHECKING:
    from rloo_kit.runs.recorder import RunRecorder
    from rloo_kit.training.trainer import LeaveOneOutTrainer

Say = Callable[[str], None]


def train(
    source: str | Path | RunConfig,
    overrides: Sequence[str] = (),
    say: Say = print,
    *,
    resume: bool | str | Path = False,
    in_subprocess: bool = False,
) -> RunResult:
    """Train as a run file says, and leave a folder with everything that belongs to the run.

    Args:
        source: A YAML file, the name of one that ships with the kit, the folder of a run, or a
            ``RunConfig``.
        overrides: ``section.key=value``, as after ``--set``.
        say: Called with each line for the user.
        resume: Resume the newest run of ``output_dir`` (True) or the run in this folder, from its
            newest whole checkpoint; without a checkpoint the run starts from step 0.
        in_subprocess: Train in a subprocess, which returns all its memory to the system. It also
            does where an earlier vLLM engine of this process could not give back all of its memory.

    Returns:
        The folder, the scores before and after, and what was released. After Ctrl-C or SIGTERM
        the current step ends, the adapter is saved, and ``interrupted`` is true.

    Raises:
        KitError: With the remedy. Before the first step it leaves no folder; later the checkpoint
            of the last finished step is saved.
    """
    if left := 0 if in_subprocess else sleep_pool_bytes():
        say(
            f"an earlier vLLM engine of this process holds {left / MIB:,.0f} MiB: this training "
            f"runs in a process of its own"
        )
    if in_subprocess or left:
        from rloo_kit.runs.child import call_in_child

        return call_in_child(train, (source, overrides), say, resume=resume)
    say = redacting(say)
    config, base = read_config(source, overrides)
    job = PreparedJob(config, base, say)
    absolute = with_whole_paths(config, base, job.rewards_base)
    with terminate_as_interrupt(), session() as opened, contextlib.ExitStack() as held:
        past = folder_to_resume(source, config, resume)
        if past is not None:
            held.enter_context(lock_folder(past))
            check_same_settings(past, absolute)
            if has_finished(past, config.trainer.get("max_steps") or 0):
                return _already_finished(past, say)
        elif resume:
            say(f"no run in {config.output_dir} to resume: a new one begins")
        result = _train_and_score(job, absolute, past, say)
    result = replace(result, released=opened.released)
    summary.conclude(say, result)
    return result


def _already_finished(folder: Path, say: Say) -> RunResult:
    steps = read_run(folder).end["steps"]
    say(f"the run in {folder} has finished its {steps} steps; for more raise trainer.max_steps")
    return RunResult(folder, folder / "adapter", None, None, steps, 0.0, interrupted=False)


# --- preparation ---------------------------------------------------------------------------------


def _prepare(job: PreparedJob, past: Path | None, say: Say) -> Path:
    """Make the parts of the job, and return the folder of the run; nothing is written yet."""
    chosen_view()  # refuses a wrong RLOO_KIT_LIVE before the model is loaded
    folder = past or free_folder(job.config.output_dir)
    job.prepare()
    from rloo_kit.training.trainer import check_prompts  # TRL, after Unsloth

    prompts, held_out = job.splits
    check_prompts(prompts, job.args)
    summary.announce_load(say, job.config, job.environment, job.args)
    engine, choice = job.engine
    summary.introduce(say, job.config, job.environment)
    say(
        f"{len(prompts):,} prompts to train on, {len(held_out or ()):,} held out; "
        f"run folder {folder}"
    )
    if engine is not None:
        say(f"completions from {engine.name}, adapter sent after every step")
    elif choice.reason:
        say(f"completions from transformers and not vLLM: {choice.reason}")
    return folder


def _score(job: PreparedJob) -> Evaluation | None:
    """Score the held-out prompts, if there are any."""
    _, held_out = job.splits
    if held_out is None:
        return None
    how: dict[str, Any] = settings_of(job.args) | {"engine": job.engine[0]}
    return evaluate(
        *job.policy, held_out, job.judges, num_samples=job.config.data.held_out_samples, **how
    )


# --- training ------------------------------------------------------------------------------------


def _train_and_score(
    job: PreparedJob, absolute: RunConfig, past: Path | None, say: Say
) -> RunResult:
    """Run everything except the release; what is made here belongs to the open session."""
    free = _prepare(job, past, say)
    checkpoint, before = _find_progress(past)
    if past is None:
        opened = new_folder(free, absolute, job.environment)
    else:
        opened = reopened_folder(past, absolute, job.environment, checkpoint)
    score = functools.partial(_score, job)
    with opened as recorder:
        folder = recorder.folder
        job.args.output_dir = str(folder)
        trainer = _make_trainer(job, recorder)
        if checkpoint is None:
            trainer.dry_run_if_wanted(
                say,
                max_prompt_tokens=job.config.data.max_prompt_tokens,
                remedy=lambda: remedy(job.config, room_here(), base=job.base),
            )
        if before is None:
            before = score()
        if before:
            say(f"before: {summary.means(before)}")
        _follow_scores(trainer, recorder, job.config, score, before, resumed=checkpoint is not None)
        seconds, by = _train(trainer, checkpoint, say)
        save_adapter(*job.policy, folder / "adapter")
        after, by = _score_again(score, by)
        steps = trainer.state.global_step
        _finish(trainer, recorder, after, seconds, by)
    summary.compare(say, before, after)
    return RunResult(
        folder,
        folder / "adapter",
        before,
        after,
        steps,
        seconds,
        interrupted=bool(by),
        terminated=by == "SIGTERM",
    )


def _find_progress(past: Path | None) -> tuple[Checkpoint | None, Evaluation | None]:
    """Return the checkpoint to resume from, and the scores from before the training."""
    checkpoint = find_checkpoint(past) if past is not None else None
    if past is None or checkpoint is None:
        return None, None
    found = (read_json(past / "evaluation.json") or {}).get("before") or {}
    try:
        return checkpoint, Evaluation.from_dict(found)
    except TypeError:  # there are none, or another version's, or damaged ones: score again
        return checkpoint, None


def _make_trainer(job: PreparedJob, recorder: "RunRecorder") -> "LeaveOneOutTrainer":
    from rloo_kit.training.trainer import LeaveOneOutTrainer

    model, tokenizer = job.policy
    try:
        return LeaveOneOutTrainer(
            model=model,
            reward_funcs=job.rewards,
            args=job.args,
            train_dataset=job.splits[0],
            processing_class=tokenizer,
            callbacks=[recorder],
            engine=job.engine[0],
        )
    except (ValueError, NotImplementedError) as exc:
        if isinstance(exc, KitError):
            raise
        raise ConfigError(f"TRL refuses the trainer settings: {first_line(exc)}") from exc


def _follow_scores(
    trainer: "LeaveOneOutTrainer",
    recorder: "RunRecorder",
    config: RunConfig,
    score: Callable[[], Evaluation | None],
    before: Evaluation | None,
    *,
    resumed: bool,
) -> None:
    """Score held-out prompts during training, for the record and for the watch."""
    from rloo_kit.runs.recorder import HeldOutScores

    watch, every = trainer.watch, config.data.held_out_every

    def note(evaluation: Evaluation, step: int) -> None:
        if not (resumed and step == 0):
            recorder.write_evaluation(evaluation, step)
        if watch is not None:
            watch.see_held_out(step, evaluation.as_dict())

    if watch is not None:
        watch.config = config
        watch.by_held_out = before is not None and bool(every)
        # After a power cut it may hold no line
        with contextlib.suppress(DataError):
            watch.past = read_run(recorder.folder) if resumed else None
    if before is None:
        return
    note(before, 0)
    if every:
        rest = trainer.engine.sleep if trainer.engine is not None else lambda: None
        trainer.add_callback(HeldOutScores(every, score, note, rest))


def _train(
    trainer: "LeaveOneOutTrainer", checkpoint: Checkpoint | None, say: Say
) -> tuple[float, str]:
    """Train; return the seconds, and the signal that interrupted it or ""."""
    start = time.monotonic()
    if checkpoint is not None:
        say(f"resuming from step {checkpoint.step} ({checkpoint.folder})")
    try:
        with warnings.catch_warnings():
            # Said below
            warnings.filterwarnings("ignore", message="training stops")
            trainer.train(resume_from_checkpoint=checkpoint and checkpoint.folder)
    except KeyboardInterrupt as exc:
        say(f"\ninterrupted after step {trainer.state.global_step}: saving the adapter")
        return time.monotonic() - start, _signal_name(exc)
    except Exception as exc:
        if step := trainer.state.global_step:
            folder = trainer.args.output_dir
            say(f"\nstopped after step {step}: resume with rloo-kit train {folder} --resume")
        if not is_out_of_memory(exc):
            raise
        raise MemoryRanOutError(
            f"memory ran out ({first_line(exc)}): close other programs, lower "
            f"trainer.per_device_train_batch_size with more gradient_accumulation_steps, or "
            f"trainer.max_completion_length"
        ) from exc
    if trainer.stop_reason:
        say(f"\nstopped after step {trainer.state.global_step}: {trainer.stop_reason}")
    return time.monotonic() - start, ""


def _signal_name(exc: KeyboardInterrupt) -> str:
    return "SIGTERM" if isinstance(exc, Terminated) else "Ctrl-C"


def _score_again(score: Callable[[], Evaluation | None], by: str) -> tuple[Evaluation | None, str]:
    """Return the scores after training and the signal that interrupted the run."""
    if by:
        return None, by
    try:
        return score(), ""
    except KeyboardInterrupt as exc:
        return None, _signal_name(exc)


def _finish(
    trainer: "LeaveOneOutTrainer",
    recorder: "RunRecorder",
    after: Evaluation | None,
    seconds: float,
    by: str,
) -> None:
    """Write the scores after training, how the run ended, and the last report."""
    if after is not None:
        recorder.write_evaluation(after)
    how = "interrupted" if by else "stopped" if trainer.stop_reason else "finished"
    reason = f"by {by}" if by else trainer.stop_reason or ""
    recorder.write_end(how, reason, trainer.state.global_step, seconds, trainer.watch)
    recorder.write_report()
