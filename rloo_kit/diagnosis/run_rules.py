"""What is wrong with a run that trained, by the record it left; and a verdict.

Findings are made cause first: a cause that explains another finding replaces it. The thresholds
come from runs of the embedded model that were spoiled on purpose and from healthy ones
(tests/scripts/spoiled_runs.py), the remedies from the ranges of the literature.
"""

from collections.abc import Callable, Sequence
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
    mean_or_none,
    read_run,
    text_of_row,
)
from rloo_kit.diagnosis.rules import Finding, findings_text
from rloo_kit.errors import ConfigError
from rloo_kit.models.adapters import base_name

LITTLE_SIGNAL, ALMOST_NONE = 0.25, 0.05
"""Share of groups with differing scores: below the first most work is for nothing."""
MOSTLY = 0.9
"""Share of the completions, or groups, that makes one fault the fault of the run."""
KL_TOKEN, KL_TOKEN_WORSE, KL_NEGATIVE = 1.0, 0.3, -0.02
"""Nats a token: gone; gone where the run also got worse; no noise any more."""
KL_FLAT = 0.01
"""Nats a completion, from the reference, of a policy that stands still."""
LOWEST_RATE, USUAL_RATE, TINY_RATE = 1e-6, 1e-5, 1e-3
"""Learning rates with LoRA: too low below the first; usual; of the embedded model."""
CHANCE = 1e-3
"""Probability from which so many groups without signal in a row are none of chance."""
LONGER = 1.5
"""Growth of the mean length that is noticed."""
BARE_TOKENS = 3.0
"""Mean length of completions that hold nothing, their EOS included."""
ALIKE = 0.5
"""Other texts in a group beside the first, in the mean, of a sampler that draws the same."""
ENTROPY_GONE, ENTROPY_LEFT, TEXTS_LEFT = 0.1, 0.25, 0.3
"""Of the first entropy: gone; gone where the texts of a group are alike too. Of the first number of
other texts in a group: all alike."""
NOISY_PAIRS = 0.1
"""Share of equal completions of one prompt with unequal scores that makes a reward noise."""
CLIPPED, RATIO_OFF = 0.2, 0.01
"""Share of tokens (or completions) beyond the clip range in the worst quarter of the steps, where
the policy may differ from the one that sampled; deviation of the ratio from 1 where it may not."""
SLOW_SHARE, SLOW_SECONDS = 1 / 3, 0.1
"""Of the time of a step, and seconds a step, that rewards may take."""
CREEP_SHARE, CREEP_GIB, CREEP_RISES, CREEP_EVEN = 0.4, 0.1, 0.8, 0.6
"""Growth of the peak memory over the second half of a run: relative to its beginning; GiB; in which
share of the steps it rises; its median a step over its mean (a high-water mark rises in jumps)."""

KINDS: dict[str, tuple[str, str]] = {
    "stale_sampler": (
        "completions of another policy are trained as if they were this one's, so the gradient "
        "points elsewhere",
        "restart the engine with the same model folder and temperature, or sample with "
        "transformers",
    ),
    "clip_noise": (
        "what is clipped trains nothing, and what is far from a ratio of 1 was drawn by another "
        "policy than the one it trains",
        "train each batch once, or lower the learning rate",
    ),
    "negative_kl": (
        "a KL is never negative in the mean: single tokens near 0 are noise, but this is the "
        "reference, or the sampler, being another model than is thought",
        "check that the reference is the base the adapter began from, and that the engine samples "
        "at the trainer's temperature; rollout_correction makes up for small differences",
    ),
    "kl_explosion": (
        "so far from the reference the model no longer writes language, and no reward brings it "
        "back",
        "begin again with a lower learning rate, with beta 0.1 and max_grad_norm 0.5",
    ),
    "all_truncated": (
        "a completion that is cut off never reaches its answer, so the reward cannot tell one "
        "from another",
        "raise the limit on completion length, or make the thoughts shorter",
    ),
    "empty_output": (
        "the model found that saying nothing pays most, or ends its turn at once",
        "pay for an answer, add a length term with a lower bound (length_band), and begin again "
        "from the base with beta 0.05 and a lower learning rate",
    ),
    "length_explosion": (
        "length is paid and content is not: every step costs more, and the limit cuts the answers "
        "off",
        "add a length term (soft_overlong, thinking_budget), keep beta above 0, and begin again "
        "from the base",
    ),
    "constant_reward": (
        "RLOO learns from differences within a group, and there are none",
        "check that the reward looks at the completion: rloo-kit rewards check tries it without "
        "training",
    ),
    "saturated_reward": (
        "the model earned it nearly always from the first step on: nothing is left to learn",
        "take harder prompts, ask for more, or check that the reward looks at the completion",
    ),
    "cold_start": (
        "a reward that is never earned teaches nothing: the base must sometimes succeed",
        "rule a fault of the reward out with rloo-kit rewards check; then take easier prompts, "
        "give partial credit, draw more completions of each prompt, or fine-tune on examples first",
    ),
    "reward_collapse": (
        "equal scores cancel: since then the run trains nothing, or the KL penalty alone",
        "look at the last completions and at what the reward gave them; then spread the reward "
        "(partial credit), raise the temperature, or take more diverse prompts",
    ),
    "reward_hacking": (
        "the model found a way to be paid that is not the task",
        "read the best paid of the last completions; use a stricter, verifiable reward, and raise "
        "beta",
    ),
    "entropy_collapse": (
        "a model that always writes the same has nothing to compare, and explores no more",
        "begin again with a lower learning rate or a higher beta, and sample at temperature 1",
    ),
    "no_signal": (
        "equal scores in a group cancel, and the group trains nothing",
        "take prompts that the model solves sometimes, or draw more completions of each",
    ),
    "learning_rate_too_low": (
        "the scores say what to learn, and the model does not move",
        "raise the learning rate: with LoRA 1e-6 to 1e-5 is usual, more for a tiny model",
    ),
    "high_variance": (
        "the noise of the gradient is larger than what it says",
        "draw more completions of each prompt (4 to 8; 8 to 16 for hard reasoning), lower the "
        "learning rate, raise beta, or take more prompts a step",
    ),
    "slow_reward": (
        "the model waits while the reward computes",
        "batch its work, cache repeated texts, or make it async, so that several run at once",
    ),
    "memory_creeping": (
        "what grows with every step ends the run sooner or later",
        "look for a list that keeps completions or tensors, in a reward or a callback; where it "
        "runs out before it is found: fewer generations, shorter completions, gradient "
        "checkpointing",
    ),
    "loss_near_zero": (
        "advantages sum to 0 within a group, so the loss of a policy gradient is about 0 by "
        "construction, and says nothing about learning",
        "look at the reward and at the held-out prompts instead",
    ),
}
"""Kind of a finding -> (why it matters, remedy), the most harmful first."""

_ALL_ALIKE = "no_signal high_variance entropy_collapse"
EXPLAINS: dict[str, str] = {
    "stale_sampler": "clip_noise negative_kl kl_explosion reward_collapse high_variance",
    "clip_noise": f"kl_explosion all_truncated empty_output length_explosion reward_collapse "
    f"reward_hacking {_ALL_ALIKE}",
    "negative_kl": "high_variance",
    "kl_explosion": f"all_truncated empty_output length_explosion cold_start reward_collapse "
    f"reward_hacking {_ALL_ALIKE}",
    "all_truncated": f"constant_reward saturated_reward cold_start {_ALL_ALIKE}",
    "empty_output": f"reward_collapse reward_hacking {_ALL_ALIKE}",
    "length_explosion": f"all_truncated reward_collapse reward_hacking {_ALL_ALIKE}",
    "constant_reward": _ALL_ALIKE,
    "saturated_reward": _ALL_ALIKE,
    "cold_start": _ALL_ALIKE,
    "reward_collapse": "no_signal high_variance",
    "reward_hacking": _ALL_ALIKE,
    "entropy_collapse": "reward_collapse no_signal high_variance",
    "no_signal": "learning_rate_too_low high_variance",
    "learning_rate_too_low": "high_variance",
}
"""Kind of a finding -> the findings that it explains, and so replaces."""


# --- settings ------------------------------------------------------------------------------------


def _valid(run: RunStatistics, *choices: str) -> str:
    """Return the first of these settings that the run file takes; "" where there is none."""
    config = run.record.config
    if config is None:
        return ""
    for choice in choices:
        try:
            make_run_config(config.as_dict(), [line for line in choice.split(", ") if line])
        except ConfigError:
            continue
        return choice
    return ""


def _usual_rate(run: RunStatistics) -> float:
    config = run.record.config
    return TINY_RATE if config and base_name(config.model.name) == "tiny-thinker" else USUAL_RATE


def _lower_rate(run: RunStatistics) -> str:
    """Return the setting of a learning rate that is usual, or a third where it was."""
    rate = _rate(run)
    usual = _usual_rate(run)
    return f"trainer.learning_rate={usual if rate > usual else rate / 3:.1g}"


def _rate(run: RunStatistics) -> float:
    """Return the highest learning rate of the run."""
    given = finite_number(run.setting("learning_rate")) or DEFAULTS["learning_rate"]
    logged = run.series("learning_rate", "lr")
    known = [given] if run.record.config or not logged else []  # of a warm-up it is still to come
    return max([*logged, *known])


def _higher_beta(run: RunStatistics) -> str:
    beta = finite_number(run.setting("beta")) or 0.0
    return f"trainer.beta={0.1 if beta < 0.1 else 2 * beta:.1g}"


def _harder_clip(run: RunStatistics) -> str:
    """Return a further setting that clips the gradient at 0.5; "" where it is."""
    norm = finite_number(run.setting("max_grad_norm"))
    return "" if norm is not None and 0 < norm <= 0.5 else ", trainer.max_grad_norm=0.5"


def _more_generations(run: RunStatistics) -> list[str]:
    """Return settings with more completions of each prompt, the batch enlarged where it must be."""
    size = run.setting("num_generations")
    wanted = 8 if size < 8 else 16
    if size >= 16:
        return []
    more = f"trainer.num_generations={wanted}"
    return [more, f"{more}, trainer.per_device_train_batch_size={wanted}"]


def _longer(run: RunStatistics) -> str:
    """Return settings with four times the room for completions."""
    limit, config = run.setting("max_completion_length"), run.record.config
    more = f"trainer.max_completion_length={limit * 4}"
    if config and limit * 4 > config.model.max_seq_length / 2:  # the prompt keeps its room
        more += f", model.max_seq_length={config.model.max_seq_length + 3 * limit}"
    return more


def _finding(
    kind: str,
    evidence: str,
    level: str = "error",
    *,
    reward: str | None = None,
    remedy: str = "",
    setting: str = "",
) -> Finding:
    why, usual = KINDS[kind]
    return Finding(kind, level, reward, evidence, why, remedy or usual, setting)


# --- findings ------------------------------------------------------------------------------------


def _stale_sampler(run: RunStatistics) -> Finding | None:
    seen = []
    for name, what in (("adapter_reached", "its base"), ("step_reached", "itself a step ago")):
        share = run.last(f"sampling/{name}")
        if share is not None and share < 0.5:
            seen.append(f"the sampler stands at {share:.2f} between {what} (0) and the policy (1)")
    probe, noise = run.last("sampling/probe_difference"), run.last("sampling/rounding_noise")
    if probe is not None and noise is not None and probe > max(0.01, 4 * noise):
        seen.append(
            f"log-probabilities differ by {probe:.3g} nats a token, rounding explains {noise:.2g}"
        )
    apart = run.last("sampling/logp_difference_mean")
    if probe is None and apart is not None and apart > 0.1:
        seen.append(f"log-probabilities of sampler and trainer differ by {apart:.3g} nats a token")
    if not seen:
        return None
    setting = _valid(run, "trainer.generation=transformers")
    return _finding("stale_sampler", "; ".join(seen), setting=setting)


def _clip_noise(run: RunStatistics) -> Finding | None:
    iterations = run.setting("num_iterations")
    accumulation = run.setting("gradient_accumulation_steps")
    slices = run.setting("steps_per_generation") or accumulation
    clipped = sorted(run.series("policy/clipfrac_avg", "clip_ratio/region_mean"))
    worst = mean_or_none(clipped[-max(1, len(clipped) // 4) :]) or 0.0
    ratios = run.series("val/ratio")
    off = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    nulled = max(run.series("clip_ratio/nulled_rows"), default=0.0)
    if iterations == 1 and slices <= accumulation:
        if off <= RATIO_OFF and worst <= RATIO_OFF:
            return None
        return _finding(
            "clip_noise",
            f"every batch is trained once, and yet the ratio is up to {off:.3g} away from 1 and "
            f"{worst:.1%} of the tokens are clipped",
            "warning",
            remedy="leave skip_old_pass on, and check that the engine samples the policy",
            setting=_valid(run, "trainer.skip_old_pass=true"),
        )
    if worst < CLIPPED or run.better:
        return None
    once = "trainer.num_iterations=1" if iterations > 1 else "trainer.steps_per_generation=1"
    return _finding(
        "clip_noise",
        f"each batch is trained {iterations * max(1, slices // accumulation)} times at learning "
        f"rate {_rate(run):.1g}; in the worst quarter of the steps {worst:.0%} is clipped, and "
        f"up to {nulled:.0f} completions train nothing for it",
        setting=_valid(run, once),
    )


def _negative_kl(run: RunStatistics) -> Finding | None:
    values = run.series("kl/token", "kl")
    half = values[len(values) // 2 :]
    if len(half) < 2 or run.setting("kl_estimator") == "k3":
        return None
    if fmean(half) > KL_NEGATIVE or sum(v < 0 for v in half) < MOSTLY * len(half):
        return None
    engine = any(name.startswith("sampling/") for row in run.rows for name in row)
    return _finding(
        "negative_kl",
        f"the KL from the reference is {fmean(half):.3g} nats a token over the last {len(half)} "
        f"steps, and below 0 in {sum(v < 0 for v in half)} of them",
        setting=_valid(run, "trainer.generation=transformers") if engine else "",
    )


def _kl_explosion(run: RunStatistics) -> Finding | None:
    values = run.series("kl/token", "kl")
    end = run.last("kl/token", "kl")
    if end is None or run.better:
        return None
    gone = end > KL_TOKEN or (end > KL_TOKEN_WORSE and (run.worse or run.fell))
    if not gone:
        return None
    limit = KL_TOKEN if end > KL_TOKEN else KL_TOKEN_WORSE
    since = next(place for place, value in enumerate(values) if value > limit)
    return _finding(
        "kl_explosion",
        f"the KL from the reference passed {limit:g} nat a token at step {run.step(since)} and "
        f"is {end:.3g} at the end, at learning rate {_rate(run):.1g} and beta "
        f"{run.setting('beta'):g}; {_went(run)}",
        setting=_valid(
            run,
            f"{_lower_rate(run)}, {_higher_beta(run)}{_harder_clip(run)}",
            f"{_lower_rate(run)}, {_higher_beta(run)}",
            _lower_rate(run),
        ),
    )


def _all_truncated(run: RunStatistics) -> Finding | None:
    names = ("completions/truncated", "completions/clipped_ratio")
    begin, end = run.first(*names), run.last(*names)
    if begin is None or end is None:
        return None
    little = (mean_or_none(run.with_signal) or 0.0) < LITTLE_SIGNAL
    if not (begin >= MOSTLY and end >= MOSTLY) and not (begin > 0.5 and end > 0.5 and little):
        return None
    return _finding(
        "all_truncated",
        f"{begin:.0%} of the first completions and {end:.0%} of the last reached the limit of "
        f"{run.setting('max_completion_length')} tokens",
        "warning" if run.learned else "error",
        setting=_valid(run, _longer(run)),
    )


def _empty_output(run: RunStatistics) -> Finding | None:
    begin, end = run.first("completions/mean_length"), run.last("completions/mean_length")
    rows = run.completions(at_end=True)
    blank = sum(not text_of_row(row).strip() for row in rows)
    bare = end is not None and begin is not None and end <= BARE_TOKENS < begin / 3
    if run.better or not (bare or (rows and blank > len(rows) / 2)):
        return None
    seen = f"{blank} of the last {len(rows)} completions hold no text" if rows else ""
    if begin is not None and end is not None:
        seen += f"{'; ' if seen else ''}the mean length went from {begin:.1f} to {end:.1f} tokens"
    return _finding(
        "empty_output",
        f"{seen}; {_went(run)}",
        setting=_valid(run, f"{_lower_rate(run)}, {_higher_beta(run)}"),
    )


def _length_explosion(run: RunStatistics) -> Finding | None:
    begin, end = run.first("completions/mean_length"), run.last("completions/mean_length")
    if not begin or end is None or end < LONGER * begin or run.better:
        return None
    cut = run.last("completions/truncated", "completions/clipped_ratio") or 0.0
    if not (cut > 0.5 or run.worse or end > 3 * begin):
        return None
    return _finding(
        "length_explosion",
        f"the mean length went from {begin:.0f} to {end:.0f} tokens, and {cut:.0%} of the last "
        f"completions reached the limit of {run.setting('max_completion_length')}; {_went(run)}",
        setting=_valid(run, _higher_beta(run)),
    )


def _constant(run: RunStatistics) -> Finding | None:
    """Return that all scores of the run are one: nothing, all that can be had, or anything."""
    spreads, means = run.series("reward_std"), run.series("reward")
    if not spreads or not means or max(spreads) > 1e-8:
        return None
    if max(means) - min(means) > 1e-6 * abs(max(means)):
        return None
    value = means[0]
    unpaid = _never_paid(run)
    if value <= 0 or unpaid:
        return _cold(
            run, f"every completion of {run.num_steps} steps got {value:.3g}", reward=unpaid
        )
    kind = "saturated_reward" if value >= 1 else "constant_reward"
    return _finding(kind, f"every completion of {run.num_steps} steps got {value:.3g}")


def _never_paid(run: RunStatistics) -> str | None:
    """Return the name of a reward that gave 0 to every completion of the run."""
    names = [
        key.removesuffix("/mean").removeprefix("rewards/")
        for key in run.rows[0]
        if key.startswith("rewards/") and key.endswith("/mean")
    ]
    for name in names:
        means = run.series(f"rewards/{name}/mean")
        spreads = run.series(f"rewards/{name}/std")
        if means and not any(means) and not any(spreads):
            return name
    return None


def _one_unpaid(run: RunStatistics) -> Finding | None:
    """Return that one reward of several never paid."""
    name = _never_paid(run)
    if name is None or not any(run.series("reward")):
        return None
    return _finding(
        "constant_reward",
        f"it gave 0 to every completion of {run.num_steps} steps",
        "warning",
        reward=name,
    )


def _cold(
    run: RunStatistics, seen: str, level: str = "error", *, reward: str | None = None
) -> Finding:
    config = run.record.config
    now = config.data.level if config else None
    easier = [f"data.level={now - 1}"] if isinstance(now, int) and now > 1 else []
    setting = _valid(run, *easier, *_more_generations(run))
    return _finding("cold_start", seen, level, reward=reward, setting=setting)


def _saturated_or_cold(run: RunStatistics) -> Finding | None:
    """Return that from the first step nearly all earned the most, or the least."""
    begin = mean_or_none(run.with_signal[: run.window])
    scores = run.scores()
    if begin is None or not scores or run.learned:
        return None
    throughout = mean_or_none(run.with_signal) or 0.0
    top, low = max(scores), min(scores)
    at_top = sum(score == top for score in scores) / len(scores)
    at_low = sum(score == low for score in scores) / len(scores)
    if top == low or max(begin, throughout) >= LITTLE_SIGNAL:
        return None
    if at_top > 0.95:
        return _finding(
            "saturated_reward",
            f"{at_top:.1%} of {len(scores)} completions got the highest score of {top:.3g}; scores "
            f"differ in {throughout:.0%} of the groups",
        )
    if at_low > 0.98 and begin < ALMOST_NONE:
        return _cold(
            run,
            f"{at_low:.1%} of {len(scores)} completions got the lowest score of {low:.3g}; scores "
            f"differ in {throughout:.0%} of the groups",
        )
    return None


def _late_start(run: RunStatistics) -> Finding | None:
    """Return that a run which learned in the end had nothing to learn from for long."""
    cold = next((p for p, s in enumerate(run.with_signal) if s > ALMOST_NONE), run.num_steps)
    if not run.learned or cold < max(5, run.num_steps // 5):
        return None
    step = run.step(min(cold, run.num_steps - 1))
    return _cold(run, f"scores did not differ in any group before step {step}", "warning")


def _reward_collapse(run: RunStatistics) -> Finding | None:
    """Return that scores differed once, and are all alike now, at less than the best."""
    signal, rewards = run.with_signal, run.series("reward")
    dead = next((n for n, s in enumerate(reversed(signal)) if s > 0.01), len(signal))
    alive = signal[: len(signal) - dead]
    if dead < max(3, len(signal) // 10) or len(signal) != len(rewards):
        return None
    if not alive or max(alive) < LITTLE_SIGNAL:
        return None
    if (1 - fmean(alive)) ** (dead * run.groups_per_step) > CHANCE:
        return None
    end, before = fmean(rewards[-dead:]), rewards[: len(alive)]
    firsts = range(max(1, len(before) - run.window + 1))
    best = max(fmean(before[n : n + run.window]) for n in firsts)
    if end >= best - 0.02 * max(abs(best), 1e-6):
        return None
    alike = (run.others(at_end=True) or 0.0) < ALIKE
    hot = max(1.0, 1.25 * (finite_number(run.setting("temperature")) or 1.0))
    return _finding(
        "reward_collapse",
        f"scores differed in {fmean(alive):.0%} of the groups up to step "
        f"{run.step(len(alive) - 1)}, and in none of the {dead} steps since; the reward went from "
        f"{fmean(before[-run.window :]):.3g} to {end:.3g}",
        setting=_valid(run, f"trainer.temperature={hot:g}") if alike else "",
    )


def _reward_hacking(run: RunStatistics) -> Finding | None:
    paid = run.paid_more
    if not run.worse or not (run.rose or paid):
        return None
    seen = str(paid)
    if run.rose:
        seen = f"the reward rose from {run.first('reward'):.3g} to {run.last('reward'):.3g}"
    return _finding(
        "reward_hacking",
        f"{seen}, while {run.held_out}",
        setting=_valid(run, _higher_beta(run)),
    )


def _entropy_collapse(run: RunStatistics) -> Finding | None:
    values = [
        entropy
        for row in run.rows
        if (entropy := finite_number(row.get("policy/entropy_avg", row.get("entropy")))) is not None
        and row.get("passes/trained") != 0
    ]
    if len(values) < 4 or run.better or (run.rose and run.held_out is None):
        return None
    begin, end = fmean(values[: run.window]), fmean(values[-run.window :])
    left = end / begin if begin > 0 else 1.0
    before, after = run.others(at_end=False), run.others(at_end=True)
    texts = after / before if before and after is not None else 1.0
    together = left < ENTROPY_LEFT and texts < 2 * TEXTS_LEFT
    if left >= ENTROPY_GONE and texts >= TEXTS_LEFT and not together:
        return None
    told = ""
    if before is not None and after is not None:
        told = f"; beside the first {after:.2g} other texts in a group, once {before:.2g}"
    return _finding(
        "entropy_collapse",
        f"the entropy went from {begin:.3g} to {end:.3g} nats a token{told}; {_went(run)}",
        setting=_valid(run, f"{_lower_rate(run)}, {_higher_beta(run)}"),
    )


def _no_signal(run: RunStatistics) -> Finding | None:
    half = run.with_signal[: max(2, run.num_steps // 2)]
    share = mean_or_none(half)
    if share is None or share >= LITTLE_SIGNAL or run.learned:
        return None
    others = run.others(at_end=False)
    temperature = finite_number(run.setting("temperature")) or 1.0
    seen = (
        f"scores differ in {share:.0%} of the groups of the first {len(half)} steps, at "
        f"temperature {temperature:g}"
    )
    remedy, setting = "", _valid(run, *_more_generations(run))
    if others is not None and others < ALIKE:
        seen += f"; beside the first {others:.2g} other texts in a group"
        hot = max(1.0, 1.5 * temperature)
        remedy = "sample more variedly: raise the temperature"
        setting = _valid(run, f"trainer.temperature={hot:g}")
    level = "error" if share < ALMOST_NONE else "warning"
    return _finding("no_signal", seen, level, remedy=remedy, setting=setting)


def _learning_rate_too_low(run: RunStatistics) -> Finding | None:
    share, rate = mean_or_none(run.with_signal), _rate(run)
    if max(run.series("learning_rate", "lr"), default=rate) < rate / 2:
        return None  # it is still being warmed up
    moved = run.better or run.worse or run.rose or run.fell
    if share is None or share < LITTLE_SIGNAL or moved:
        return None
    kl = run.last("kl/sequence", "objective/kl")
    still = kl is not None and abs(kl) < KL_FLAT and run.num_steps >= 8
    if not still and not (rate < LOWEST_RATE and (kl is None or abs(kl) < KL_FLAT)):
        return None
    usual = _usual_rate(run)
    wanted = usual if rate < usual else 3 * rate
    seen = (
        f"scores differ in {share:.0%} of the groups, the reward stays at {run.last('reward'):.3g}"
    )
    if kl is not None:
        seen += f", the KL of a completion at {kl:.2g} nats"
    return _finding(
        "learning_rate_too_low",
        f"{seen}; the highest learning rate was {rate:.1g}",
        "error" if rate < LOWEST_RATE else "warning",
        setting=_valid(run, f"trainer.learning_rate={wanted:.1g}"),
    )


def _high_variance(run: RunStatistics) -> Finding | None:
    share = mean_or_none(run.with_signal)
    rewards = run.series("reward")
    if share is None or share < LITTLE_SIGNAL or len(rewards) < 8:
        return None
    seen = []
    pairs, unequal = _equal_texts(run)
    noisy = pairs >= 10 and unequal > NOISY_PAIRS * pairs
    if run.learned and not noisy:
        return None
    if noisy:
        seen.append(
            f"of {pairs} sets of equal completions of one prompt {unequal} got unequal scores: the "
            f"reward itself is noise"
        )
    size = run.setting("num_generations")
    if size < 4:
        seen.append(f"{size} completions of each prompt")
    if run.worse or run.fell:
        seen.append(f"{_went(run)}, at learning rate {_rate(run):.1g}")
    if not seen:
        return None
    setting = _valid(run, *_more_generations(run)) if size < 8 else _valid(run, _lower_rate(run))
    return _finding(
        "high_variance",
        f"{'; '.join(seen)}; from step to step the reward spreads by {stdev(rewards):.2g} "
        f"around {fmean(rewards):.3g}",
        "error" if run.worse or run.fell or (noisy and not run.learned) else "warning",
        setting=setting,
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
    return len(several), sum(max(s) - min(s) > 1e-6 for s in several)


def _slow_reward(run: RunStatistics) -> Finding | None:
    if run.setting("dynamic_sampling") or run.record.config is None:
        return None
    num = run.groups_per_step * run.setting("num_generations")
    waits, total, tokens = [], [], 0.0
    for row in run.rows:
        now = finite_number(row.get("num_tokens")) or tokens
        drawn, tokens = now - tokens, now
        seconds = finite_number(row.get("step_time"))
        speed = finite_number(row.get("speed/generation_tokens_per_second"))
        learning = finite_number(row.get("speed/learning_tokens_per_second"))
        length = finite_number(row.get("completions/mean_length"))
        if not (seconds and speed and learning and length):
            continue
        total.append(seconds)
        waits.append(seconds - num * length / speed - drawn / learning)
    if not total or sum(waits) < SLOW_SHARE * sum(total) or fmean(waits) < SLOW_SECONDS:
        return None
    return _finding(
        "slow_reward",
        f"{fmean(waits):.2g} s of {fmean(total):.2g} s a step are neither sampling nor learning: "
        f"{sum(waits) / sum(total):.0%}",
        "warning",
    )


def _memory_creeping(run: RunStatistics) -> Finding | None:
    values = run.series("memory/peak_gib")
    half = values[len(values) // 2 :]
    if len(half) < 6:
        return None
    steps = [b - a for a, b in pairwise(half)]
    grown, rises = sum(steps), sum(step > 0 for step in steps) / len(steps)
    if grown < max(CREEP_GIB, CREEP_SHARE * values[0]) or rises < CREEP_RISES:
        return None
    if median(steps) < CREEP_EVEN * fmean(steps):
        return None
    return _finding(
        "memory_creeping",
        f"the peak memory rose from {half[0]:.2f} to {half[-1]:.2f} GiB over the last {len(half)} "
        f"steps, {1024 * fmean(steps):.0f} MiB a step, and in {rises:.0%} of them",
        "warning",
    )


def _loss_near_zero(run: RunStatistics) -> Finding | None:
    losses = run.series("loss")
    if not losses or abs(fmean(losses)) > 0.05:
        return None
    return _finding(
        "loss_near_zero",
        f"the loss is {fmean(losses):.2g} in the mean and {max(losses, key=abs):.2g} at most",
        "note",
    )


def _went(run: RunStatistics) -> str:
    """Return how the run went, in half a sentence."""
    if run.held_out is not None:
        return str(run.held_out)
    begin, end = run.first("reward"), run.last("reward")
    if begin is None or end is None:
        return "no reward is known"
    return f"the reward went from {begin:.3g} to {end:.3g}"


_FINDERS: tuple[Callable[[RunStatistics], Finding | None], ...] = (
    _stale_sampler,
    _clip_noise,
    _negative_kl,
    _kl_explosion,
    _all_truncated,
    _empty_output,
    _length_explosion,
    _constant,
    _one_unpaid,
    _saturated_or_cold,
    _late_start,
    _reward_collapse,
    _reward_hacking,
    _entropy_collapse,
    _no_signal,
    _learning_rate_too_low,
    _high_variance,
    _slow_reward,
    _memory_creeping,
)


def find_in_run(record: RunRecord, *, notes: bool = False) -> list[Finding]:
    """Return every finding, the most harmful first; a cause replaces what it explains.

    Args:
        record: As ``read_run`` returns it; of less than two steps nothing is said. Of a run that a
            finding ended, that finding is the first.
        notes: Also explain what looks odd and is no fault, where nothing else was found.
    """
    ended_by = record.ended_by if record.ended_by and record.ended_by.kind in KINDS else None
    if ended_by:  # what was scored after it are the weights that were put back, not the run's last
        record = replace(record, evaluation=None)
    run = RunStatistics(record)
    if run.num_steps < 2:
        return []
    found = [finding for find in _FINDERS if (finding := find(run)) is not None]
    if ended_by:
        found = [ended_by, *(f for f in found if f.kind != ended_by.kind)]
    causes = [f.kind for f in found if f.level == "error"]
    explained = {kind for cause in causes for kind in EXPLAINS.get(cause, "").split()}
    order = list(KINDS)
    found = [f for f in found if f is ended_by or f.kind not in explained]
    found.sort(key=lambda f: (f is not ended_by, f.level != "error", order.index(f.kind)))
    if notes and not found and (note := _loss_near_zero(run)):
        found.append(note)
    return found


# --- the verdict ---------------------------------------------------------------------------------


def verdict(record: RunRecord, findings: Sequence[Finding]) -> str:
    """Return one sentence: whether the run learned, and what to change first.

    Args:
        record: As ``read_run`` returns it.
        findings: As ``find_in_run`` returns them.
    """
    run = RunStatistics(record)
    if run.num_steps < 2:
        counted = "one step" if run.num_steps else "no step"
        return f"Nothing can be told: the run recorded {counted}, and two are needed."
    text = f"{_outcome(run)}: {_went(run)}"
    if record.ended_by:
        kept = record.end.get("kept_step")
        text = f"It was ended by {record.ended_by.kind}"
        text += "" if kept is None else f" and keeps its weights after step {kept}"
        text += f": {_went(run)}"
    serious = [f for f in findings if f.level != "note"]
    if not serious:
        spent = _nothing_left(run)
        return f"{text}{spent}."
    first = serious[0]
    what = first.setting or first.remedy.partition(";")[0]
    return f"{text}; change first ({first.kind}): {what}."


def _outcome(run: RunStatistics) -> str:
    if run.better or (run.held_out is None and run.rose):
        return "It learned"
    if run.worse or (run.held_out is None and run.fell):
        return "It got worse"
    if run.rose:
        return "The reward rose, and held-out prompts do not show it"
    return "It did not learn"


def _nothing_left(run: RunStatistics) -> str:
    """Return that a run which learned ended with nothing left to learn from."""
    spent = next((n for n, s in enumerate(reversed(run.with_signal)) if s > 0.2), run.num_steps)
    if not run.learned or spent < 3:
        return ""
    return f"; in the last {spent} steps little was left to learn, so harder prompts come next"


def diagnose(folder: str | Path, say: Callable[[str], None] = print) -> list[Finding]:
    """Say whether a run learned, what went wrong and what to change; return the findings.

    Args:
        folder: Of the run; it may still be going on.
        say: Called with the text.

    Raises:
        DataError: It is no folder of a run.
    """
    record = read_run(folder)
    findings = find_in_run(record)
    say("\n\n".join(filter(None, (verdict(record, findings), findings_text(findings)))))
    return findings
