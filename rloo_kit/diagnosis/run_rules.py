"""Rules that find faults in the record of a run, and the verdict on the run.

The thresholds come from healthy runs of the embedded model, and from its runs with deliberate
faults. The suggested values come from ranges in the literature. A metric that a run does not have
is NaN. Every comparison with NaN is false, so no rule finds a fault in such a metric.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rloo_kit.config.run_file import make_run_config
from rloo_kit.diagnosis.record import REWARD_MEAN, WINDOW, RunRecord, mean, read_run
from rloo_kit.diagnosis.registry import (
    ALMOST_NONE,
    LITTLE_SIGNAL,
    MOSTLY,
    Finding,
    Rules,
    Seen,
    findings_text,
)
from rloo_kit.diagnosis.tool_rules import add_kinds, seen_in_calls
from rloo_kit.errors import ConfigError
from rloo_kit.models.adapters import EMBEDDED, base_name
from rloo_kit.text.numbers import finite_number, finite_numbers
from rloo_kit.text.thoughts import THOUGHT_ENDS
from rloo_kit.text.wording import text_of
from rloo_kit.tools.numbers import CALL_NUMBERS

# Learning rates with LoRA: the lowest useful one, the usual one, and the usual one of the embedded
# model
LOWEST_RATE = 1e-6
USUAL_RATE = 1e-5
TINY_RATE = 1e-3
# If a group has fewer different texts than this on average, the sampler repeats itself
REPEATED = 1.5
TRUNCATED = "completions/truncated"
# Rewards that may be 0 for every completion: penalties that no completion earned, and `tool_use` if
# no tool is called (a rule for tools reports that)
MAY_BE_0 = re.compile(r"(soft_overlong|repetition|tool_use)(_\d+)?")

RULES = Rules()
KINDS = RULES.kinds
_ALL_ALIKE = "no_signal high_variance entropy_collapse"


# --- settings ------------------------------------------------------------------------------------


def _valid(run: RunRecord, *choices: str) -> str:
    """Return the first of the suggested changes that the run file accepts, or "" if there is none.

    A suggestion may change several settings, separated by ", ".
    """
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
    # During a warm-up the logged rates are below the rate in the run file
    return max([run.setting("learning_rate"), *run.series("learning_rate")])


def _usual_rate(run: RunRecord) -> float:
    config = run.config
    return TINY_RATE if config and base_name(config.model.name) in EMBEDDED else USUAL_RATE


def _lower_rate(run: RunRecord) -> str:
    # The logged rates may be from before a resume that lowered the rate. If the run file sets no
    # rate, the user's own optimizer may have one, which only the logs show
    given = run.config.trainer.get("learning_rate") if run.config else None
    rate = _rate(run) if given is None else given
    usual = _usual_rate(run)
    return f"trainer.learning_rate={usual if rate > usual else rate / 3:.1g}"


def _higher_beta(run: RunRecord) -> str:
    beta = run.setting("beta")
    return f"trainer.beta={0.1 if beta < 0.1 else 2 * beta:.1g}"


def _calmer(run: RunRecord) -> str:
    return f"{_lower_rate(run)}, {_higher_beta(run)}"


def _more_generations(run: RunRecord) -> str:
    """Return settings for 8 or 16 completions per prompt and, if necessary, a larger batch.

    The result is "" if the run already has 16 completions per prompt.
    """
    size = 8 if run.setting("num_generations") < 8 else 16
    more = f"trainer.num_generations={size}"
    rows = math.ceil(run.setting("per_device_train_batch_size") / size) * size
    larger = f"{more}, trainer.per_device_train_batch_size={rows}"
    return _valid(run, more, larger) if run.setting("num_generations") < 16 else ""


def four_times_longer(limit: int, max_seq_length: int | None) -> str:
    """Return settings, written as after ``--set``, that allow completions four times as long.

    Args:
        limit: The present ``max_completion_length``, in tokens.
        max_seq_length: The present ``max_seq_length`` of the model, in tokens; None if unknown. If
            the new ``max_completion_length`` exceeds half of it, the settings raise both limits by
            the same number of tokens.
    """
    setting = f"trainer.max_completion_length={limit * 4}"
    if max_seq_length and limit * 4 > max_seq_length / 2:
        setting += f", model.max_seq_length={max_seq_length + 3 * limit}"
    return setting


def _half_done(run: RunRecord) -> bool:
    """Return True if at least half of the planned steps are done (and at least 8).

    Before that it is too early to say that a run learned nothing.
    """
    return run.num_steps >= 8 and run.step(-1) >= (run.planned_steps or 2 * WINDOW) / 2


def _moved(run: RunRecord) -> str:
    """Return a clause about the change of the held-out score or, if unknown, of the reward."""
    if run.held_out:
        return str(run.held_out)
    if not run.series("reward"):
        return "no reward is known"
    return f"the reward went from {run.first('reward'):.3g} to {run.last('reward'):.3g}"


# --- sampling and the policy ---------------------------------------------------------------------


@RULES.rule(
    "stale_sampler",
    "the sampler has other weights than the policy, but training assumes that they are the same",
    "restart the run, or sample with transformers",
    explains="clip_noise kl_explosion reward_collapse high_variance",
)
def _stale_sampler(run: RunRecord) -> Iterator[Seen]:
    seen = [
        f"the sampler's weights are at {share:.2f} on the way from {what} (0) to the policy (1)"
        for name, what in (("adapter_reached", "the base"), ("step_reached", "the step before"))
        if (share := run.last(f"sampling/{name}")) < 0.5
    ]
    apart = run.last("sampling/probe_difference")
    noise = run.last("sampling/rounding_noise")
    if apart > max(0.01, 4 * noise):
        seen.append(
            f"log-probabilities differ by {apart:.3g} nats per token, and rounding explains only "
            f"{noise:.2g}"
        )
    if seen:
        yield Seen("; ".join(seen), setting="trainer.generation=transformers")


@RULES.rule(
    "clip_noise",
    "updates are so large that the probability ratios of many completions leave the clip range, "
    "and these completions train nothing",
    "train on each batch only once (trainer.num_iterations), or lower the learning rate",
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
            setting="trainer.num_iterations=1" if passes > 1 else _lower_rate(run),
        )


@RULES.rule(
    "old_rollouts",
    "the policy has changed too much since it sampled the completions",
    "set trainer.rollout_correction to token, lower trainer.max_rollout_age, or lower the learning "
    "rate",
    explains="clip_noise reward_collapse high_variance",
)
def _old_rollouts(run: RunRecord) -> Iterator[Seen]:
    sizes = sorted(run.series("effective_sample_size"))
    worst = mean(sizes[: max(1, len(sizes) // 4)])
    if run.setting("partial_rollouts") and worst < 0.5:
        age = run.setting("max_rollout_age")
        others = [] if run.setting("rollout_correction") else ["trainer.rollout_correction=token"]
        others += ["trainer.max_rollout_age=1"] if age > 1 else []
        yield Seen(
            f"in the worst quarter of the steps the effective sample size is {worst:.0%} of the "
            f"completions, at max_rollout_age {age}",
            setting=_valid(run, *others, _lower_rate(run)),
        )


@RULES.rule(
    "kl_explosion",
    "a model this far from the reference no longer writes language, and rewards cannot repair it",
    "start again with a lower learning rate, beta 0.1 and max_grad_norm 0.5",
    explains=f"all_truncated empty_output length_explosion cold_start reward_collapse "
    f"reward_hacking {_ALL_ALIKE}",
)
def _kl_explosion(run: RunRecord) -> Iterator[Seen]:
    end = run.last("kl")
    # In nats per token; the limit is lower for a run that also got worse
    limit = 1.0 if end > 1.0 or not (run.worse or run.fell) else 0.3
    if not end > limit or run.better:
        return
    above = (row["step"] for row in run.rows if (finite_number(row.get("kl")) or 0) > limit)
    # Later passes over a batch log a KL, but have no row in `rows`
    since = next(above, run.step(-1))
    clips = 0 < (run.setting("max_grad_norm") or 0) <= 0.5  # 0: no clipping
    yield Seen(
        f"the KL from the reference passed {limit:g} nat per token at step {since} and "
        f"is {end:.3g} at the end, at learning rate {_rate(run):.1g} and beta "
        f"{run.setting('beta'):g}; {_moved(run)}",
        setting=_calmer(run) + ("" if clips else ", trainer.max_grad_norm=0.5"),
    )


# --- completions ---------------------------------------------------------------------------------


@RULES.rule(
    "all_truncated",
    "truncated completions have no answer, so the reward cannot tell good ones from bad ones",
    "raise trainer.max_completion_length or trainer.thinking_budget, or make the thoughts shorter",
    explains=f"constant_reward cold_start {_ALL_ALIKE}",
)
def _all_truncated(run: RunRecord) -> Iterator[Seen]:
    cut_off = min(run.first(TRUNCATED), run.last(TRUNCATED))
    if cut_off >= MOSTLY or (cut_off > 0.5 and not mean(run.signal) >= LITTLE_SIGNAL):
        config = run.config
        limit = run.setting("max_completion_length")
        longer = four_times_longer(limit, config.model.max_seq_length if config else None)
        reached = f"the limit of {limit} tokens"
        budget = run.setting("thinking_budget")
        if budget and run.last("completions/max_length") < limit:  # the budget cut the thoughts
            reached = f"the limit of {budget} tokens for a thought"
            more = f"trainer.thinking_budget={4 * budget}"
            longer = _valid(run, more, f"{more}, {longer}")
        yield Seen(
            f"at least {cut_off:.0%} of the completions reached {reached}",
            "warning" if run.learned else "error",
            setting=longer,
        )


@RULES.rule(
    "empty_output",
    "the model learned that an empty answer earns the most, or that it can stop at once",
    "reward answers, add a reward with a minimum length (length_band), and start again from the "
    "base with beta 0.05 and a lower learning rate",
    explains=f"reward_collapse reward_hacking {_ALL_ALIKE}",
)
def _empty_output(run: RunRecord) -> Iterator[Seen]:
    rows = run.completions_of(at_end=True)
    blank = sum(map(_is_blank, rows))
    if blank > len(rows) / 2 and not run.better:
        yield Seen(
            f"{blank} of the last {len(rows)} completions are empty; {_moved(run)}",
            setting=_calmer(run),
        )


def _is_blank(row: dict[str, Any]) -> bool:
    """Return True if a completion, or its last message, has neither text nor tool calls."""
    completion = row.get("completion")
    last = completion[-1] if isinstance(completion, list) and completion else None
    calls = isinstance(last, dict) and last.get("tool_calls")
    return not (calls or text_of(completion).strip())


@RULES.rule(
    "no_thought",
    "a thinking reward is the same for all completions if no completion closes a thought",
    "turn thoughts on in the chat template (data.enable_thinking: true), set the model's own tags "
    "(thinking.start and thinking.end), or teach the format first with rloo-kit warm-up",
    explains=f"constant_reward cold_start {_ALL_ALIKE}",
)
def _no_thought(run: RunRecord) -> Iterator[Seen]:
    rows = [row for row in run.completions_of(at_end=True) if not row.get("truncated")]
    is_paid = any(name.startswith("rewards/thinking") for name in run.rows[0])
    # If `</think>` is not a single token, only the text shows that a thought is closed
    closes = (
        row.get("thought_tokens") is not None or THOUGHT_ENDS in text_of(row.get("completion"))
        for row in rows
    )
    if is_paid and rows and not any(closes):
        level = "warning" if run.better else "error"
        yield Seen(f"none of the last {len(rows)} untruncated completions closes a thought", level)


@RULES.rule(
    "length_explosion",
    "the rewards pay for length more than for content, so steps get slower and answers are cut off",
    "add a reward that limits the length (soft_overlong, thinking_budget), set beta above 0, and "
    "start again from the base",
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
            f"last completions were truncated; {_moved(run)}",
            setting=_higher_beta(run),
        )


# --- rewards -------------------------------------------------------------------------------------


@RULES.rule(
    "constant_reward",
    "RLOO learns from score differences within a group, and all scores are equal",
    "check that the reward reads the completion (rloo-kit rewards check); if every completion "
    "earns the highest score, use harder prompts or a stricter reward",
    about_signal=True,
    explains=_ALL_ALIKE,
)
def _constant(run: RunRecord) -> Iterator[Seen]:
    """Report that all scores of the run are equal, or that one of its rewards was always 0."""
    spreads = run.series("reward_std")
    means = run.series("reward")
    unpaid = _never_paid(run)
    if not means or not spreads:
        return
    all_got = f"every completion of {run.num_steps} steps got"
    if max(spreads) > 1e-8 or max(means) - min(means) > 1e-6 * abs(max(means)):
        if unpaid and any(means):
            yield Seen(f"{all_got} 0", "warning", unpaid)
    elif means[0] > 0:
        yield Seen(f"{all_got} {means[0]:.3g}")
    else:
        level = run.config.data.level if run.config else None
        easier = f"data.level={level - 1}" if isinstance(level, int) and level > 1 else ""
        setting = easier or _more_generations(run)
        seen = f"{all_got} {means[0]:.3g}"
        yield Seen(seen, reward=unpaid, setting=setting, kind="cold_start")


def _never_paid(run: RunRecord) -> str | None:
    """Return the name of a reward that was 0 for every completion of the run, or None.

    The rewards in ``MAY_BE_0`` are ignored. Exception: if the run has no tools, ``tool_use`` is
    checked like any other reward.
    """
    has_tools = bool(run.series("tools/call_frequency"))
    for match in filter(None, map(REWARD_MEAN.fullmatch, run.rows[0])):
        means = run.series(match[0])  # empty if the reward never gave a score
        is_0 = means and not any(means) and not any(run.series(f"rewards/{match[1]}/std"))
        may_be_0 = MAY_BE_0.fullmatch(match[1])
        if is_0 and not (may_be_0 and (has_tools or may_be_0[1] != "tool_use")):
            return match[1]
    return None


RULES.rule(
    "cold_start",
    "the model cannot learn from a reward that it never earns; it must succeed sometimes",
    "rule out a fault of the reward with rloo-kit rewards check; then use easier prompts, give "
    "partial credit, sample more completions per prompt, or train on examples first (rloo-kit "
    "warm-up)",
    about_signal=True,
    explains=_ALL_ALIKE,
)


@RULES.rule(
    "reward_collapse",
    "groups with equal scores train nothing, so at most the KL penalty still trains the model",
    "read the last completions and their scores; then give partial credit, raise the temperature, "
    "or use more diverse prompts",
    about_signal=True,
    explains="no_signal high_variance",
)
def _reward_collapse(run: RunRecord) -> Iterator[Seen]:
    """Report that scores within groups differed at first but are equal now, at a lower reward."""
    signal = run.signal
    rewards = run.series("reward")
    dead = next((n for n, share in enumerate(reversed(signal)) if share > 0.01), len(signal))
    alive = signal[: len(signal) - dead]
    if dead < max(3, len(signal) // 10) or len(signal) != len(rewards):
        return
    # In small batches, many groups in a row without signal may be chance
    chance = (1 - mean(alive)) ** (dead * run.groups_per_step)
    if not alive or max(alive) < LITTLE_SIGNAL or chance > 1e-3:
        return
    # The reward must have fallen, because a run with perfect scores has no signal either
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
    "the model found a way to earn the reward without solving the task",
    "read the highest-scoring of the last completions; then use a stricter, verifiable reward, and "
    "raise beta",
    explains=_ALL_ALIKE,
)
def _reward_hacking(run: RunRecord) -> Iterator[Seen]:
    if run.worse and run.rose:
        yield Seen(
            f"the reward rose from {run.first('reward'):.3g} to {run.last('reward'):.3g}, while "
            f"{run.held_out}",
            setting=_higher_beta(run),
        )


@RULES.rule(
    "entropy_collapse",
    "if the model always writes the same text, the completions of a group no longer differ",
    "start again with a lower learning rate or a higher beta, and sample at temperature 1",
    explains="reward_collapse no_signal high_variance",
)
def _entropy_collapse(run: RunRecord) -> Iterator[Seen]:
    values = finite_numbers(
        row.get("policy/entropy_avg", row.get("entropy"))
        for row in run.rows
        if row.get("passes/trained") != 0
    )
    if len(values) < 4 or run.better or (run.rose and run.held_out is None):
        return
    begin = fmean(values[: run.window])
    end = fmean(values[-run.window :])
    before = run.num_texts(at_end=False)
    after = run.num_texts(at_end=True)
    left = end / begin if begin > 0 else 1.0
    texts = (after - 1) / (before - 1) if before > 1 else 1.0
    # Texts begin to repeat before the entropy of their tokens reaches 0
    if min(left, texts / 3) < 0.1:
        counted = f"; different texts per group {before:.2g} -> {after:.2g}" if before > 0 else ""
        yield Seen(
            f"the entropy went from {begin:.3g} to {end:.3g} nats per token{counted}; "
            f"{_moved(run)}",
            setting=_calmer(run),
        )


# --- signal and noise ----------------------------------------------------------------------------


@RULES.rule(
    "no_signal",
    "a group whose scores are all equal trains nothing",
    "use prompts that the model solves sometimes, or sample more completions of each",
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
        seen += f"; a group has {num_texts:.2g} different texts on average"
        remedy = "sample more varied texts: raise the temperature"
        setting = f"trainer.temperature={max(1.0, 1.5 * run.setting('temperature')):g}"
    yield Seen(seen, "error" if share < ALMOST_NONE else "warning", None, remedy, setting)


@RULES.rule(
    "learning_rate_too_low",
    "the scores differ enough to learn from, but the model hardly changes",
    "raise the learning rate (with LoRA 1e-5 is usual, and more for a tiny model)",
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
            f"scores differ in {share:.0%} of the groups, but the reward stays at "
            f"{run.last('reward'):.3g}; the highest learning rate was {rate:.1g}",
            "error" if rate < LOWEST_RATE else "warning",
            setting=f"trainer.learning_rate={usual if rate < usual else 3 * rate:.1g}",
        )


@RULES.rule(
    "high_variance",
    "the reward and the gradient vary so much between steps that noise hides what to learn",
    "sample more completions per prompt (6 to 8), lower the learning rate, or raise beta",
)
def _high_variance(run: RunRecord) -> Iterator[Seen]:
    pairs = pairwise(run.series("reward"))
    spread = mean(run.series("reward_std"))
    # Differences of successive steps contain no trend, and have twice the variance of the noise.
    # The mean of three independent scores has a noise of 0.6 standard deviations.
    noise = math.sqrt(mean([(now - before) ** 2 for before, now in pairs]) / 2)
    if not run.learned and _half_done(run) and noise >= 0.6 * spread > 0:
        size = run.setting("num_generations")
        yield Seen(
            f"the mean reward varies by {noise:.2g} between steps, and single scores by "
            f"{spread:.2g}, with {size} completions per prompt; {_moved(run)}",
            "error" if run.worse or run.fell else "warning",
            setting=_more_generations(run) if size < 8 else _calmer(run),
        )


@add_kinds(RULES, "all_truncated")
def _tools(run: RunRecord) -> Iterator[Seen]:
    """Report faults of the tool calls at the end of a run.

    A metric counts only if at least five steps have it.
    """
    calls = run.series("tools/call_frequency")
    if any(calls) and run.last("tools/call_frequency") == 0:
        return  # the model learned not to call its tools
    yield from seen_in_calls(
        {name: run.last(name) if len(run.series(name)) >= 5 else math.nan for name in CALL_NUMBERS}
    )


# --- all findings, and the verdict ---------------------------------------------------------------


def find_in_run(record: RunRecord) -> list[Finding]:
    """Return all findings about a run, the most harmful first.

    A finding that another one explains is left out. If a finding stopped the run, it comes first.
    Settings that the run file would reject are not suggested. The list is empty if the run has
    fewer than two steps.
    """
    ended_by = record.ended_by
    first = [ended_by] if ended_by and ended_by.kind in KINDS else []
    if first:  # the last evaluation was made with the restored weights
        record = replace(record, evaluation={})
    if record.num_steps < 2:
        return []
    found = [
        replace(finding, setting=_valid(record, finding.setting))
        for check in RULES.checks
        for finding in check(record)
    ]
    known = [finding.kind for finding in first]
    return first + [one for one in RULES.ordered(first + found) if one.kind not in known]


def verdict(record: RunRecord, findings: Sequence[Finding]) -> str:
    """Return one sentence that says whether the run learned, and what to change first."""
    if record.num_steps < 2:
        counted = "one step" if record.num_steps else "no step"
        return f"Nothing can be said yet: the run recorded {counted}, and two are needed."
    text = _outcome(record)
    if record.ended_by:
        kept = record.end.get("kept_step")
        text = f"It was stopped by {record.ended_by.kind}"
        text += "" if kept is None else f" and keeps the weights that it had after step {kept}"
    text = f"{text}: {_moved(record)}"
    if findings:
        what = findings[0].setting or findings[0].remedy.partition(";")[0]
        return f"{text}; change this first ({findings[0].kind}): {what}."
    return f"{text}."


def _outcome(run: RunRecord) -> str:
    if run.better or (run.held_out is None and run.rose):
        return "It learned"
    if run.worse or (run.held_out is None and run.fell):
        return "It got worse"
    if run.rose:
        return "The reward rose, but the score on held-out prompts did not"
    return "It did not learn"


def diagnose(folder: str | Path, say: Callable[[str], None] = print) -> list[Finding]:
    """Diagnose a run: print whether it learned, what went wrong and what to change.

    Args:
        folder: Folder of the run. The run may still be training.
        say: Function that is called with the whole text.

    Returns:
        The findings, the most harmful first.

    Raises:
        DataError: ``folder`` is not the folder of a run, or its metrics cannot be read.
    """
    record = read_run(folder)
    findings = find_in_run(record)
    say("\n\n".join(filter(None, (verdict(record, findings), findings_text(findings)))))
    return findings
