"""One run told from top to bottom: set up, load, attach, train, save, release."""

import contextlib
import functools
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rloo_kit.config import EXAMPLES, RunConfig
from rloo_kit.engines import check_engine, start_engine
from rloo_kit.environment import Environment, setup
from rloo_kit.errors import ConfigError, KitError
from rloo_kit.evaluation import Evaluation, evaluate, settings_of
from rloo_kit.generation import Choice, Engine
from rloo_kit.hardware import GIB, TESTED, installed_version
from rloo_kit.live import live_progress
from rloo_kit.memory import Released, belongs_to_session, session
from rloo_kit.models import save_adapter
from rloo_kit.output_folder import free_folder
from rloo_kit.preparation import (
    fitting_prompts,
    load_policy,
    make_trainer_args,
    read_config,
    read_prompts,
    with_whole_paths,
)
from rloo_kit.reward_contract import guarded
from rloo_kit.reward_loading import LoadedReward, load_rewards
from rloo_kit.run_findings import find_in_run, verdict
from rloo_kit.run_record import read_run

if TYPE_CHECKING:
    from rloo_kit.recording import RunRecorder

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
    """Training alone."""
    interrupted: bool
    released: Released | None = None


def train(
    source: str | Path | RunConfig,
    overrides: Sequence[str] = (),
    say: Say = print,
    *,
    in_subprocess: bool = False,
) -> RunResult:
    """Train as a run file says, and leave a folder with everything that belongs to the run.

    Args:
        source: A YAML file, the name of one that ships with the kit, or a ``RunConfig``.
        overrides: ``section.key=value``, as after ``--set``.
        say: Called with each line for the user.
        in_subprocess: Train in a child process, so that all its memory returns for certain.

    Returns:
        The folder, before and after, and what was released. Ctrl-C during training saves the
        adapter and returns with ``interrupted``.

    Raises:
        KitError: With the remedy; nothing is written when it comes before the first step, and the
            adapter is saved when it comes later.
    """
    if in_subprocess:
        from rloo_kit.child import call_in_child

        return call_in_child(train, (source, overrides), say)
    config, base = read_config(source, overrides)
    with session() as opened:
        result = _train_and_score(config, base, say)
    result = replace(result, released=opened.released)
    _conclude(say, result)
    return result


def _train_and_score(config: RunConfig, base: Path, say: Say) -> RunResult:
    """Do all of it but the release; what is made here belongs to the open session."""
    rewards_base = Path() if base == EXAMPLES else base  # rewards of one's own are not shipped
    # Once before anything is loaded: a wrong name then costs a second, not a model load.
    load_rewards(config.rewards, base_dir=rewards_base)
    environment = _set_up(config.model.backend)
    prompts, held_out = read_prompts(config, base)
    folder = free_folder(config.output_dir)
    args = make_trainer_args(config, folder)
    check_engine(args)
    model, tokenizer = load_policy(config, base, args)
    load = functools.partial(
        load_rewards, tokenizer=tokenizer, chat_template_kwargs=args.chat_template_kwargs
    )
    rewards = load(config.rewards, base_dir=rewards_base)
    prompts, held_out = fitting_prompts(tokenizer, prompts, held_out, config, args, say)
    engine, choice = start_engine(model, args)
    _introduce(say, config, environment, len(prompts), len(held_out or []), folder)
    if engine is not None or choice.reason:
        say(_who_samples(engine, choice))

    judges = [
        replace(judge, func=guarded(judge.func, args.reward_timeout_seconds, args.on_reward_error))
        for judge in _judges(rewards, held_out, load)
    ]
    for judge in judges:
        belongs_to_session(judge.func)
    score = _scorer(model, tokenizer, held_out, judges, args, engine)
    before = score()
    if before:
        say(f"before: {_means(before)}")
    with _new_folder(folder, with_whole_paths(config, base, rewards_base), environment) as recorder:
        trainer = _make_trainer(args, model, tokenizer, rewards, prompts, recorder, engine)
        _watch(trainer, recorder, config, score, before)
        seconds, interrupted = _train(trainer, folder, say)
        adapter = save_adapter(model, tokenizer, folder / "adapter")
        after, interrupted = _score_again(score, interrupted=interrupted)
        steps = _finish(trainer, recorder, after, seconds, interrupted=interrupted)
    _compare(say, before, after)
    return RunResult(folder, adapter, before, after, steps, seconds, interrupted)


def _set_up(backend: str) -> Environment:
    environment = setup(backend)
    live_progress()  # a wrong RLOO_KIT_LIVE, of .env too, is told before the model is loaded
    return environment


# --- preparation ---------------------------------------------------------------------------------


def _make_trainer(  # noqa: PLR0913
    args: Any,
    model: Any,
    tokenizer: Any,
    rewards: list[LoadedReward],
    prompts: Any,
    recorder: "RunRecorder",
    engine: Engine | None,
) -> Any:
    from rloo_kit.trainer import LeaveOneOutTrainer

    try:
        return LeaveOneOutTrainer(
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
            callbacks=[recorder],
            engine=engine,
        )
    except (ValueError, NotImplementedError) as exc:
        if isinstance(exc, KitError):
            raise
        raise ConfigError(f"TRL refuses the trainer settings: {exc}") from exc


def _watch(
    trainer: Any,
    recorder: "RunRecorder",
    config: RunConfig,
    score: Callable[[], Evaluation | None],
    before: Evaluation | None,
) -> None:
    """Let the doctor know the run file and the scores on held-out prompts."""
    from rloo_kit.recording import HeldOutScores

    def tell(evaluation: Evaluation, step: int) -> None:
        recorder.write_evaluation(evaluation, step)
        if trainer.watch is not None:
            trainer.watch.see_held_out(step, evaluation.as_dict())

    if trainer.watch is not None:
        trainer.watch.config = config
    if before is not None:
        tell(before, 0)
        if config.data.held_out_every:
            if trainer.watch is not None:
                trainer.watch.by_held_out = True
            engine = trainer.engine
            rest = engine.sleep if engine is not None else lambda: None
            trainer.add_callback(HeldOutScores(config.data.held_out_every, score, tell, rest))


def _judges(
    rewards: list[LoadedReward], held_out: Any, load: Callable[..., list[LoadedReward]]
) -> list[LoadedReward]:
    """Return the rewards, with accuracy first when the held-out prompts have answers."""
    named = {reward.name for reward in rewards}
    if held_out is None or "accuracy" in named or "answer" not in held_out.column_names:
        return rewards
    return [*load(["accuracy"]), *rewards]


def _scorer(
    model: Any,
    tokenizer: Any,
    held_out: Any,
    judges: list[LoadedReward],
    args: Any,
    engine: Engine | None,
) -> Callable[[], Evaluation | None]:
    def score() -> Evaluation | None:
        if held_out is None:
            return None
        return evaluate(
            model,
            tokenizer,
            held_out,
            judges,
            engine=engine,
            **settings_of(args),
        )

    return score


# --- training and what is written ----------------------------------------------------------------


def _train(trainer: Any, folder: Path, say: Say) -> tuple[float, bool]:
    """Train; return seconds and whether Ctrl-C ended it. A fault saves what was learned first."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="training stops")  # it is said below
            trainer.train()
    except KeyboardInterrupt:
        say(f"\ninterrupted after step {trainer.state.global_step}: saving the adapter")
        return time.monotonic() - start, True
    except Exception:
        if trainer.state.global_step:
            adapter = save_adapter(trainer.model, trainer.processing_class, folder / "adapter")
            say(f"\nstopped after step {trainer.state.global_step}: adapter saved in {adapter}")
        raise
    if trainer.stop_reason:
        say(f"\nstopped after step {trainer.state.global_step}: {trainer.stop_reason}")
    return time.monotonic() - start, False


@contextlib.contextmanager
def _new_folder(
    folder: Path, config: RunConfig, environment: Environment
) -> Iterator["RunRecorder"]:
    """Make the run's folder with its first files; take it away if the body fails before a step.

    A fault after it is written to the folder, and its report with it.
    """
    from rloo_kit.recording import RunRecorder

    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    facts = asdict(environment)
    facts["versions"] = {name: installed_version(name) for name in ("rloo_kit", *TESTED)}
    try:
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(config.as_dict(), sort_keys=False))
        (folder / "environment.json").write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as exc:
        raise ConfigError(
            f"output_dir {str(folder)!r} cannot be written ({exc}): choose another"
        ) from exc
    recorder, start = RunRecorder(folder), time.monotonic()
    try:
        yield recorder
    except BaseException as exc:
        learned = ("metrics.jsonl", "completions.jsonl", "adapter")
        if not any((folder / name).exists() for name in learned):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # a parent that is in use by now
                for parent in made[1:]:
                    parent.rmdir()
        else:
            reason = f"{type(exc).__name__}: {exc}"
            with contextlib.suppress(OSError):  # a full disk must not hide what happened first
                recorder.write_end("failed", reason, recorder.steps, time.monotonic() - start)
            recorder.write_report()
        raise


def _score_again(
    score: Callable[[], Evaluation | None], *, interrupted: bool
) -> tuple[Evaluation | None, bool]:
    """Return the second evaluation and whether Ctrl-C ended the run; the adapter is saved."""
    if interrupted:
        return None, True
    try:
        return score(), False
    except KeyboardInterrupt:
        return None, True


def _finish(
    trainer: Any,
    recorder: "RunRecorder",
    after: Evaluation | None,
    seconds: float,
    *,
    interrupted: bool,
) -> int:
    """Write the second scores, how the run ended, and the last report; return the steps."""
    if after is not None:
        recorder.write_evaluation(after)
    how = "interrupted" if interrupted else "stopped" if trainer.stop_reason else "finished"
    reason = "by Ctrl-C" if interrupted else trainer.stop_reason or ""
    steps = trainer.state.global_step
    recorder.write_end(how, reason, steps, seconds, trainer.watch)
    recorder.write_report()
    return steps


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
    if not result.interrupted:
        say(
            "next: rloo-kit rewards list, then copy examples/quickstart.yaml and train your own "
            "model"
        )
