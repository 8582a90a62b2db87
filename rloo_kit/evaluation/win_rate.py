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
from rloo_kit.evaluation.statistics import Difference, difference
from rloo_kit.evaluation.table import write_results
from rloo_kit.machine.memory import session
from rloo_kit.output_folder import check_writable
from rloo_kit.scoring.loading import LoadedReward
from rloo_kit.types import Tokenizer

FILE, SAMPLES = "judge.json", "judge_samples.jsonl"
COLUMNS: tuple[str, ...] = ("prompt", "completion", "against", "won")


@dataclass(frozen=True)
class WinRate:
    """How often one side was preferred. Half a tie counts as a win."""

    model: str
    against: str
    judge: str
    mode: str  # how the completions were drawn
    prompts: str
    wins: int
    losses: int
    ties: int
    unjudged: int  # prompts that the judge gave no verdict on; they are not counted
    found: Difference  # of the rate from one half, over prompts

    @property
    def rate(self) -> float:
        """Share of prompts that were won."""
        return 0.5 + self.found.mean

    def __str__(self) -> str:
        low, high = (min(1.0, max(0.0, 0.5 + end)) for end in (self.found.low, self.found.high))
        lines = [
            f"{self.model} wins {self.rate:.1%} [{low:.1%}, {high:.1%}] against {self.against}: "
            f"{self.wins} won, {self.ties} tied, {self.losses} lost of {self.found.num} prompts of "
            f"{self.prompts}, {self.mode}; {self.found.verdict}",
            f"judge: {self.judge}",
        ]
        if self.unjudged:
            lines.append(f"{self.unjudged} prompts without a verdict are not counted")
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
        against: ``base``, or another model.
        by: A reward as in a run file, text or table; None: what judges the run's held-out prompts
            first. ``{name: judge, model: NAME, mode: pairwise}`` asks a server.
        overrides: ``section.key=value`` of the run file.
        prompts: A file, task or dataset instead of the run's held-out prompts.
        num_prompts: At most so many.
        sampled: Draw at the run's temperature instead of greedily.
        batch_size: Completions at one time.
        output: Folder for ``judge.json``; None: that of the run.
        say: For lines.
    """
    mine = find_trained(model)
    other = mine.without_adapter() if str(against) == "base" else find_trained(against)
    if (other.base, other.adapter) == (mine.base, mine.adapter):
        raise ConfigError(
            f"{mine.name} would be compared with itself: name another model with --against"
        )
    spec = read_value(by) if isinstance(by, str) and by.lstrip().startswith("{") else by
    folder = Path(output) if output is not None else mine.run
    with session():
        held_out = read_held_out([mine, other], overrides, prompts, num_prompts, batch_size)
        if folder is not None:
            check_writable(folder)
            folder.mkdir(parents=True, exist_ok=True)
        how = {} if sampled else {"temperature": 0.0}
        held_out, sides = _answers(held_out, [mine, other], spec, how)
        for side in sides:
            say(f"{side.name}: {len(side.texts)} completions")
        won = verdicts(list(held_out.prompts), *sides)
        result = _win_rate(mine, sides, held_out, won, spec=spec, sampled=sampled)
    if folder is not None:
        columns = zip(held_out.prompts["prompt"][:], *(s.texts for s in sides), won, strict=True)
        rows = [dict(zip(COLUMNS, values, strict=True)) for values in columns]
        write_results(folder / FILE, "judged", result.as_dict(), folder / SAMPLES, rows, say)
    return result


# --- the two sides -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What one model answered."""

    name: str
    texts: list[str]
    scores: list[float | None]  # of a judge that scores each alone
    judge: LoadedReward
    tokenizer: Tokenizer
    sampler: str = "transformers"  # who drew the completions


def _answers(
    held_out: HeldOut, models: list[TrainedModel], spec: Any, how: dict[str, Any]
) -> tuple[HeldOut, list[Side]]:
    """Return the prompts that were used, and the completions of each model."""
    found: dict[str, Side] = {}
    # by what a reward reads of a tokenizer: token ids, and whether the template opens a thought
    judges: dict[tuple[str, frozenset], LoadedReward] = {}
    for base, on_it in by_base(models):
        held_out = held_out.fit(base.tokenizer)
        read = str(base.tokenizer.chat_template), frozenset(base.tokenizer.get_vocab().items())
        if read not in judges:
            specs = None if spec is None else [spec]
            judges[read] = held_out.rewards(base.tokenizer, specs)[0]
        judge = judges[read]
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
    # of a completion the judge reads what follows the thought
    ours, theirs = (
        [inner.answer_text(row["prompt"], text) for row, text in zip(rows, side.texts, strict=True)]
        for side in (mine, other)
    )
    pairs = [(a.strip(), b.strip()) for a, b in zip(ours, theirs, strict=True)]
    won: list[float | None] = [0.5 + (bool(a) - bool(b)) / 2 for a, b in pairs]
    to_ask = [number for number, pair in enumerate(pairs) if all(pair)]
    if to_ask:
        asked = [{**rows[number], inner.column: theirs[number]} for number in to_ask]
        texts = [mine.texts[number] for number in to_ask]
        ids = [mine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        said = score_texts(asked, texts, ids, [mine.judge])[mine.judge.name]
        for number, value in zip(to_ask, said, strict=True):
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
    judge = sides[0].judge
    mode = f"sampled at {held_out.args.temperature:g}" if sampled else "greedy"
    mode += f", by {' and '.join(sorted({side.sampler for side in sides}))}"
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
    )


def _describe(spec: Any, judge: LoadedReward) -> str:
    if _compares(judge):
        inner = _inner(judge)
        return f"{inner.model}, asked in both orders (orders that disagree tie), for {inner.rubric}"
    wins = "lower" if judge.weight_at(1.0) < 0 else "higher"
    name = judge.name if spec is None else spec if isinstance(spec, str) else json.dumps(spec)
    return f"{name}, the {wins} score wins"
