"""Facts that the kit stores about a model that it has loaded."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelNotes:
    """Facts about a loaded model that the kit needs later."""

    backend: str | None = None  # "unsloth" or "transformers"
    processor: Any = None  # the tokenizer or processor that was loaded with the model
    max_seq_length: int | None = None  # maximum tokens of prompt and completion together
    gradient_checkpointing: bool | str | None = None  # as the user set it; None if not set
    hub: tuple[str, str] | None = None  # name and revision on the hub, if a revision was requested
    adapter: str | None = None  # the folder that the model's adapter was loaded from
    # the vLLM engine that was started for the model, and the settings it was started with
    engine: tuple[Any, dict[str, Any]] | None = None
    # further arguments of a vLLM engine with its own copy of the weights
    vllm: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    shared_engine: Any = None  # `EngineSettings` of the vLLM engine that shares the weights
    why_not_shared: str | None = None  # the reason why no vLLM engine shares the weights


def notes_of(model: Any) -> ModelNotes:
    """Return the facts stored about a model; a PEFT model and its base share these facts.

    If none are stored yet, a model that Unsloth's ``FastLanguageModel`` has loaded gets the backend
    ``unsloth`` and the ``max_seq_length`` that Unsloth stored with the model.
    """
    notes = getattr(model, "rloo_kit_notes", None)
    if notes is None:
        notes = model.rloo_kit_notes = ModelNotes()
        if hasattr(model, "for_training"):
            notes.backend = "unsloth"
            notes.max_seq_length = getattr(model, "max_seq_length", None)
    return notes
