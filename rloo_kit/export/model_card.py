"""README.md of a trained model: metadata for the hub, and what a person should know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import RULES
from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.text.redaction import redact, redact_tree

LIBRARIES = {"merged": "transformers", "gguf": "gguf"}
KINDS = {
    "adapter": "A LoRA adapter for",
    "merged": "16-bit weights: a LoRA adapter merged into",
    "gguf": "A GGUF file: a LoRA adapter merged into",
}
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
LIMITS = [
    "It was trained to earn its rewards. What they do not measure (facts, safety, tone, other "
    "languages and tasks) may have changed and was not evaluated.",
    "The scores above are of prompts like those it was trained on, by the same rewards.",
]
DATA_SUFFIXES = (".jsonl", ".csv", ".parquet", ".gguf")


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from."""

    kind: str  # adapter, merged or gguf
    name: str  # title
    base: str  # name of the base; a folder is shown by its last part
    licence: str = "unknown"  # of the base
    record: RunRecord | None = None  # none for an adapter without a run
    environment: Mapping[str, Any] = field(default_factory=dict)  # as in environment.json
    notes: tuple[str, ...] = ()  # sentences on how it was exported and checked

    @property
    def config(self) -> RunConfig | None:
        """The run's settings."""
        return self.record.config if self.record else None

    @property
    def scored(self) -> dict[str, Evaluation]:
        """The held-out scores before and after the training, those that can be read."""
        found, scored = (self.record.evaluation if self.record else None) or {}, {}
        for when in ("before", "after"):
            try:
                scored[when] = Evaluation.from_dict(found[when])
            except (TypeError, KeyError, AttributeError):  # of another version, or missing
                continue
        return scored


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md, without secrets or folders of this machine."""
    from huggingface_hub import ModelCardData

    prompts = facts.config.data.prompts if facts.config else ""
    data = ModelCardData(
        base_model=facts.base if is_hub_name(facts.base) else None,
        datasets=prompts if is_hub_name(prompts) else None,
        library_name=LIBRARIES.get(facts.kind, "peft"),
        license=facts.licence,
        pipeline_tag="text-generation",
        tags=["rloo", "rloo-kit", "trl", *(["lora"] if facts.kind == "adapter" else [])],
    )
    licence = "is not known" if facts.licence == "unknown" else f"is {facts.licence}"
    text = (
        f"---\n{data}\n---\n\n# {facts.name}\n\n{KINDS[facts.kind]} `{public_name(facts.base)}`, "
        f"trained by reinforcement learning (RLOO, REINFORCE Leave-One-Out) with rloo-kit. The "
        f"licence of the base {licence}; it holds for this model too.\n"
    )
    sections = {
        "How it was trained": _training(facts),
        "Rewards": _rewards(facts),
        "Evaluation": _evaluation(facts),
        "Limits": LIMITS if facts.scored else [*LIMITS[:1], "It was not evaluated."],
        "This export": list(facts.notes),
    }
    for title, lines in sections.items():
        if lines:
            text += f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in lines)
    return redact(text)


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME, and is no path of this machine."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and Path(name).suffix.lower() not in DATA_SUFFIXES


def public_name(name: str) -> str:
    """Return a hub name or a built-in name as it is, of a path the last part."""
    return name if is_hub_name(name) else Path(name).name


def _training(facts: CardFacts) -> list[str]:
    lines, record, config = [], facts.record, facts.config
    if record is not None and config is not None:
        data, given = config.data, config.trainer
        lines.append(f"Prompts: `{public_name(data.prompts)}`")
        steps = record.end.get("steps") or len(record.metrics)
        lines.append(f"{steps} steps of TRL's RLOO; seed {config.seed}")
        bits = "4-bit (NF4)" if config.model.load_in_4bit else "16-bit"
        lines.append(f"{bits} base; LoRA of rank {config.lora.r}, alpha {config.lora.lora_alpha}")
        settings = [
            f"{name} {given[name]}"
            for name, rule in RULES.items()
            if given.get(name) is not None and (rule.resume != "free" or name in BATCH)
        ]
        lines.append("Settings: " + ", ".join(settings))
    hardware = (facts.environment.get("hardware") or {}).get("name")
    lines += [f"Hardware: {hardware}"] if hardware else []
    if versions := facts.environment.get("versions"):
        lines.append("Versions: " + ", ".join(f"{name} {v}" for name, v in versions.items() if v))
    return lines


def _rewards(facts: CardFacts) -> list[str]:
    rewards = redact_tree(facts.config.rewards) if facts.config else []
    return [f"`{_without_folders(reward)}`" for reward in rewards]


def _without_folders(value: Any) -> Any:
    if isinstance(value, str):
        paths = PurePosixPath(value), PureWindowsPath(value)
        whole = [path for path in paths if path.is_absolute() or path.parts[:1] == ("~",)]
        return whole[0].name if whole else value
    if isinstance(value, dict):
        return {name: _without_folders(one) for name, one in value.items()}
    return [_without_folders(one) for one in value] if isinstance(value, list) else value


def _evaluation(facts: CardFacts) -> list[str]:
    lines = []
    for when, found in facts.scored.items():
        how = f"sampled at {found.temperature:g}" if found.temperature else "greedy"
        for name in found.rewards:
            if one := found.estimate(name):
                interval = f"95% interval {one.low:.3f} to {one.high:.3f}"
                prompts = f"{found.num_prompts} held-out prompts, {how}"
                lines.append(f"{when}: {name} {one.mean:.3f} ({interval}) on {prompts}")
    return lines
