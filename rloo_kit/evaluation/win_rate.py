"""``rloo-kit judge``: how often one model's completions beat those of another model.

The judge is either a reward or a language model. With a reward (a rule, a reward model, your own
file), the completion with the higher score wins. A language model, on an OpenAI-compatible server,
compares the two completions of a prompt in both orders.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rloo_kit.config.run_file import read_value
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.evaluation.held_out import HeldOut, read_held_out
from rloo_kit.evaluation.statistics import Difference, difference
from rloo_kit.evaluation.table import Row, results_folder, score_models, write_results
from rloo_kit.evaluation.trained import TrainedModel, find_trained
from rloo_kit.machine.cleanup import session
from rloo_kit.sampling.completer import as_completions
from rloo_kit.scoring.contract import call_reward
from rloo_kit.scoring.specs import LoadedReward
from rloo_kit.types import Say, Tokenizer

# A reward, written as in a run file, or None
Spec: TypeAlias = str | Mapping[str, Any] | None


@dataclass(frozen=True)
class WinRate:
    """Share of prompts on which a model beat another model; a tie counts as half a win."""

    model: str
    against: str  # the other model
    judge: str
    mode: str  # how the completions were sampled, in words
    prompts: str  # file, task or dataset of the prompts
    wins: int
    losses: int
    ties: int
    unjudged: int  # number of prompts without a verdict, which do not count
    found: Difference  # win rate minus one half

    @property
    def rate(self) -> float:
        """Share of judged prompts that the model won, where a tie counts as half a win."""
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
        """Return all fields and the win rate as plain values for JSON."""
        return {"time": time.time(), **asdict(self), "rate": self.rate}


def judge_models(  # noqa: PLR0913
    model: str | Path,
    *,
    against: str | Path = "base",
    by: Spec = None,
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    sampled: bool = False,
    batch_size: int | None = None,
    output: str | Path | None = None,
    say: Say = print,
) -> WinRate:
    """Compute how often a judge prefers a model's completions to those of another model.

    Both models complete the same held-out prompts, once each.

    Args:
        model: Folder of a run, a checkpoint or an adapter, or name of a model.
        against: The other model, named in the same way, or ``base`` for the base of ``model``.
        by: The judge: a reward, written as in a run file (text or table). None uses the first
            reward that scores the run's held-out prompts. To let a language model on a server
            judge, give ``{name: judge, model: NAME, mode: pairwise}``.
        overrides: Changes to the run file, each as ``section.key=value``.
        prompts: A file, task or dataset to use instead of the run's held-out prompts.
        num_prompts: Maximum number of prompts. None uses all of them.
        sampled: If True, sample at the run's temperature. If False, complete greedily.
        batch_size: Number of completions at a time. None uses a number that is known to fit.
        output: Folder for ``judge.json``. None uses the run's folder; if ``model`` has no run,
            nothing is written.
        say: Function that is called with each line of output.

    Raises:
        ConfigError: Both models are the same, or a setting is wrong.
        DataError: There are no prompts, or the judge returned no verdict for any prompt.
        ModelError: A model cannot be loaded.
        RewardLoadError: The judge cannot be loaded.
    """
    mine = find_trained(model)
    other = mine.without_adapter() if str(against) == "base" else find_trained(against)
    if _places(other) == _places(mine):
        raise ConfigError(
            f"{mine.name} would be compared with itself: name another model with --against"
        )
    spec = read_value(by) if isinstance(by, str) and by.lstrip().startswith("{") else by
    with session():
        held_out = read_held_out([mine, other], overrides, prompts, num_prompts, batch_size, say)
        folder = results_folder(output, mine.run)
        # One judge serves all tokenizers with the same vocabulary and chat template
        judges = {}

        def rewards_for(tokenizer: Tokenizer) -> list[LoadedReward]:
            read = str(tokenizer.chat_template), frozenset(tokenizer.get_vocab().items())
            if read not in judges:
                judges[read] = held_out.rewards(tokenizer, None if spec is None else [spec])[0]
            return [] if _compares(judges[read]) else [judges[read]]

        how = {} if sampled else {"temperature": 0.0}
        rows = score_models(held_out, [mine, other], [how], rewards_for)
        judge, *of_other = judges.values()
        first, second = (row.evaluation for row in rows)
        won = verdicts(judge, first, second, *of_other)
        result = _win_rate(rows, held_out, won, _describe(spec, judge))
    if folder is not None:
        samples = [
            {
                "prompt": a["prompt"],
                "completion": a["completion"],
                "against": b["completion"],
                "won": score,
            }
            for a, b, score in zip(first.samples, second.samples, won, strict=True)
        ]
        write_results(folder / "judge.json", "judged", result.as_dict(), samples, say)
    return result


# --- the verdicts --------------------------------------------------------------------------------


def verdicts(
    judge: LoadedReward,
    mine: Evaluation,
    other: Evaluation,
    of_other: LoadedReward | None = None,
) -> list[float | None]:
    """Return the verdict on each prompt: 1 for a win, 0.5 for a tie, 0 for a loss.

    A verdict is None if the judge did not decide.

    Args:
        judge: The judge. A reward that compares two completions (mode ``pairwise``) is called
            here. The scores of any other reward are read from the two evaluations.
        mine: The model's evaluation, with one completion of each prompt.
        other: The evaluation of the other model, on the same prompts.
        of_other: The judge, loaded for the tokenizer of the other model. None: ``judge`` itself.
    """
    if _compares(judge):
        return _compare_texts(judge, mine, other, of_other or judge)
    sign = -1 if judge.weight_at(1.0) < 0 else 1  # with a negative weight the lower score wins
    return [
        None if a is None or b is None else 0.5 + sign * ((a > b) - (a < b)) / 2
        for a, b in zip(mine.values(judge.name), other.values(judge.name), strict=True)
    ]


def _compares(judge: LoadedReward) -> bool:
    """Return True if the judge has the mode ``pairwise``, in which it reads both completions."""
    return getattr(judge.func.reward, "mode", None) == "pairwise"


def _compare_texts(
    judge: LoadedReward, mine: Evaluation, other: Evaluation, of_other: LoadedReward
) -> list[float | None]:
    """Return the verdicts of a judge that reads both completions of a prompt.

    If one of the answers is empty, the other one wins and the judge is not asked. Two empty answers
    tie.
    """
    prompts = [one["prompt"] for one in mine.samples]
    # The judge reads only the text after the thought. A model's chat template may open the thought
    ours, theirs = (
        [reads.answer_text(one["prompt"], one["completion"]) for one in side.samples]
        for reads, side in ((judge.func.reward, mine), (of_other.func.reward, other))
    )
    # The judge skips a row whose reference is None
    references = [
        text if own.strip() and text.strip() else None
        for own, text in zip(ours, theirs, strict=True)
    ]
    columns = {
        "prompts": prompts,
        "completions": as_completions(prompts, [one["completion"] for one in mine.samples]),
        judge.func.reward.column: references,
    }
    rows = zip(call_reward(judge.func, columns), ours, theirs, references, strict=True)
    return [
        0.5 + (bool(own.strip()) - bool(text.strip())) / 2 if reference is None else score
        for score, own, text, reference in rows
    ]


def _places(model: TrainedModel) -> tuple[Path, Path | None]:
    """Return the base and the adapter of a model as absolute paths."""
    return Path(model.base).resolve(), model.adapter and model.adapter.resolve()


# --- the result ----------------------------------------------------------------------------------


def _win_rate(rows: list[Row], held_out: HeldOut, won: list[float | None], judge: str) -> WinRate:
    judged = [value for value in won if value is not None]
    if not judged:
        raise DataError(
            "the judge returned no verdict for any prompt: check that the prompts have the columns "
            "that the judge reads, and that its server can be reached"
        )
    mine, other = rows
    return WinRate(
        model=mine.model,
        against=other.model,
        judge=judge,
        mode=f"{mine.evaluation.drawn}, by {' and '.join(sorted({row.sampler for row in rows}))}",
        prompts=held_out.source,
        wins=judged.count(1.0),
        losses=judged.count(0.0),
        ties=judged.count(0.5),
        unjudged=len(won) - len(judged),
        found=difference([0.5] * len(judged), judged),
    )


def _describe(spec: Spec, judge: LoadedReward) -> str:
    inner = judge.func.reward
    name = json.dumps(spec) if isinstance(spec, Mapping) else spec or judge.name
    if _compares(judge):
        if not hasattr(inner, "rubric"):  # a class of the user
            return f"{name}, which compares the answers"
        return f"{inner.model}, asked in both orders (a tie if they disagree), for {inner.rubric}"
    wins = "lower" if judge.weight_at(1.0) < 0 else "higher"
    return f"{name}, the {wins} score wins"
