"""``rloo-kit eval``: scores of several models on the same prompts, and their differences."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.evaluator import Evaluation, evaluate
from rloo_kit.evaluation.held_out import HeldOut, read_held_out
from rloo_kit.evaluation.statistics import Difference, difference
from rloo_kit.evaluation.trained import TrainedModel, find_trained, load_base
from rloo_kit.machine.cleanup import release, session
from rloo_kit.output_folder import check_writable, read_json, write_json, write_rows
from rloo_kit.report.page import write_report
from rloo_kit.scoring.specs import LoadedReward
from rloo_kit.text.redaction import redact_tree
from rloo_kit.types import Say, Tokenizer


@dataclass(frozen=True)
class Row:
    """A row of the table: the evaluation of one model, greedy or sampled."""

    model: str
    evaluation: Evaluation
    seconds: float  # time to sample and score
    sampler: str = "transformers"  # what sampled: transformers, or the name of an engine

    @property
    def mode(self) -> str:
        """How the model was sampled, in words.

        It is ``greedy``, or the number of samples per prompt and the temperature, such as
        ``4 sampled at 0.7``.
        """
        found = self.evaluation
        return f"{found.num_samples} {found.drawn}" if found.temperature else found.drawn


@dataclass(frozen=True)
class Compared:
    """Comparison of a model with the first model: scores by one reward, prompt by prompt."""

    model: str
    against: str  # name of the first model
    mode: str  # how both were sampled, in words
    reward: str
    found: Difference  # scores of ``model`` minus scores of ``against``

    def __str__(self) -> str:
        return f"{self.model} against {self.against}, {self.reward}, {self.mode}: {self.found}"


@dataclass(frozen=True)
class EvalTable:
    """Result of ``evaluate_models``: one row for each model and way of sampling."""

    prompts: str  # file, task or dataset of the prompts
    rows: list[Row]
    compared: list[Compared]
    folder: Path | None = None  # folder that the results were written to; None: not written

    def __str__(self) -> str:
        samplers = " and ".join(sorted({row.sampler for row in self.rows}))
        head = (
            f"{self.rows[0].evaluation.num_prompts} prompts of {self.prompts}, "
            f"completions by {samplers}"
        )
        scores = [_scores(row.evaluation) for row in self.rows]
        titles = list(max(scores, key=len))  # a greedy row has no pass@k
        lines = [["model", "drawn", *titles, "thinking", "tokens", "cut off"]]
        for row, own in zip(self.rows, scores, strict=True):
            found = row.evaluation
            thinking = found.thinking_length
            lines.append(
                [
                    row.model,
                    row.mode,
                    *(own.get(title, "") for title in titles),
                    "none" if thinking is None else f"{thinking:.1f}",
                    f"{found.mean_length:.1f}",
                    f"{found.cut_off or 0:.0%}",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([head, *table, "", *map(str, self.compared)]).rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain values for JSON, without the completions."""
        rows = []
        for row in self.rows:
            facts = {name: getattr(row, name) for name in ("model", "mode", "seconds", "sampler")}
            rows.append(facts | row.evaluation.as_dict())
            del rows[-1]["samples"]
        compared = [asdict(one) for one in self.compared]
        return {"time": time.time(), "prompts": self.prompts, "rows": rows, "compared": compared}


def evaluate_models(  # noqa: PLR0913
    models: Sequence[str | Path],
    *,
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    num_samples: int = 4,
    greedy: bool = True,
    base: bool = True,
    batch_size: int | None = None,
    output: str | Path | None = None,
    say: Say = print,
) -> EvalTable:
    """Score models on the same prompts, greedy and sampled, and compare each with the first one.

    Args:
        models: Folders of runs, checkpoints or adapters, or names of models. The first model that
            comes from a run determines the prompts, the rewards and the sampling settings.
        overrides: Changes to that run's run file, each as ``section.key=value``, such as
            ``trainer.temperature=0.6``.
        prompts: A file, task or dataset to use instead of the run's held-out prompts.
        num_prompts: Maximum number of prompts. None uses all of them.
        num_samples: Number of sampled completions for each prompt, for pass@k. 0 samples none.
        greedy: If True, also generate one greedy completion for each prompt.
        base: If True and all models have an adapter, also evaluate the first model's base alone,
            and compare all models with it.
        batch_size: Number of completions at a time. None uses a number that is known to fit.
        output: Folder for ``eval.json`` and ``eval_samples.jsonl``. None uses the run's folder.
        say: Function that is called with each line of output.

    Raises:
        ConfigError: No model is given, ``num_samples`` is negative, ``num_samples`` is 0 and
            ``greedy`` is False, or a setting is wrong.
        DataError: There are no prompts, or a prompt does not fit into a model's context length.
        ModelError: A model cannot be loaded.
    """
    models = [models] if isinstance(models, str | Path) else models
    if not models:
        raise ConfigError("there is no model to evaluate: give the folder of a run")
    if num_samples < 0 or not (num_samples or greedy):
        raise ConfigError(
            f"num_samples is {num_samples}: set it to 1 or more (0 is allowed only with greedy "
            "completions)"
        )
    found = [find_trained(model) for model in models]
    if base and all(one.adapter for one in found):  # otherwise a base is already among them
        found = [found[0].without_adapter(), *found]
    how = [{"temperature": 0.0}] if greedy else []
    how += [{"num_samples": num_samples}] if num_samples else []
    with session():
        held_out = read_held_out(found, overrides, prompts, num_prompts, batch_size, say)
        folder = results_folder(output, next((one.run for one in found if one.run), None))
        rows = judge_alike(score_models(held_out, found, how, held_out.rewards))
    table = EvalTable(held_out.source, rows, list(compare(rows)), folder)
    if folder is not None:
        samples = [
            {"model": row.model, "mode": row.mode, **sample}
            for row in rows
            for sample in row.evaluation.samples
        ]
        write_results(folder / "eval.json", "evaluations", table.as_dict(), samples, say)
    return table


def score_models(
    held_out: HeldOut,
    models: list[TrainedModel],
    how: list[dict[str, Any]],
    rewards_for: Callable[[Tokenizer], list[LoadedReward]],
) -> list[Row]:
    """Sample each model in several ways, score it, and return a row for each model and way.

    The rows are in the order of ``models``. The rows of one model are in the order of ``how``.

    Args:
        held_out: The prompts.
        models: The models. Each base is loaded once, and released before the next base is loaded.
        how: Ways of sampling. Each is a dict of keyword arguments of ``evaluate``, such as
            ``{"temperature": 0.0}``, which replace the run's settings.
        rewards_for: Function that is called with the tokenizer of each base and returns the
            rewards.
    """
    rows = []
    for settings_of_base in dict.fromkeys(one.base_settings for one in models):
        on_it = [one for one in models if one.base_settings == settings_of_base]
        base = load_base(on_it[0])
        tokenizer = base.tokenizer
        rewards = rewards_for(tokenizer)
        with held_out.settings(base, on_it) as settings:
            sampler = getattr(settings["engine"], "name", "transformers")
            for trained, changes in itertools.product(on_it, how):
                began = time.monotonic()
                own = {"tool_loop": held_out.tool_loop(tokenizer), **changes}
                with base.using(trained) as model:
                    scored = evaluate(model, tokenizer, held_out.prompts, rewards, **settings | own)
                rows.append(Row(trained.name, scored, time.monotonic() - began, sampler))
                scores = [f"{name} {score}" for name, score in _scores(scored).items()]
                facts = ", ".join([*scores, f"{rows[-1].seconds:.0f} s"])
                held_out.job.say(f"{trained.name}, {rows[-1].mode}: {facts}")
        release(base.model)
    names = [one.name for one in models]
    return sorted(rows, key=lambda row: names.index(row.model))


def judge_alike(rows: list[Row]) -> list[Row]:
    """Return the rows with the same ``judged_by`` in each, so that their pass@k can be compared.

    ``judged_by`` is the reward that decides which completions are correct. It becomes the first
    reward whose scores are only 0 and 1 in every row, or "" if there is none. Without this, a
    reward could decide in one row but not in another, because it may score one model with 0 and 1
    only, and another model with values between them.
    """
    names = (
        name
        for name in rows[0].evaluation.rewards
        if all(row.evaluation.says_right_or_wrong(name) for row in rows)
    )
    judge = next(names, "")
    return [replace(row, evaluation=replace(row.evaluation, judged_by=judge)) for row in rows]


def compare(rows: list[Row]) -> Iterator[Compared]:
    """Compare every row with the first model's row in the same mode; yield one result per reward.

    Rows that were sampled by different engines are not compared, since rounding alone may make
    them differ.
    """
    first = {row.mode: row for row in reversed(rows) if row.model == rows[0].model}
    for row in rows:
        before = first[row.mode]
        if row is before or row.sampler != before.sampler:
            continue
        for name in row.evaluation.rewards:
            pairs = zip(before.evaluation.values(name), row.evaluation.values(name), strict=True)
            known = [(a, b) for a, b in pairs if a is not None and b is not None]
            if known:
                old, new = zip(*known, strict=True)
                moved = difference(old, new)
                yield Compared(row.model, before.model, row.mode, name, moved)


# --- text ----------------------------------------------------------------------------------------


def _scores(found: Evaluation) -> dict[str, str]:
    scores = {name: str(found.estimate(name) or "none") for name in found.rewards}
    # pass@1 is the mean itself
    return scores | {f"pass@{k}": str(one) for k, one in found.pass_at.items() if k > 1}


# --- result files: eval.json and judge.json grow, their samples are replaced ---------------------


def results_folder(given: str | Path | None, run: Path | None) -> Path | None:
    """Return the folder for the results, and create it if it does not exist.

    Args:
        given: The folder that the user named, or None.
        run: The run's folder, which is used if ``given`` is None. If both are None, the result is
            None and no results are written.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    folder = run if given is None else Path(given).expanduser()
    if folder is not None:
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_results(
    path: Path, name: str, result: dict[str, Any], samples: list[dict[str, Any]], say: Say
) -> None:
    """Add a result to a JSON file, and rewrite its samples file.

    In the folder of a run, also rewrite the run's report, and say where the files are.

    Args:
        path: The JSON file, such as ``eval.json``, which contains ``{name: [result, ...]}``.
        name: The key in that file.
        result: The result, which is added to the earlier ones.
        samples: Lines for the samples file next to ``path``, such as ``eval_samples.jsonl``. They
            replace the earlier ones.
        say: Function that is called with a line of output.
    """
    results = [*(read_json(path) or {}).get(name, []), result]
    write_json(path, redact_tree({name: results}), indent=1)
    write_rows(path.with_name(f"{path.stem}_samples.jsonl"), map(redact_tree, samples))
    if (path.parent / "run.yaml").is_file():
        say(f"written to {path} and {write_report([path.parent])}")
