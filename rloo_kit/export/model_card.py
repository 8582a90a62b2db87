"""Model card (README.md) of a trained model: metadata for the hub, and text for readers."""

from collections.abc import Sequence
from pathlib import Path

from rloo_kit.config.settings import RULES
from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.wording import without_folders

# Folder with the example code that loads an adapter
ASSETS = Path(__file__).resolve().parents[1] / "assets" / "model_card"
# Kind of export -> the hub's name of the library that loads it, and a description
KINDS = {
    "adapter": ("peft", "A LoRA adapter for"),
    "merged": ("transformers", "Whole weights: a LoRA adapter merged into"),
    "gguf": ("gguf", "A GGUF file: a LoRA adapter merged into"),
}
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
LIMITS = [
    "It was trained to earn its rewards. What they do not measure (facts, safety, tone, other "
    "languages and tasks) may have changed and was not evaluated.",
    "The scores above are of prompts like those it was trained on, by the same rewards.",
]
DATA_SUFFIXES = (".jsonl", ".csv", ".parquet", ".gguf")


def model_card(
    kind: str,
    name: str,
    base: str,
    licence: str = "unknown",
    record: RunRecord | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the text of README.md. It contains no secrets and no folders of this machine.

    Args:
        kind: Kind of export: ``adapter``, ``merged`` or ``gguf``.
        name: Title of the card.
        base: Name or folder of the base model. Only the last part of a folder is shown.
        licence: Licence of the base model.
        record: Record of the run that trained the model. None if there is no run.
        notes: Sentences about the export and its weights.
    """
    from huggingface_hub import ModelCardData

    config = record.config if record else None
    prompts = config.data.prompts if config else ""
    library, what = KINDS[kind]
    data = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=prompts if is_hub_name(prompts) else None,
        library_name=library,
        license=licence,
        pipeline_tag="text-generation",
        tags=["rloo", "rloo-kit", "trl", *(["lora"] if kind == "adapter" else [])],
    )
    known = "is not known" if licence == "unknown" else f"is {licence}"
    text = (
        f"---\n{data}\n---\n\n# {name}\n\n{what} `{public_name(base)}`, "
        f"trained by reinforcement learning (RLOO, REINFORCE Leave-One-Out) with rloo-kit. The "
        f"licence of the base {known}; it holds for this model too.\n"
    )
    if kind == "adapter":
        loader = "rloo_kit" if base in EMBEDDED or base.endswith(".gguf") else "peft"
        code = (ASSETS / f"{loader}.py.txt").read_text(encoding="utf-8")
        text += f"\n## How to load it\n\n```python\n{code}```\n"
    rewards = redact_tree(config.rewards) if config else []
    scores = _scores(record) if record else []
    sections = {
        "How it was trained": _training(record) if record else [],
        "Rewards": [f"`{without_folders(reward)}`" for reward in rewards],
        "Evaluation": scores,
        "Limits": LIMITS if scores else [*LIMITS[:1], "It was not evaluated."],
        "This export": notes,
    }
    for title, lines in sections.items():
        if lines:
            text += f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in lines)
    return redact(text)


def is_hub_name(name: str) -> bool:
    """Return True if a name has the hub's form OWNER/NAME and does not end like a data file."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and Path(name).suffix.lower() not in DATA_SUFFIXES


def public_name(name: str) -> str:
    """Return a name that may be published: the last part of a path, any other name unchanged."""
    return name if is_hub_name(name) else Path(name).name


def _training(record: RunRecord) -> list[str]:
    lines = []
    if config := record.config:
        steps = record.end.get("steps") or len(record.metrics)
        bits = "4-bit (NF4)" if config.model.load_in_4bit else "16-bit"
        given = config.trainer
        settings = [
            f"{name} {given[name]}"
            for name, rule in RULES.items()
            if given.get(name) is not None and (rule.resume != "free" or name in BATCH)
        ]
        lines = [
            f"Prompts: `{public_name(config.data.prompts)}`",
            f"{steps} steps of TRL's RLOO; seed {config.seed}",
            f"{bits} base; LoRA of rank {config.lora.r}, alpha {config.lora.lora_alpha}",
            f"Settings: {', '.join(settings)}",
        ]
    if hardware := record.environment.get("hardware"):
        lines.append(f"Hardware: {hardware.get('name')}")
    if versions := record.environment.get("versions"):
        lines.append("Versions: " + ", ".join(f"{name} {v}" for name, v in versions.items() if v))
    return lines


def _scores(record: RunRecord) -> list[str]:
    """Return a line for each held-out score before and after training.

    An evaluation that is missing or was written by another version is left out.
    """
    lines = []
    for when in ("before", "after"):
        try:
            found = Evaluation.from_dict(record.evaluation[when])
        except (TypeError, KeyError, AttributeError):  # missing, or of another version
            continue
        for name in found.rewards:
            if one := found.estimate(name):
                interval = f"95% interval {one.low:.3f} to {one.high:.3f}"
                prompts = f"{found.num_prompts} held-out prompts, {found.drawn}"
                lines.append(f"{when}: {name} {one.mean:.3f} ({interval}) on {prompts}")
    return lines
