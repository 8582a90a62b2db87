"""One run from start to end: set up, load, attach, train, score, save, release."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_kit.checkpoints.stopping import Terminated, terminate_as_interrupt
from rloo_kit.checkpoints.store import Checkpoint, find_checkpoint
from rloo_kit.config.run_file import EXAMPLES, RunConfig
from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import ConfigError, DataError, KitError, MemoryRanOutError
from rloo_kit.evaluation.evaluator import Evaluation, evaluate, settings_of
from rloo_kit.job import (
    fitting_prompts,
    held_out_judges,
    load_policy,
    make_trainer_args,
    read_config,
    read_prompts,
    tokenizer_of,
    with_whole_paths,
)
from rloo_kit.live.select import live_progress
from rloo_kit.machine.engines import sleep_pool_bytes
from rloo_kit.machine.environment import Environment, setup
from rloo_kit.machine.memory import MIB, add_to_session, is_out_of_memory, session
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
from rloo_kit.sampling.choice import check_engine, start_engine, thought_limit
from rloo_kit.sampling.engine import Choice, Engine
from rloo_kit.scoring.contract import guarded
from rloo_kit.scoring.loading import LoadedReward, load_rewards
from rloo_kit.text.redaction import redacting
from rloo_kit.text.wording import first_line
from rloo_kit.types import Model, Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

    from rloo_kit.runs.recorder import RunRecorder
    from rloo_kit.training.config import LeaveOneOutConfig
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
    # A run file that ships with the kit finds the user's own rewards in the working folder.
    rewards_base = Path() if base == EXAMPLES else base
    absolute = with_whole_paths(config, base, rewards_base)
    with terminate_as_interrupt(), session() as opened, contextlib.ExitStack() as held:
        past = folder_to_resume(source, config, resume)
        if past is not None:
            held.enter_context(lock_folder(past))
            check_same_settings(past, absolute)
            if has_finished(past, config.trainer.get("max_steps") or 0):
                return _already_finished(past, say)
        elif resume:
            say(f"no run in {config.output_dir} to resume: a new one begins")
        made = _prepare(config, base, rewards_base, past, say)
        result = _train_and_score(made, absolute, past, say)
    result = replace(result, released=opened.released)
    summary.conclude(say, result)
    return result


def _already_finished(folder: Path, say: Say) -> RunResult:
    steps = read_run(folder).end["steps"]
    say(f"the run in {folder} has finished its {steps} steps; for more raise trainer.max_steps")
    return RunResult(folder, folder / "adapter", None, None, steps, 0.0, interrupted=False)


# --- preparation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """All that a training needs, checked; nothing is on the disk yet."""

    config: RunConfig
    base: Path  # folder that relative paths of model and prompts start from
    environment: Environment
    folder: Path
    args: "LeaveOneOutConfig"
    model: Model
    tokenizer: Tokenizer
    rewards: list[LoadedReward]
    prompts: "Dataset"
    engine: Engine | None
    score: Callable[[], Evaluation | None]


def _prepare(
    config: RunConfig, base: Path, rewards_base: Path, past: Path | None, say: Say
) -> _Prepared:
    # Load the rewards once before the model: a wrong name then costs a second, not a model load.
    for specs in (config.rewards, config.data.held_out_rewards):
        load_rewards(specs, base_dir=rewards_base, say=say)
    if config.model.trust_remote_code:
        say(f"code that comes with {config.model.name} may run: model.trust_remote_code is true")
    environment = setup(config.model.backend)
    from rloo_kit.training.trainer import check_prompts  # TRL, after Unsloth

    live_progress()  # refuses a wrong RLOO_KIT_LIVE, from .env too, before the model is loaded
    prompts, held_out = read_prompts(config, base)
    folder = past or free_folder(config.output_dir)
    args = make_trainer_args(config, folder)
    check_engine(args)
    # All that a tokenizer can tell comes before the weights, which may take minutes
    tokenizer = tokenizer_of(config, base)
    thought_limit(tokenizer, args.thinking_budget)  # refuses a model without thoughts
    load = functools.partial(
        load_rewards,
        base_dir=rewards_base,
        tokenizer=tokenizer,
        chat_template_kwargs=args.chat_template_kwargs,
    )
    rewards = load(config.rewards)
    prompts, held_out = fitting_prompts(tokenizer, prompts, held_out, config, args, say)
    check_prompts(prompts, args)
    summary.announce_load(say, config, environment, args)
    model, tokenizer = load_policy(config, base, args)
    engine, choice = start_engine(model, args)
    if engine is None:
        args.generation, args.use_vllm = "transformers", False  # the trainer starts none either
    summary.introduce(say, config, environment)
    say(
        f"{len(prompts):,} prompts to train on, {len(held_out or ()):,} held out; "
        f"run folder {folder}"
    )
    _say_sampler(say, engine, choice)
    judges = [
        replace(judge, func=guarded(judge.func, args.reward_timeout_seconds, args.on_reward_error))
        for judge in held_out_judges(rewards, held_out, load, config.data)
    ]
    for judge in judges:
        add_to_session(judge.func)
    how = settings_of(args) | {"engine": engine, "num_samples": config.data.held_out_samples}

    def score() -> Evaluation | None:
        """Score the held-out prompts, if there are any."""
        if held_out is None:
            return None
        return evaluate(model, tokenizer, held_out, judges, **how)

    return _Prepared(
        config, base, environment, folder, args, model, tokenizer, rewards, prompts, engine, score
    )


def _say_sampler(say: Say, engine: Engine | None, choice: Choice) -> None:
    if engine is not None:
        say(f"completions from {engine.name}, adapter sent after every step")
    elif choice.reason:
        say(f"completions from transformers and not vLLM: {choice.reason}")


# --- training ------------------------------------------------------------------------------------


def _train_and_score(
    made: _Prepared, absolute: RunConfig, past: Path | None, say: Say
) -> RunResult:
    """Run everything except the release; what is made here belongs to the open session."""
    checkpoint, before = _find_progress(past)
    if past is None:
        opened = new_folder(made.folder, absolute, made.environment)
    else:
        opened = reopened_folder(past, absolute, made.environment, checkpoint)
    with opened as recorder:
        folder = recorder.folder
        made.args.output_dir = str(folder)
        trainer = _make_trainer(made, recorder)
        score = made.score
        if checkpoint is None:
            trainer.dry_run_if_wanted(
                say,
                max_prompt_tokens=made.config.data.max_prompt_tokens,
                remedy=lambda: remedy(made.config, room_here(), base=made.base),
            )
        if before is None:
            before = score()
        if before:
            say(f"before: {summary.means(before)}")
        _follow_scores(trainer, recorder, made, score, before, resumed=checkpoint is not None)
        seconds, by = _train(trainer, checkpoint, say)
        save_adapter(made.model, made.tokenizer, folder / "adapter")
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


def _make_trainer(made: _Prepared, recorder: "RunRecorder") -> "LeaveOneOutTrainer":
    from rloo_kit.training.trainer import LeaveOneOutTrainer

    try:
        return LeaveOneOutTrainer(
            model=made.model,
            reward_funcs=made.rewards,
            args=made.args,
            train_dataset=made.prompts,
            processing_class=made.tokenizer,
            callbacks=[recorder],
            engine=made.engine,
        )
    except (ValueError, NotImplementedError) as exc:
        if isinstance(exc, KitError):
            raise
        raise ConfigError(f"TRL refuses the trainer settings: {first_line(exc)}") from exc


def _follow_scores(
    trainer: "LeaveOneOutTrainer",
    recorder: "RunRecorder",
    made: _Prepared,
    score: Callable[[], Evaluation | None],
    before: Evaluation | None,
    *,
    resumed: bool,
) -> None:
    """Score held-out prompts during training, for the record and for the watch."""
    from rloo_kit.runs.recorder import HeldOutScores

    watch, every = trainer.watch, made.config.data.held_out_every

    def note(evaluation: Evaluation, step: int) -> None:
        if not (resumed and step == 0):
            recorder.write_evaluation(evaluation, step)
        if watch is not None:
            watch.see_held_out(step, evaluation.as_dict())

    if watch is not None:
        watch.config = made.config
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
