"""Rules that find faults of rewards in their scores of completions, and the verdict."""

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
from rloo_kit.diagnosis.tool_rules import KINDS as TOOL_KINDS
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
from rloo_kit.types import Score

# With this or a larger rank correlation, a score is said to follow the length
LENGTH_CORRELATION = 0.8
# Names of rewards that pay for length on purpose
_MEANS_LENGTH = re.compile(r"len|brev|brief|concis|short|long|word|token|budget", re.IGNORECASE)

RULES = Rules()
KINDS = RULES.kinds

# Fault that stops the run -> why it matters, remedy
_STOPPING = {
    "raises": (
        "the run stops at the first such completion",
        "call it on that completion by hand: text.split('</think>')[1] and re.search(...).group() "
        "raise if nothing matches",
    ),
    "timeout": (
        "the run stops when a reward takes longer than trainer.reward_timeout_seconds",
        "make it faster, or give its requests a time limit of their own",
    ),
    "missing_column": (
        "the reward cannot be called without what it compares with",
        "add the column to the data, or give the parameter a default",
    ),
    "wrong_output": (
        "a score that is NaN or belongs to no completion stops the run",
        "return a list with one finite float (or None) per completion, in order (look for 0/0 and "
        "log(0))",
    ),
}
for _kind, _texts in _STOPPING.items():
    RULES.rule(_kind, *_texts, stops=True, about_signal=True)


# --- probes --------------------------------------------------------------------------------------


def wanted_probes(batch: Batch, probed: Probed) -> list[str]:
    """Return the names of the altered completions with which this reward should also be called.

    - ``empty``: no text
    - ``unclosed``: cut off in the middle of the thought
    - ``masked``: every character except white space replaced, so that the length stays
    - ``opened``: with ``<think>`` before the text
    - ``repeated``: a single completion, with its beginning repeated 200 times
    """
    wanted = ["empty", "unclosed", "repeated" if is_constant(probed.scores) else "masked"]
    closed = [text for text in batch.texts if "</think>" in text]
    if sum("<think>" not in text for text in closed) > len(closed) / 2:
        # The prompt opens the thought
        wanted.append("opened")
    return wanted


# --- one reward ----------------------------------------------------------------------------------


def find_in_reward(probed: Probed, batch: Batch, *, excused: bool) -> list[Finding]:
    """Return the findings on one reward, without those that another finding explains.

    Args:
        probed: The reward's scores.
        batch: The completions.
        excused: True if a fault of the completions explains why scores do not differ.
    """
    if probed.fault:
        return [RULES.finding(probed.fault.kind, probed.fault)]
    cause = _never_applies(probed) or _noisy(probed) or _moved(probed)
    if cause or not probed.counts:
        return cause or _fragile(probed)
    if is_constant(probed.scores):
        cause = _blind(probed, least=0.1) or ([] if excused else _constant(probed))
        return cause or _fragile(probed)
    # A longer text with "<think>" before it also scores higher where length pays
    return _fragile(probed) + (_length(probed, batch) or _blind(probed, least=0.3))


@RULES.rule(
    "never_applies",
    "a reward that returns None for every row leaves nothing to compare",
    "return a number for the rows it can judge; fill the column that it reads, or name the one "
    "that holds the answers with data.columns",
    about_signal=True,
)
def _never_applies(probed: Probed) -> Iterator[Seen]:
    if not known(probed.scores):
        evidence = f"it returned None for all {len(probed.scores)} completions"
        yield Seen(evidence, reward=probed.name)


@RULES.rule(
    "truncated",
    "a truncated completion never reaches its answer, so rewards cannot tell one from another",
    "raise the limit on completion length, or make the thoughts shorter",
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
    "the prompt opens the thought, so no completion holds the '<think>' that the reward looks for",
    "look for '</think>' alone, or use the built-in thinking_format, which knows the template",
    about_signal=True,
)
def _blind(probed: Probed, least: float) -> Iterator[Seen]:
    """Find that a ``<think>`` before the completion raises the score."""
    opened = probed.probes.get("opened")
    now = probed.first
    if not opened:
        return
    gains = [a - b for a, b in zip(opened, now, strict=True) if a is not None and b is not None]
    rises = sum(gain > 1e-6 for gain in gains)
    falls = sum(gain < -1e-6 for gain in gains)
    if rises >= max(1, 4 * falls, least * len(opened)):
        yield Seen(
            f"with '<think>' put before them, {rises} of {len(opened)} completions score higher "
            f"(mean {fmean(known(now)):.3g} -> {fmean(known(opened)):.3g})",
            reward=probed.name,
        )


@RULES.rule(
    "non_deterministic",
    "noise in a score is noise in every gradient; noise alone teaches nothing",
    "seed what is random by the completion's text, or ask a judge at temperature 0",
)
def _noisy(probed: Probed) -> Iterator[Seen]:
    first = probed.first
    again = probed.probes.get("again", [])
    if changed := _num_changed(first, again):
        found = rank_correlation(first, again) or 0.0
        yield Seen(
            f"called twice with the same input, {changed} of {len(first)} scores differ "
            f"(correlation of the two calls {found:.2f})",
            "error" if found < 0.5 else "warning",
            probed.name,
        )


@RULES.rule(
    "order_dependent",
    "a completion is scored by its place in the batch, or by the other completions",
    "compute every score from its own row alone, and keep no state between rows",
)
def _moved(probed: Probed) -> Iterator[Seen]:
    first = probed.first
    if changed := _num_changed(first, probed.probes.get("permuted", [])):
        seen = "with the same rows in another order"
        yield Seen(f"{seen}, {changed} of {len(first)} got another score", reward=probed.name)


def _num_changed(first: list[Score], other: list[Score]) -> int:
    """Return the number of scores that differ by more than rounding in a batched model.

    ``other`` is empty if the call failed.
    """
    values = known(first)
    slack = 0.01 * (max(values) - min(values)) + 1e-6 if values else 0.0
    return sum(not is_same(a, b, slack) for a, b in zip(first, other, strict=False))


@RULES.rule(
    "fragile",
    "sooner or later a model writes such a completion, and the run stops",
    "return a low score, or None, for a completion without the parts it looks for",
)
def _fragile(probed: Probed) -> Iterator[Seen]:
    """Find that a reward raises in other calls than the first one."""
    tried = {
        "again": "the same completions in a second call",
        "permuted": "the same completions in another order",
        "empty": "an empty completion",
        "unclosed": "a completion cut off in the middle",
    }
    failed = [name for name in tried if name in probed.probe_errors]
    if failed:
        evidence = f"for {tried[failed[0]]}: {probed.probe_errors[failed[0]]}"
        yield Seen(evidence, "warning", probed.name)


@RULES.rule(
    "length_in_disguise",
    "the cheapest way to more reward is length, and the model will take it",
    "compare what is said; use length_band or soft_overlong if length is what you mean",
)
def _length(probed: Probed, batch: Batch) -> Iterator[Seen]:
    """Find that the score follows the length, also of completions that say nothing."""
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
            probed.name,
        )


@RULES.rule(
    "constant",
    "RLOO learns from differences within a group, and there are none",
    "check that the reward reads the completion, and the part of it that varies",
    about_signal=True,
)
def _constant(probed: Probed) -> Iterator[Seen]:
    """Find why all scores are equal, by the scores of altered completions."""
    tried = ("empty", "unclosed", "repeated")
    other = [s for name in tried for s in known(probed.probes.get(name, []))]
    values = known(probed.scores)
    name = probed.name
    value = values[0]
    best = max([value, *other])
    worst = min([value, *other])
    seen = f"all {len(values)} completions earned {value:g}"
    higher = f"{seen}; altered ones earned up to {best:g}"
    if is_same(best, worst):
        kind = "constant" if value else "all_zero"
        also = ", altered ones too" if other else ""
        yield Seen(f"{seen}{also}", "error", name, kind=kind)
    elif value == 0:
        if best > 0:
            # Otherwise it is a penalty that no completion has earned
            yield Seen(f"{higher}, so it can fire", "warning", name, kind="all_zero")
    elif is_same(best, value):
        yield Seen(f"{seen}; worse ones earned {worst:g}", "warning", name, kind="saturated")
    else:
        yield Seen(higher, "warning", name)


RULES.rule(
    "all_zero",
    "a reward that is always 0 teaches nothing, and a total with other rewards may hide that",
    "print a completion and look for what the reward expects: case, white space, line breaks "
    "(re.DOTALL), a missing tag; otherwise use easier prompts or give partial credit",
    about_signal=True,
)
RULES.rule(
    "saturated",
    "the model always earns it, so there is nothing to learn from it",
    "use harder prompts, ask for more, or remove the reward",
    about_signal=True,
)


# --- the whole run -------------------------------------------------------------------------------


@RULES.rule(
    "no_signal", "equal scores in a group cancel, and the group trains nothing", "see the verdict"
)
def _no_signal(signal: Signal) -> Iterator[Seen]:
    """Find that the scores of too many groups are equal, and name a remedy."""
    if not signal.num_groups or signal.share >= LITTLE_SIGNAL:
        return
    evidence = (
        f"scores differ in {signal.num_with_signal} of {signal.num_groups} groups; "
        f"{signal.all_highest} have only the highest score, {signal.all_lowest} only the lowest"
    )
    remedy = "use easier prompts, give partial credit, or sample more completions"
    if signal.all_highest > signal.all_lowest:
        remedy = "use harder prompts (data.level of a built-in task), or ask for more"
    level = "error" if signal.share < ALMOST_NONE else "warning"
    yield Seen(evidence, level, remedy=remedy)


add_kinds(RULES)


@RULES.rule("tools_never_called", *TOOL_KINDS["tools_never_called"])
def _tools(calls: Mapping[str, float]) -> Iterator[Seen]:
    yield from seen_in_calls(calls)


# --- all findings, and the verdict ---------------------------------------------------------------


def find_all(
    rewards: Sequence[Probed],
    batch: Batch,
    signal: Signal,
    calls: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return every finding, the most harmful first; a cause replaces what it explains.

    Args:
        rewards: The rewards' scores.
        batch: The completions.
        signal: The differences of the total score.
        calls: Numbers of the calls (``call_numbers``); None without tools.
    """
    dull = any(r.counts and is_constant(r.scores) for r in rewards)
    fault = _truncated(batch, harmful=dull or signal.share < LITTLE_SIGNAL)
    excused = any(finding.level == "error" for finding in fault)
    found = [f for r in rewards for f in find_in_reward(r, batch, excused=excused)]
    dead = {finding.reward for finding in found if KINDS[finding.kind].about_signal}
    live = [r for r in rewards if r.counts and r.name not in dead and not is_constant(r.scores)]
    if not live:
        # A reward without signal is an error if no other reward has any
        dull_now = ("constant", "all_zero", "saturated")
        found = [replace(f, level="error") if f.kind in dull_now else f for f in found]
    found += fault + ([] if calls is None else _tools(calls))
    if not excused and (any(known(r.scores) for r in live) or not dead):
        found += _no_signal(signal)
    return RULES.ordered(found)


def verdict(signal: Signal, findings: Sequence[Finding]) -> str:
    """Return one sentence on whether RLOO will learn from these rewards."""
    stopping = [f for f in findings if KINDS[f.kind].stops and f.level == "error"]
    if stopping:
        return f"The run would stop at its first step: see {stopping[0].kind} below."
    if not signal.num_groups:
        return (
            "It is unknown whether RLOO will learn, since no prompt has two scored completions: "
            "give several for each prompt."
        )
    learns = "will learn"
    if signal.share < ALMOST_NONE:
        learns = "cannot learn from this"
    elif signal.share < LITTLE_SIGNAL:
        learns = "will hardly learn"
    elif signal.share < 0.5:
        learns = "will learn, and waste more than half of its work"
    text = (
        f"RLOO {learns}: scores differ in {signal.num_with_signal} of {signal.num_groups} groups "
        f"({signal.share:.0%}), the spread within a group is {signal.group_std:.3g}"
    )
    num = sum(finding.level == "error" for finding in findings)
    what = "the error" if num == 1 else f"the {num} errors"
    return f"{text}; fix {what} below first." if num else f"{text}."
