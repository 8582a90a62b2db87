"""Rules for rewards: what is wrong by what they gave to completions, and a verdict."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from rloo_kit.diagnosis.rules import (
    ALMOST_NONE,
    LITTLE_SIGNAL,
    MOSTLY,
    SLOW_SHARE,
    Finding,
    Rules,
    Seen,
)
from rloo_kit.diagnosis.run_rules import four_times_longer
from rloo_kit.reward_lab.statistics import (
    Batch,
    Probed,
    Settings,
    Signal,
    both_scored,
    is_constant,
    is_same,
    known,
    rank_correlation,
    relative_rank_correlation,
)
from rloo_kit.types import Score

NEVER, ALWAYS = 0.01, 0.99
"""A reward that fires in less, or more, of the completions tells them apart too rarely."""
LENGTH_CORRELATION = 0.9
# Spread within groups, relative to the largest reward's, below which a reward has no say
DROWNED = 0.02

_MEANS_LENGTH = re.compile(r"len|brev|brief|concis|short|long|word|token|budget", re.I)
_MEANS_FORM = re.compile(r"think|thought|reason|reflect|repeti", re.I)

RULES = Rules()
KINDS = RULES.kinds

_STOPPING = {  # of a fault that stops the run: why it matters, remedy
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
        "a score that cannot be matched with its completion stops the run",
        "return a list with one float (or None) per completion, in order",
    ),
    "not_finite": (
        "one NaN would make every weight of the adapter NaN, so the run stops instead",
        "return a finite number, or None for a row it cannot score (look for 0/0 and log(0))",
    ),
}
for _kind, _texts in _STOPPING.items():
    RULES.rule(_kind, *_texts, stops=True, about_signal=True)


# --- probes --------------------------------------------------------------------------------------


def wanted_probes(batch: Batch, probed: Probed) -> list[str]:
    """Return the altered completions that this reward should also be called with.

    - ``empty``, and ``unclosed``: cut off in the middle of the thought
    - ``opened``: with ``<think>`` before it; ``tagged``: with another tag before it
    - ``answerless``: cut after the thought
    - ``masked``: all letters and tokens replaced, the length kept
    - ``repeated``: its beginning twenty times more; ``endless``: one, to 40,000 tokens
    - ``first_words``: twenty words and a full stop; ``swapped``: that of another prompt
    """
    wanted = ["empty", "unclosed"]
    dull = _is_dull(known(probed.scores))
    closed = [text for text in batch.texts if "</think>" in text]
    if any("<think>" not in text for text in closed):
        wanted += ["opened", "tagged"]
    if closed and not dull:
        wanted.append("answerless")
    if dull:
        wanted += ["repeated", "endless", "first_words", "swapped"]
    elif length_of(probed, batch):
        wanted.append("masked")
    return wanted


def _is_dull(values: list[float]) -> bool:
    """Return whether nearly all scores are the same."""
    most = Counter(values).most_common(1)
    return not most or most[0][1] >= ALWAYS * len(values)


def length_of(probed: Probed, batch: Batch) -> tuple[str, float] | None:
    """Return (unit, correlation) if the scores follow a length, else None.

    Truncated completions are left out: they are the longest, whatever the reward sees.
    """
    cut = batch.truncated or [False] * len(batch.texts)
    rows = [row for row, score in enumerate(probed.scores) if score is not None and not cut[row]]
    scores = [probed.scores[row] for row in rows]
    best: tuple[str, float] | None = None
    for unit, lengths in batch.lengths.items():
        chosen = [lengths[row] for row in rows]
        if len(rows) < 8 or len(set(chosen)) < 4:
            continue
        found = relative_rank_correlation(*both_scored(chosen, scores)) or 0.0
        if abs(found) > max(LENGTH_CORRELATION, abs(best[1]) if best else 0.0):
            best = unit, found
    return best


# --- one reward ----------------------------------------------------------------------------------


def find_in_reward(probed: Probed, batch: Batch, *, excused: bool) -> list[Finding]:
    """Return what is wrong with one reward; only the cause if one explains the rest.

    Args:
        probed: The reward.
        batch: The completions.
        excused: Whether a fault of the completions explains that scores do not differ.
    """
    if probed.fault:
        return _faulty(probed)
    cause = _unscored(probed) or _never_applies(probed) or _noisy(probed) or _moved(probed)
    if not cause and probed.counts:
        cause = _dull(probed, batch, excused=excused)
    if not cause:
        cause = [*_batch_dependent(probed), *_fragile(probed)]
        if probed.counts:
            half_blind = _blind(probed, batch, least=0.3) if batch.thought_opened else []
            cause += [*half_blind, *_length(probed, batch)]
    return [*cause, *_slow(probed, batch)]


@RULES.rule(
    "answers_missing",
    "a row without the expected answer is not scored, and trains nothing",
    "fill the column, or name the one that holds the answers with data.columns",
    about_signal=True,
)
def _unscored(probed: Probed) -> Iterator[Seen]:
    count = len(probed.scores)
    missing = count - len(known(probed.scores))
    blank = {name: share for name, share in probed.blank_columns.items() if share > 0.5}
    if blank and missing > count / 2:
        column, share = max(blank.items(), key=lambda item: item[1])
        yield Seen(
            f"column {column!r} is blank in {share:.0%} of the rows, and {missing} of {count} "
            "completions were not scored",
            "error" if missing == count else "warning",
            probed.name,
        )


@RULES.rule(
    "never_applies",
    "a reward that returns None for every row leaves nothing to compare",
    "return a number for the rows it can judge; look at the condition for None",
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
def _truncated(batch: Batch, settings: Settings, *, harmful: bool) -> Iterator[Seen]:
    limit = settings.max_completion_length
    what = "reached the limit" + (f" of {limit} tokens" if limit else "")
    yield from _share(sum(batch.truncated or []), what, batch, settings, harmful=harmful)


@RULES.rule(
    "empty_completions",
    "an empty completion holds nothing to reward",
    "look at the prompts and at the chat template: the model ends its turn at once",
)
def _empty(batch: Batch, settings: Settings, *, harmful: bool) -> Iterator[Seen]:
    num = sum(not text.strip() for text in batch.texts)
    yield from _share(num, "hold no text", batch, Settings(), harmful=harmful)


@RULES.rule(
    "unclosed_thoughts",
    "what follows the thought is what most rewards look at, and here nothing follows it",
    "raise the limit on completion length, or reward a closed thought first",
)
def _unclosed(batch: Batch, settings: Settings, *, harmful: bool) -> Iterator[Seen]:
    opened = batch.thought_opened or [False] * len(batch.texts)
    num = sum(
        "<think>" in text.rpartition("</think>")[2] or (by_prompt and "</think>" not in text)
        for text, by_prompt in zip(batch.texts, opened, strict=True)
    )
    yield from _share(num, "end within the thought", batch, settings, harmful=harmful)


def _share(
    num: int, what: str, batch: Batch, settings: Settings, *, harmful: bool
) -> Iterator[Seen]:
    """Yield that most completions have a fault; an error if it leaves a reward nothing to see."""
    count = len(batch.texts)
    if num > count / 2:
        level = "error" if num >= MOSTLY * count and harmful else "warning"
        limit = settings.max_completion_length
        longer = four_times_longer(limit, settings.max_seq_length) if limit else ""
        yield Seen(f"{num} of {count} completions {what}", level, setting=longer)


@RULES.rule(
    "blind_to_thought",
    "the prompt opens the thought, so no completion holds the '<think>' that the reward looks for",
    "look for '</think>' alone, or use the built-in thinking_format, which knows the template",
    about_signal=True,
)
def _blind(probed: Probed, batch: Batch, least: float) -> Iterator[Seen]:
    """Find that a ``<think>`` before the completion, and no other tag, raises the score."""
    opened, tagged, now = probed.probes.get("opened"), probed.probes.get("tagged"), probed.at_rows()
    if not opened or not tagged or not _may_be_opened(batch):
        return
    usual = [max(known(pair), default=math.inf) for pair in zip(now, tagged, strict=True)]
    rises = sum(a > b + 1e-6 for a, b in zip(*both_scored(opened, usual), strict=True))
    falls = sum(a < b - 1e-6 for a, b in zip(*both_scored(opened, now), strict=True))
    if rises < max(1, 4 * falls, least * len(opened)):
        return
    seen = f"with '<think>' put before them, {rises} of {len(opened)} completions score higher"
    if probed.unbound:
        yield Seen(seen, "warning", probed.name, kind="unbound")
    else:
        mean, then = fmean(known(now)), fmean(known(opened))
        yield Seen(f"{seen} (mean {mean:.3g} -> {then:.3g})", reward=probed.name)


def _may_be_opened(batch: Batch) -> bool:
    """Return whether prompts open the thought, as they say or as the completions show."""
    if batch.thought_opened is not None:
        return sum(batch.thought_opened) > len(batch.texts) / 2
    closed = [text for text in batch.texts if "</think>" in text]
    return sum("<think>" not in text for text in closed) > len(closed) / 2


RULES.rule(
    "unbound",
    "without a tokenizer the reward does not know this model's thinking tokens: its scores here "
    "say nothing",
    "check with the model instead of a file, or give the reward its end_token_id or thought_opened",
    about_signal=True,
)


@RULES.rule(
    "non_deterministic",
    "noise in a score is noise in every gradient; noise alone teaches nothing",
    "seed what is random by the completion's text, or ask a judge at temperature 0",
)
def _noisy(probed: Probed) -> Iterator[Seen]:
    first, again = probed.probes.get("first", probed.at_rows()), probed.probes.get("again")
    if changed := _num_changed(first, again):
        found = rank_correlation(*both_scored(first, again or [])) or 0.0
        yield Seen(
            f"called twice with the same input, {changed} of {len(first)} scores differ "
            f"(correlation of the two calls {found:.2f})",
            "error" if found < 0.5 else "warning",
            probed.name,
        )


@RULES.rule(
    "order_dependent",
    "a completion is scored by its place in the batch, or by another completion",
    "compute every score from its own row alone, and keep no state between rows",
)
def _moved(probed: Probed) -> Iterator[Seen]:
    first = probed.probes.get("first", probed.at_rows())
    if changed := _num_changed(first, probed.probes.get("permuted")):
        yield Seen(
            f"with the same rows in another order, {changed} of {len(first)} completions got "
            "another score",
            reward=probed.name,
        )


def _num_changed(first: list[Score], other: list[Score] | None) -> int:
    """Return how many scores differ by more than rounding in a batched model explains."""
    if other is None:
        return 0
    values = known(first)
    slack = 0.01 * (max(values) - min(values)) + 1e-6 if values else 0.0
    return sum(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > slack)
        for a, b in zip(first, other, strict=False)
    )


def _dull(probed: Probed, batch: Batch, *, excused: bool) -> list[Finding]:
    """Return why nearly all scores are the same, if they are."""
    values = known(probed.scores)
    count, low, high = len(values), min(values), max(values)
    fires = sum(value > 0 for value in values)
    rarely = low == 0 < high and fires < NEVER * count
    nearly = high > 0 and len(set(values)) == 2 and values.count(high) > ALWAYS * count
    if not (is_constant(values) or rarely or nearly):
        return []
    blind = _blind(probed, batch, least=0.1)
    if blind or excused:
        return blind
    if is_constant(values):
        return _constant(probed, batch, low)
    if rarely:
        return _never_fires(probed, fires)
    return _saturated(probed, f"{values.count(high)} of {count} completions earned {high:g}")


@RULES.rule(
    "constant",
    "RLOO learns from differences within a group, and there are none",
    "check that the reward looks at the completion, and at the part of it that varies",
    about_signal=True,
)
def _constant(probed: Probed, batch: Batch, value: float) -> Iterator[Seen]:
    """Find why all scores are one value, by what altered completions would have earned."""
    tried = ("empty", "unclosed", "repeated", "endless", "first_words", "swapped")
    other = [s for name in tried for s in known(probed.probes.get(name, []))]
    best, worst, name = max(other, default=value), min(other, default=value), probed.name
    ignores = is_same(best, worst) and is_same(best, value)
    if ignores and "end_token_id" in probed.unbound and any("</think>" in t for t in batch.texts):
        evidence = f"every score is {value:g}, though thoughts are closed in the text"
        yield Seen(evidence, "warning", name, kind="unbound")
        return
    seen = f"all {len(known(probed.scores))} completions earned {value:g}"
    higher = f"{seen}; altered ones earned up to {best:g}"
    if ignores:
        kind = "constant" if value else "all_zero"
        yield Seen(f"{seen}, empty and foreign ones too", "error", name, kind=kind)
    elif value == 0:
        if best > 0:  # else it is a penalty that no completion has earned
            yield Seen(f"{higher}, so it can fire", "warning", name, kind="all_zero")
    elif is_same(max(best, value), value):
        yield Seen(f"{seen}; worse ones earned {worst:g}", "warning", name, kind="saturated")
    else:
        yield Seen(higher, "warning", name)


RULES.rule(
    "all_zero",
    "a reward that is always 0 teaches nothing, and a total with other rewards may hide that",
    "print a completion and look for what the reward expects: case, white space, line breaks "
    "(re.DOTALL), a missing tag; else take easier prompts or give partial credit",
    about_signal=True,
)


@RULES.rule(
    "never_fires",
    "most groups never see a reward, so the model cannot learn what was right",
    "take easier prompts, give partial credit, or draw more completions of each prompt",
    about_signal=True,
)
def _never_fires(probed: Probed, fires: int) -> Iterator[Seen]:
    count = len(known(probed.scores))
    yield Seen(f"{fires} of {count} completions earned more than 0", reward=probed.name)


@RULES.rule(
    "saturated",
    "the model already earns it nearly always: nothing is left to learn from it",
    "take harder prompts, ask for more, or drop the reward",
    about_signal=True,
)
def _saturated(probed: Probed, evidence: str) -> Iterator[Seen]:
    yield Seen(evidence, "warning", probed.name)


# --- the whole run -------------------------------------------------------------------------------


@RULES.rule(
    "no_signal", "equal scores in a group cancel, and the group trains nothing", "see the verdict"
)
def _no_signal(signal: Signal, settings: Settings) -> Iterator[Seen]:
    """Find that the scores of too many groups are equal, and what would make them differ."""
    if not signal.num_groups or signal.share >= LITTLE_SIGNAL:
        return
    evidence = (
        f"scores differ in {signal.num_with_signal} of {signal.num_groups} groups; "
        f"{signal.all_highest} earn the highest score throughout, {signal.all_lowest} the lowest"
    )
    if settings.temperature is not None:
        evidence += f", at temperature {settings.temperature:g}"
    if signal.distinct is not None and signal.distinct < 0.5:
        evidence += f"; {signal.distinct:.0%} of the texts of a group are different"
    remedy, setting = _how_to_differ(signal, settings)
    level = "error" if signal.share < ALMOST_NONE else "warning"
    yield Seen(evidence, level, remedy=remedy, setting=setting)


def _how_to_differ(signal: Signal, settings: Settings) -> tuple[str, str]:
    """Return (remedy, setting) for groups whose scores are equal."""
    if signal.distinct is not None and signal.distinct < 0.5:
        hot = max(1.0, 1.5 * (settings.temperature or 0.0))
        return "sample more varied texts: raise the temperature", f"trainer.temperature={hot:g}"
    if signal.all_highest > signal.all_lowest:
        return "take harder prompts (data.level of a built-in task), or ask for more", ""
    least, remedy = max(signal.share, LITTLE_SIGNAL), "take easier prompts, or give partial credit"
    better = {num: share for num, share in signal.forecast.items() if share > least}
    if not settings.num_generations or not better:
        return remedy, ""
    num = min(better)
    more = f"{num} completions of each prompt would give about {better[num]:.0%}"
    return f"{remedy}; {more}", f"trainer.num_generations={num}"


@RULES.rule(
    "drowned",
    "within a group the largest spread decides who is better; the other rewards have no say",
    "lower its weight, or bring the rewards to one scale with scaled_by",
)
def _drowned(live: list[Probed], batch: Batch) -> Iterator[Seen]:
    spreads = {r.name: spread for r in live if (spread := _spread(r, batch)) > 0}
    if len(spreads) < 2:
        return
    largest = max(spreads, key=spreads.__getitem__)
    small = {name: s for name, s in spreads.items() if s < DROWNED * spreads[largest]}
    if small:
        share = spreads[largest] ** 2 / sum(spread**2 for spread in spreads.values())
        weight = next(r.weight for r in live if r.name == largest)
        kept = weight * max(s for name, s in spreads.items() if name != largest) / spreads[largest]
        listed = ", ".join(f"{name} {spread:.2g}" for name, spread in small.items())
        yield Seen(
            f"weight times spread within a group is {spreads[largest]:.3g}, {share:.2%} of the "
            f"variance; of the others {listed}",
            "warning",
            largest,
            f"lower the weight of {largest}, or bring the rewards to one scale (scaled_by)",
            f"weight: {kept:.1g}",
        )


def _spread(probed: Probed, batch: Batch) -> float:
    """Return the weighted spread within the groups in which the reward varies at all."""
    groups = [known(probed.scores[row] for row in rows) for rows in batch.groups]
    spreads = [stdev(group) for group in groups if len(group) > 1 and not is_constant(group)]
    return abs(probed.weight) * fmean(spreads) if spreads else 0.0


# --- one reward that works -----------------------------------------------------------------------


@RULES.rule(
    "batch_dependent",
    "a score that depends on the other completions of the call changes with the batch size",
    "compute every score from its own row alone",
)
def _batch_dependent(probed: Probed) -> Iterator[Seen]:
    alone = probed.probes.get("alone", [])
    if changed := _num_changed(probed.probes.get("first", probed.at_rows())[: len(alone)], alone):
        yield Seen(
            f"called with one completion at a time, {changed} of {len(alone)} got another score",
            "warning",
            probed.name,
        )


@RULES.rule(
    "fragile",
    "a model writes such a completion, or a batch holds it so, sooner or later; the run stops then",
    "return a low score, or None, for a completion without the parts it looks for",
)
def _fragile(probed: Probed) -> Iterator[Seen]:
    """Find that it raises in other calls than the first one."""
    tried = {
        "again": "the same completions in a second call",
        "permuted": "the same completions in another order",
        "alone": "a single completion",
        "empty": "an empty completion",
        "unclosed": "a completion cut off in the middle",
    }
    failed = [f"for {what}: {probed.probe_errors[name]}" for name, what in tried.items()
              if name in probed.probe_errors]  # fmt: skip
    if failed:
        yield Seen(failed[0], "warning", probed.name)


@RULES.rule(
    "length_in_disguise",
    "the cheapest way to more reward is length, and the model will take it",
    "compare what is said; use length_band or soft_overlong if length is what you mean",
)
def _length(probed: Probed, batch: Batch) -> Iterator[Seen]:
    """Find that the score follows the length, also of completions that say nothing."""
    found, masked = length_of(probed, batch), probed.probes.get("masked")
    if found is None or not masked or _MEANS_LENGTH.search(probed.name):
        return
    scores, blind = both_scored(probed.at_rows(), masked)
    same = sum(map(is_same, scores, blind))
    alike = relative_rank_correlation(scores, blind) or 0.0
    if same >= MOSTLY * len(masked) or abs(alike) >= LENGTH_CORRELATION:
        unit, strength = found
        yield Seen(
            f"rank correlation with the number of {unit} {strength:+.2f}; with every letter "
            f"replaced by x, {same} of {len(masked)} scores stay the same",
            "warning",
            probed.name,
        )


@RULES.rule(
    "only_thought",
    "no reward looks at what follows the thought, so the answer may become anything",
    "add a reward for the answer, such as accuracy",
)
def _only_thought(live: list[Probed], batch: Batch) -> Iterator[Seen]:
    """Find that cutting the answers off changes no score."""
    answered = [bool(text.partition("</think>")[2].strip()) for text in batch.texts]
    live = [reward for reward in live if _spread(reward, batch)]
    if not live or sum(answered) <= len(answered) / 2:
        return
    for reward in live:
        cut = reward.probes.get("answerless")
        by_name = _MEANS_FORM.search(reward.name) or _MEANS_LENGTH.search(reward.name)
        if by_name or not cut or _num_changed(reward.at_rows(), cut) > 0.05 * len(cut):
            return
    names = ", ".join(reward.name for reward in live)
    yield Seen(f"without the text after the thought, the scores of {names} are the same", "warning")


@RULES.rule(
    "scale",
    "beta times the KL is subtracted from the score, so both need one scale",
    "change the weights, or beta",
)
def _scale(live: list[Probed], batch: Batch, settings: Settings, signal: Signal) -> Iterator[Seen]:
    """Find that the scores are out of all proportion to the KL penalty."""
    beta = settings.beta
    if not beta or not live or settings.normalized or not signal.num_with_signal:
        return
    spread = (signal.group_std or 0.0) * signal.num_groups / signal.num_with_signal
    largest = max(live, key=lambda r: _spread(r, batch))
    seen = (
        f"scores that differ within a group spread by {spread:.3g}, and a completion one nat from "
        f"the reference costs beta = {beta:g}"
    )
    if spread > 10.0 and spread > 1000.0 * beta:
        remedy = f"lower the weight of {largest.name}, so that the penalty counts for something"
        setting = f"weight: {largest.weight / spread:.1g}"
        yield Seen(seen, "warning", largest.name, remedy, setting)
    elif spread < 0.1 * beta:
        remedy = f"raise the weight of {largest.name}, or lower beta"
        yield Seen(seen, "warning", largest.name, remedy, f"trainer.beta={spread / 10:.1g}")


@RULES.rule(
    "slow",
    "the model waits while the reward computes",
    "batch its work, cache repeated texts, or make it async, so that several run at once",
)
def _slow(probed: Probed, batch: Batch) -> Iterator[Seen]:
    seconds, generation = probed.seconds, batch.generation_seconds
    if generation is None:
        if seconds > 0.1:
            evidence = f"{seconds:.2g} s per completion: {seconds * 64:.0f} s for 64 of them"
            yield Seen(evidence, "warning", probed.name)
        return
    share = seconds / max(1e-9, seconds + generation)
    if seconds > 0.01 and share > SLOW_SHARE:
        yield Seen(
            f"{seconds * 1000:.0f} ms per completion, where sampling takes "
            f"{generation * 1000:.0f} ms: {share:.0%} of the two together",
            "warning",
            probed.name,
        )


def _faulty(probed: Probed) -> list[Finding]:
    """Return why a reward gave no usable scores at all."""
    fault = probed.fault
    if fault is None:
        return []
    if fault.kind != "missing_ids":
        return [RULES.finding(fault.kind, Seen(fault.text, reward=probed.name))]
    seen = Seen(
        "it needs completion_ids, which the file does not hold, so it was not checked",
        "warning",
        probed.name,
        "check with the model; its --output-dir writes a file that holds them",
    )
    return [RULES.finding("missing_column", seen)]


# --- all findings, and the verdict ---------------------------------------------------------------


def find_all(
    rewards: Sequence[Probed], batch: Batch, settings: Settings, signal: Signal
) -> list[Finding]:
    """Return every finding, the most harmful first; a cause replaces what it explains.

    Args:
        rewards: As they were called.
        batch: The completions.
        settings: Of the run.
        signal: Of the total scores.
    """
    dull = any(r.counts and _is_dull(known(r.scores)) for r in rewards)
    harmful = dull or signal.share < LITTLE_SIGNAL
    faults = (check(batch, settings, harmful=harmful) for check in (_truncated, _empty, _unclosed))
    fault = next(filter(None, faults), [])
    excused = any(finding.level == "error" for finding in fault)
    found = [f for r in rewards for f in find_in_reward(r, batch, excused=excused)]
    dead = {finding.reward for finding in found if KINDS[finding.kind].about_signal}
    live = [r for r in rewards if r.counts and r.name not in dead and not is_constant(r.scores)]
    if not live:  # a reward that is dull only for now is an error if no other one is alive
        dull_now = ("constant", "all_zero", "saturated")
        found = [replace(f, level="error") if f.kind in dull_now else f for f in found]
    live = [r for r in live if known(r.scores)]
    found += fault
    if not excused and (live or not dead):
        found += _no_signal(signal, settings)
    found += _drowned(live, batch)
    found += [] if found else _only_thought(live, batch)
    found += _scale(live, batch, settings, signal)
    return RULES.ordered(found)


def verdict(signal: Signal, findings: Sequence[Finding]) -> str:
    """Return one sentence: whether RLOO will learn from these rewards."""
    stopping = [finding for finding in findings if KINDS[finding.kind].stops]
    if errors := [finding for finding in stopping if finding.level == "error"]:
        return f"The run would stop at its first step: see {errors[0].kind} below."
    for finding in findings:
        if finding in stopping or finding.kind == "unbound":
            return f"Whether RLOO will learn is unknown: {finding.reward} was not really checked."
    if not signal.num_groups:
        return (
            "Whether RLOO will learn is unknown: no prompt has two scored completions; give "
            "several of each."
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
