"""Rules that find faults of rewards from the scores they return, and the verdict of a check."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from rloo_kit.diagnosis.registry import (
    ALMOST_NONE,
    LITTLE_SIGNAL,
    MOSTLY,
    Finding,
    Rules,
    Seen,
)
from rloo_kit.diagnosis.run_rules import four_times_longer
from rloo_kit.diagnosis.tool_rules import add_kinds, seen_in_calls
from rloo_kit.reward_lab.score_statistics import (
    Batch,
    Probed,
    Signal,
    is_constant,
    is_same,
    known,
    rank_correlation,
)

# A score follows the length if their rank correlation is at least this, in absolute value
LENGTH_CORRELATION = 0.8
# Names of rewards that pay for length on purpose
_MEANS_LENGTH = re.compile(r"len|brev|brief|concis|short|long|word|token|budget", re.IGNORECASE)

RULES = Rules()
KINDS = RULES.kinds

# Kinds of faults that stop a run -> why they matter, what to do
_STOPPING = {
    "raises": (
        "the run stops at the first completion for which a reward raises an error",
        "call the reward on that completion by hand: text.split('</think>')[1] and "
        "re.search(...).group() raise if nothing matches",
    ),
    "timeout": (
        "the run stops when a reward takes longer than trainer.reward_timeout_seconds",
        "make the reward faster, or set a time limit for each request that it sends",
    ),
    "missing_column": (
        "the reward cannot be called, because the data lacks a column that it reads",
        "add the column to the data, or give the reward's parameter a default value",
    ),
    "wrong_output": (
        "the run stops if a score is not a finite number, or if the number of scores is wrong",
        "return a list with one finite float (or None) per completion, in order (look for 0/0 and "
        "log(0))",
    ),
}
for _kind, _texts in _STOPPING.items():
    RULES.rule(_kind, *_texts, about_signal=True)


# --- one reward ----------------------------------------------------------------------------------


def find_in_reward(probed: Probed, batch: Batch, *, excused: bool) -> list[Finding]:
    """Return the findings about one reward.

    A finding that another finding explains is left out. The findings do not name the reward: their
    ``reward`` is None.

    Args:
        probed: The reward's scores for the completions and in the probes.
        batch: The completions.
        excused: True if equal scores are not a fault of the reward, for example because all
            completions are truncated.
    """
    if probed.fault:
        return [RULES.finding(probed.fault.kind, probed.fault)]
    cause = _never_applies(probed) or _noisy(probed) or _moved(probed)
    if cause or not probed.weight:
        return cause or _fragile(probed)
    if is_constant(probed.scores):
        cause = _blind(probed, least=0.1) or ([] if excused else _constant(probed))
        return cause or _fragile(probed)
    # If the reward pays for length, a "<think>" before the text also raises the score
    return _fragile(probed) + (_length(probed, batch) or _blind(probed, least=0.3))


@RULES.rule(
    "never_applies",
    "a reward that returns None for every row gives RLOO no scores to compare",
    "return a number for each row that the reward can score; fill the column that it reads, or "
    "name the column with the answers in data.columns",
    about_signal=True,
)
def _never_applies(probed: Probed) -> Iterator[Seen]:
    if not known(probed.scores):
        yield Seen(f"it returned None for all {len(probed.scores)} completions")


@RULES.rule(
    "truncated",
    "a truncated completion has no answer, so rewards cannot tell good completions from bad ones",
    "raise trainer.max_completion_length or trainer.thinking_budget, or make the thoughts shorter",
)
def _truncated(batch: Batch, *, harmful: bool) -> Iterator[Seen]:
    num = sum(map(bool, batch.truncated or []))
    count = len(batch.texts)
    limit = batch.max_completion_length
    if num > count / 2:
        level = "error" if num >= MOSTLY * count and harmful else "warning"
        longer = four_times_longer(limit, batch.max_seq_length) if limit else ""
        what = f"the limit of {limit} tokens" if limit else "the limit"
        yield Seen(f"{num} of {count} completions reached {what}", level, setting=longer)


@RULES.rule(
    "blind_to_thought",
    "the prompt already contains '<think>', so the reward never finds it in a completion",
    "look for '</think>' alone, or use the built-in thinking_format, which knows the template",
    about_signal=True,
)
def _blind(probed: Probed, least: float) -> Iterator[Seen]:
    """Report a reward whose scores rise if ``<think>`` is put before the completions.

    At least the share ``least`` of the scores must rise, and rise more than with another tag of the
    same length.
    """
    opened = probed.probes.get("opened", [])
    now = probed.first
    other = probed.probes.get("prefixed", now)
    gains = [
        a - max(b, b if c is None else c)
        for a, b, c in zip(opened, now, other, strict=False)
        if a is not None and b is not None
    ]
    rises = sum(gain > 1e-6 for gain in gains)
    falls = sum(gain < -1e-6 for gain in gains)
    if rises >= max(1, 4 * falls, least * len(opened)):
        yield Seen(
            f"with '<think>' put before them, {rises} of {len(opened)} completions score higher "
            f"(mean {fmean(known(now)):.3g} -> {fmean(known(opened)):.3g})"
        )


@RULES.rule(
    "non_deterministic",
    "random scores add noise to every gradient, and the model learns nothing from noise",
    "derive the random seed from the completion's text, or sample a judge at temperature 0",
)
def _noisy(probed: Probed) -> Iterator[Seen]:
    if changed := _num_changed(probed, "again"):
        found = rank_correlation(probed.first, probed.probes["again"]) or 0.0
        yield Seen(
            f"called twice with the same input, {changed} of {len(probed.first)} scores differ "
            f"(correlation of the two calls {found:.2f})",
            "error" if found < 0.5 else "warning",
        )


@RULES.rule(
    "order_dependent",
    "the score depends on a completion's place in the batch, or on the other completions",
    "compute each score from its own row alone, and keep no state between rows",
)
def _moved(probed: Probed) -> Iterator[Seen]:
    if changed := _num_changed(probed, "permuted"):
        seen = "called with the same rows in another order"
        yield Seen(f"{seen}, {changed} of {len(probed.first)} scores differ")


def _num_changed(probed: Probed, probe: str) -> int:
    """Return how many scores of another call differ from those of the first, beyond rounding.

    The tolerance is 1% of the range of the first scores, because a reward model rounds differently
    if the batch differs. If the other call failed, the result is 0.
    """
    values = known(probed.first)
    slack = 0.01 * (max(values) - min(values)) + 1e-6 if values else 0.0
    pairs = zip(probed.first, probed.probes.get(probe, []), strict=False)
    return sum(not is_same(a, b, slack) for a, b in pairs)


@RULES.rule(
    "fragile",
    "sooner or later the model writes a completion like this, and the run stops",
    "return a low score or None for a completion that lacks what the reward looks for",
)
def _fragile(probed: Probed) -> Iterator[Seen]:
    """Report a reward that raises an error in a later call, but not in the first one."""
    tried = {
        "again": "the same completions in a second call",
        "permuted": "the same completions in another order",
        "empty": "an empty completion",
        "unclosed": "a completion cut off in the middle",
    }
    failed = [name for name in tried if name in probed.probe_errors]
    if failed:
        evidence = f"it fails for {tried[failed[0]]}: {probed.probe_errors[failed[0]]}"
        yield Seen(evidence, "warning")


@RULES.rule(
    "length_in_disguise",
    "the model can raise this reward through the length alone, and it will",
    "score what the completion says; to reward length on purpose, use length_band or soft_overlong",
)
def _length(probed: Probed, batch: Batch) -> Iterator[Seen]:
    """Report a reward whose scores follow the length and do not depend on the letters."""
    masked = probed.probes.get("masked")
    found = rank_correlation(batch.lengths, probed.scores) or 0.0
    if not masked or abs(found) < LENGTH_CORRELATION or _MEANS_LENGTH.search(probed.name):
        return
    same = sum(map(is_same, probed.first, masked))
    if same >= MOSTLY * len(masked):
        yield Seen(
            f"rank correlation with the length {found:+.2f}; with every letter replaced by x, "
            f"{same} of {len(masked)} scores stay the same",
            "warning",
        )


@RULES.rule(
    "constant",
    "RLOO learns from score differences within a group, and all scores are equal",
    "check that the reward reads the completion, and the part of it that varies",
    about_signal=True,
)
def _constant(probed: Probed) -> Iterator[Seen]:
    """Report that all scores are equal; the scores of altered completions show why."""
    tried = ("empty", "unclosed", "repeated")
    other = [s for name in tried for s in known(probed.probes.get(name, []))]
    values = known(probed.scores)
    value = values[0]
    best = max([value, *other])
    worst = min([value, *other])
    level = "error" if is_same(best, worst) else "warning"
    if level == "warning" and value == 0 and best <= 0:
        return  # a penalty that no completion has earned
    kind = "constant"
    if value == 0:
        kind = "all_zero"
    elif level == "warning" and is_same(best, value):
        kind = "saturated"
    also = dict.fromkeys(f"{score:g}" for score in (min(other), max(other))) if other else ()
    seen = f"all {len(values)} completions scored {value:g}"
    if also:
        seen += f", and altered completions scored {' to '.join(also)}"
    yield Seen(seen, level, kind=kind)


RULES.rule(
    "all_zero",
    "a reward that is always 0 teaches nothing, and the total of all rewards may not show that",
    "print a completion and compare it with what the reward expects (case, white space, line "
    "breaks with re.DOTALL, tags); if they agree, use easier prompts or give partial credit",
    about_signal=True,
)
RULES.rule(
    "saturated",
    "every completion earns the full reward, so the model learns nothing from it",
    "use harder prompts, make the reward harder to earn, or remove it",
    about_signal=True,
)


# --- the whole run -------------------------------------------------------------------------------


@RULES.rule("no_signal", "a group whose scores are all equal trains nothing", "see the verdict")
def _no_signal(signal: Signal) -> Iterator[Seen]:
    """Report that too many groups have equal scores, with a remedy that fits the scores."""
    if not signal.num_groups or signal.share >= LITTLE_SIGNAL:
        return
    evidence = (
        f"scores differ in {signal.num_with_signal} of {signal.num_groups} groups; "
        f"{signal.all_highest} have only the highest score, {signal.all_lowest} only the lowest"
    )
    remedy = "use easier prompts, give partial credit, or sample more completions"
    if signal.all_highest > signal.all_lowest:
        remedy = "use harder prompts (data.level of a built-in task), or stricter rewards"
    level = "error" if signal.share < ALMOST_NONE else "warning"
    yield Seen(evidence, level, remedy=remedy)


_tools = add_kinds(RULES, "truncated")(seen_in_calls)


# --- all findings, and the verdict ---------------------------------------------------------------


def find_all(
    rewards: Sequence[Probed],
    batch: Batch,
    signal: Signal,
    calls: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return all findings of a check, the most harmful first.

    A finding that another one explains is left out.

    Args:
        rewards: Scores of each reward, from ``probe``.
        batch: The completions.
        signal: Statistics of the score differences within groups, from ``signal_of``.
        calls: Metrics of the tool calls, from ``call_numbers``; None if the run has no tools.
    """
    dull = any(r.weight and is_constant(r.scores) for r in rewards)
    fault = _truncated(batch, harmful=dull or signal.share < LITTLE_SIGNAL)
    excused = any(finding.level == "error" for finding in fault)
    found = []
    for r in rewards:
        # All scores of `tool_use` are equal if no tool is called, which `_tools` reports
        no_calls = calls is not None and calls["tools/call_frequency"] == 0
        is_use = no_calls and re.fullmatch(r"tool_use(_\d+)?", r.name) is not None
        of_reward = find_in_reward(r, batch, excused=excused or is_use)
        found += [replace(finding, reward=r.name) for finding in of_reward]
    dead = {finding.reward for finding in found if KINDS[finding.kind].about_signal}
    live = [r for r in rewards if r.weight and r.name not in dead and not is_constant(r.scores)]
    if not live:
        # A reward without signal is an error if no other reward has a signal
        dull_now = ("constant", "all_zero", "saturated")
        found = [replace(f, level="error") if f.kind in dull_now else f for f in found]
    found += fault
    if calls is not None:
        found += _tools(calls)
    if not excused and (live or not dead):
        found += _no_signal(signal)
    return RULES.ordered(found)


def verdict(signal: Signal, findings: Sequence[Finding]) -> str:
    """Return one sentence that says whether RLOO will learn from these rewards."""
    stopping = [f for f in findings if f.kind in _STOPPING and f.level == "error"]
    if stopping:
        return f"The run would stop at its first step: see {stopping[0].kind} below."
    num = sum(finding.level == "error" for finding in findings)
    what = "the error" if num == 1 else f"the {num} errors"
    fix = f"; fix {what} below first." if num else "."
    if not signal.num_groups:
        needed = "" if num else ": it needs two per prompt, and a reward that scores them"
        return (
            "It is unknown whether RLOO will learn, because no prompt has two scored completions"
            f"{needed}{fix}"
        )
    learns = "will learn"
    if signal.share < ALMOST_NONE:
        learns = "cannot learn from this"
    elif signal.share < LITTLE_SIGNAL:
        learns = "will hardly learn"
    elif signal.share < 0.5:
        learns = "will learn, but waste more than half of its compute"
    return (
        f"RLOO {learns}: scores differ in {signal.num_with_signal} of {signal.num_groups} groups "
        f"({signal.share:.0%}), the spread within a group is {signal.group_std:.3g}{fix}"
    )
