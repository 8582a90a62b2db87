"""What a report shows of a run, as plain values for its page."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.diagnosis.record import (
    RunRecord,
    RunStatistics,
    finite_number,
    finite_numbers,
    read_json,
)
from rloo_kit.diagnosis.rules import Finding
from rloo_kit.diagnosis.run_rules import find_in_run, verdict
from rloo_kit.report.curves import Chart, curves_of, held_out_points, rows_of
from rloo_kit.report.groups import kept_groups, place_of_row
from rloo_kit.report.texts import completion_parts, messages_of, page_json
from rloo_kit.text.redaction import redact_tree

# Of all runs together, about; 1.5 MiB.
GROUP_BYTES = 3 << 19
# Of held-out prompts with two completions each, all runs together; 384 KiB
SAMPLE_BYTES = 3 << 17
# Characters of a prompt, or a completion, of those
SAMPLE_LENGTH = 4000
# Of a table of scored models, of their comparisons, and of win rates
MAX_ROWS = 24
# Of the planned memory
MAX_PARTS = 40
# In place of a default that the kit does not set itself
UNKNOWN = "not known here"


def run_content(
    record: RunRecord, name: str, charts: Sequence[Chart], share: int = 1
) -> dict[str, Any]:
    """Return all that the page shows of a run.

    Args:
        record: The run.
        name: Of the run on the page.
        charts: As ``charts_of`` returns them.
        share: Runs on the page, which divide its budget of bytes.
    """
    known = [row for row in record.completions if place_of_row(row) is not None]
    record = replace(record, completions=known)
    findings = find_in_run(record, notes=True)
    kept = kept_groups(record, GROUP_BYTES // share)
    content = {
        "name": name,
        "verdict": verdict(record, findings),
        "findings": [_finding(finding, record) for finding in findings],
        "end": _end(record),
        "facts": _facts(record),
        "held_out": _held_out(record),
        "samples": _samples(record, SAMPLE_BYTES // share),
        "scored": _scored(record),
        "judged": _judged(record),
        "curves": curves_of(record, charts, share),
        "points": held_out_points(record),
        "groups": kept.groups,
        "num_groups": kept.num_groups,
        "num_completions": kept.num_completions,
        "beta": _beta(record),
        "config": _settings(record.config),
        "environment": _environment(record),
        "plan": _plan(record),
        "files": _files(record.folder),
        "command": _command(record),
        "notices": _notices(record.config),
    }
    return redact_tree(content)  # the files may come from elsewhere, or from an older version


# --- plain values out of files that anybody may have written --------------------------------------


def _read(record: RunRecord, name: str) -> dict[str, Any]:
    return (read_json(record.folder / name) if record.folder else None) or {}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _numbers(value: object) -> dict[str, float | None]:
    return {name: finite_number(number) for name, number in _dict(value).items()}


def _number(value: object, digits: int, sign: str = "") -> str:
    number = finite_number(value)
    return "none" if number is None else f"{number:{sign}.{digits}f}"


# --- how it went ---------------------------------------------------------------------------------


def _finding(finding: Finding, record: RunRecord) -> dict[str, Any]:
    # Several settings are one text, "a.b=1, a.c=2"; a value may hold a comma too.
    settings = re.split(r", (?=[\w.]+=)", finding.setting) if finding.setting else []
    command = " ".join([_command(record), *(f"--set {shlex.quote(one)}" for one in settings)])
    return {**finding.as_dict(), "settings": settings, "command": command if settings else ""}


def _end(record: RunRecord) -> dict[str, Any]:
    """Return how the run ended, and when; without end.json from its other files."""
    steps = rows_of(record).steps
    # A run that was killed has no end.json; its rows still have times.
    times = [time for row in record.metrics if (time := finite_number(row.get("time")))]
    end = record.end
    evaluated = "after" in (record.evaluation or {})
    seconds = [finite_number(row.get("train_runtime")) for row in record.metrics[-1:]]
    return {
        "how": str(end.get("how") or ("finished" if evaluated else "open")),
        "reason": str(end.get("reason") or ""),
        "steps": finite_number(end.get("steps")) or (steps[-1] if steps else 0),
        "planned": finite_number(record.config.trainer.get("max_steps")) if record.config else None,
        "rows": RunStatistics(record).num_steps,
        "seconds": finite_number(end.get("seconds")) or next(iter(seconds), None),
        "began": times[0] if times else None,
        "ended": finite_number(end.get("time")) or (times[-1] if times else None),
    }


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return what a reader wants to know first, as pairs of name and value."""
    config, facts = record.config, []
    if config:
        quantized = ", 4-bit" if config.model.load_in_4bit else ", 16-bit"
        facts += [
            ("model", f"{config.model.name}{quantized}, LoRA r={config.lora.r}"),
            ("prompts", str(config.data.prompts)),
            ("rewards", ", ".join(map(_reward_name, config.rewards))),
            ("seed", str(config.seed)),
        ]
    resumed = record.end.get("resumed_at")
    steps = finite_numbers(resumed if isinstance(resumed, list) else [])
    if steps:
        facts.append(("resumed", f"after step {', '.join(f'{step:g}' for step in steps)}"))
    return [*facts, *_hardware(_read(record, "environment.json"))]


def _reward_name(reward: object) -> str:
    if not isinstance(reward, dict):
        return str(reward)
    weight = reward.get("weight")
    return f"{reward.get('name')}{'' if weight is None else f':{weight}'}"


def _held_out(record: RunRecord) -> dict[str, Any]:
    """Return every reward before and after, and what their difference amounts to."""
    found = record.evaluation or {}
    parts = {name: found[name] for name in ("before", "after") if _dict(found.get(name))}
    means = {name: _numbers(part.get("rewards")) for name, part in parts.items()}
    compared = {one.name: one for one in RunStatistics(record).scored_twice}
    rewards = []
    for name in dict.fromkeys([*compared, *(name for mean in means.values() for name in mean)]):
        row: dict[str, Any] = {"name": name}
        row |= {part: mean.get(name) for part, mean in means.items()}
        if one := compared.get(name):
            row |= {"error": one.error, "num": one.num, "change": _sign(one.change)}
        rewards.append(row)
    keys = ("num_prompts", "mean_length", "temperature")
    facts = {name: {k: finite_number(part.get(k)) for k in keys} for name, part in parts.items()}
    return {"rewards": rewards, **facts}


def _sign(change: float) -> str:
    """Return what a difference in standard errors amounts to."""
    if abs(change) <= 2:
        return "chance" if change else "same"
    return "rose" if change > 0 else "fell"


def _scored(record: RunRecord) -> dict[str, Any] | None:
    """Return the newest table of ``rloo-kit eval``; None where there is none."""
    entry = next(iter(_dicts(_read(record, "eval.json").get("evaluations"))[-1:]), {})
    rows = _dicts(entry.get("rows"))[:MAX_ROWS]
    if not rows:
        return None
    cells = [_scored_cells(row) for row in rows]
    titles = list(dict.fromkeys(title for row in cells for title in row))
    prompts = finite_number(rows[0].get("num_prompts"))
    return {
        "caption": f"{prompts or 0:g} prompts of {entry.get('prompts')}; in brackets 95%",
        "head": titles,
        "rows": [[row.get(title, "") for title in titles] for row in cells],
        "compared": [_compared(one) for one in _dicts(entry.get("compared"))[:MAX_ROWS]],
    }


def _scored_cells(row: dict[str, Any]) -> dict[str, str]:
    sampler = row.get("sampler", "transformers")
    by = "" if sampler == "transformers" else f", by {sampler}"
    cells = {"model": str(row.get("model")), "completions": f"{row.get('mode')}{by}"}
    intervals = _dict(row.get("intervals"))
    for name, mean in _dict(row.get("rewards")).items():
        bounds = intervals.get(name)
        known = finite_numbers(bounds) if isinstance(bounds, list) else []
        between = f" [{known[0]:.3f}, {known[1]:.3f}]" if len(known) == 2 else ""
        cells[str(name)] = f"{_number(mean, 3)}{between}"
    for title, key, trivial in (("pass", "pass_at_k", ("1",)), ("maj", "maj_at_k", ("1", "2"))):
        for k, mean in _dict(row.get(key)).items():
            if k not in trivial:
                cells[f"{title}@{k}"] = _number(mean, 3)
    cells["thinking"] = _number(row.get("thinking_length"), 1)
    cells["tokens"] = _number(row.get("mean_length"), 1)
    return cells


def _compared(one: dict[str, Any]) -> str:
    found = _dict(one.get("found"))
    mean, low, high = (_number(found.get(name), 3, "+") for name in ("mean", "low", "high"))
    real = "real" if found.get("is_real") is True else "may be chance"
    return (
        f"{one.get('model')} against {one.get('against')}, {one.get('reward')}, {one.get('mode')}: "
        f"{mean} [{low}, {high}], {real}"
    )


def _judged(record: RunRecord) -> list[str]:
    """Return the newest win rates in a sentence each, with judge and number of prompts."""
    lines = []
    for one in _dicts(_read(record, "judge.json").get("judged"))[-MAX_ROWS:]:
        found = _numbers(one.get("found"))
        known = (found.get(name) for name in ("mean", "low", "high"))
        # Stored as the difference from an even match.
        rate, low, high = (None if x is None else 100 * (x + 0.5) for x in known)
        words = (("wins", "won"), ("ties", "tied"), ("losses", "lost"))
        counts = ", ".join(f"{_number(one.get(name), 0)} {word}" for name, word in words)
        lines.append(
            f"{one.get('model')} wins {_number(rate, 1)}% [{_number(low, 1)}, {_number(high, 1)}] "
            f"against {one.get('against')}: {counts} of {_number(found.get('num'), 0)} prompts of "
            f"{one.get('prompts')}, {one.get('mode')}; judge: {one.get('judge')}"
        )
    return lines


# --- held-out prompts ----------------------------------------------------------------------------


def _samples(record: RunRecord, budget: int) -> dict[str, Any]:
    """Return held-out prompts with both completions, those whose rewards changed most first."""
    found = record.evaluation or {}
    before, after = (_dicts(_dict(found.get(name)).get("samples")) for name in ("before", "after"))
    if len(before) != len(after):  # the run still trains, or scored other prompts
        after = [{}] * len(before)
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: -abs(_change(*pair)))
    kept = []
    for old, new in pairs:
        pair = {
            "prompt": messages_of(old.get("prompt"), SAMPLE_LENGTH),
            "before": _sample(old),
            "after": _sample(new) if new else None,
            "change": _change(old, new),
        }
        budget -= len(page_json(pair).encode())
        if budget < 0:
            break
        kept.append(pair)
    return {"pairs": kept, "total": len(pairs)}


def _change(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Return by how much the rewards of a prompt rose, in sum."""
    before, after = _numbers(old.get("rewards")), _numbers(new.get("rewards"))
    known = ((value, after.get(name)) for name, value in before.items())
    return math.fsum(new - old for old, new in known if old is not None and new is not None)


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {**completion_parts(sample, SAMPLE_LENGTH), "rewards": _numbers(sample.get("rewards"))}


# --- how it was made -----------------------------------------------------------------------------


def _beta(record: RunRecord) -> float | None:
    """Return what a nat of KL costs; None where advantages are of tokens."""
    run = RunStatistics(record)
    return None if run.setting("token_level_kl") else finite_number(run.setting("beta"))


def _settings(config: RunConfig | None) -> list[dict[str, Any]]:
    """Return every setting with its default, and whether it differs."""
    if config is None:
        return []
    defaults = _flat(RunConfig()) | _flat_table("trainer", DEFAULTS | DEFAULTS)
    rows = []
    for name, value in _flat(config).items():
        default = defaults.get(name, UNKNOWN)
        differs = value != default
        rows.append({"name": name, "value": value, "default": default, "differs": differs})
    return rows


def _flat(config: RunConfig) -> dict[str, str]:
    """Return the settings as texts, by ``section.key``."""
    found = {}
    for name, value in redact_tree(config.as_dict()).items():
        found |= _flat_table(name, value) if isinstance(value, dict) else {name: _text(value)}
    return found


def _flat_table(name: str, table: dict[str, Any]) -> dict[str, str]:
    return {f"{name}.{key}": _text(item) for key, item in table.items()}


def _text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _environment(record: RunRecord) -> list[tuple[str, str]]:
    """Return hardware, backend and versions as pairs of name and value."""
    facts = _read(record, "environment.json")
    found = _hardware(facts)
    if facts.get("backend"):
        why = facts.get("why_not_unsloth")
        found.append(("backend", f"{facts['backend']}{f' ({why})' if why else ''}"))
    versions = _dict(facts.get("versions")).items()
    return found + [(str(name), str(version or "not installed")) for name, version in versions]


def _hardware(facts: dict[str, Any]) -> list[tuple[str, str]]:
    hardware = _dict(facts.get("hardware"))
    if not hardware.get("name"):
        return []
    num, memory = (finite_number(hardware.get(key)) for key in ("num_devices", "total_memory"))
    several = f"{num:g} x " if num and num > 1 else ""
    size = f", {memory / (1 << 30):.0f} GiB" if memory else ""
    return [("hardware", f"{several}{hardware['name']}{size}")]


def _files(folder: Path | None) -> list[tuple[str, int]]:
    """Return the visible files of the run's folder, with sizes in bytes."""
    found = []
    try:
        for entry in sorted(folder.iterdir()) if folder else ():
            if entry.is_symlink() or entry.name.startswith("."):  # a link may lead anywhere
                continue
            files = entry.rglob("*") if entry.is_dir() else [entry]
            size = sum(file.stat().st_size for file in files if file.is_file())
            found.append((f"{entry.name}/" if entry.is_dir() else entry.name, size))
    except OSError:  # a file that a running training replaced just now
        pass
    return found


def _plan(record: RunRecord) -> dict[str, Any] | None:
    """Return the memory that was planned at the peak; None where no plan was written."""
    content = _read(record, "plan.json")
    pairs = [
        (str(part.get("name")), finite_number(part.get("bytes")))
        for part in _dicts(content.get("parts"))[:MAX_PARTS]
    ]
    parts = [(name, size) for name, size in pairs if size is not None]
    if not parts:
        return None
    return {
        "verdict": str(content.get("verdict") or ""),
        "doing": str(content.get("doing") or ""),
        "peak": finite_number(content.get("peak")),
        "room": finite_number(content.get("room")),
        "parts": parts,
    }


def _command(record: RunRecord) -> str:
    place = (record.folder / "run.yaml").as_posix() if record.folder else "run.yaml"
    return f"rloo-kit train {shlex.quote(place)}"


def _notices(config: RunConfig | None) -> list[str]:
    """Return what a reader should know before running it again."""
    if config is None:
        return ["run.yaml is missing or cannot be read: the settings are not known"]
    settings = "\n".join(f"{name} = {value}" for name, value in _flat(config).items())
    trusting = re.findall(r"[\w.\"]*trust_remote_code\"?(?:: | = )true", settings)
    return [f"{setting}: code that comes with the model may run" for setting in trusting]
