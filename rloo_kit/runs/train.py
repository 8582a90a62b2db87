"""One run told from top to bottom: set up, load, attach, train, save, release."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.checkpoints.stopping import Terminated, terminate_as_interrupt
from rloo_kit.checkpoints.store import Checkpoint, find_checkpoint
from rloo_kit.config.run_file import EXAMPLES, RunConfig
from rloo_kit.diagnosis.record import read_run
from rloo_kit.diagnosis.run_rules import find_in_run, verdict
from rloo_kit.errors import ConfigError, DataError, KitError
from rloo_kit.evaluation.evaluator import Evaluation, evaluate, settings_of
from rloo_kit.live.display import live_progress
from rloo_kit.machine.environment import Environment, setup
from rloo_kit.machine.hardware import GIB
from rloo_kit.machine.memory import Released, add_to_session, session
from rloo_kit.models.loading import save_adapter
from rloo_kit.output_folder import free_folder, lock_folder
from rloo_kit.planning.planner import remedy, room_here, write_plan
from rloo_kit.processes import (
    ALONE,
    Team,
    check_resumable,
    current_team,
    join_team,
    launched_rank,
    launched_size,
    why_sharded,
)
from rloo_kit.runs.folder import (
    check_same_settings,
    earlier_scores,
    folder_to_resume,
    has_finished,
    new_folder,
    reopened_folder,
)
from rloo_kit.sampling.choice import check_engine, start_engine
from rloo_kit.sampling.engine import Choice, Engine
from rloo_kit.scoring.contract import guarded
from rloo_kit.scoring.loading import LoadedReward, load_rewards
from rloo_kit.text.redaction import redacting
from rloo_kit.text.wording import first_line
from rloo_kit.training.preparation import (
    fitting_prompts,
    held_out_judges,
    load_policy,
    make_trainer_args,
    read_config,
    read_prompts,
    with_whole_paths,
)

if TYPE_CHECKING:
    from rloo_kit.runs.recorder import RunRecorder

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    folder: Path
    adapter: Path
    before: Evaluation | None
    after: Evaluation | None
    steps: int
    seconds: float
    """Training alone, since it was last gone on with."""
    interrupted: bool
    """By Ctrl-C or SIGTERM."""
    terminated: bool = False
    """By SIGTERM."""
    rescued: bool = False
    """The disk was full: what there is lies in ``folder``, another one than was asked for."""
    released: Released | None = None


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
        resume: Go on with the newest run of ``output_dir`` (True), or with the run in this folder,
            from its newest whole checkpoint; where there is none, begin.
        in_subprocess: Train in a child process, so that all its memory returns for certain.

    Returns:
        The folder, before and after, and what was released. Ctrl-C and SIGTERM let the step in
        progress end, save, and return with ``interrupted``.

    Raises:
        KitError: With the remedy; nothing is written when it comes before the first step, and the
            last finished step is saved when it comes later.
    """
    if in_subprocess:
        from rloo_kit.runs.child import call_in_child

        return call_in_child(train, (source, overrides), say, resume=resume)
    say = redacting(say) if launched_rank() == 0 else _nothing
    config, base = read_config(source, overrides)
    rewards_base = Path() if base == EXAMPLES else base  # rewards of one's own are not shipped
    whole = with_whole_paths(config, base, rewards_base)
    with terminate_as_interrupt(), session() as opened, contextlib.ExitStack() as held:
        team = _join(config.model.backend)

        def look_back() -> tuple[Path | None, bool]:
            """Return the run to go on with, locked, and whether it has ended."""
            past = folder_to_resume(source, config, resume)
            if past is None:
                return None, False
            check_resumable()
            held.enter_context(lock_folder(past))
            check_same_settings(past, whole)
            return past, has_finished(past, config.trainer.get("max_steps") or 0)

        past, finished = team.run_on_first(look_back)
        if finished:
            return _already_finished(past, say)
        if resume and past is None:
            say(f"no run in {config.output_dir} to resume: a new one begins")
        made = _prepare(config, base, rewards_base, past, say)
        result = _train_and_score(made, whole, past, say)
    result = replace(result, released=opened.released)
    if launched_rank() == 0:
        _conclude(say, result)
    return result


def _join(backend: str) -> Team:
    """Join the processes that a launcher started; alone, nothing is loaded for it."""
    if launched_size() == 1:
        return ALONE
    return join_team(on_cpu=_set_up(backend).hardware.device == "cpu")


def _nothing(line: str) -> None:
    """Say nothing: in other processes than the first."""


@dataclass(frozen=True)
class _Prepared:
    """All that a training needs, made and tried once; nothing of it is on the disk yet."""

    config: RunConfig
    base: Path
    """Folder that the paths of model and prompts start from."""
    environment: Environment
    folder: Path
    args: Any
    model: Any
    tokenizer: Any
    rewards: list[LoadedReward]
    prompts: Any
    engine: Engine | None
    score: Callable[[], Evaluation | None]


def _train_and_score(made: _Prepared, whole: RunConfig, past: Path | None, say: Say) -> RunResult:
    """Do all of it but the release; what is made here belongs to the open session."""
    team = current_team()
    checkpoint, found = team.run_on_first(lambda: _what_is_there(past))
    if past is None:
        taken = new_folder(made.folder, whole, made.environment)
    else:
        taken = reopened_folder(past, whole, made.environment, checkpoint)
    with taken if team.is_first else contextlib.nullcontext() as recorder:
        folder = team.broadcast(recorder and recorder.folder)
        made.args.output_dir = str(folder)
        trainer = _make_trainer(made, recorder)
        made = replace(made, score=trainer.whole_weights()(made.score))
        if checkpoint is None:
            _rehearse(trainer, made, say)
        before = made.score() if found is None else found
        if before:
            say(f"before: {_means(before)}")
        _watch(trainer, recorder, made, before, past=checkpoint is not None)
        seconds, by = _train(trainer, recorder, checkpoint, say)
        weights = trainer.gathered_weights()
        if recorder is not None:
            save_adapter(made.model, made.tokenizer, recorder.folder / "adapter", weights)
        after, by = _score_again(made.score, by)
        steps, rescued = trainer.state.global_step, trainer.rescued is not None
        if recorder is not None:
            _finish(trainer, recorder, after, seconds, by)
            folder = recorder.folder
    _compare(say, before, after)
    terminated = by == "SIGTERM"
    adapter = folder / "adapter"
    return RunResult(folder, adapter, before, after, steps, seconds, bool(by), terminated, rescued)


def _what_is_there(past: Path | None) -> tuple[Checkpoint | None, Evaluation | None]:
    """Return the checkpoint to go on from, and the scores from before the training."""
    checkpoint = find_checkpoint(past) if past is not None else None
    found = earlier_scores(past) if checkpoint is not None else None
    try:
        return checkpoint, None if found is None else Evaluation.from_dict(found)
    except TypeError:  # another version's, or damaged: it is scored again
        return checkpoint, None


def _prepare(
    config: RunConfig, base: Path, rewards_base: Path, past: Path | None, say: Say
) -> _Prepared:
    # Once before anything is loaded: a wrong name then costs a second, not a model load.
    for specs in (config.rewards, config.data.held_out_rewards):
        load_rewards(specs, base_dir=rewards_base, say=say)
    if config.model.trust_remote_code:
        say(f"code that comes with {config.model.name} may run: model.trust_remote_code is true")
    environment, team = _set_up(config.model.backend), current_team()
    prompts, held_out = read_prompts(config, base)
    folder = past or team.run_on_first(lambda: free_folder(config.output_dir))
    args = make_trainer_args(config, folder, team.size)
    check_engine(args)
    model, tokenizer = load_policy(config, base, args)
    load = functools.partial(
        load_rewards, tokenizer=tokenizer, chat_template_kwargs=args.chat_template_kwargs
    )
    load_beside = functools.partial(load, base_dir=rewards_base)
    rewards = load_beside(config.rewards)
    prompts, held_out = fitting_prompts(tokenizer, prompts, held_out, config, args, say)
    engine, choice = start_engine(model, args)
    _introduce(say, config, environment, len(prompts), len(held_out or []), folder)
    if engine is not None or choice.reason:
        say(_who_samples(engine, choice))
    judges = [
        replace(judge, func=guarded(judge.func, args.reward_timeout_seconds, args.on_reward_error))
        for judge in held_out_judges(rewards, held_out, load_beside, config.data.held_out_rewards)
    ]
    for judge in judges:
        add_to_session(judge.func)
    how = settings_of(args) | {"engine": engine, "num_samples": config.data.held_out_samples}
    score = _scorer(model, tokenizer, held_out, judges, how)
    return _Prepared(
        config, base, environment, folder, args, model, tokenizer, rewards, prompts, engine, score
    )


def _already_finished(folder: Path, say: Say) -> RunResult:
    end = read_run(folder).end
    say(
        f"the run in {folder} has finished: {end['steps']} steps; raise trainer.max_steps to train "
        f"on"
    )
    return RunResult(folder, folder / "adapter", None, None, end["steps"], 0.0, interrupted=False)


def _set_up(backend: str) -> Environment:
    environment = setup(backend)
    live_progress()  # a wrong RLOO_KIT_LIVE, of .env too, is told before the model is loaded
    return environment


# --- preparation ---------------------------------------------------------------------------------


def _make_trainer(made: _Prepared, recorder: "RunRecorder | None") -> Any:
    from rloo_kit.training.trainer import LeaveOneOutTrainer

    try:
        return LeaveOneOutTrainer(
            model=made.model,
            reward_funcs=made.rewards,
            args=made.args,
            train_dataset=made.prompts,
            processing_class=made.tokenizer,
            callbacks=[recorder] if recorder is not None else [],
            engine=made.engine,
        )
    except (ValueError, NotImplementedError) as exc:
        if isinstance(exc, KitError):
            raise
        raise ConfigError(f"TRL refuses the trainer settings: {first_line(exc)}") from exc


def _watch(
    trainer: Any,
    recorder: "RunRecorder | None",
    made: _Prepared,
    before: Evaluation | None,
    *,
    past: bool,
) -> None:
    """Let the doctor know the run file and the scores on held-out prompts.

    All processes score them together; the first has a recorder, and a doctor.
    """
    from rloo_kit.runs.recorder import HeldOutScores

    watch, every = trainer.watch, made.config.data.held_out_every

    def see(evaluation: Evaluation, step: int) -> None:
        if watch is not None:
            watch.see_held_out(step, evaluation.as_dict())

    def tell(evaluation: Evaluation, step: int) -> None:
        if recorder is not None:
            recorder.write_evaluation(evaluation, step)
        see(evaluation, step)

    if recorder is not None:
        recorder.stop = trainer.stop
    if watch is not None:
        watch.config = made.config
        with contextlib.suppress(DataError):  # what a power cut left of it may hold no line
            watch.past = read_run(recorder.folder) if past else None
    if before is None:
        return
    (see if past else tell)(before, 0)
    if every:
        if watch is not None:
            watch.by_held_out = True
        rest = trainer.engine.sleep if trainer.engine is not None else lambda: None
        trainer.add_callback(HeldOutScores(every, made.score, tell, rest))


def _rehearse(trainer: Any, made: _Prepared, say: Say) -> None:
    """Let memory that is not enough for the longest step run out before the first.

    What was planned for it is written beside, for the report.
    """
    from rloo_kit.training.dry_run import rehearse_first

    if trainer.team.is_first:
        write_plan(made.config, Path(made.args.output_dir), base=made.base)
    rehearse_first(
        trainer,
        say,
        max_prompt_tokens=made.config.data.max_prompt_tokens,
        remedy=lambda: remedy(made.config, room_here(), base=made.base),
    )


def _scorer(
    model: Any,
    tokenizer: Any,
    held_out: Any,
    judges: list[LoadedReward],
    how: dict[str, Any],
) -> Callable[[], Evaluation | None]:
    team, mine = current_team(), held_out
    # divided weights need every process in every pass: all score all of them
    divided = team.size > 1 and why_sharded() is None
    divided = divided and held_out is not None and len(held_out) >= team.size
    if divided:
        mine = held_out.shard(team.size, team.rank, contiguous=True)

    def score() -> Evaluation | None:
        if held_out is None:
            return None
        found = evaluate(model, tokenizer, mine, judges, **how)
        return Evaluation.joined(team.gather(found)) if divided else found

    return score


# --- training and what is written ----------------------------------------------------------------


def _train(
    trainer: Any, recorder: "RunRecorder | None", checkpoint: Checkpoint | None, say: Say
) -> tuple[float, str]:
    """Train; return seconds and what interrupted it, or "". A fault saves what was learned first.

    Args:
        trainer: The trainer.
        recorder: Of the run; None in other processes than the first.
        checkpoint: To go on from; None: from the beginning.
        say: For lines.
    """
    start = time.monotonic()
    if checkpoint is not None:
        say(f"going on after step {checkpoint.step}, from {checkpoint.folder}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="training stops")  # it is said below
            trainer.train(resume_from_checkpoint=checkpoint and checkpoint.folder)
    except KeyboardInterrupt as exc:
        by = "SIGTERM" if isinstance(exc, Terminated) else "Ctrl-C"
        say(f"\ninterrupted after step {trainer.state.global_step}: saving the adapter")
        return time.monotonic() - start, by
    except Exception:
        _save_after_fault(trainer, recorder, say)
        raise
    if trainer.stop_reason:
        say(f"\nstopped after step {trainer.state.global_step}: {trainer.stop_reason}")
    return time.monotonic() - start, ""


def _save_after_fault(trainer: Any, recorder: "RunRecorder | None", say: Say) -> None:
    if recorder is None or not trainer.state.global_step:
        return
    if trainer.weights_are_divided:  # the other processes may not be there to gather them
        say(
            f"\nstopped after step {trainer.state.global_step}, adapter not saved: "
            f"{why_sharded()} divides the weights"
        )
        return
    try:
        trainer.check_weights()
        adapter = save_adapter(trainer.model, trainer.processing_class, recorder.folder / "adapter")
    except KitError as exc:  # the fault itself must be what is raised
        say(f"\nstopped after step {trainer.state.global_step}, adapter not saved: {exc}")
        return
    say(
        f"\nstopped after step {trainer.state.global_step}: adapter saved in {adapter}; go on with "
        f"rloo-kit train {recorder.folder} --resume"
    )


def _score_again(score: Callable[[], Evaluation | None], by: str) -> tuple[Evaluation | None, str]:
    """Return the second evaluation and what interrupted the run; the adapter is saved."""
    if by:
        return None, by
    try:
        return score(), ""
    except KeyboardInterrupt as exc:
        return None, "SIGTERM" if isinstance(exc, Terminated) else "Ctrl-C"


def _finish(
    trainer: Any, recorder: "RunRecorder", after: Evaluation | None, seconds: float, by: str
) -> None:
    """Write the second scores, how the run ended, and the last report."""
    recorder.write_waiting()
    if after is not None:
        recorder.write_evaluation(after)
    how = "interrupted" if by else "stopped" if trainer.stop_reason else "finished"
    how = "failed" if trainer.rescued else how
    reason = f"by {by}" if by else trainer.stop_reason or ""
    steps = trainer.state.global_step
    recorder.write_end(how, reason, steps, seconds, trainer.watch)
    recorder.write_report()


def _introduce(
    say: Say,
    config: RunConfig,
    environment: Environment,
    num_prompts: int,
    num_held_out: int,
    folder: Path,
) -> None:
    bits = "4-bit NF4" if config.model.load_in_4bit else "16-bit"
    hardware = environment.hardware
    say(
        f"{config.model.name}, {bits}, LoRA r={config.lora.r}, {environment.backend} on "
        f"{hardware.name} ({hardware.total_memory / GIB:.0f} GiB)"
    )
    if environment.why_not_unsloth and config.model.backend == "auto":
        say(f"without Unsloth: {environment.why_not_unsloth}")
    for package, reason in environment.hidden.items():
        say(f"{package} is installed but cannot be imported, so it is hidden: {reason}")
    say(f"{num_prompts:,} prompts to train on, {num_held_out:,} held out; run folder {folder}")


def _compare(say: Say, before: Evaluation | None, after: Evaluation | None) -> None:
    if after:
        say(f"after:  {_means(after)}")
    for line in _changed_samples(before, after):
        say(line)


def _means(evaluation: Evaluation) -> str:
    parts = [
        f"{name} {'none' if value is None else f'{value:.3f}'}"
        for name, value in evaluation.rewards.items()
    ]
    how = f"sampled at {evaluation.temperature:g}" if evaluation.temperature else "greedy"
    return f"{', '.join(parts)} on {evaluation.num_prompts} held-out prompts, {how}"


def _changed_samples(
    before: Evaluation | None, after: Evaluation | None, num: int = 2
) -> list[str]:
    """Return the lines of ``num`` prompts whose scores rose the most."""
    if before is None or after is None:
        return []

    def total(sample: dict[str, Any]) -> float:
        return sum(value for value in sample["rewards"].values() if value is not None)

    twice = zip(before.samples, after.samples, strict=True)
    pairs = [pair for pair in twice if total(pair[1]) > total(pair[0])]
    pairs.sort(key=lambda pair: total(pair[0]) - total(pair[1]))
    lines = []
    for old, new in pairs[:num]:
        prompt = old["prompt"]
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        lines += [
            f"\n  {_one_line(question)}",
            f"    before: {_one_line(old['completion'])}",
            f"    after:  {_one_line(new['completion'])}",
        ]
    return lines


def _one_line(text: str, limit: int = 160) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."


def _who_samples(engine: Engine | None, choice: Choice) -> str:
    if engine is not None:
        return f"completions from {engine.name}, adapter sent after every step"
    return f"completions from transformers and not vLLM: {choice.reason}"


def _conclude(say: Say, result: RunResult) -> None:
    record = read_run(result.folder)
    say(f"\n{verdict(record, find_in_run(record))}")
    say(f"{result.steps} steps in {result.seconds:.0f} s; adapter in {result.adapter}")
    say(f"read {result.folder / 'report.html'} in a browser")
    say(str(result.released))
    if record.end.get("how") != "finished":
        say(f"go on with rloo-kit train {result.folder} --resume")
    else:
        say(
            "next: rloo-kit rewards list, then copy examples/quickstart.yaml and train your own "
            "model"
        )
