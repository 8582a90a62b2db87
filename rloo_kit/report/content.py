"""Content of a run's report, as plain values that the page's script draws."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import BY_DEVICE, DEFAULTS
from rloo_kit.config.trainer_settings import trl_defaults
from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.diagnosis.registry import Finding
from rloo_kit.diagnosis.run_rules import find_in_run, verdict
from rloo_kit.live.series import Chart
from rloo_kit.report.curves import as_dict, as_list, curves_of, held_out_points, metrics_of, scored
from rloo_kit.report.examples import completion_parts, kept_groups, messages_of, read_thumbnails
from rloo_kit.text.numbers import finite_number, finite_numbers
from rloo_kit.text.redaction import redact_tree
from rloo_kit.text.wording import shell_path

# Approximate size of the groups and of the thumbnails on a page, for all runs together
GROUP_BYTES = 3 << 19  # 1.5 MiB
THUMBNAIL_BYTES = 1 << 20
# Maximum number of held-out prompts on a page, for all runs together
MAX_SAMPLES = 60
# Maximum number of characters in a held-out prompt, and in a completion of it
SAMPLE_LENGTH = 4000


def run_content(
    record: RunRecord, name: str, charts: Sequence[Chart], share: int = 1
) -> dict[str, Any]:
    """Return everything that the page shows about a run, as plain values.

    Args:
        record: Record of the run.
        name: Name of the run on the page.
        charts: Charts of the page.
        share: Number of runs on the page, which share the space for examples equally.
    """
    findings = find_in_run(record)
    content = {
        "name": name,
        "verdict": verdict(record, findings),
        "findings": [_finding(finding, record) for finding in findings],
        "end": _end(record),
        "facts": _facts(record),
        "held_out": _held_out(record),
        "samples": _samples(record, MAX_SAMPLES // share),
        "curves": curves_of(record, charts),
        "points": held_out_points(record),
        **kept_groups(record.folder, GROUP_BYTES // share),
        # The penalty for a nat of KL; None if the penalty is per token
        "beta": None if record.setting("token_level_kl") else record.setting("beta"),
        "config": _settings(record.config),
        "environment": _environment(record),
        "command": _command(record),
    }
    thumbnails = read_thumbnails(record.folder, content, THUMBNAIL_BYTES // share)
    # The files may come from another machine
    return redact_tree(content) | {"thumbnails": thumbnails}


def _numbers(value: object) -> dict[str, float | None]:
    return {name: finite_number(number) for name, number in as_dict(value).items()}


# --- findings, end, facts ------------------------------------------------------------------------


def _finding(finding: Finding, record: RunRecord) -> dict[str, Any]:
    # Several settings are one text, "a.b=1, a.c=2", and values may contain commas too
    settings = re.split(r", (?=[\w.]+=)", finding.setting) if finding.setting else []
    command = " ".join([_command(record), *(f"--set {shlex.quote(one)}" for one in settings)])
    return {**asdict(finding), "settings": settings, "command": command}


def _end(record: RunRecord) -> dict[str, Any]:
    """Return how and when the run ended, with its number of steps.

    A run that was killed or still trains has no end.json. It counts as ``finished`` if it was
    evaluated after training, and as ``open`` otherwise.
    """
    times = finite_numbers(row.get("time") for row in record.metrics) or [None]
    end = record.end
    last_step = max(metrics_of(record).steps, default=0)
    return {
        "how": str(end.get("how") or ("finished" if scored(record, "after") else "open")),
        "reason": str(end.get("reason") or ""),
        "steps": finite_number(end.get("steps")) or last_step,
        "planned": record.planned_steps,
        "rows": record.num_steps,
        "seconds": finite_number(end.get("seconds")),
        "began": times[0],
        "ended": finite_number(end.get("time")) or times[-1],
    }


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return the most important facts about a run (model, prompts, rewards) as name and value."""
    config = record.config
    facts = []
    if config:
        quantized = ", 4-bit" if config.model.load_in_4bit else ", 16-bit"
        facts += [
            ("model", f"{config.model.name}{quantized}, LoRA r={config.lora.r}"),
            ("prompts", str(config.data.prompts)),
            ("rewards", ", ".join(map(_reward_name, config.rewards))),
            ("seed", str(config.seed)),
        ]
    if steps := finite_numbers(as_list(record.end.get("resumed_at"))):
        facts.append(("resumed", f"after step {', '.join(f'{step:g}' for step in steps)}"))
    return [*facts, *_environment(record)[:1]]


def _reward_name(reward: object) -> str:
    if not isinstance(reward, dict):
        return str(reward)
    weight = reward.get("weight")
    return f"{reward.get('name')}{'' if weight is None else f':{weight}'}"


# --- held-out prompts ----------------------------------------------------------------------------


def _held_out(record: RunRecord) -> dict[str, Any]:
    """Return the held-out score of each reward before and after training, and how it changed."""
    rewards: dict[str, dict[str, Any]] = {
        one.name: {**asdict(one), "change": _sign(one.change)} for one in record.scored_twice
    }
    facts = {}
    for when in ("before", "after"):
        part = scored(record, when)
        facts[when] = {key: finite_number(part.get(key)) for key in ("num_prompts", "mean_length")}
        for name, mean in _numbers(part.get("rewards")).items():
            rewards.setdefault(name, {"name": name})[when] = mean
    return {"rewards": [*rewards.values()], **facts}


def _sign(change: float) -> str:
    """Return ``rose``, ``fell``, ``chance`` or ``same`` for a change, given in standard errors."""
    if abs(change) <= 2:
        return "chance" if change else "same"
    return "rose" if change > 0 else "fell"


def _samples(record: RunRecord, most: int) -> dict[str, Any]:
    """Return pairs of completions of held-out prompts, from before and after training.

    A prompt has as many pairs as it has samples. Pairs whose rewards changed most come first.
    ``most`` is the maximum number of pairs.
    """
    before, after = (
        [*map(as_dict, as_list(scored(record, when).get("samples")))]
        for when in ("before", "after")
    )
    if len(before) != len(after):  # the run still trains, or scored other prompts
        after = [{}] * len(before)
    pairs = [
        {
            "prompt": messages_of(old.get("prompt"), SAMPLE_LENGTH),
            "before": _sample(old),
            "after": _sample(new) if new else None,
            "change": _total(new) - _total(old) if new else 0.0,
        }
        for old, new in zip(before, after, strict=True)
    ]
    pairs.sort(key=lambda pair: -abs(pair["change"]))
    return {"pairs": pairs[:most], "total": len(pairs)}


def _total(sample: dict[str, Any]) -> float:
    return math.fsum(finite_numbers(as_dict(sample.get("rewards")).values()))


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {**completion_parts(sample, SAMPLE_LENGTH), "rewards": _numbers(sample.get("rewards"))}


# --- settings and environment --------------------------------------------------------------------


def _settings(config: RunConfig | None) -> list[dict[str, Any]]:
    """Return a row for each setting: its name, value and default, and whether the two differ."""
    if config is None:
        return []
    trainer = trl_defaults() | DEFAULTS | dict.fromkeys(BY_DEVICE, "by the device")
    values, defaults = (
        {name: _text(value) for name, value in flat_settings(redact_tree(one.as_dict())).items()}
        for one in (config, RunConfig(trainer=trainer))
    )
    return [
        {
            "name": name,
            "value": value,
            # The default of a library that is not installed is unknown
            "default": (default := defaults.get(name, "the library's own")),
            "differs": value != default,
        }
        for name, value in values.items()
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of a run file in one dict, whose keys are ``section.key`` or ``key``."""
    return {
        f"{section}.{name}".rstrip("."): one
        for section, value in settings.items()
        for name, one in (value if isinstance(value, dict) else {"": value}).items()
    }


def _environment(record: RunRecord) -> list[tuple[str, str]]:
    """Return hardware, backend and package versions as pairs of name and value."""
    facts = record.environment
    hardware = as_dict(facts.get("hardware"))
    memory = finite_number(hardware.get("total_memory"))
    size = f", {memory / (1 << 30):.0f} GiB" if memory else ""
    processes = finite_number(facts.get("processes")) or 1
    found = {
        "hardware": hardware.get("name") and f"{hardware['name']}{size}",
        "backend": facts.get("backend"),
        "training step": facts.get("step"),
        "processes": f"{processes:g}" if processes > 1 else None,
    }
    versions = as_dict(facts.get("versions")).items()
    return [
        *((name, str(value)) for name, value in found.items() if value),
        *((name, str(version or "not installed")) for name, version in versions),
    ]


def _command(record: RunRecord) -> str:
    return f"rloo-kit train {shell_path(record.folder / 'run.yaml')}"
