"""Rules for runs: what went wrong by the record a run left, and a verdict.

The thresholds come from runs of the embedded model, some spoiled on purpose and some healthy
(tests/scripts/spoiled_runs.py); the remedies from the ranges of the literature. A metric that a run
does not have is NaN, for which no comparison holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rloo_kit.config.run_file import make_run_config
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.diagnosis.record import (
    RunRecord,
    RunStatistics,
    finite_number,
    finite_numbers,
    mean,
    read_run,
    text_of_row,
)
from rloo_kit.diagnosis.rules import (
    ALMOST_NONE,
    LITTLE_SIGNAL,
    MOSTLY,
    SLOW_SHARE,
    Finding,
    Rules,
    Seen,
    findings_text,
)
from rloo_kit.errors import ConfigError
from rloo_kit.models.adapters import base_name

LOWEST_RATE, USUAL_RATE, TINY_RATE = 1e-6, 1e-5, 1e-3
"""Learning rates with LoRA: too low below the first; usual; of the embedded model."""
# Mean number of different texts in a group below which the sampler repeats itself
REPEATED = 1.5
TRUNCATED = ("completions/truncated", "completions/clipped_ratio")

RULES = Rules(stops=True)
KINDS = RULES.kinds
_ALL_ALIKE = "no_signal high_variance entropy_collapse"


# --- settings ------------------------------------------------------------------------------------


def _valid(run: RunStatistics, *choices: str) -> str:
    """Return the first of these settings that the run file accepts, else ""."""
    settings = run.record.config.as_dict() if run.record.config else None
    for choice in choices if settings else ():
        try:
            make_run_config(settings, choice.split(", "))
        except ConfigError:
            continue
        return choice
    return ""


def _rate(run: RunStatistics) -> float:
    """Return the highest learning rate of the run."""
    given = finite_number(run.setting("learning_rate")) or DEFAULTS["learning_rate"]
    logged = run.series("learning_rate", "lr")
    # During a warm-up the given rate is still to come.
    return max([*logged, *([given] if run.record.config or not logged else [])])


def _usual_rate(run: RunStatistics) -> float:
    config = run.record.config
    return TINY_RATE if config and base_name(config.model.name) == "tiny-thinker" else USUAL_RATE


def _lower_rate(run: RunStatistics) -> str:
    rate, usual = _rate(run), _usual_rate(run)
    return f"trainer.learning_rate={usual if rate > usual else rate / 3:.1g}"


def _higher_beta(run: RunStatistics) -> str:
    beta = finite_number(run.setting("beta")) or 0.0
    return f"trainer.beta={0.1 if beta < 0.1 else 2 * beta:.1g}"


def _calmer(run: RunStatistics) -> str:
    return f"{_lower_rate(run)}, {_higher_beta(run)}"


def _hotter(run: RunStatistics, factor: float) -> str:
    temperature = finite_number(run.setting("temperature")) or 1.0
    return f"trainer.temperature={max(1.0, factor * temperature):g}"


def _more_generations(run: RunStatistics) -> list[str]:
    """Return settings with more completions per prompt, in the same batch and in a larger one."""
    size = run.setting("num_generations")
    if size >= 16:
        return []
    more = f"trainer.num_generations={8 if size < 8 else 16}"
    return [more, f"{more}, trainer.per_device_train_batch_size={8 if size < 8 else 16}"]


def four_times_longer(limit: int, max_seq_length: int | None) -> str:
    """Return the settings of a fourfold completion limit; the prompt keeps its share."""
    setting = f"trainer.max_completion_length={limit * 4}"
    if max_seq_length and limit * 4 > max_seq_length / 2:
        setting += f", model.max_seq_length={max_seq_length + 3 * limit}"
    return setting


def _moved(run: RunStatistics) -> str:
    """Return how the run went, in half a sentence."""
    if run.held_out is not None:
        return str(run.held_out)
    if not run.series("reward"):
        return "no reward is known"
    return f"the reward went from {run.first('reward'):.3g} to {run.last('reward'):.3g}"


# --- sampling and the policy ---------------------------------------------------------------------


@RULES.rule(
    "stale_sampler",
    "completions of another policy are trained as if they were this one's",
    "restart the engine with the same model folder and temperature, or sample with transformers",
    explains="clip_noise negative_kl kl_explosion reward_collapse high_variance",
)
def _stale_sampler(run: RunStatistics) -> Iterator[Seen]:
    seen = [
        f"the sampler is at {share:.2f} between {what} (0) and the policy (1)"
        for name, what in (("adapter_reached", "its base"), ("step_reached", "itself a step ago"))
        if (share := run.last(f"sampling/{name}")) < 0.5
    ]
    probe, noise = run.last("sampling/probe_difference"), run.last("sampling/rounding_noise")
    apart = run.last("sampling/logp_difference_mean")
    if probe > 0.01 and probe > 4 * noise:
        seen.append(
            f"log-probs differ by {probe:.3g} nats per token; rounding explains {noise:.2g}"
        )
    elif not run.series("sampling/probe_difference") and apart > 0.1:
        seen.append(f"log-probs of sampler and trainer differ by {apart:.3g} nats per token")
    if seen:
        yield Seen("; ".join(seen), setting=_valid(run, "trainer.generation=transformers"))


@RULES.rule(
    "clip_noise",
    "clipped tokens train nothing, and a ratio far from 1 means that another policy drew them",
    "train each batch once, or lower the learning rate",
    explains=f"kl_explosion all_truncated empty_output length_explosion reward_collapse "
    f"reward_hacking {_ALL_ALIKE}",
)
def _clip_noise(run: RunStatistics) -> Iterator[Seen]:
    iterations = run.setting("num_iterations")
    accumulation = run.setting("gradient_accumulation_steps")
    slices = run.setting("steps_per_generation") or accumulation
    clipped = sorted(run.series("policy/clipfrac_avg", "clip_ratio/region_mean"))
    worst = mean(clipped[-max(1, len(clipped) // 4) :])  # quarter of the steps
    off = max((abs(ratio - 1) for ratio in run.series("val/ratio")), default=0.0)
    if iterations == 1 and slices <= accumulation:
        if off > 0.01 or worst > 0.01:
            yield Seen(
                f"every batch is trained once, but the ratio is up to {off:.3g} away from 1 and "
                f"{worst:.1%} of the tokens are clipped",
                "warning",
                remedy="leave skip_old_pass on, and check that the engine samples the policy",
                setting=_valid(run, "trainer.skip_old_pass=true"),
            )
    elif worst >= 0.2 and not run.better:
        unused = max(run.series("clip_ratio/nulled_rows"), default=0.0)
        once = "trainer.num_iterations=1" if iterations > 1 else "trainer.steps_per_generation=1"
        yield Seen(
            f"each batch is trained {iterations * max(1, slices // accumulation)} times at "
            f"learning rate {_rate(run):.1g}; in the worst quarter of the steps {worst:.0%} is "
            f"clipped, and up to {unused:.0f} completions train nothing",
            setting=_valid(run, once),
        )


@RULES.rule(
    "negative_kl",
    "a mean KL is never negative, noise aside: the reference, or the sampler, is another model",
    "check that the reference is the base the adapter began from, and that the engine samples at "
    "the trainer's temperature; rollout_correction corrects small differences",
    explains="high_variance",
)
def _negative_kl(run: RunStatistics) -> Iterator[Seen]:
    values = run.series("kl/token", "kl")
    half = values[len(values) // 2 :]
    below = sum(value < 0 for value in half)
    # The k3 estimator cannot be negative.
    if len(half) < 2 or run.setting("kl_estimator") == "k3" or below < MOSTLY * len(half):
        return
    if fmean(half) <= -0.02:
        engine = any(name.startswith("sampling/") for row in run.rows for name in row)
        yield Seen(
            f"the KL from the reference is {fmean(half):.3g} nats per token over the last "
            f"{len(half)} steps, and below 0 in {below} of them",
            setting=_valid(run, "trainer.generation=transformers") if engine else "",
        )


@RULES.rule(
    "kl_explosion",
    "so far from the reference the model writes no language, and no reward brings it back",
    "begin again with a lower learning rate, with beta 0.1 and max_grad_norm 0.5",
    explains=f"all_truncated empty_output length_explosion cold_start reward_collapse "
    f"reward_hacking {_ALL_ALIKE}",
)
def _kl_explosion(run: RunStatistics) -> Iterator[Seen]:
    values, end = run.series("kl/token", "kl"), run.last("kl/token", "kl")
    # Nats per token; a run that also got worse is lost earlier.
    limit = 1.0 if end > 1.0 or not (run.worse or run.fell) else 0.3
    if not end > limit or run.better:
        return
    since = next(place for place, value in enumerate(values) if value > limit)
    norm = finite_number(run.setting("max_grad_norm"))
    clip = "" if norm is not None and 0 < norm <= 0.5 else ", trainer.max_grad_norm=0.5"
    yield Seen(
        f"the KL from the reference passed {limit:g} nat per token at step {run.step(since)} and "
        f"is {end:.3g} at the end, at learning rate {_rate(run):.1g} and beta "
        f"{run.setting('beta'):g}; {_moved(run)}",
        setting=_valid(run, _calmer(run) + clip, _calmer(run), _lower_rate(run)),
    )


# --- completions ---------------------------------------------------------------------------------


@RULES.rule(
    "all_truncated",
    "a completion that is cut off never reaches its answer: the reward cannot tell them apart",
    "raise the limit on completion length, or make the thoughts shorter",
    explains=f"constant_reward saturated_reward cold_start {_ALL_ALIKE}",
)
def _all_truncated(run: RunStatistics) -> Iterator[Seen]:
    begin, end = run.first(*TRUNCATED), run.last(*TRUNCATED)
    little = not mean(run.signal) >= LITTLE_SIGNAL
    if min(begin, end) >= MOSTLY or (min(begin, end) > 0.5 and little):
        config, limit = run.record.config, run.setting("max_completion_length")
        longer = four_times_longer(limit, config.model.max_seq_length if config else None)
        yield Seen(
            f"{begin:.0%} of the first completions and {end:.0%} of the last reached the limit of "
            f"{limit} tokens",
            "warning" if run.learned else "error",
            setting=_valid(run, longer),
        )


@RULES.rule(
    "empty_output",
    "the model found that saying nothing pays most, or ends its turn at once",
    "reward an answer, add a length term with a lower bound (length_band), and begin again from "
    "the base with beta 0.05 and a lower learning rate",
    explains=f"reward_collapse reward_hacking {_ALL_ALIKE}",
)
def _empty_output(run: RunStatistics) -> Iterator[Seen]:
    begin, end = run.first("completions/mean_length"), run.last("completions/mean_length")
    rows = run.completions(at_end=True)
    blank = sum(not text_of_row(row).strip() for row in rows)
    if not run.better and (end <= 3.0 < begin / 3 or blank > len(rows) / 2):
        yield Seen(
            f"{blank} of the last {len(rows)} completions hold no text; the mean length went from "
            f"{begin:.1f} to {end:.1f} tokens; {_moved(run)}",
            setting=_valid(run, _calmer(run)),
        )


@RULES.rule(
    "length_explosion",
    "length is rewarded and content is not: steps cost more, and the limit cuts the answers off",
    "add a length term (soft_overlong, thinking_budget), keep beta above 0, begin from the base",
    explains=f"all_truncated reward_collapse reward_hacking {_ALL_ALIKE}",
)
def _length_explosion(run: RunStatistics) -> Iterator[Seen]:
    begin, end = run.first("completions/mean_length"), run.last("completions/mean_length")
    cut = mean(run.series(*TRUNCATED)[-run.window :] or [0.0])
    harmful = cut > 0.5 or run.worse or end > 3 * begin
    if begin and end >= 1.5 * begin and harmful and not run.better:
        limit = run.setting("max_completion_length")
        yield Seen(
            f"the mean length went from {begin:.0f} to {end:.0f} tokens, and {cut:.0%} of the last "
            f"completions reached the limit of {limit}; {_moved(run)}",
            setting=_valid(run, _higher_beta(run)),
        )


# --- rewards -------------------------------------------------------------------------------------


@RULES.rule(
    "constant_reward",
    "RLOO learns from differences within a group, and there are none",
    "check that the reward looks at the completion: rloo-kit rewards check tries it",
    about_signal=True,
    explains=_ALL_ALIKE,
)
def _constant(run: RunStatistics) -> Iterator[Seen]:
    """Find that all scores of the run are the same, or that one reward of several never paid."""
    spreads, means, unpaid = run.series("reward_std"), run.series("reward"), _never_paid(run)
    steps = run.num_steps
    if not means or not spreads:
        return
    if max(spreads) > 1e-8 or max(means) - min(means) > 1e-6 * abs(max(means)):
        if unpaid and any(means):
            yield Seen(f"it gave 0 to every completion of {steps} steps", "warning", unpaid)
        return
    seen = f"every completion of {steps} steps got {means[0]:.3g}"
    if means[0] <= 0 or unpaid:
        yield _cold(run, seen, reward=unpaid)
    else:
        yield Seen(seen, kind="saturated_reward" if means[0] >= 1 else "constant_reward")


def _never_paid(run: RunStatistics) -> str | None:
    """Return the name of a reward that gave 0 to every completion of the run."""
    for key in run.rows[0]:
        name = key.removesuffix("/mean")
        if key.startswith("rewards/") and name != key:
            means = run.series(key)
            if means and not any(means) and not any(run.series(f"{name}/std")):
                return name.removeprefix("rewards/")
    return None


def _cold(run: RunStatistics, seen: str, level: str = "error", reward: str | None = None) -> Seen:
    now = run.record.config.data.level if run.record.config else None
    easier = [f"data.level={now - 1}"] if isinstance(now, int) and now > 1 else []
    setting = _valid(run, *easier, *_more_generations(run))
    return Seen(seen, level, reward, setting=setting, kind="cold_start")


@RULES.rule(
    "saturated_reward",
    "the model earned it nearly always from the first step on: nothing is left to learn",
    "take harder prompts, ask for more, or check that the reward looks at the completion",
    about_signal=True,
    explains=_ALL_ALIKE,
)
def _saturated_or_cold(run: RunStatistics) -> Iterator[Seen]:
    """Find that from the first step nearly all earned the most, or the least."""
    begin, throughout, scores = mean(run.signal[: run.window]), mean(run.signal), run.scores()
    if not scores or run.learned or not max(begin, throughout) < LITTLE_SIGNAL:
        return
    top, low, count = max(scores), min(scores), len(scores)
    rest = f"; scores differ in {throughout:.0%} of the groups"
    if top == low:
        return
    if (share := scores.count(top) / count) > 0.95:
        yield Seen(f"{share:.1%} of {count} completions got the highest score of {top:.3g}{rest}")
    elif (share := scores.count(low) / count) > 0.98 and begin < ALMOST_NONE:
        seen = f"{share:.1%} of {count} completions got the lowest score of {low:.3g}{rest}"
        yield _cold(run, seen)


@RULES.rule(
    "cold_start",
    "a reward that is never earned teaches nothing: the base must sometimes succeed",
    "rule out a fault of the reward with rloo-kit rewards check; then take easier prompts, give "
    "partial credit, draw more completions per prompt, or fine-tune on examples first",
    about_signal=True,
    explains=_ALL_ALIKE,
)
def _late_start(run: RunStatistics) -> Iterator[Seen]:
    """Find that a run which learned in the end had nothing to learn from for long."""
    cold = next((n for n, share in enumerate(run.signal) if share > ALMOST_NONE), run.num_steps)
    if run.learned and cold >= max(5, run.num_steps // 5):
        step = run.step(min(cold, run.num_steps - 1))
        yield _cold(run, f"scores did not differ in any group before step {step}", "warning")


@RULES.rule(
    "reward_collapse",
    "equal scores cancel: since then the run trains nothing, or the KL penalty alone",
    "look at the last completions and their scores; then spread the reward (partial credit), raise "
    "the temperature, or take more diverse prompts",
    about_signal=True,
    explains="no_signal high_variance",
)
def _reward_collapse(run: RunStatistics) -> Iterator[Seen]:
    """Find that scores differed once, and are all alike now, at less than the best."""
    signal, rewards = run.signal, run.series("reward")
    dead = next((n for n, share in enumerate(reversed(signal)) if share > 0.01), len(signal))
    alive = signal[: len(signal) - dead]
    if dead < max(3, len(signal) // 10) or len(signal) != len(rewards):
        return
    # In small batches so many groups without signal in a row may be chance.
    chance = (1 - mean(alive)) ** (dead * run.groups_per_step)
    if not alive or max(alive) < LITTLE_SIGNAL or chance > 1e-3:
        return
    end, before = fmean(rewards[-dead:]), rewards[: len(alive)]
    firsts = range(max(1, len(before) - run.window + 1))
    best = max(fmean(before[n : n + run.window]) for n in firsts)
    if end < best - 0.02 * max(abs(best), 1e-6):
        repeats = not run.num_texts(at_end=True) >= REPEATED
        yield Seen(
            f"scores differed in {fmean(alive):.0%} of the groups up to step "
            f"{run.step(len(alive) - 1)}, and in none of the {dead} steps since; the reward went "
            f"from {fmean(before[-run.window :]):.3g} to {end:.3g}",
            setting=_valid(run, _hotter(run, 1.25)) if repeats else "",
        )


@RULES.rule(
    "reward_hacking",
    "the model found a way to earn the reward that is not the task",
    "read the best paid of the last completions; use a stricter, verifiable reward, and raise beta",
    explains=_ALL_ALIKE,
)
def _reward_hacking(run: RunStatistics) -> Iterator[Seen]:
    # Another reward may have risen on the held-out prompts while the main one fell.
    seen = [str(one) for one in run.scored_twice[1:] if one.change > 2]
    if run.rose:
        seen = [f"the reward rose from {run.first('reward'):.3g} to {run.last('reward'):.3g}"]
    if run.worse and seen:
        setting = _valid(run, _higher_beta(run))
        yield Seen(f"{seen[0]}, while {run.held_out}", setting=setting)


@RULES.rule(
    "entropy_collapse",
    "a model that always writes the same has nothing to compare, and stops exploring",
    "begin again with a lower learning rate or a higher beta, and sample at temperature 1",
    explains="reward_collapse no_signal high_variance",
)
def _entropy_collapse(run: RunStatistics) -> Iterator[Seen]:
    rows = [row for row in run.rows if row.get("passes/trained") != 0]
    values = finite_numbers(row.get("policy/entropy_avg", row.get("entropy")) for row in rows)
    if len(values) < 4 or run.better or (run.rose and run.held_out is None):
        return
    begin, end = fmean(values[: run.window]), fmean(values[-run.window :])
    before, after = run.num_texts(at_end=False), run.num_texts(at_end=True)
    left = end / begin if begin > 0 else 1.0
    texts = (after - 1) / (before - 1) if before > 1 else 1.0
    if left < 0.1 or texts < 0.3 or (left < 0.25 and texts < 0.6):
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
def _no_signal(run: RunStatistics) -> Iterator[Seen]:
    half = run.signal[: max(2, run.num_steps // 2)]
    share = mean(half)
    if run.learned or not share < LITTLE_SIGNAL:
        return
    num_texts = run.num_texts(at_end=False)
    seen, remedy = f"scores differ in {share:.0%} of the groups of the first {len(half)} steps", ""
    setting = _valid(run, *_more_generations(run))
    if num_texts < REPEATED:
        temperature = finite_number(run.setting("temperature")) or 1.0
        seen += f"; a group has {num_texts:.2g} different texts at temperature {temperature:g}"
        remedy = "sample more varied texts: raise the temperature"
        setting = _valid(run, _hotter(run, 1.5))
    yield Seen(seen, "error" if share < ALMOST_NONE else "warning", None, remedy, setting)


@RULES.rule(
    "learning_rate_too_low",
    "the scores say what to learn, and the model does not move",
    "raise the learning rate: with LoRA 1e-6 to 1e-5 is usual, more for a tiny model",
    about_signal=True,
    explains="high_variance",
)
def _learning_rate_too_low(run: RunStatistics) -> Iterator[Seen]:
    share, rate, usual = mean(run.signal), _rate(run), _usual_rate(run)
    kl = run.series("kl/sequence", "objective/kl")
    warming_up = max(run.series("learning_rate", "lr"), default=rate) < rate / 2
    moved = run.better or run.worse or run.rose or run.fell
    if warming_up or moved or not share >= LITTLE_SIGNAL:
        return
    still = not kl or abs(mean(kl[-run.window :])) < 0.01  # nats per completion
    if still and (rate < LOWEST_RATE or (kl and run.num_steps >= 8)):
        far = f", the KL of a completion at {mean(kl[-run.window :]):.2g} nats" if kl else ""
        yield Seen(
            f"scores differ in {share:.0%} of the groups, the reward stays at "
            f"{run.last('reward'):.3g}{far}; the highest learning rate was {rate:.1g}",
            "error" if rate < LOWEST_RATE else "warning",
            setting=_valid(run, f"trainer.learning_rate={usual if rate < usual else 3 * rate:.1g}"),
        )


@RULES.rule(
    "high_variance",
    "the noise of the gradient is larger than its signal",
    "draw more completions per prompt (4 to 8; 8 to 16 for hard reasoning), lower the learning "
    "rate, raise beta, or take more prompts per step",
)
def _high_variance(run: RunStatistics) -> Iterator[Seen]:
    num_sets, unequal = _equal_texts(run)
    noisy = num_sets >= 10 and unequal > 0.1 * num_sets
    size, lost, rewards = (
        run.setting("num_generations"),
        run.worse or run.fell,
        run.series("reward"),
    )
    if not mean(run.signal) >= LITTLE_SIGNAL or len(rewards) < 8 or (run.learned and not noisy):
        return
    seen = [f"{size} completions per prompt"] if size < 4 else []
    if noisy:
        seen.append(f"{unequal} of {num_sets} sets of equal completions got unequal scores")
    if lost:
        seen.append(f"{_moved(run)}, at learning rate {_rate(run):.1g}")
    if seen:
        choices = _more_generations(run) if size < 8 else [_lower_rate(run)]
        yield Seen(
            f"{'; '.join(seen)}; the reward is {fmean(rewards):.3g} with a standard deviation of "
            f"{stdev(rewards):.2g} over the steps",
            "error" if lost or (noisy and not run.learned) else "warning",
            setting=_valid(run, *choices),
        )


def _equal_texts(run: RunStatistics) -> tuple[int, int]:
    """Return how many sets of equal completions there are, and how many with unequal scores."""
    found: dict[tuple[Any, Any, str], list[float]] = {}
    for row in run.record.completions:
        score = finite_number(row.get("score"))
        if score is not None and not row.get("truncated"):
            key = (row.get("step"), row.get("group"), text_of_row(row))
            found.setdefault(key, []).append(score)
    several = [scores for scores in found.values() if len(scores) > 1]
    return len(several), sum(max(scores) - min(scores) > 1e-6 for scores in several)


# --- time, memory, loss --------------------------------------------------------------------------


@RULES.rule(
    "slow_reward",
    "the model waits while the reward computes",
    "batch its work, cache repeated texts, or make it async, so that several run at once",
    stops=False,
)
def _slow_reward(run: RunStatistics) -> Iterator[Seen]:
    if run.setting("dynamic_sampling") or run.record.config is None:
        return
    num = run.groups_per_step * run.setting("num_generations")
    names = ("step_time", "completions/mean_length", "speed/generation_tokens_per_second",
             "speed/learning_tokens_per_second")  # fmt: skip
    waits, total, tokens = [], 0.0, 0.0
    for row in run.rows:
        now = finite_number(row.get("num_tokens")) or tokens
        drawn, tokens = now - tokens, now
        seconds, length, speed, learning = (finite_number(row.get(name)) for name in names)
        if seconds and length and speed and learning:
            total += seconds
            waits.append(seconds - num * length / speed - drawn / learning)
    if sum(waits) >= SLOW_SHARE * total and mean(waits) >= 0.1:  # seconds
        yield Seen(
            f"{fmean(waits):.2g} s of the {total / len(waits):.2g} s of a step are neither "
            f"sampling nor learning: {sum(waits) / total:.0%}",
            "warning",
        )


@RULES.rule(
    "memory_creeping",
    "memory that grows with every step runs out sooner or later",
    "look for a list that keeps completions or tensors, in a reward or a callback",
    stops=False,
)
def _memory_creeping(run: RunStatistics) -> Iterator[Seen]:
    values = run.series("memory/peak_gib")
    half = values[len(values) // 2 :]
    if len(half) < 6:
        return
    steps = [b - a for a, b in pairwise(half)]
    rises = sum(step > 0 for step in steps) / len(steps)
    # A high-water mark rises in jumps: its median rise is far below the mean one.
    steady = rises >= 0.8 and median(steps) >= 0.6 * fmean(steps)
    if steady and sum(steps) >= max(0.1, 0.4 * values[0]):
        yield Seen(
            f"the peak memory rose from {half[0]:.2f} to {half[-1]:.2f} GiB over the last "
            f"{len(half)} steps, {1024 * fmean(steps):.0f} MiB per step",
            "warning",
        )


@RULES.rule(
    "loss_near_zero",
    "advantages sum to 0 within a group: the loss is about 0, and says nothing about learning",
    "look at the reward and at the held-out prompts instead",
    stops=False,
)
def _loss_near_zero(run: RunStatistics) -> Iterator[Seen]:
    losses = run.series("loss")
    if abs(mean(losses)) <= 0.05:
        largest = max(losses, key=abs)
        yield Seen(f"the mean loss is {fmean(losses):.2g}, the largest {largest:.2g}", "note")


# --- all findings, and the verdict ---------------------------------------------------------------


def find_in_run(record: RunRecord, *, notes: bool = False) -> list[Finding]:
    """Return every finding, the most harmful first; a cause replaces what it explains.

    Args:
        record: As ``read_run`` returns it; nothing is found in less than two steps. A finding that
            stopped the run comes first.
        notes: If nothing else was found, also explain what looks odd and is no fault.
    """
    ended_by = record.ended_by if record.ended_by and record.ended_by.kind in KINDS else None
    if ended_by:  # the evaluation is of the restored weights, not of the run's last ones
        record = replace(record, evaluation=None)
    run = RunStatistics(record)
    if run.num_steps < 2:
        return []
    found = [finding for check in RULES.checks for finding in check(run)]
    if ended_by:
        others = [f for f in found if f.kind != ended_by.kind]
        ordered = RULES.ordered([ended_by, *others])
        return [ended_by, *(f for f in ordered if f is not ended_by and f.level != "note")]
    faults = [finding for finding in found if finding.level != "note"]
    return RULES.ordered(faults) if faults or not notes else found


def verdict(record: RunRecord, findings: Sequence[Finding]) -> str:
    """Return one sentence: whether the run learned, and what to change first.

    Args:
        record: As ``read_run`` returns it.
        findings: As ``find_in_run`` returns them.
    """
    run = RunStatistics(record)
    if run.num_steps < 2:
        counted = "one step" if run.num_steps else "no step"
        return f"Nothing can be said: the run recorded {counted}, and two are needed."
    text = _outcome(run)
    if record.ended_by:
        kept = record.end.get("kept_step")
        text = f"It was stopped by {record.ended_by.kind}"
        text += "" if kept is None else f" and keeps its weights after step {kept}"
    text = f"{text}: {_moved(run)}"
    serious = [finding for finding in findings if finding.level != "note"]
    if serious:
        what = serious[0].setting or serious[0].remedy.partition(";")[0]
        return f"{text}; change first ({serious[0].kind}): {what}."
    spent = next((n for n, share in enumerate(reversed(run.signal)) if share > 0.2), run.num_steps)
    if run.learned and spent >= 3:
        text += f"; in the last {spent} steps little was left to learn: take harder prompts next"
    return f"{text}."


def _outcome(run: RunStatistics) -> str:
    if run.better or (run.held_out is None and run.rose):
        return "It learned"
    if run.worse or (run.held_out is None and run.fell):
        return "It got worse"
    if run.rose:
        return "The reward rose, and held-out prompts do not show it"
    return "It did not learn"


def diagnose(folder: str | Path, say: Callable[[str], None] = print) -> list[Finding]:
    """Say whether a run learned, what went wrong and what to change; return the findings.

    Args:
        folder: Of the run, which may be unfinished.
        say: Called with the text.

    Raises:
        DataError: It is no folder of a run.
    """
    record = read_run(folder)
    findings = find_in_run(record)
    say("\n\n".join(filter(None, (verdict(record, findings), findings_text(findings)))))
    return findings
