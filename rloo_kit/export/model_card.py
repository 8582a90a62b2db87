"""Model card (README.md) of a trained model: metadata for the hub, and text for readers."""

import contextlib
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
    record: RunRecord | None = None,
    notes: Sequence[str] = (),
    has_vision: bool = False,
) -> str:
    """Return the text of README.md. It contains no secrets and no folders of this machine.

    The licence is read from the model card of the base, which may be downloaded.

    Args:
        kind: Kind of export: ``adapter``, ``merged`` or ``gguf``.
        name: Title of the card.
        base: Name or folder of the base model. Only the last part of a folder is shown.
        record: Record of the run that trained the model. None if there is no run.
        notes: Sentences about the export and its weights.
        has_vision: True if an adapter is for a model with a vision part. The card then loads it
            with the kit. PEFT would load the model class without the vision part, and the layers of
            that class have other names than in the adapter.
    """
    from huggingface_hub import ModelCard, ModelCardData

    record = record or RunRecord([])
    config = record.config
    prompts = config.data.prompts if config else ""
    data = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=prompts if is_hub_name(prompts) else None,
        library_name=KINDS[kind],
        license=licence_of(base),
        pipeline_tag="text-generation",
        tags=["rloo", "rloo-kit", "trl", *(["lora"] if kind == "adapter" else [])],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        kind=kind,
        name=name,
        base=public_name(base),
        needs_kit=has_vision or base in EMBEDDED or base.endswith(".gguf"),
        record=record,
        prompts=public_name(prompts),
        settings=_settings(config.trainer) if config else [],
        rewards=without_folders(redact_tree(config.rewards)) if config else [],
        scores=_scores(record),
        notes=notes,
    )
    return redact(str(card))


def licence_of(base: str) -> str:
    """Return the licence that the base's model card names, or ``unknown`` if it names none."""
    from huggingface_hub import ModelCard

    with contextlib.suppress(Exception):  # no card, no network, no metadata
        place = EMBEDDED.get(base, Path(base))
        # A .gguf file is not a card, and may be larger than the memory
        card = ModelCard.load(place / "README.md" if place.exists() else base)
        return card.data.get("license") or "unknown"
    return "unknown"


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
    """Return a text for each trainer setting that the run sets and that affects its results."""
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
        except (TypeError, KeyError, AttributeError):  # missing, or written by another version
            continue
        for name in found.rewards:
            if one := found.estimate(name):
                interval = f"95% interval {one.low:.3f} to {one.high:.3f}"
                prompts = f"{found.num_prompts} held-out prompts, {found.drawn}"
                lines.append(f"{when}: {name} {one.mean:.3f} ({interval}) on {prompts}")
    return lines
