"""What is wrong with the rewards of a run, by what they gave to completions; and a verdict.

Findings are made cause first: a cause that explains another finding replaces it.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from rloo_kit.diagnosis.rules import Finding
from rloo_kit.reward_lab.statistics import (
    Batch,
    Fault,
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
MOSTLY = 0.9
"""Share of the completions from which one fault explains what the rewards say."""
LITTLE_SIGNAL = 0.25
"""Share of groups with differing scores below which most of the compute is spent on nothing."""
ALMOST_NONE = 0.05
LENGTH_CORRELATION = 0.9
DROWNED = 0.02
"""Spread within groups, relative to the largest reward's, below which a reward has no say."""
SLOW_SHARE, SLOW_SECONDS, SLOW_UNKNOWN = 1 / 3, 0.01, 0.1
"""Of generation and rewards together; seconds a completion that are noticed at all; seconds a
completion that are slow where it is not known what generation takes."""
LARGE_SCORES, SCORES_PER_BETA, KL_DECIDES = 10.0, 1000.0, 0.1
"""Spread of scores within a group: from here large, and over or under so many beta."""

_MEANS_LENGTH = re.compile(r"len|brev|brief|concis|short|long|word|token|budget", re.I)
_MEANS_FORM = re.compile(r"think|thought|reason|reflect|repeti", re.I)


KINDS: dict[str, tuple[str, str]] = {
    "raises": (
        "the run stops at the first such completion",
        "call it on that completion by hand: text.split('</think>')[1] and re.search(...).group() "
        "raise where nothing matches",
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
    "answers_missing": (
        "a row without the expected answer is not scored, and trains nothing",
        "fill the column, or name the one that holds the answers with data.columns",
    ),
    "never_applies": (
        "a reward that returns None for every row leaves nothing to compare",
        "return a number for the rows it can judge; look at the condition for None",
    ),
    "truncated": (
        "a completion that is cut off never reaches its answer, so rewards cannot tell one from "
        "another",
        "raise the limit on completion length, or make the thoughts shorter",
    ),
    "empty_completions": (
        "an empty completion holds nothing to reward",
        "look at the prompts and at the chat template: the model ends its turn at once",
    ),
    "unclosed_thoughts": (
        "what follows the thought is what most rewards look at, and here nothing follows it",
        "raise the limit on completion length, or reward a closed thought first",
    ),
    "blind_to_thought": (
        "the thought is opened by the prompt, so the completion never holds the '<think>' that "
        "the reward looks for",
        "look for '</think>' alone, or use the built-in thinking_format, which knows the template",
    ),
    "unbound": (
        "without a tokenizer the reward does not know this model's thinking tokens, so its scores "
        "here say nothing",
        "check with the model instead of a file, or give the reward its end_token_id or "
        "thought_opened",
    ),
    "non_deterministic": (
        "noise in a score is noise in every gradient; noise alone teaches nothing",
        "seed what is random by the completion's text, or ask a judge at temperature 0",
    ),
    "order_dependent": (
        "a completion is paid for its place in the batch, or for another completion",
        "compute every score from its own row alone, and keep no state between rows",
    ),
    "constant": (
        "RLOO learns from differences within a group, and there are none",
        "check that the reward looks at the completion, and at the part of it that varies",
    ),
    "all_zero": (
        "a reward that pays nothing teaches nothing, and a total beside it may hide that",
        "print a completion and look for what the reward expects: case, white space, line breaks "
        "(re.DOTALL), a missing tag; else take easier prompts or give partial credit",
    ),
    "never_fires": (
        "most groups never see a reward, so the model is not told what was right",
        "take easier prompts, give partial credit, or draw more completions of each prompt",
    ),
    "saturated": (
        "the model already earns it nearly always: nothing is left to learn from it",
        "take harder prompts, ask for more, or drop the reward",
    ),
    "no_signal": (
        "equal scores in a group cancel, and the group trains nothing",
        "see the verdict",
    ),
    "drowned": (
        "within a group the largest spread decides who is better; the other rewards have no say",
        "lower its weight, or bring the rewards to one scale with scaled_by",
    ),
    "batch_dependent": (
        "a score that depends on the other completions of the call changes with the batch size",
        "compute every score from its own row alone",
    ),
    "fragile": (
        "a model writes such a completion, or a batch holds it so, sooner or later; then the run "
        "stops",
        "return a low score, or None, for a completion without the parts it looks for",
    ),
    "length_in_disguise": (
        "the cheapest way to more reward is length, and the model will take it",
        "compare what is said; use length_band or soft_overlong where length is what you mean",
    ),
    "only_thought": (
        "no reward looks at what follows the thought, so the answer may become anything",
        "add a reward for the answer, such as accuracy",
    ),
    "scale": (
        "beta times the KL is subtracted from the score, so both need one scale",
        "change the weights, or beta",
    ),
    "slow": (
        "the model waits while the reward computes",
        "batch its work, cache repeated texts, or make it async, so that several run at once",
    ),
}
"""Kind of a finding -> (why it matters, remedy), the most harmful first."""

STOPS = ("raises", "timeout", "missing_column", "wrong_output", "not_finite")
"""Findings after which the run cannot even begin."""
PAYS_NOTHING = frozenset(
    {
        *STOPS,
        "answers_missing",
        "never_applies",
        "blind_to_thought",
        "unbound",
        "constant",
        "all_zero",
        "never_fires",
        "saturated",
    }
)
"""Findings that explain why a reward tells no completions apart."""


def _finding(
    kind: str,
    evidence: str,
    reward: str | None = None,
    level: str = "error",
    *,
    remedy: str = "",
    setting: str = "",
) -> Finding:
    why, usual = KINDS[kind]
    return Finding(kind, level, reward, evidence, why, remedy or usual, setting)


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
    """Return (unit, correlation) where the scores follow a length, else None.

    Completions that were cut off are left out: they are the longest, whatever the reward sees.
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


# --- findings about one reward -------------------------------------------------------------------


def find_in_reward(probed: Probed, batch: Batch, *, excused: bool) -> list[Finding]:
    """Return what is wrong with one reward, its cause alone where there is one.

    Args:
        probed: The reward.
        batch: The completions.
        excused: Whether a fault of the completions explains that scores do not differ.
    """
    slow = _slow(probed, batch)
    if probed.fault:
        return [_from_fault(probed.fault, probed.name)]
    cause = _unscored(probed) or _unstable(probed)
    if cause is None and probed.counts:
        cause = _dull(probed, batch, excused=excused)
    if cause is not None:
        return [cause, *slow]
    others = [_batch_dependent(probed), _fragile(probed)]
    if probed.counts:
        others += [_half_blind(probed, batch), _length(probed, batch)]
    return [*filter(None, others), *slow]


def _from_fault(fault: Fault, name: str) -> Finding:
    if fault.kind == "missing_ids":
        return _finding(
            "missing_column",
            "it asks for completion_ids, which the file does not hold, so it was not checked",
            name,
            "warning",
            remedy="check with the model; its --output-dir writes a file that holds them",
        )
    return _finding(fault.kind, fault.text, name)


def _unscored(probed: Probed) -> Finding | None:
    """Return why rows were not scored."""
    count = len(probed.scores)
    missing = count - len(known(probed.scores))
    blank = {name: share for name, share in probed.blank_columns.items() if share > 0.5}
    if blank and missing > count / 2:
        column, share = max(blank.items(), key=lambda item: item[1])
        return _finding(
            "answers_missing",
            f"column {column!r} is blank in {share:.0%} of the rows, and {missing} of {count} "
            "completions were not scored",
            probed.name,
            "error" if missing == count else "warning",
        )
    if missing == count:
        return _finding(
            "never_applies", f"it returned None for all {count} completions", probed.name
        )
    return None


def _unstable(probed: Probed) -> Finding | None:
    """Return that the same completions got other scores, in a second call or in another order."""
    again, moved = probed.probes.get("again"), probed.probes.get("permuted")
    first = probed.probes.get("first", probed.at_rows())
    count = len(first)
    changed = _num_changed(first, again)
    if changed:
        found = rank_correlation(*both_scored(first, again or [])) or 0.0
        return _finding(
            "non_deterministic",
            f"called twice with the same input, {changed} of {count} scores differ (correlation of "
            f"the two calls {found:.2f})",
            probed.name,
            "error" if found < 0.5 else "warning",
        )
    changed = _num_changed(first, moved)
    if changed:
        return _finding(
            "order_dependent",
            f"with the same rows in another order, {changed} of {count} completions got another "
            "score",
            probed.name,
        )
    return None


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


def _dull(probed: Probed, batch: Batch, *, excused: bool) -> Finding | None:
    """Return why nearly all scores are the same, where they are."""
    values = known(probed.scores)
    count, low, high = len(values), min(values), max(values)
    fires = sum(value > 0 for value in values)
    rarely = low == 0 < high and fires < NEVER * count
    nearly = high > 0 and len(set(values)) == 2 and values.count(high) > ALWAYS * count
    if not (is_constant(values) or rarely or nearly):
        return None
    blind = _blind(probed, batch, least=0.1)
    if blind or excused:
        return blind
    if is_constant(values):
        return _constant(probed, batch, low)
    if rarely:
        return _finding(
            "never_fires", f"{fires} of {count} completions earned more than 0", probed.name
        )
    return _saturated(probed, f"{values.count(high)} of {count} completions earned {high:g}")


def _constant(probed: Probed, batch: Batch, value: float) -> Finding | None:
    """Return why all scores are one value, by what altered completions would have earned."""
    tried = ("empty", "unclosed", "repeated", "endless", "first_words", "swapped")
    other = [s for name in tried for s in known(probed.probes.get(name, []))]
    best, worst = max(other, default=value), min(other, default=value)
    ignores = is_same(best, worst) and is_same(best, value)
    if ignores and "end_token_id" in probed.unbound and any("</think>" in t for t in batch.texts):
        evidence = f"every score is {value:g}, though thoughts are closed in the text"
        return _finding("unbound", evidence, probed.name, "warning")
    seen = f"all {len(known(probed.scores))} completions earned {value:g}"
    level = "error" if ignores else "warning"
    if value == 0 and not ignores and best <= 0:
        return None  # a penalty that no completion has earned
    if value == 0:
        seen += "" if ignores else f"; altered ones earned up to {best:g}, so it can fire"
        return _finding("all_zero", seen, probed.name, level)
    if not ignores and is_same(max(best, value), value):
        return _saturated(probed, f"{seen}; worse ones earned {worst:g}")
    seen += ", empty and foreign ones too" if ignores else f"; altered ones earned up to {best:g}"
    return _finding("constant", seen, probed.name, level)


def _saturated(probed: Probed, evidence: str) -> Finding:
    return _finding("saturated", evidence, probed.name, "warning")


def _blind(probed: Probed, batch: Batch, least: float) -> Finding | None:
    """Return that a ``<think>`` before the completion, and no other tag, raises the score."""
    opened, tagged = probed.probes.get("opened"), probed.probes.get("tagged")
    if not opened or not tagged or not _may_be_opened(batch):
        return None
    usual = [
        max(known((now, other)), default=math.inf)
        for now, other in zip(probed.at_rows(), tagged, strict=True)
    ]
    rises = sum(a > b + 1e-6 for a, b in zip(*both_scored(opened, usual), strict=True))
    falls = sum(a < b - 1e-6 for a, b in zip(*both_scored(opened, probed.at_rows()), strict=True))
    if rises < max(1, 4 * falls, least * len(opened)):
        return None
    if probed.unbound:
        return _finding(
            "unbound",
            f"with '<think>' put before them, {rises} of {len(opened)} completions score higher",
            probed.name,
            "warning",
        )
    mean, then = fmean(known(probed.at_rows())), fmean(known(opened))
    return _finding(
        "blind_to_thought",
        f"mean {mean:.3g}; with '<think>' put before the same completions {then:.3g} "
        f"({rises} of {len(opened)} rise)",
        probed.name,
    )


def _may_be_opened(batch: Batch) -> bool:
    """Return whether prompts open the thought, as they say or as the completions show."""
    if batch.thought_opened is not None:
        return sum(batch.thought_opened) > len(batch.texts) / 2
    closed = [text for text in batch.texts if "</think>" in text]
    return sum("<think>" not in text for text in closed) > len(closed) / 2


def _half_blind(probed: Probed, batch: Batch) -> Finding | None:
    """Return the same of a reward that also pays for something else."""
    return _blind(probed, batch, least=0.3) if batch.thought_opened else None


def _batch_dependent(probed: Probed) -> Finding | None:
    alone = probed.probes.get("alone", [])
    changed = _num_changed(probed.probes.get("first", probed.at_rows())[: len(alone)], alone)
    if not changed:
        return None
    return _finding(
        "batch_dependent",
        f"called with one completion at a time, {changed} of {len(alone)} got another score",
        probed.name,
        "warning",
    )


def _fragile(probed: Probed) -> Finding | None:
    """Return that it raises for other calls than the first one."""
    for name, what in _TRIED.items():
        if name in probed.probe_errors:
            return _finding(
                "fragile", f"for {what}: {probed.probe_errors[name]}", probed.name, "warning"
            )
    return None


_TRIED = {
    "again": "the same completions in a second call",
    "permuted": "the same completions in another order",
    "alone": "a single completion",
    "empty": "an empty completion",
    "unclosed": "a completion cut off in the middle",
}


def _length(probed: Probed, batch: Batch) -> Finding | None:
    """Return that the score follows the length, also of completions that say nothing."""
    found, masked = length_of(probed, batch), probed.probes.get("masked")
    if found is None or not masked or _MEANS_LENGTH.search(probed.name):
        return None
    scores, blind = both_scored(probed.at_rows(), masked)
    same = sum(map(is_same, scores, blind))
    alike = relative_rank_correlation(scores, blind) or 0.0
    if same < MOSTLY * len(masked) and abs(alike) < LENGTH_CORRELATION:
        return None
    unit, strength = found
    return _finding(
        "length_in_disguise",
        f"rank correlation with the number of {unit} {strength:+.2f}; with every letter replaced "
        f"by x, {same} of {len(masked)} scores stay the same",
        probed.name,
        "warning",
    )


def _slow(probed: Probed, batch: Batch) -> list[Finding]:
    seconds, generation = probed.seconds, batch.generation_seconds
    if generation is None:
        if seconds <= SLOW_UNKNOWN:
            return []
        evidence = f"{seconds:.2g} s a completion: {seconds * 64:.0f} s for 64 of them"
    else:
        share = seconds / max(1e-9, seconds + generation)
        if seconds <= SLOW_SECONDS or share <= SLOW_SHARE:
            return []
        evidence = (
            f"{seconds * 1000:.0f} ms a completion, where sampling takes "
            f"{generation * 1000:.0f} ms: {share:.0%} of the two together"
        )
    return [_finding("slow", evidence, probed.name, "warning")]


# --- findings about the whole run ----------------------------------------------------------------


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
    fault = _fault_of_completions(rewards, batch, settings, signal)
    excused = fault is not None and fault.level == "error"
    found = [f for r in rewards for f in find_in_reward(r, batch, excused=excused)]
    found = _hardened(found, rewards)
    dead = {f.reward for f in found if f.kind in PAYS_NOTHING}
    live = [r for r in rewards if r.counts and r.name not in dead and not is_constant(r.scores)]
    live = [r for r in live if known(r.scores)]
    if fault:
        found.append(fault)
    if not excused and (live or not dead):
        found += _no_signal(signal, settings)
    found += _drowned(live, batch)
    found += [] if found else _only_thought(live, batch)
    if signal.num_with_signal:
        found += _scale(live, batch, settings, signal)
    order = list(KINDS)
    return sorted(found, key=lambda f: (f.level != "error", order.index(f.kind)))


def _hardened(found: list[Finding], rewards: Sequence[Probed]) -> list[Finding]:
    """Return a reward that is dull only for now as an error where no other one is alive."""
    dull = {f.reward for f in found if f.kind in PAYS_NOTHING}
    others = [r for r in rewards if r.counts and r.name not in dull and not is_constant(r.scores)]
    if others:
        return found
    dull_now = ("constant", "all_zero", "saturated")
    return [replace(f, level="error") if f.kind in dull_now else f for f in found]


def _fault_of_completions(
    rewards: Sequence[Probed], batch: Batch, settings: Settings, signal: Signal
) -> Finding | None:
    """Return what is wrong with the completions; an error where a reward has nothing to see."""
    count = len(batch.texts)
    dull = any(r.counts and _is_dull(known(r.scores)) for r in rewards)
    cut = sum(batch.truncated or [])
    empty = sum(not text.strip() for text in batch.texts)
    unclosed = _num_unclosed(batch)
    for kind, num, what in (
        ("truncated", cut, "reached the limit"),
        ("empty_completions", empty, "hold no text"),
        ("unclosed_thoughts", unclosed, "end within the thought"),
    ):
        if num <= count / 2:
            continue
        lost = num >= MOSTLY * count and (dull or signal.share < LITTLE_SIGNAL)
        limit = settings.max_completion_length
        if kind == "truncated" and limit:
            what += f" of {limit} tokens"
        return _finding(
            kind,
            f"{num} of {count} completions {what}",
            level="error" if lost else "warning",
            setting="" if kind == "empty_completions" else _longer(settings),
        )
    return None


def _longer(settings: Settings) -> str:
    """Return settings with four times the room for completions."""
    limit, total = settings.max_completion_length, settings.max_seq_length
    if not limit:
        return ""
    setting = f"trainer.max_completion_length={limit * 4}"
    if total and limit * 4 > total / 2:  # the prompt needs its room as before
        setting += f", model.max_seq_length={total + 3 * limit}"
    return setting


def _num_unclosed(batch: Batch) -> int:
    opened = batch.thought_opened or [False] * len(batch.texts)
    return sum(
        "<think>" in text.rpartition("</think>")[2] or (by_prompt and "</think>" not in text)
        for text, by_prompt in zip(batch.texts, opened, strict=True)
    )


def _no_signal(signal: Signal, settings: Settings) -> list[Finding]:
    """Return that the scores of too many groups are equal, and what would make them differ."""
    if not signal.num_groups or signal.share >= LITTLE_SIGNAL:
        return []
    evidence = (
        f"scores differ in {signal.num_with_signal} of {signal.num_groups} groups; "
        f"{signal.all_highest} earn the highest score throughout, {signal.all_lowest} the lowest"
    )
    temperature = settings.temperature
    if temperature is not None:
        evidence += f", at temperature {temperature:g}"
    if signal.distinct is not None and signal.distinct < 0.5:
        evidence += f"; {signal.distinct:.0%} of the texts of a group are different"
    remedy, setting = _how_to_differ(signal, settings)
    level = "error" if signal.share < ALMOST_NONE else "warning"
    return [_finding("no_signal", evidence, level=level, remedy=remedy, setting=setting)]


def _how_to_differ(signal: Signal, settings: Settings) -> tuple[str, str]:
    """Return (remedy, setting) for groups whose scores are equal."""
    if signal.distinct is not None and signal.distinct < 0.5:
        hot = max(1.0, 1.5 * (settings.temperature or 0.0))
        return "sample more variedly: raise the temperature", f"trainer.temperature={hot:g}"
    if signal.all_highest > signal.all_lowest:
        return "take harder prompts (data.level of a built-in task), or ask for more", ""
    size = settings.num_generations
    better = {
        num: share
        for num, share in signal.forecast.items()
        if share > max(signal.share, LITTLE_SIGNAL)
    }
    remedy = "take easier prompts, or give partial credit"
    if not size or not better:
        return remedy, ""
    num = min(better)
    return (
        f"{remedy}; {num} completions of each prompt would give about {better[num]:.0%}",
        f"trainer.num_generations={num}",
    )


def _spread(probed: Probed, batch: Batch) -> float:
    """Return the weighted spread within the groups in which the reward varies at all."""
    groups = [known(probed.scores[row] for row in rows) for rows in batch.groups]
    spreads = [stdev(group) for group in groups if len(group) > 1 and not is_constant(group)]
    return abs(probed.weight) * fmean(spreads) if spreads else 0.0


def _drowned(live: list[Probed], batch: Batch) -> list[Finding]:
    """Return the reward beside which others have no say within groups."""
    spreads = {r.name: spread for r in live if (spread := _spread(r, batch)) > 0}
    if len(spreads) < 2:
        return []
    largest = max(spreads, key=spreads.__getitem__)
    small = {name: s for name, s in spreads.items() if s < DROWNED * spreads[largest]}
    if not small:
        return []
    squares = sum(spread**2 for spread in spreads.values())
    share = spreads[largest] ** 2 / squares
    weight = next(r.weight for r in live if r.name == largest)
    kept = weight * max(s for name, s in spreads.items() if name != largest) / spreads[largest]
    listed = ", ".join(f"{name} {spread:.2g}" for name, spread in small.items())
    return [
        _finding(
            "drowned",
            f"weight times spread within a group is {spreads[largest]:.3g}, {share:.2%} of the "
            f"variance; beside it {listed}",
            largest,
            "warning",
            remedy=f"lower the weight of {largest}, or bring the rewards to one scale (scaled_by)",
            setting=f"weight: {kept:.1g}",
        )
    ]


def _only_thought(live: list[Probed], batch: Batch) -> list[Finding]:
    """Return that cutting the answers off changes no score."""
    answered = [bool(text.partition("</think>")[2].strip()) for text in batch.texts]
    live = [reward for reward in live if _spread(reward, batch)]
    if not live or sum(answered) <= len(answered) / 2:
        return []
    for reward in live:
        if _MEANS_FORM.search(reward.name) or _MEANS_LENGTH.search(reward.name):
            return []
        cut = reward.probes.get("answerless")
        if not cut or _num_changed(reward.at_rows(), cut) > 0.05 * len(cut):
            return []
    names = ", ".join(reward.name for reward in live)
    return [
        _finding(
            "only_thought",
            f"with everything after the thought removed, the scores of {names} stay the same",
            level="warning",
        )
    ]


def _scale(live: list[Probed], batch: Batch, settings: Settings, signal: Signal) -> list[Finding]:
    """Return that the scores are out of all proportion to the KL penalty."""
    beta = settings.beta
    if not beta or not live or settings.normalized or signal.num_groups == 0:
        return []
    spread = (signal.group_std or 0.0) * signal.num_groups / signal.num_with_signal
    largest = max(live, key=lambda r: _spread(r, batch))
    seen = (
        f"scores that differ within a group spread by {spread:.3g}, and a completion one nat from "
        f"the reference pays beta = {beta:g}"
    )
    if spread > LARGE_SCORES and spread > SCORES_PER_BETA * beta:
        setting = f"weight: {largest.weight / spread:.1g}"
        remedy = f"lower the weight of {largest.name}, so that the penalty counts for something"
    elif spread < KL_DECIDES * beta:
        setting = f"trainer.beta={spread / 10:.1g}"
        remedy = f"raise the weight of {largest.name}, or lower beta"
    else:
        return []
    return [_finding("scale", seen, largest.name, "warning", remedy=remedy, setting=setting)]


# --- the verdict ---------------------------------------------------------------------------------


def verdict(signal: Signal, findings: Sequence[Finding]) -> str:
    """Return one sentence: whether RLOO will learn from these rewards."""
    stopped = [f for f in findings if f.kind in STOPS and f.level == "error"]
    if stopped:
        return f"The run would stop at its first step: see {stopped[0].kind} below."
    unsure = [f.reward for f in findings if f.kind in (*STOPS, "unbound")]
    if unsure:
        return f"Whether RLOO will learn cannot be told: {unsure[0]} was not really checked."
    if not signal.num_groups:
        return (
            "Whether RLOO will learn cannot be told: no prompt has two scored completions; give "
            "several of each."
        )
    seen = (
        f"scores differ in {signal.num_with_signal} of {signal.num_groups} groups "
        f"({signal.share:.0%}), the spread within a group is {signal.group_std:.3g}"
    )
    if signal.share < ALMOST_NONE:
        text = f"RLOO cannot learn from this: {seen}"
    elif signal.share < LITTLE_SIGNAL:
        text = f"RLOO will hardly learn: {seen}"
    elif signal.share < 0.5:
        text = f"RLOO will learn, and spend more than half of its work on nothing: {seen}"
    else:
        text = f"RLOO will learn: {seen}"
    errors = sum(f.level == "error" for f in findings)
    return f"{text}; {_counted(errors)} below first." if errors else f"{text}."


def _counted(errors: int) -> str:
    return "mend the error" if errors == 1 else f"mend the {errors} errors"
