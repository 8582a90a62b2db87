"""rloo-kit judge: whose completions a judge prefers, prompt by prompt.

The judge is a reward (a rule, a reward model, a file of one's own), whose higher score wins; or a
language model behind an OpenAI-compatible server, which compares the two in both orders.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rloo_kit.config import read_value
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.eval_statistics import Difference, difference
from rloo_kit.evaluation import score_texts
from rloo_kit.examination import Examination, examine_models
from rloo_kit.memory import session
from rloo_kit.report import write_report
from rloo_kit.result_files import add_result, replace_rows
from rloo_kit.reward_loading import LoadedReward, load_rewards
from rloo_kit.trained_models import TrainedModel, by_base, find_trained

Say = Callable[[str], None]
FILE, SAMPLES = "judge.json", "judge_samples.jsonl"


@dataclass(frozen=True)
class WinRate:
    """How often one side was preferred. Half a tie counts as a win."""

    model: str
    against: str
    judge: str
    """Named with all that decides: which model, which rubric, both orders."""
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
        real = "real" if self.found.is_real else "may be chance"
        p = "p < 0.001" if self.found.p_value < 0.001 else f"p = {self.found.p_value:.3f}"
        lines = [
            f"{self.model} wins {self.rate:.1%} [{low:.1%}, {high:.1%}] against {self.against}: "
            f"{self.wins} won, {self.ties} tied, {self.losses} lost of {self.found.num} prompts of "
            f"{self.prompts}, {self.mode}; {p}: {real}",
            f"judge: {self.judge}",
        ]
        if self.unjudged:
            lines.append(f"{self.unjudged} prompts without a verdict are not counted")
        if self.paid:
            lines.append("this judge is a reward of the run: it was trained to please it")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = {**asdict(self.found), "is_real": self.found.is_real}
        return {"time": time.time(), **asdict(self), "rate": self.rate, "found": found}


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
        prompts: A file, task or dataset in the place of the run's held-out prompts.
        num_prompts: At most so many.
        sampled: Draw at the run's temperature in the place of greedy.
        batch_size: Completions at one time.
        output: Folder for ``judge.json``; None: that of the run, whose report then shows it.
        say: For lines.

    Returns:
        The win rate, with the judge and the number of prompts named.

    Raises:
        KitError: With the remedy.
    """
    mine = find_trained(model)
    other, column = _opponent(mine, against)
    spec = read_value(by) if isinstance(by, str) and by.lstrip().startswith("{") else by
    sides = [mine] if other is None else [mine, other]
    with session():
        exam = examine_models(
            sides,
            overrides=overrides,
            prompts=prompts,
            num_prompts=num_prompts,
            batch_size=batch_size,
        )
        if column is not None and column not in exam.asked.column_names:
            raise DataError(
                f"the prompts have no column {column!r} to compare with: name one of "
                f"{', '.join(exam.asked.column_names)} as --against reference:NAME"
            )
        drawn = _draw(exam, sides, spec, {} if sampled else {"temperature": 0.0}, say)
        judge = drawn[0].judge
        if other is None:
            drawn.append(_given(exam, drawn[0].tokenizer, judge, column))
        won = _verdicts(exam, judge, *drawn)
    result = WinRate(
        model=mine.name,
        against=other.name if other is not None else f"column {column!r} of the prompts",
        judge=_described(spec, judge, exam),
        mode=f"sampled at {exam.args.temperature:g}" if sampled else "greedy",
        prompts=exam.source,
        wins=won.count(1.0),
        losses=won.count(0.0),
        ties=len(won) - won.count(1.0) - won.count(0.0) - won.count(None),
        unjudged=won.count(None),
        found=_from_half(won),
        paid=judge.name in {one.name for one in load_rewards(exam.config.rewards)},
    )
    _write(_folder(sides, output), result, exam, drawn, won, say)
    return result


# --- the two sides -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """What one side answered."""

    texts: list[str]
    scores: list[float | None]
    """Of a judge that scores each by itself."""
    judge: LoadedReward
    tokenizer: Any


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


def _draw(
    exam: Examination, sides: list[TrainedModel], spec: Any, how: dict[str, Any], say: Say
) -> list[_Side]:
    """Return the completions of each model, scored where the judge scores them by themselves."""
    found: dict[str, _Side] = {}
    for one, on_it in by_base(sides):
        judge = exam.rewards(one.tokenizer, None if spec is None else [spec])[0]
        ask = exam.asker(one, [] if _compares(judge) else [judge])
        for trained in on_it:
            with one.speaking_as(trained) as model:
                scored = ask(model, **how)
            texts = [sample["completion"] for sample in scored.samples]
            scores = [sample["rewards"].get(judge.name) for sample in scored.samples]
            found[trained.name] = _Side(texts, scores, judge, one.tokenizer)
            say(f"{trained.name}: {len(texts)} completions of {scored.mean_length:.1f} tokens")
    return [found[trained.name] for trained in sides]


def _given(exam: Examination, tokenizer: Any, judge: LoadedReward, column: str | None) -> _Side:
    """Return the texts of a column as a side."""
    texts = ["" if text is None else str(text) for text in exam.asked[column][:]]
    scores: list[float | None] = [None] * len(texts)
    if not _compares(judge):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        scores = score_texts(list(exam.asked), texts, ids, [judge])[judge.name]
    return _Side(texts, scores, judge, tokenizer)


# --- the verdicts --------------------------------------------------------------------------------


def _compares(judge: LoadedReward) -> bool:
    """Return whether the judge reads both texts at once."""
    return getattr(_inner(judge), "mode", None) == "pairwise"


def _inner(judge: LoadedReward) -> Any:
    return getattr(judge.func, "reward", judge.func)


def _verdicts(
    exam: Examination, judge: LoadedReward, mine: _Side, other: _Side
) -> list[float | None]:
    """Return 1 for a win, 0.5 for a tie, 0 for a loss, None without a verdict; one a prompt."""
    if _compares(judge):
        column = _inner(judge).column
        rows = [{**row, column: text} for row, text in zip(exam.asked, other.texts, strict=True)]
        ids = [mine.tokenizer(text)["input_ids"] for text in mine.texts]
        return score_texts(rows, mine.texts, ids, [judge])[judge.name]
    pairs = zip(mine.scores, other.scores, strict=True)
    return [None if None in (a, b) else 0.5 + (a > b) / 2 - (a < b) / 2 for a, b in pairs]


def _from_half(won: list[float | None]) -> Difference:
    counted = [value for value in won if value is not None]
    if not counted:
        raise DataError(
            "the judge gave no verdict on any prompt: it applies to none of them, or could not be "
            "reached"
        )
    return difference([0.5] * len(counted), counted)


def _described(spec: Any, judge: LoadedReward, exam: Examination) -> str:
    if _compares(judge):
        inner = _inner(judge)
        return f"{inner.model}, asked in both orders (orders that disagree tie), for {inner.rubric}"
    if spec is None:
        return f"{judge.name}, the higher score wins"
    return f"{spec if isinstance(spec, str) else json.dumps(spec)}, the higher score wins"


# --- what is written -----------------------------------------------------------------------------


def _folder(sides: list[TrainedModel], output: str | Path | None) -> Path | None:
    return Path(output) if output is not None else sides[0].run


def _write(
    folder: Path | None,
    result: WinRate,
    exam: Examination,
    drawn: list[_Side],
    won: list[float | None],
    say: Say,
) -> None:
    if folder is None:
        return
    mine, other = drawn
    rows = zip(exam.asked["prompt"][:], mine.texts, other.texts, won, strict=True)
    add_result(folder / FILE, "judged", result.as_dict())
    names = ("prompt", "completion", "against", "won")
    replace_rows(folder / SAMPLES, [dict(zip(names, row, strict=True)) for row in rows])
    if (folder / "run.yaml").is_file():
        say(f"written to {folder / FILE} and {write_report([folder])}")
