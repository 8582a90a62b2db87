"""README.md of a model that was trained: what the hub reads, and what a person should know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.text.redaction import redact, redact_tree

SETTINGS = (
    "learning_rate", "beta", "num_generations", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_iterations", "max_completion_length", "temperature",
    "missing_eos_penalty", "normalize_advantages",
)  # fmt: skip
"""Of the trainer, shown where the run file sets them."""
LIBRARIES = {"merged": "transformers", "gguf": "gguf", "ollama": "gguf"}


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from."""

    kind: str
    """adapter, merged, gguf or ollama."""
    name: str
    """Title."""
    base: str
    """Name of the base; a folder is shown by its last part."""
    licence: str = "unknown"
    """Of the base."""
    record: RunRecord | None = None
    """None for an adapter without a run."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """As environment.json has it."""
    version: str = ""
    """Of the kit."""
    notes: tuple[str, ...] = ()
    """Sentences on how it was exported and checked."""


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md, without secrets or folders of this machine."""
    from huggingface_hub import ModelCardData

    config = facts.record.config if facts.record else None
    hub_name = facts.base if is_hub_name(facts.base) else None
    prompts = config.data.prompts if config else None
    data = ModelCardData(
        base_model=hub_name,
        datasets=prompts if prompts and is_hub_name(prompts) else None,
        library_name=LIBRARIES.get(facts.kind, "peft"),
        license=facts.licence,
        pipeline_tag="text-generation",
        tags=["rloo", "rloo-kit", "trl", *(["lora"] if facts.kind == "adapter" else [])],
        model_name=facts.name,
        eval_results=_results(facts),
    )
    sections = [
        f"# {facts.name}",
        _introduction(facts),
        *_section("How it was trained", _training(facts)),
        *_section("Rewards", _rewards(facts)),
        *_section("Evaluation", _evaluation(facts)),
        *_section("Limits", _limits(facts)),
        *_section("This export", list(facts.notes)),
    ]
    return redact(f"---\n{data}\n---\n\n" + "\n\n".join(sections) + "\n")


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME, and is no path of this machine."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    suffix = Path(name).suffix.lower()
    return name.count("/") == 1 and suffix not in (".jsonl", ".csv", ".parquet", ".gguf")


def public_name(name: str) -> str:
    """Return a hub name or a built-in name as it is, of a path the last part."""
    return name if is_hub_name(name) else Path(name).name


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def _introduction(facts: CardFacts) -> str:
    what = {
        "adapter": "A LoRA adapter for",
        "merged": "16-bit weights: a LoRA adapter merged into",
    }.get(facts.kind, "A GGUF file: a LoRA adapter merged into")
    licence = "is not known" if facts.licence == "unknown" else f"is {facts.licence}"
    return (
        f"{what} `{public_name(facts.base)}`, trained by reinforcement learning (RLOO, REINFORCE "
        f"Leave-One-Out) with rloo-kit. The licence of the base {licence}; it holds for this model "
        f"too."
    )


def _training(facts: CardFacts) -> list[str]:
    lines = []
    record, config = facts.record, facts.record.config if facts.record else None
    if config is not None:
        data, given = config.data, config.trainer
        count = "" if data.num_prompts is None else f", the first {data.num_prompts:,}"
        lines.append(f"Prompts: `{public_name(data.prompts)}`{count}")
        steps = (record.end or {}).get("steps") or len(record.metrics)
        lines.append(f"{steps} steps of TRL's RLOO; seed {config.seed}")
        plain = "FP8" if config.model.load_in_fp8 else "16-bit"
        how = "4-bit (NF4)" if config.model.load_in_4bit else plain
        lines.append(f"{how} base; LoRA of rank {config.lora.r}, alpha {config.lora.lora_alpha}")
        told = [f"{name} {given[name]}" for name in SETTINGS if given.get(name) is not None]
        lines.append("Settings: " + ", ".join(told))
    machine = (facts.environment.get("hardware") or {}).get("name")
    if machine:
        lines.append(f"Hardware: {machine}")
    found = facts.environment.get("versions") or {}
    versions = [f"{name} {version}" for name, version in found.items() if version]
    if versions or facts.version:
        lines.append("Versions: " + (", ".join(versions) or f"rloo-kit {facts.version}"))
    return lines


def _rewards(facts: CardFacts) -> list[str]:
    config = facts.record.config if facts.record else None
    return [f"`{_without_folders(spec)}`" for spec in redact_tree(config.rewards)] if config else []


def _without_folders(value: Any) -> Any:
    if isinstance(value, str):
        return value.rpartition("/")[2] if value.startswith(("/", "~")) or "\\" in value else value
    if isinstance(value, dict):
        return {name: _without_folders(one) for name, one in value.items()}
    return [_without_folders(one) for one in value] if isinstance(value, list) else value


# --- evaluation ----------------------------------------------------------------------------------


def _scored(facts: CardFacts) -> dict[str, Evaluation]:
    found = (facts.record.evaluation if facts.record else None) or {}
    scored = {}
    for when in ("before", "after"):
        try:
            scored[when] = Evaluation.from_dict(found[when])
        except (TypeError, KeyError, AttributeError):  # another version's, or none
            continue
    return scored


def _evaluation(facts: CardFacts) -> list[str]:
    return [
        f"{when}: {name} {one.mean:.3f} (95% interval {one.low:.3f} to {one.high:.3f}) on "
        f"{found.num_prompts} held-out prompts, {_drawn(found.temperature)}"
        for when, found in _scored(facts).items()
        for name in found.rewards
        if (one := found.estimate(name))
    ]


def _drawn(temperature: float) -> str:
    return f"sampled at {temperature:g}" if temperature else "greedy"


def _results(facts: CardFacts) -> list[Any] | None:
    """Return the scores after training in the hub's form."""
    from huggingface_hub import EvalResult

    after = _scored(facts).get("after")
    config = facts.record.config if facts.record else None
    if after is None or config is None:
        return None
    prompts = public_name(config.data.prompts)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=prompts,
            dataset_name=f"{prompts}, {after.num_prompts} held-out prompts",
            metric_type=name,
            metric_value=round(value, 4),
        )
        for name, value in after.rewards.items()
        if value is not None
    ] or None


def _limits(facts: CardFacts) -> list[str]:
    lines = [
        "It was trained to earn its rewards. What they do not measure (facts, safety, tone, other "
        "languages and tasks) may have changed, and nobody has looked.",
    ]
    if _scored(facts):
        lines.append(
            "The scores above are of prompts like those it was trained on, by the same rewards; it "
            "was evaluated on nothing else."
        )
    else:
        lines.append("It was not evaluated.")
    return lines
