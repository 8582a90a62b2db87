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

from rloo_kit.config.run_file import read_value
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import score_texts
from rloo_kit.evaluation.held_out import HeldOut, read_held_out
from rloo_kit.evaluation.models import LoadedBase, TrainedModel, by_base, find_trained
from rloo_kit.evaluation.result_files import add_result, check_place, replace_rows
from rloo_kit.evaluation.statistics import Difference, difference
from rloo_kit.machine.memory import session
from rloo_kit.report.page import write_report
from rloo_kit.scoring.loading import LoadedReward, load_rewards

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
        exam = read_held_out(
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
        folder = _folder(sides, output)
        if folder is not None:
            check_place(folder)
        exam, drawn = _draw(exam, sides, spec, {} if sampled else {"temperature": 0.0}, say)
        judge = drawn[0].judge
        if column is not None:
            drawn.append(_given(exam, drawn[0].tokenizer, spec, column))
        won = _verdicts(exam, judge, *drawn)
    result = WinRate(
        model=mine.name,
        against=other.name if other is not None else f"column {column!r} of the prompts",
        judge=_described(spec, judge),
        mode=_mode(f"sampled at {exam.args.temperature:g}" if sampled else "greedy", drawn),
        prompts=exam.source,
        wins=won.count(1.0),
        losses=won.count(0.0),
        ties=len(won) - won.count(1.0) - won.count(0.0) - won.count(None),
        unjudged=won.count(None),
        found=_from_half(won),
        paid=_was_paid(mine, judge, drawn[0].tokenizer),
    )
    _write(folder, result, exam, drawn, won, say)
    return result


# --- the two sides -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """What one side answered."""

    texts: list[str | None]
    """None: this side has nothing to show there."""
    scores: list[float | None]
    """Of a judge that scores each by itself."""
    judge: LoadedReward
    tokenizer: Any
    sampler: str = ""
    """Who drew the completions."""
    given: bool = False
    """By the prompts, and not by a model."""


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
    exam: HeldOut, sides: list[TrainedModel], spec: Any, how: dict[str, Any], say: Say
) -> tuple[HeldOut, list[_Side]]:
    """Return what was asked, and the completions of each model.

    They are scored where the judge scores each by itself.
    """
    found: dict[str, _Side] = {}
    for one, on_it in by_base(sides):
        exam = exam.fitting(one.tokenizer)
        found |= _answers(exam, one, on_it, spec, how, say)
    for name, side in found.items():
        say(f"{name}: {len(side.texts)} completions")
    return exam, [found[trained.name] for trained in sides]


def _answers(
    exam: HeldOut,
    one: LoadedBase,
    on_it: list[TrainedModel],
    spec: Any,
    how: dict[str, Any],
    say: Say,
) -> dict[str, _Side]:
    judge = exam.rewards(one.tokenizer, None if spec is None else [spec])[0]
    paid, found = [] if _compares(judge) else [judge], {}
    with exam.asking(one, on_it, say) as ask:
        for trained in on_it:
            scored = ask(trained, paid, **how)
            texts = [sample["completion"] for sample in scored.samples]
            scores = [sample["rewards"].get(judge.name) for sample in scored.samples]
            found[trained.name] = _Side(texts, scores, judge, one.tokenizer, ask.sampler)
    return found


def _given(exam: HeldOut, tokenizer: Any, spec: Any, column: str) -> _Side:
    """Return the texts of a column as a side; they are answers, and never begin in a thought."""
    judge = exam.rewards(None, None if spec is None else [spec])[0]
    texts = [None if text is None else str(text) for text in exam.asked[column][:]]
    scores: list[float | None] = [None] * len(texts)
    if not _compares(judge):
        whole = [text or "" for text in texts]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in whole]
        found = score_texts(list(exam.asked), whole, ids, [judge])[judge.name]
        scores = [None if text is None else score for text, score in zip(texts, found, strict=True)]
    return _Side(texts, scores, judge, tokenizer, given=True)


# --- the verdicts --------------------------------------------------------------------------------


def _mode(drawn_as: str, sides: Sequence[_Side]) -> str:
    samplers = sorted({side.sampler for side in sides} - {""})
    return drawn_as if samplers == ["transformers"] else f"{drawn_as}, by {' and '.join(samplers)}"


def _compares(judge: LoadedReward) -> bool:
    """Return whether the judge reads both texts at once."""
    return getattr(_inner(judge), "mode", None) == "pairwise"


def _inner(judge: LoadedReward) -> Any:
    return getattr(judge.func, "reward", judge.func)


def _verdicts(exam: HeldOut, judge: LoadedReward, mine: _Side, other: _Side) -> list[float | None]:
    """Return 1 for a win, 0.5 for a tie, 0 for a loss, None without a verdict; one a prompt."""
    if _compares(judge):
        return _asked(exam, judge, mine, other)
    sign = -1 if judge.weight_at(1.0) < 0 else 1  # a penalty: the lower one wins
    pairs = zip(mine.scores, other.scores, strict=True)
    return [None if None in (a, b) else 0.5 + sign * ((a > b) - (a < b)) / 2 for a, b in pairs]


def _asked(exam: HeldOut, judge: LoadedReward, mine: _Side, other: _Side) -> list[float | None]:
    """Return what a judge that reads both says; an answer beats none, on either side."""
    inner = _inner(judge)

    def answers(side: _Side) -> list[str | None]:
        if side.given:
            return side.texts
        pairs = zip(exam.asked, side.texts, strict=True)
        return [inner.answer_text(row["prompt"], text) for row, text in pairs]

    ours, theirs = answers(mine), answers(other)
    both = zip(ours, theirs, strict=True)
    empty = [tuple(not (text or "").strip() for text in pair) for pair in both]
    rows = [{**row, inner.column: text} for row, text in zip(exam.asked, theirs, strict=True)]
    ask = [n for n, pair in enumerate(empty) if not any(pair)]
    won: list[float | None] = [
        None if b is None else 0.5 + (no_b - no_a) / 2
        for b, (no_a, no_b) in zip(theirs, empty, strict=True)
    ]
    if ask:
        texts = [mine.texts[n] for n in ask]
        ids = [mine.tokenizer(text)["input_ids"] for text in texts]
        said = score_texts([rows[n] for n in ask], texts, ids, [judge])[judge.name]
        for n, value in zip(ask, said, strict=True):
            won[n] = value
    return won


def _from_half(won: list[float | None]) -> Difference:
    counted = [value for value in won if value is not None]
    if not counted:
        raise DataError(
            "the judge gave no verdict on any prompt: it applies to none of them, or could not be "
            "reached"
        )
    return difference([0.5] * len(counted), counted)


def _was_paid(mine: TrainedModel, judge: LoadedReward, tokenizer: Any) -> bool:
    """Return whether a reward of the run is this very judge."""
    if mine.config is None:
        return False
    paid = load_rewards(mine.config.rewards, tokenizer=tokenizer)
    return any(_inner(one) == _inner(judge) for one in paid)


def _described(spec: Any, judge: LoadedReward) -> str:
    if _compares(judge):
        inner = _inner(judge)
        return f"{inner.model}, asked in both orders (orders that disagree tie), for {inner.rubric}"
    wins = "lower" if judge.weight_at(1.0) < 0 else "higher"
    name = judge.name if spec is None else spec if isinstance(spec, str) else json.dumps(spec)
    return f"{name}, the {wins} score wins"


# --- what is written -----------------------------------------------------------------------------


def _folder(sides: list[TrainedModel], output: str | Path | None) -> Path | None:
    return Path(output) if output is not None else sides[0].run


def _write(
    folder: Path | None,
    result: WinRate,
    exam: HeldOut,
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
