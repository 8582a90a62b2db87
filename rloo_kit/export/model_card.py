"""Model card (README.md) of a trained model: metadata for the hub, and text for readers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_kit.config.settings import RULES
from rloo_kit.diagnosis.record import RunRecord
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.text.redaction import redact, redact_tree
from rloo_kit.text.wording import without_folders

TEMPLATE = Path(__file__).resolve().parents[1] / "assets" / "model_card" / "card.md.jinja"
# Kind of export -> the hub's name of the library that loads it
KINDS = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
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
    from huggingface_hub import ModelCard, ModelCardData

    record = record or RunRecord([])
    config = record.config
    prompts = config.data.prompts if config else ""
    data = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=prompts if is_hub_name(prompts) else None,
        library_name=KINDS[kind],
        license=licence,
        pipeline_tag="text-generation",
        tags=["rloo", "rloo-kit", "trl", *(["lora"] if kind == "adapter" else [])],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        kind=kind,
        name=name,
        base=public_name(base),
        needs_kit=base in EMBEDDED or base.endswith(".gguf"),
        record=record,
        prompts=public_name(prompts),
        settings=_settings(config.trainer) if config else [],
        rewards=without_folders(redact_tree(config.rewards)) if config else [],
        scores=_scores(record),
        notes=notes,
    )
    return redact(str(card))


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


def _settings(given: dict[str, Any]) -> list[str]:
    """Return a text for each trainer setting that was given and has an effect on the results."""
    return [
        f"{name} {given[name]}"
        for name, rule in RULES.items()
        if given.get(name) is not None and (rule.resume != "free" or name in BATCH)
    ]


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
