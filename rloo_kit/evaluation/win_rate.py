"""rloo-kit judge: whose completions a judge prefers, prompt by prompt.

The judge is a reward (a rule, a reward model, your own file), whose higher score wins; or a
language model behind an OpenAI-compatible server, which compares the two in both orders.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rloo_kit.config.run_file import read_value
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import score_texts
from rloo_kit.evaluation.held_out import HeldOut, Say, read_held_out
from rloo_kit.evaluation.models import TrainedModel, by_base, find_trained
from rloo_kit.evaluation.result_files import check_writable, write_results
from rloo_kit.evaluation.statistics import Difference, difference
from rloo_kit.machine.memory import session
from rloo_kit.scoring.loading import LoadedReward, load_rewards

FILE, SAMPLES = "judge.json", "judge_samples.jsonl"


@dataclass(frozen=True)
class WinRate:
    """How often one side was preferred. Half a tie counts as a win."""

    model: str
    against: str
    judge: str
    """With its model, its rubric, and that both orders were judged."""
    mode: str
    """How the completions were drawn."""
    prompts: str
    wins: int
    losses: int
    ties: int
    unjudged: int
    """Prompts that the judge gave no verdict on; they are not counted."""
    found: Difference
    """Of the rate from one half, over prompts."""
    paid: bool = False
    """Whether the run was trained by this very judge."""

    @property
    def rate(self) -> float:
        """Share of prompts that were won."""
        return 0.5 + self.found.mean

    def __str__(self) -> str:
        low, high = (0.5 + bound for bound in (self.found.low, self.found.high))
        lines = [
            f"{self.model} wins {self.rate:.1%} [{low:.1%}, {high:.1%}] against {self.against}: "
            f"{self.wins} won, {self.ties} tied, {self.losses} lost of {self.found.num} prompts of "
            f"{self.prompts}, {self.mode}; {self.found.verdict}",
            f"judge: {self.judge}",
        ]
        if self.unjudged:
            lines.append(f"{self.unjudged} prompts without a verdict are not counted")
        if self.paid:
            lines.append("this judge is a reward of the run: it was trained to please it")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = {"rate": self.rate, "found": self.found.as_dict()}
        return {"time": time.time()} | asdict(self) | found


def judge_models(  # noqa: PLR0913
    model: str | Path,
    *,
    against: str | Path = "base",
    by: str | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    sampled: bool = False,
    batch_size: int | None = None,
    output: str | Path | None = None,
    say: Say = print,
) -> WinRate:
    """Let a judge compare a model's completions with others, on held-out prompts.

    Args:
        model: A run, a checkpoint, an adapter or a model.
        against: ``base``; another model; or ``reference``, the texts in the prompts' column of that
            name (``reference:NAME`` for another one).
        by: A reward as in a run file, text or table; None: what judges the run's held-out prompts
            first. ``{name: judge, model: NAME, mode: pairwise}`` asks a server.
        overrides: ``section.key=value`` of the run file.
        prompts: A file, task or dataset instead of the run's held-out prompts.
        num_prompts: At most so many.
        sampled: Draw at the run's temperature instead of greedily.
        batch_size: Completions at one time.
        output: Folder for ``judge.json``; None: that of the run, whose report then shows it.
        say: For lines.

    Raises:
        KitError: With the remedy.
    """
    mine = find_trained(model)
    other, column = _opponent(mine, against)
    spec = read_value(by) if isinstance(by, str) and by.lstrip().startswith("{") else by
    folder = Path(output) if output is not None else mine.run
    models = [mine] if other is None else [mine, other]
    with session():
        held_out = read_held_out(
            models,
            overrides=overrides,
            prompts=prompts,
            num_prompts=num_prompts,
            batch_size=batch_size,
        )
        _check_column(held_out, column)
        if folder is not None:
            check_writable(folder)
        held_out, sides = _answers(held_out, models, spec, {} if sampled else {"temperature": 0.0})
        for side in sides:
            say(f"{side.name}: {len(side.texts)} completions")
        if column is not None:
            sides.append(_given(held_out, column, sides[0], spec))
        won = verdicts(list(held_out.prompts), *sides)
        result = _win_rate(mine, sides, held_out, won, spec=spec, sampled=sampled)
    if folder is not None and (line := _write(folder, result, held_out, sides, won)):
        say(line)
    return result


# --- the two sides -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What one side answered."""

    name: str
    texts: list[str | None]
    """None: this side has no text for that prompt."""
    scores: list[float | None]
    """Of a judge that scores each alone."""
    judge: LoadedReward
    tokenizer: Any
    sampler: str | None = None
    """Who drew the completions; None: they came with the prompts."""


def _opponent(mine: TrainedModel, against: str | Path) -> tuple[TrainedModel | None, str | None]:
    """Return the model, or the column of texts, on the other side.

    Raises:
        ConfigError: It is the same.
    """
    name, _, column = str(against).partition(":")
    if name == "reference":
        return None, column or "reference"
    other = mine.without_adapter() if str(against) == "base" else find_trained(against)
    if (other.base, other.adapter) == (mine.base, mine.adapter):
        raise ConfigError(
            f"{mine.name} would be compared with itself: name another model with --against"
        )
    return other, None


def _check_column(held_out: HeldOut, column: str | None) -> None:
    known = held_out.prompts.column_names
    if column is not None and column not in known:
        raise DataError(
            f"the prompts have no column {column!r} to compare with: name one of "
            f"{', '.join(known)} as --against reference:NAME"
        )


def _answers(
    held_out: HeldOut, models: list[TrainedModel], spec: Any, how: dict[str, Any]
) -> tuple[HeldOut, list[Side]]:
    """Return the prompts that were used, and the completions of each model.

    They are scored where the judge scores each alone.
    """
    found: dict[str, Side] = {}
    for base, on_it in by_base(models):
        held_out = held_out.fit(base.tokenizer)
        judge = held_out.rewards(base.tokenizer, None if spec is None else [spec])[0]
        with held_out.on(base, on_it) as sample:
            for trained in on_it:
                scored = sample(trained, [] if _compares(judge) else [judge], **how).samples
                found[trained.name] = Side(
                    trained.name,
                    [one["completion"] for one in scored],
                    [one["rewards"].get(judge.name) for one in scored],
                    judge,
                    base.tokenizer,
                    sample.name,
                )
    return held_out, [found[trained.name] for trained in models]


def _given(held_out: HeldOut, column: str, mine: Side, spec: Any) -> Side:
    """Return the texts of a column as a side; they are answers, and never begin in a thought."""
    judge = held_out.rewards(None, None if spec is None else [spec])[0]
    texts = [None if text is None else str(text) for text in held_out.prompts[column][:]]
    scores: list[float | None] = [None] * len(texts)
    if not _compares(judge):
        found = _scores(list(held_out.prompts), [text or "" for text in texts], judge, mine)
        scores = [None if text is None else score for text, score in zip(texts, found, strict=True)]
    return Side(f"column {column!r} of the prompts", texts, scores, judge, mine.tokenizer)


def _scores(
    rows: list[dict[str, Any]], texts: list[str], judge: LoadedReward, side: Side
) -> list[float | None]:
    ids = [side.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return score_texts(rows, texts, ids, [judge])[judge.name]


# --- the verdicts --------------------------------------------------------------------------------


def verdicts(rows: list[dict[str, Any]], mine: Side, other: Side) -> list[float | None]:
    """Return 1 for a win, 0.5 for a tie, 0 for a loss, None without a verdict; one a prompt."""
    if _compares(mine.judge):
        return _compare_texts(rows, mine, other)
    sign = -1 if mine.judge.weight_at(1.0) < 0 else 1  # a penalty: the lower one wins
    return [
        None if a is None or b is None else 0.5 + sign * ((a > b) - (a < b)) / 2
        for a, b in zip(mine.scores, other.scores, strict=True)
    ]


def _compares(judge: LoadedReward) -> bool:
    """Return whether the judge reads both texts at once."""
    return getattr(_inner(judge), "mode", None) == "pairwise"


def _inner(judge: LoadedReward) -> Any:
    return getattr(judge.func, "reward", judge.func)


def _compare_texts(rows: list[dict[str, Any]], mine: Side, other: Side) -> list[float | None]:
    """Return what a judge that reads both says; an answer beats none, without asking."""
    inner = _inner(mine.judge)

    def answers(side: Side) -> list[str | None]:
        if side.sampler is None:
            return side.texts
        pairs = zip(rows, side.texts, strict=True)
        return [inner.answer_text(row["prompt"], text) for row, text in pairs]

    # given texts are answers already; of a completion the judge reads what follows the thought
    theirs = answers(other)
    won: list[float | None] = [None] * len(rows)
    to_ask = []
    for number, pair in enumerate(zip(answers(mine), theirs, strict=True)):
        match [None if text is None else bool(text.strip()) for text in pair]:
            case [_, None]:  # nothing to compare with
                pass
            case [True, True]:
                to_ask.append(number)
            case [True, False]:
                won[number] = 1.0
            case [False, True]:
                won[number] = 0.0
            case _:
                won[number] = 0.5
    if to_ask:
        asked = [{**rows[number], inner.column: theirs[number]} for number in to_ask]
        texts = [mine.texts[number] or "" for number in to_ask]
        for number, value in zip(to_ask, _scores(asked, texts, mine.judge, mine), strict=True):
            won[number] = value
    return won


# --- the result ----------------------------------------------------------------------------------


def _win_rate(
    mine: TrainedModel,
    sides: list[Side],
    held_out: HeldOut,
    won: list[float | None],
    *,
    spec: Any,
    sampled: bool,
) -> WinRate:
    judged = [value for value in won if value is not None]
    if not judged:
        raise DataError(
            "the judge gave no verdict on any prompt: it applies to none of them, or could not be "
            "reached"
        )
    judge, tokenizer = sides[0].judge, sides[0].tokenizer
    mode = f"sampled at {held_out.args.temperature:g}" if sampled else "greedy"
    samplers = sorted({side.sampler for side in sides if side.sampler})
    if samplers != ["transformers"]:
        mode = f"{mode}, by {' and '.join(samplers)}"
    own = [] if mine.config is None else load_rewards(mine.config.rewards, tokenizer=tokenizer)
    return WinRate(
        model=mine.name,
        against=sides[1].name,
        judge=_describe(spec, judge),
        mode=mode,
        prompts=held_out.source,
        wins=judged.count(1.0),
        losses=judged.count(0.0),
        ties=len(judged) - judged.count(1.0) - judged.count(0.0),
        unjudged=len(won) - len(judged),
        found=difference([0.5] * len(judged), judged),
        paid=any(_inner(one) == _inner(judge) for one in own),
    )


def _describe(spec: Any, judge: LoadedReward) -> str:
    if _compares(judge):
        inner = _inner(judge)
        return f"{inner.model}, asked in both orders (orders that disagree tie), for {inner.rubric}"
    wins = "lower" if judge.weight_at(1.0) < 0 else "higher"
    name = judge.name if spec is None else spec if isinstance(spec, str) else json.dumps(spec)
    return f"{name}, the {wins} score wins"


def _write(
    folder: Path, result: WinRate, held_out: HeldOut, sides: list[Side], won: list[float | None]
) -> str | None:
    mine, other = sides
    columns = (held_out.prompts["prompt"][:], mine.texts, other.texts, won)
    names = ("prompt", "completion", "against", "won")
    rows: list[dict[str, Any]] = [
        dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)
    ]
    return write_results(folder / FILE, "judged", result.as_dict(), folder / SAMPLES, rows)
