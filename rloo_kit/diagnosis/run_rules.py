"""Rules that find faults in the record of a run, and a verdict on the run.

The thresholds come from runs of the embedded model, some with faults made on purpose and some
healthy; the remedies come from ranges in the literature. A metric that a run does not have is NaN,
for which every comparison is false.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rloo_kit.config.run_file import make_run_config
from rloo_kit.diagnosis.record import WINDOW, RunRecord, mean, read_run
from rloo_kit.diagnosis.registry import (
    ALMOST_NONE,
    LITTLE_SIGNAL,
    MOSTLY,
    Finding,
    Rules,
    Seen,
    findings_text,
)
from rloo_kit.diagnosis.tool_rules import KINDS as TOOL_KINDS
from rloo_kit.diagnosis.tool_rules import add_kinds, seen_in_calls
from rloo_kit.errors import ConfigError
from rloo_kit.models.adapters import EMBEDDED, base_name
from rloo_kit.text.numbers import finite_numbers
from rloo_kit.text.wording import text_of
from rloo_kit.tools.numbers import CALL_NUMBERS

# Learning rates with LoRA: too low below the first; usual; usual for the embedded model
LOWEST_RATE = 1e-6
USUAL_RATE = 1e-5
TINY_RATE = 1e-3
# Mean number of different texts in a group below which the sampler repeats itself
REPEATED = 1.5
TRUNCATED = "completions/truncated"

RULES = Rules()
KINDS = RULES.kinds
_ALL_ALIKE = "no_signal high_variance entropy_collapse"


# --- settings ------------------------------------------------------------------------------------


def _valid(run: RunRecord, *choices: str) -> str:
    """Return the first of these settings that is valid in the run's file, else ""."""
    if run.config is None:
        return ""
    for choice in choices:
        try:
            make_run_config(run.config.as_dict(), choice.split(", "))
        except ConfigError:
            continue
        return choice
    return ""


def _rate(run: RunRecord) -> float:
    """Return the highest learning rate of the run."""
    # during a warm-up the logged rates are below the given one
    return max([run.setting("learning_rate"), *run.series("learning_rate")])


def _usual_rate(run: RunRecord) -> float:
    config = run.config
    return TINY_RATE if config and base_name(config.model.name) in EMBEDDED else USUAL_RATE


def _lower_rate(run: RunRecord) -> str:
    rate = _rate(run)
    usual = _usual_rate(run)
    return f"trainer.learning_rate={usual if rate > usual else rate / 3:.1g}"


def _higher_beta(run: RunRecord) -> str:
    beta = run.setting("beta")
    return f"trainer.beta={0.1 if beta < 0.1 else 2 * beta:.1g}"


def _calmer(run: RunRecord) -> str:
    return f"{_lower_rate(run)}, {_higher_beta(run)}"


def _more_generations(run: RunRecord) -> str:
    """Return the setting with more completions per prompt, in a batch that holds them."""
    size = 8 if run.setting("num_generations") < 8 else 16
    more = f"trainer.num_generations={size}"
    larger = f"{more}, trainer.per_device_train_batch_size={size}"
    return _valid(run, more, larger) if run.setting("num_generations") < 16 else ""


def four_times_longer(limit: int, max_seq_length: int | None) -> str:
    """Return settings, as after ``--set``, that allow completions four times as long.

    Args:
        limit: The present ``max_completion_length``.
        max_seq_length: The model's ``max_seq_length``, which is raised by as many tokens if the new
            limit is more than half of it; None: unknown.
    """
    setting = f"trainer.max_completion_length={limit * 4}"
    if max_seq_length and limit * 4 > max_seq_length / 2:
        setting += f", model.max_seq_length={max_seq_length + 3 * limit}"
    return setting


def _half_done(run: RunRecord) -> bool:
    """Return whether half of the planned steps are done, enough to say that they taught nothing."""
    planned = run.setting("max_steps") or 0
    return run.num_steps >= 8 and run.step(-1) >= (planned if planned > 0 else 2 * WINDOW) / 2


def _moved(run: RunRecord) -> str:
    """Return the change of the scores, as a part of a sentence."""
    if run.held_out is not None:
        return str(run.held_out)
    if not run.series("reward"):
        return "no reward is known"
    return f"the reward went from {run.first('reward'):.3g} to {run.last('reward'):.3g}"


# --- sampling and the policy ---------------------------------------------------------------------


@RULES.rule(
    "stale_sampler",
    "completions of another policy are trained as if this policy had sampled them",
    "restart the run, or sample with transformers",
    explains="clip_noise kl_explosion reward_collapse high_variance",
)
def _stale_sampler(run: RunRecord) -> Iterator[Seen]:
    seen = [
        f"the sampler is at {share:.2f} between {what} (0) and the policy (1)"
        for name, what in (("adapter_reached", "its base"), ("step_reached", "itself a step ago"))
        if (share := run.last(f"sampling/{name}")) < 0.5
    ]
    apart = run.last("sampling/probe_difference")
    noise = run.last("sampling/rounding_noise")
    if apart > max(0.01, 4 * noise):
        seen.append(f"log-probs differ by {apart:.3g} nats per token; rounding by {noise:.2g}")
    if seen:
        yield Seen("; ".join(seen), setting=_valid(run, "trainer.generation=transformers"))


@RULES.rule(
    "clip_noise",
    "updates are so large that the ratio leaves the clip range, where a completion trains nothing",
    "train each batch once, or lower the learning rate, until the ratio stays near 1",
    explains=f"kl_explosion empty_output length_explosion reward_collapse {_ALL_ALIKE}",
)
def _clip_noise(run: RunRecord) -> Iterator[Seen]:
    clipped = sorted(run.series("clip_ratio/region_mean"))
    # The first pass over a batch clips nothing
    worst = mean(clipped[-max(1, len(clipped) // 4) :])
    if worst >= 0.2 and not run.better:
        passes = run.setting("num_iterations")
        yield Seen(
            f"in the worst quarter of the steps {worst:.0%} of the completions are clipped, at "
            f"num_iterations {passes} and learning rate {_rate(run):.1g}",
            setting=_valid(run, "trainer.num_iterations=1" if passes > 1 else _lower_rate(run)),
        )


@RULES.rule(
    "old_rollouts",
    "completions are so old that the policy has moved away from them",
    "carry fewer completions over, for fewer batches, or lower the learning rate",
    explains="clip_noise reward_collapse high_variance",
)
def _old_rollouts(run: RunRecord) -> Iterator[Seen]:
    sizes = sorted(run.series("effective_sample_size"))
    worst = mean(sizes[: max(1, len(sizes) // 4)])
    if run.setting("partial_rollouts") and worst < 0.5:
        age = run.setting("max_rollout_age")
        yield Seen(
            f"in the worst quarter of the steps the effective sample size is {worst:.0%} of the "
            f"completions, at max_rollout_age {age}",
            setting=_valid(run, "trainer.max_rollout_age=1", _lower_rate(run)),
        )


@RULES.rule(
    "kl_explosion",
    "this far from the reference the model no longer writes language, and rewards cannot help",
    "begin again with a lower learning rate, with beta 0.1 and max_grad_norm 0.5",
    explains=f"all_truncated empty_output length_explosion cold_start reward_collapse "
    f"reward_hacking {_ALL_ALIKE}",
)
def _kl_explosion(run: RunRecord) -> Iterator[Seen]:
    values = run.series("kl")
    end = run.last("kl")
    # Nats per token; a run that also got worse is lost earlier.
    limit = 1.0 if end > 1.0 or not (run.worse or run.fell) else 0.3
    if not end > limit or run.better:
        return
    since = next(place for place, value in enumerate(values) if value > limit)
    yield Seen(
        f"the KL from the reference passed {limit:g} nat per token at step {run.step(since)} and "
        f"is {end:.3g} at the end, at learning rate {_rate(run):.1g} and beta "
        f"{run.setting('beta'):g}; {_moved(run)}",
        setting=_valid(run, f"{_calmer(run)}, trainer.max_grad_norm=0.5", _lower_rate(run)),
    )


# --- completions ---------------------------------------------------------------------------------


@RULES.rule(
    "all_truncated",
    "truncated completions never reach an answer, so that the reward cannot distinguish them",
    "raise the limit on completion length, or make the thoughts shorter",
    explains=f"constant_reward cold_start {_ALL_ALIKE}",
)
def _all_truncated(run: RunRecord) -> Iterator[Seen]:
    cut_off = min(run.first(TRUNCATED), run.last(TRUNCATED))
    if cut_off >= MOSTLY or (cut_off > 0.5 and not mean(run.signal) >= LITTLE_SIGNAL):
        config = run.config
        limit = run.setting("max_completion_length")
        longer = four_times_longer(limit, config.model.max_seq_length if config else None)
        yield Seen(
            f"{cut_off:.0%} of the completions, or more, reached the limit of {limit} tokens",
            "warning" if run.learned else "error",
            setting=_valid(run, longer),
        )


@RULES.rule(
    "empty_output",
    "the model learned that an empty answer earns most, or it ends its turn at once",
    "reward an answer, add a length term with a lower bound (length_band), and begin again from "
    "the base with beta 0.05 and a lower learning rate",
    explains=f"reward_collapse reward_hacking {_ALL_ALIKE}",
)
def _empty_output(run: RunRecord) -> Iterator[Seen]:
    rows = run.completions_of(at_end=True)
    blank = sum(not text_of(row.get("completion")).strip() for row in rows)
    if blank > len(rows) / 2 and not run.better:
        yield Seen(
            f"{blank} of the last {len(rows)} completions hold no text; {_moved(run)}",
            setting=_valid(run, _calmer(run)),
        )


@RULES.rule(
    "no_thought",
    "a reward for thoughts is the same for all completions if no thought is closed",
    "let the chat template ask for a thought (data.enable_thinking: true), name the model's own "
    "marks (thinking.start and thinking.end), or teach them first with rloo-kit warm-up",
    explains=f"constant_reward cold_start {_ALL_ALIKE}",
)
def _no_thought(run: RunRecord) -> Iterator[Seen]:
    rows = [row for row in run.completions_of(at_end=True) if not row.get("truncated")]
    is_paid = any(name.startswith("rewards/thinking") for name in run.rows[0])
    if is_paid and rows and all(row.get("thought_tokens") is None for row in rows):
        level = "warning" if run.better else "error"
        yield Seen(f"none of the last {len(rows)} whole completions closes a thought", level)


@RULES.rule(
    "length_explosion",
    "length is rewarded and content is not: steps cost more, and the limit cuts the answers off",
    "add a length term (soft_overlong, thinking_budget), keep beta above 0, begin from the base",
    explains=f"all_truncated reward_collapse reward_hacking {_ALL_ALIKE}",
)
def _length_explosion(run: RunRecord) -> Iterator[Seen]:
    begin = run.first("completions/mean_length")
    end = run.last("completions/mean_length")
    cut_off = run.last(TRUNCATED)
    harmful = cut_off > 0.5 or run.worse or end > 3 * begin
    if begin and end >= 1.5 * begin and harmful and not run.better:
        yield Seen(
            f"the mean length went from {begin:.0f} to {end:.0f} tokens, and {cut_off:.0%} of the "
            f"last completions were cut off; {_moved(run)}",
            setting=_valid(run, _higher_beta(run)),
        )


# --- rewards -------------------------------------------------------------------------------------


@RULES.rule(
    "constant_reward",
    "RLOO learns from differences within a group, and there are none",
    "check that the reward looks at the completion (rloo-kit rewards check); where all earn the "
    "most, take harder prompts or ask for more",
    about_signal=True,
    explains=_ALL_ALIKE,
)
def _constant(run: RunRecord) -> Iterator[Seen]:
    """Find that all scores of the run are equal, or that one of several rewards always gave 0."""
    spreads = run.series("reward_std")
    means = run.series("reward")
    unpaid = _never_paid(run)
    if not means or not spreads:
        return
    if max(spreads) > 1e-8 or max(means) - min(means) > 1e-6 * abs(max(means)):
        if unpaid and any(means):
            yield Seen(f"it gave 0 to every completion of {run.num_steps} steps", "warning", unpaid)
        return
    seen = f"every completion of {run.num_steps} steps got {means[0]:.3g}"
    if means[0] > 0:
        yield Seen(seen)
        return
    level = run.config.data.level if run.config else None
    easier = f"data.level={level - 1}" if isinstance(level, int) and level > 1 else ""
    setting = easier or _more_generations(run)
    yield Seen(seen, reward=unpaid, setting=setting, kind="cold_start")


def _never_paid(run: RunRecord) -> str | None:
    """Return the name of a reward that gave 0 to every completion of the run."""
    for key in run.rows[0]:
        if key.startswith("rewards/") and key.endswith("/mean"):
            name = key.removesuffix("/mean")
            if not any(run.series(key)) and not any(run.series(f"{name}/std")):
                return name.removeprefix("rewards/")
    return None


RULES.rule(
    "cold_start",
    "a reward that is never earned teaches nothing: the base must sometimes succeed",
    "rule out a fault of the reward with rloo-kit rewards check; then take easier prompts, give "
    "partial credit, draw more completions per prompt, or show it examples first: rloo-kit warm-up",
    about_signal=True,
    explains=_ALL_ALIKE,
)


@RULES.rule(
    "reward_collapse",
    "equal scores cancel, so the run has since trained nothing, or only the KL penalty",
    "look at the last completions and their scores; then spread the reward (partial credit), raise "
    "the temperature, or take more diverse prompts",
    about_signal=True,
    explains="no_signal high_variance",
)
def _reward_collapse(run: RunRecord) -> Iterator[Seen]:
    """Find that scores differed at first, and are equal now, below the best reward."""
    signal = run.signal
    rewards = run.series("reward")
    dead = next((n for n, share in enumerate(reversed(signal)) if share > 0.01), len(signal))
    alive = signal[: len(signal) - dead]
    if dead < max(3, len(signal) // 10) or len(signal) != len(rewards):
        return
    # in small batches a long series of groups without signal may be chance
    chance = (1 - mean(alive)) ** (dead * run.groups_per_step)
    if not alive or max(alive) < LITTLE_SIGNAL or chance > 1e-3:
        return
    # the reward just before must be higher, because a run with perfect scores has no signal either
    before = fmean(rewards[: len(alive)][-run.window :])
    end = fmean(rewards[-dead:])
    if end < before - 0.02 * max(abs(before), 1e-6):
        yield Seen(
            f"scores differed in {fmean(alive):.0%} of the groups up to step "
            f"{run.step(len(alive) - 1)}, and in none of the {dead} steps since; the reward went "
            f"from {before:.3g} to {end:.3g}"
        )


@RULES.rule(
    "reward_hacking",
    "the model found a way to earn the reward that is not the task",
    "read the best paid of the last completions; use a stricter, verifiable reward, and raise beta",
    explains=_ALL_ALIKE,
)
def _reward_hacking(run: RunRecord) -> Iterator[Seen]:
    if run.worse and run.rose:
        yield Seen(
            f"the reward rose from {run.first('reward'):.3g} to {run.last('reward'):.3g}, while "
            f"{run.held_out}",
            setting=_valid(run, _higher_beta(run)),
        )


@RULES.rule(
    "entropy_collapse",
    "a model that always writes the same has nothing to compare, and stops exploring",
    "begin again with a lower learning rate or a higher beta, and sample at temperature 1",
    explains="reward_collapse no_signal high_variance",
)
def _entropy_collapse(run: RunRecord) -> Iterator[Seen]:
    rows = [row for row in run.rows if row.get("passes/trained") != 0]
    values = finite_numbers(row.get("policy/entropy_avg", row.get("entropy")) for row in rows)
    if len(values) < 4 or run.better or (run.rose and run.held_out is None):
        return
    begin = fmean(values[: run.window])
    end = fmean(values[-run.window :])
    before = run.num_texts(at_end=False)
    after = run.num_texts(at_end=True)
    left = end / begin if begin > 0 else 1.0
    texts = (after - 1) / (before - 1) if before > 1 else 1.0
    # sampled texts repeat before the entropy of their tokens reaches 0
    if min(left, texts / 3) < 0.1:
        counted = f"; different texts per group {before:.2g} -> {after:.2g}" if before > 0 else ""
        yield Seen(
            f"the entropy went from {begin:.3g} to {end:.3g} nats per token{counted}; "
            f"{_moved(run)}",
            setting=_valid(run, _calmer(run)),
        )


# --- signal and noise ----------------------------------------------------------------------------


@RULES.rule(
    "no_signal",
    "equal scores in a group cancel, and the group trains nothing",
    "take prompts that the model solves sometimes, or draw more completions of each",
    about_signal=True,
    explains="learning_rate_too_low high_variance",
)
def _no_signal(run: RunRecord) -> Iterator[Seen]:
    half = run.signal[: max(2, run.num_steps // 2)]
    share = mean(half)
    if run.learned or not share < LITTLE_SIGNAL:
        return
    num_texts = run.num_texts(at_end=False)
    setting = _more_generations(run)
    seen = f"scores differ in {share:.0%} of the groups of the first {len(half)} steps"
    remedy = ""
    if num_texts < REPEATED:
        seen += f"; a group has {num_texts:.2g} different texts"
        remedy = "sample more varied texts: raise the temperature"
        setting = _valid(run, f"trainer.temperature={max(1.0, 1.5 * run.setting('temperature')):g}")
    yield Seen(seen, "error" if share < ALMOST_NONE else "warning", None, remedy, setting)


@RULES.rule(
    "learning_rate_too_low",
    "the scores say what to learn, and the model does not move",
    "raise the learning rate: with LoRA 1e-5 is usual, more for a tiny model",
    about_signal=True,
    explains="high_variance",
)
def _learning_rate_too_low(run: RunRecord) -> Iterator[Seen]:
    share = mean(run.signal)
    rate = _rate(run)
    usual = _usual_rate(run)
    kl = run.series("kl/sequence")
    warming_up = max(run.series("learning_rate"), default=rate) < rate / 2
    moved = run.better or run.worse or run.rose or run.fell
    if warming_up or moved or not share >= LITTLE_SIGNAL:
        return
    still = not kl or abs(mean(kl[-run.window :])) < 0.01  # nats per completion
    if still and (rate < LOWEST_RATE or (kl and _half_done(run))):
        yield Seen(
            f"scores differ in {share:.0%} of the groups, the reward stays at "
            f"{run.last('reward'):.3g}; the highest learning rate was {rate:.1g}",
            "error" if rate < LOWEST_RATE else "warning",
            setting=_valid(run, f"trainer.learning_rate={usual if rate < usual else 3 * rate:.1g}"),
        )


@RULES.rule(
    "high_variance",
    "the reward jumps from step to step, and so does the gradient: noise hides what to learn",
    "draw more completions per prompt (6 to 8), lower the learning rate, or raise beta",
)
def _high_variance(run: RunRecord) -> Iterator[Seen]:
    pairs = pairwise(run.series("reward"))
    spread = mean(run.series("reward_std"))
    # successive differences contain no trend, and have twice the variance of the noise; 0.6
    # standard deviations are the noise of three independent scores
    noise = math.sqrt(mean([(now - before) ** 2 for before, now in pairs]) / 2)
    if not run.learned and _half_done(run) and noise >= 0.6 * spread > 0:
        size = run.setting("num_generations")
        yield Seen(
            f"the mean reward scatters by {noise:.2g} from step to step, and single scores by "
            f"{spread:.2g}, at {size} completions per prompt; {_moved(run)}",
            "error" if run.worse or run.fell else "warning",
            setting=_more_generations(run) if size < 8 else _valid(run, _calmer(run)),
        )


add_kinds(RULES)


@RULES.rule("tools_never_called", *TOOL_KINDS["tools_never_called"])
def _tools(run: RunRecord) -> Iterator[Seen]:
    """Find what is wrong with the calls at the end of a run, if five steps or more tell."""
    calls = run.series("tools/call_frequency")
    if calls and max(calls) > 0 and run.last("tools/call_frequency") == 0:
        return  # it learned not to call
    yield from seen_in_calls(
        {name: run.last(name) if len(run.series(name)) >= 5 else math.nan for name in CALL_NUMBERS}
    )


# --- all findings, and the verdict ---------------------------------------------------------------


def find_in_run(record: RunRecord) -> list[Finding]:
    """Return all findings, the most harmful first; a cause replaces the findings it explains.

    A finding that stopped the run comes first. Less than two steps give no findings.
    """
    ended_by = record.ended_by if record.ended_by and record.ended_by.kind in KINDS else None
    if ended_by:  # the evaluation is of the restored weights, not of the run's last ones
        record = replace(record, evaluation=None)
    if record.num_steps < 2:
        return []
    found = [finding for check in RULES.checks for finding in check(record)]
    if ended_by is None:
        return RULES.ordered(found)
    others = RULES.ordered([ended_by, *found])
    return [ended_by, *(finding for finding in others if finding.kind != ended_by.kind)]


def verdict(record: RunRecord, findings: Sequence[Finding]) -> str:
    """Return one sentence that tells whether the run learned, and what to change first."""
    if record.num_steps < 2:
        counted = "one step" if record.num_steps else "no step"
        return f"Nothing can be said: the run recorded {counted}, and two are needed."
    text = _outcome(record)
    if record.ended_by:
        kept = record.end.get("kept_step")
        text = f"It was stopped by {record.ended_by.kind}"
        text += "" if kept is None else f" and keeps its weights after step {kept}"
    text = f"{text}: {_moved(record)}"
    if findings:
        what = findings[0].setting or findings[0].remedy.partition(";")[0]
        return f"{text}; change first ({findings[0].kind}): {what}."
    return f"{text}."


def _outcome(run: RunRecord) -> str:
    if run.better or (run.held_out is None and run.rose):
        return "It learned"
    if run.worse or (run.held_out is None and run.fell):
        return "It got worse"
    if run.rose:
        return "The reward rose, and held-out prompts do not show it"
    return "It did not learn"


def diagnose(folder: str | Path, say: Callable[[str], None] = print) -> list[Finding]:
    """Print whether a run learned, what went wrong and what to change; return the findings.

    Args:
        folder: Folder of the run, which may be unfinished.
        say: Called with the text.

    Raises:
        DataError: ``folder`` is not the folder of a run.
    """
    record = read_run(folder)
    findings = find_in_run(record)
    say("\n\n".join(filter(None, (verdict(record, findings), findings_text(findings)))))
    return findings
